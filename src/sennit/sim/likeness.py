"""Which devices of a lane run alike where some nodes are not as the others: colours, refined.

A device begins with a colour of its own where its node's links differ from those of most nodes (a failed NIC, a slow
link), else with that of its lane and sort. Then, again and again, it takes the colours of those it communicates with,
in their order:

    colour(d) := (colour(d), colours of the group of d for each set of axes of its lane's collectives and for each exchange,
                  of its partner in each other lane)

until the number of colours stays. What is far from a failed link keeps few colours: of 64 nodes with one that is
different, the devices at one place of the other 63 stay one. Equal colours are what folding needs and no proof of it:
`sim/build.py` checks every bundle all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sennit.cluster import Topology
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Exchange, Program, Send
from sennit.sim.exchanges import Exchanges
from sennit.sim.lane import LaneCode
from sennit.sim.local import Machine

__all__ = ["alike_devices", "different_nodes"]


def different_nodes(topology: Topology) -> frozenset[int]:
    """The nodes whose own links are not those of most nodes."""
    links: dict[int, list[tuple[str, float, float]]] = {node: [] for node in range(topology.cluster.nodes)}
    for wire in topology.wires:
        if wire.node is not None:
            links[wire.node].append((wire.link, wire.bandwidth, wire.latency))
    sorts = {node: tuple(found) for node, found in links.items()}
    common, _ = Counter(sorts.values()).most_common(1)[0]
    lost = {*topology.special, *(node for node, _ in topology.dead_nics)}
    return frozenset(node for node, sort in sorts.items() if sort != common or node in lost)


def alike_devices(
    program: Program,
    codes: Sequence[LaneCode],
    topology: Topology,
    machines: Sequence[Machine],
    exchanges: Exchanges,
) -> dict[int, int]:
    """A colour for each device of the program."""
    near = different_nodes(topology)
    first: dict[int, object] = {}
    for number, code in enumerate(codes):
        for device in code.lane.devices:
            own = device if topology.cluster.node_of(device) in near else None
            first[device] = (number, id(machines[device]), own)
    colours = _numbered(first)
    groups = [group for code in codes for group in _groups(code)]
    labels = dict.fromkeys(job.step.label for code in codes for job in code.jobs if isinstance(job.step, Exchange))
    parts = [part.devices for label in labels for part in exchanges.parts(label, exchanges.devices(label))]
    groups += list(dict.fromkeys(parts))
    pairs = [pair for code in codes for pair in _pairs(program, code)]
    while True:
        told: dict[int, list[tuple[int, ...]]] = {device: [] for device in colours}
        for group in groups:
            seen = tuple(colours[device] for device in group if device in colours)
            for device in group:
                if device in told:
                    told[device].append(seen)
        for one, other in pairs:
            told[one].append((colours[other],))
            told[other].append((colours[one],))
        refined = _numbered({device: (colours[device], *seen) for device, seen in told.items()})
        if len(set(refined.values())) == len(set(colours.values())):
            return refined
        colours = refined


def _numbered(colours: dict[int, object] | dict[int, tuple[object, ...]]) -> dict[int, int]:
    numbers: dict[object, int] = {}
    return {device: numbers.setdefault(colour, len(numbers)) for device, colour in colours.items()}


def _groups(code: LaneCode) -> list[tuple[int, ...]]:
    """Of every set of axes that the lane's collectives use, in one order."""
    kinds: dict[tuple[int, tuple[str, ...]], Mesh] = {}
    for job in code.jobs:
        if isinstance(job.step, Collective):
            mesh = job.step.result.layout.mesh
            kinds[id(mesh), job.step.axes] = mesh
    found: list[tuple[int, ...]] = []
    for (_, axes), mesh in kinds.items():
        left = set(code.lane.devices)
        for device in code.lane.devices:
            if device in left:
                group = mesh.group(device, axes)
                left.difference_update(group)
                found.append(group)
    return found


def _pairs(program: Program, code: LaneCode) -> list[tuple[int, int]]:
    """Who sends to whom."""
    targets = dict.fromkeys(job.step.to for job in code.jobs if isinstance(job.step, Send))
    return [
        pair
        for name in targets
        if len(program.lane(name).devices) == len(code.lane.devices)
        for pair in zip(code.lane.devices, program.lane(name).devices, strict=True)
    ]
