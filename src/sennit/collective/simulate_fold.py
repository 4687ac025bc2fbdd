"""A symmetric schedule on a symmetric cluster, folded: one rank stands for all that a symmetry maps it to.

Let a group G of symmetries of the cluster (`synthesis_symmetry.py`) keep the schedule: it maps every block to a block
that does the same with the mapped peers. Then every rank of an orbit does the same at the same time, since the
simulator's rates depend on nothing but loads. So only the representatives' blocks are built, and

- a message that arrives at a representative is the image of one that a representative sends, and is matched with that
  one;
- all wires of an orbit are equally full. One stands for them. A message over a wire of an orbit O is one of |G| / |O|
  copies on
  each wire of O, so its load there counts |G| / |O| times.

This is exact, not an approximation; the tests compare both. What cannot be folded gives None: a schedule that treats
ranks differently, wires shared by both directions, routes that are not symmetric, a cluster without symmetries.
"""

from __future__ import annotations

from collections import Counter

from sennit.cluster import Cluster, Topology
from sennit.collective.simulate import Fold
from sennit.collective.synthesis_network import network_of
from sennit.collective.synthesis_symmetry import Permutation, Symmetries, symmetries
from sennit.ir.schedule import Block, Schedule

__all__ = ["fold"]

Key = tuple[int | None, int | None, int]  # the peers and the channel of a block


def fold(schedule: Schedule, cluster: Cluster) -> Fold | None:
    """What `simulate_seconds` needs, or None where the schedule or the cluster has no symmetry to fold by."""
    cluster.require(schedule.collective.ranks, f"schedule {schedule.name!r}")
    topology = Topology.of(cluster)
    if schedule.collective.ranks != cluster.devices or cluster.devices < 2:
        return None
    group = symmetries(network_of(topology))
    if len(group.elements) == 1 or not all(_kept(schedule, generator) for generator in group.generators):
        return None
    wires = _wires(topology, group)
    if wires is None:
        return None
    canonical = []
    for rank in range(cluster.devices):
        _, element = group.to_representative[rank]  # from the representative to the rank
        back = [0] * cluster.devices
        for device in range(cluster.devices):
            back[element[device]] = device
        canonical.append(tuple(back))
    return Fold(topology, tuple(group.representatives), tuple(canonical), wires)


def _wires(topology: Topology, group: Symmetries) -> tuple[tuple[int, int], ...] | None:
    """By wire: the one that stands for its orbit, and how many copies of a message each wire of the orbit carries."""
    network = network_of(topology)
    vertex = {name: number for number, name in enumerate(network.names)}
    ends: dict[int, tuple[int, int]] = {}
    for edge in topology.edges():
        if edge.wire in ends or edge.tail not in vertex or edge.head not in vertex:
            return None  # a shared wire
        ends[edge.wire] = vertex[edge.tail], vertex[edge.head]
    wire_at = {pair: wire for wire, pair in ends.items()}
    orbits = group.arc_orbits(network)
    size = Counter(orbits.values())
    stands: dict[int, int] = {}
    found = [(wire, 1) for wire in range(len(topology.wires))]  # a wire that no route uses keeps itself
    for wire, pair in sorted(ends.items()):
        first = stands.setdefault(orbits[pair], wire)
        one, other = topology.wires[wire], topology.wires[first]
        if (one.link, one.bandwidth, one.latency, one.speeds) != (
            other.link,
            other.bandwidth,
            other.latency,
            other.speeds,
        ):
            return None
        found[wire] = first, len(group.elements) // size[orbits[pair]]
    for generator in group.generators:  # routes must be symmetric too
        for source in group.representatives:
            for target in range(topology.cluster.devices):
                moved = [
                    wire_at[generator[a], generator[b]]
                    for a, b in map(ends.__getitem__, topology.route(source, target))
                ]
                if tuple(moved) != topology.route(generator[source], generator[target]):
                    return None
    return tuple(found)


def _kept(schedule: Schedule, generator: Permutation) -> bool:
    """Whether the blocks of every rank are those of the rank that it is mapped to, peers mapped."""
    keys = [[_key(block) for block in ranked.blocks] for ranked in schedule.ranks]
    numbers = [{key: number for number, key in enumerate(held)} for held in keys]
    for rank, ranked in enumerate(schedule.ranks):
        other = schedule.ranks[generator[rank]]
        if len(numbers[rank]) != len(ranked.blocks) or len(ranked.blocks) != len(other.blocks):
            return False
        image = [numbers[generator[rank]].get(_moved(key, generator)) for key in keys[rank]]
        for block, place in zip(ranked.blocks, image, strict=True):
            if place is None or not _alike(block, other.blocks[place], image):
                return False
    return True


def _key(block: Block) -> Key:
    return block.send, block.receive, block.channel


def _moved(key: Key, generator: Permutation) -> Key:
    send, receive, channel = key
    return None if send is None else generator[send], None if receive is None else generator[receive], channel


def _alike(block: Block, other: Block, image: list[int | None]) -> bool:
    """The same opcodes, sizes and waits; where the data lies does not matter for time."""
    if len(block.instructions) != len(other.instructions):
        return False
    for one, two in zip(block.instructions, other.instructions, strict=True):
        place, there = one.source or one.target, two.source or two.target
        assert place is not None
        assert there is not None
        if (one.opcode, place.count, len(one.further)) != (two.opcode, there.count, len(two.further)):
            return False
        if {(image[wait.block], wait.step) for wait in one.after} != {(wait.block, wait.step) for wait in two.after}:
            return False
    return True
