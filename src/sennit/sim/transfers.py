"""Who takes part in a collective or a transfer, and what it lays on the wires.

A *party* is the groups of an actor's devices, a *bundle* the transfers that its groups (or pairs of devices) make
together: the bytes of a bundle lie on the wires together. Clusters are the same from each node on, so what a group
moves is found for the group of the same shape that begins in node 0, and moved to its wires: thousands of groups cost
as much as one.

`alike` says whether the parts of each bundle are told apart by nothing that the clock sees: equal latency, and wires of
equal sorts with equal bytes, where the sort of a wire is what it carries a second and the list of all bundles with the
bytes that each lays on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sennit.cluster import Topology, Wire
from sennit.cost import CollectiveTimes, Transfer, collective, point_to_point
from sennit.ir.dtype import TensorType
from sennit.ir.mesh import Mesh
from sennit.ir.program import CollectiveKind
from sennit.sim.exchanges import Part

__all__ = ["Bundle", "Group", "Party", "Transfers", "alike"]

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Party:
    """Who takes part: the groups, and all their devices in order. Parties of equal groups are one object."""

    groups: tuple[Group, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Transfers that run as one. `unit` is the most bytes that one part lays on a wire."""

    parts: tuple[Transfer, ...]
    latency: float
    drain: float
    unit: float
    load: tuple[tuple[int, float], ...]
    wire_bytes: int


class Transfers:
    def __init__(self, topology: Topology, collectives: CollectiveTimes | None) -> None:
        self.topology, self.collectives = topology, collectives
        self.groups: dict[tuple[int, tuple[str, ...]], dict[int, Group]] = {}  # by mesh and axes, then device
        self.parties: dict[tuple[Group, ...], Party] = {}
        self.first: dict[object, Transfer] = {}  # of groups that begin in node 0
        self.bundles: dict[object, Bundle] = {}
        self.found: dict[tuple[int, tuple[str, ...], int], Party] = {}
        self.alive: list[object] = []  # what tables above know by its identity

    def party(self, mesh: Mesh, axes: tuple[str, ...], devices: tuple[int, ...]) -> Party:
        """The groups of these devices; meshes and tuples of devices are told apart by identity, as layouts are."""
        key = (id(mesh), axes, id(devices))
        if key not in self.found:
            self.found[key] = self._party(mesh, axes, devices)
            self.alive.append((mesh, devices))
        return self.found[key]

    def _party(self, mesh: Mesh, axes: tuple[str, ...], devices: tuple[int, ...]) -> Party:
        known = self.groups.setdefault((id(mesh), axes), {})
        for device in devices:
            if device not in known:
                group = mesh.group(device, axes)
                known.update(dict.fromkeys(group, group))
        mine = [known[device] for device in devices]
        groups = tuple(sorted({id(group): group for group in mine}.values()))
        party = self.parties.get(groups)
        if party is None:
            everyone = tuple(sorted(device for group in groups for device in group))
            party = self.parties[groups] = Party(groups, everyone)
        return party

    def collective(self, kind: CollectiveKind, party: Party, moved: TensorType) -> Bundle:
        key = (id(kind), id(party), id(moved))  # comparing them costs more than a bundle too many
        if key not in self.bundles:
            self.bundles[key] = self._bundle([self._collective(kind, group, moved.bytes) for group in party.groups])
            self.alive.append(moved)
        return self.bundles[key]

    def pairs(self, pairs: tuple[tuple[int, int], ...], size: int) -> Bundle:
        key = (pairs, size)
        if key not in self.bundles:
            self.bundles[key] = self._bundle([self._send(pair, size) for pair in pairs])
        return self.bundles[key]

    def exchange(self, parts: tuple[Part, ...]) -> Bundle:
        """The messages of several parts of an exchange; a part is one thing, whose messages start together."""
        key = ("exchange", tuple([id(part) for part in parts]))
        if key not in self.bundles:
            self.bundles[key] = self._bundle([self._messages(part) for part in parts])
            self.alive.append(parts)
        return self.bundles[key]

    def _messages(self, part: Part) -> Transfer:
        sends = [self._send((sender, receiver), size) for sender, receiver, size in part.messages]
        if not sends:
            return Transfer(0.0, (), "nothing to move", 0)
        load: dict[int, float] = {}
        sent: dict[int, int] = {}
        for (sender, _, size), send in zip(part.messages, sends, strict=True):
            sent[sender] = sent.get(sender, 0) + size
            for wire, laid in send.load:
                load[wire] = load.get(wire, 0.0) + laid
        return Transfer(
            max(send.latency for send in sends),
            tuple(sorted(load.items())),
            "messages",
            max(sent.values()),
            max(send.floor for send in sends),
        )

    def _collective(self, kind: CollectiveKind, group: Group, size: int) -> Transfer:
        def make(members: Group) -> Transfer:
            found = self.collectives(kind, members, size) if self.collectives is not None else None
            return found if found is not None else collective(self.topology, kind, members, size)

        return self._moved((kind, size), group, make)

    def _send(self, pair: tuple[int, int], size: int) -> Transfer:
        return self._moved(("send", size), pair, lambda pair: point_to_point(self.topology, pair[0], pair[1], size))

    def _moved(self, key: tuple[object, ...], group: Group, make: Callable[[Group], Transfer]) -> Transfer:
        """`make` of the group, by way of the group that lies the same way from node 0 on."""
        shift = min(group) // self.topology.cluster.device.per_node if self.topology.is_uniform else 0
        back = shift * self.topology.cluster.device.per_node
        first = tuple([device - back for device in group]) if shift else group
        found = self.first.get((key, first))
        if found is None:
            found = self.first[key, first] = make(first)
        if not shift:
            return found
        moved = self.topology.moved
        return replace(found, load=tuple(sorted([(moved(wire, shift), size) for wire, size in found.load])))

    def _bundle(self, parts: list[Transfer]) -> Bundle:
        load: dict[int, float] = {}
        for part in parts:
            for wire, size in part.load:
                load[wire] = load.get(wire, 0.0) + size
        wires = self.topology.wires
        drain = max([*(part.floor for part in parts), *(size / wires[wire].bandwidth for wire, size in load.items())])
        return Bundle(
            tuple(parts),
            max(part.latency for part in parts),
            drain,
            max((size for part in parts for _, size in part.load), default=0.0),
            tuple(sorted(load.items())),
            parts[0].wire_bytes,
        )


def alike(bundles: list[Bundle], wires: Sequence[Wire]) -> bool:
    """Whether the parts of every bundle see the same: see the module's text."""
    laid: dict[int, list[tuple[int, float]]] = {}
    for number, bundle in enumerate(bundles):
        for wire, size in bundle.load:
            laid.setdefault(wire, []).append((number, round(size, 3)))
    sorts: dict[object, int] = {}
    sort = {
        wire: sorts.setdefault((wires[wire].bandwidth, wires[wire].burst, tuple(items)), len(sorts))
        for wire, items in laid.items()
    }
    for bundle in bundles:
        seen = {
            (part.latency, part.floor, tuple(sorted([(round(size, 3), sort[wire]) for wire, size in part.load])))
            for part in bundle.parts
        }
        if len(seen) > 1:
            return False
    return True
