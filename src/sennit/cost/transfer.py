"""What moving bytes costs: the alpha-beta model, as bytes laid on the wires of a topology.

A *transfer* takes `latency` seconds to start and then carries `load`, bytes by wire. Alone on its wires it takes

    seconds = latency + max over its wires of bytes / bandwidth             (no less than `floor` for the second part)

and the simulator shares wires among the transfers that run at once. The cluster's `algorithms` say what its library
knows; the fastest alone is taken, over the protocols of its links too. For p devices in a node, n bytes a device
(all-reduce: the array; gather and scatter: the whole array; all-to-all: what a device holds), a the latency of a hop:

| | steps of latency | bytes on each device's wires, each way |
|---|---|---|
| ring all-reduce | 2 (p-1) a | 2 (p-1)/p n |
| tree all-reduce, double binary | 2 ceil(log2 p) a | 2 n, on the links of the ring |
| multicast all-reduce (NVLink SHARP) | 2 a | (1 + 1/p) n, at the multicast rate |
| ring all-gather, reduce-scatter | (p-1) a | (p-1)/p n |
| direct all-reduce | 2 a | 2 n/p between each pair |
| direct all-gather, reduce-scatter | a | n/p between each pair |
| all-to-all, always direct | a | n/p between each pair |
| send | a | n |

A direct gather or scatter is for links that join each pair of devices; `Algorithm.DIRECT` says that the library uses
them so.

Each also waits for the cluster's `collective_start` or `send_start`. Where the cluster gives a `reduction` rate, an
all-reduce or a reduce-scatter takes (p-1)/p n / rate longer: its library adds what has arrived, and then sends on. With
`starts_use_cores` of a `[host]` the start is work too, and slower beside other work.

**Across nodes**, with g of the group's p devices on each of its m nodes, the library lays g rings (or trees), each of
which passes through every node and leaves it by another device's NIC. So 1/g of the bytes above goes over each NIC,
(g-1)/g over the links inside; a chunk's way has m-1 hops between nodes and p-m inside them (a tree: ceil(log2 m) and
ceil(log2 g)). Groups with unequal parts use one ring through all.

`Transfer.wire_bytes` is what the Timeline shows for a device: the bandwidth-optimal bytes of the table's ring rows,
whatever the algorithm, as nccl-tests counts bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, log2

from sennit.cluster import Algorithm, Basis, Figure, Topology
from sennit.cost.value import Cost
from sennit.ir.program import CollectiveKind

__all__ = ["Transfer", "bus_bytes", "collective", "point_to_point"]


@dataclass(frozen=True, slots=True)
class Transfer:
    latency: float
    load: tuple[tuple[int, float], ...]
    algorithm: str
    wire_bytes: int
    floor: float = 0.0

    def drain(self, topology: Topology) -> float:
        """Seconds for the bytes, alone on the wires."""
        return max([self.floor, *(size / topology.wires[wire].bandwidth for wire, size in self.load)])

    def seconds(self, topology: Topology) -> float:
        return self.latency + self.drain(topology)

    def cost(self, topology: Topology) -> Cost:
        return Cost(self.seconds(topology), Basis.ESTIMATED, f"alpha-beta, {self.algorithm} on {topology.cluster.name}")


def bus_bytes(kind: CollectiveKind, members: int, size: int) -> int:
    """Bytes that a device puts on the wire in a bandwidth-optimal algorithm; `size` as in the module's table."""
    once = size * (members - 1) // members
    return 2 * size * (members - 1) // members if kind is CollectiveKind.ALL_REDUCE else once


def point_to_point(topology: Topology, source: int, target: int, size: int) -> Transfer:
    def plan(protocol: str | None) -> Transfer:
        load = _Load(topology, protocol)
        load.add(source, target, size)
        return Transfer(topology.latency(source, target, protocol), load.items(), _label("send", protocol), size)

    return _fastest(
        topology, (plan(protocol) for protocol in (None, *topology.protocols())), topology.cluster.send_start
    )


def collective(topology: Topology, kind: CollectiveKind, members: Sequence[int], size: int) -> Transfer:
    """The fastest way that the cluster's library has; `size` as in the module's table."""
    group = sorted(members)
    wire_bytes = bus_bytes(kind, len(group), size)
    if len(group) == 1 or size == 0:
        return Transfer(0.0, (), "nothing to move", wire_bytes)
    best = _fastest(topology, _candidates(topology, kind, group, size, wire_bytes), topology.cluster.collective_start)
    rate = topology.cluster.reduction
    if rate is None or kind not in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
        return best
    added = size * (len(group) - 1) / len(group)
    return replace(best, floor=best.drain(topology) + added / rate.value)


def _starting(topology: Topology, best: Transfer, start: float) -> Transfer:
    """What comes before the first byte: a time by itself, or work of the cores that whatever else they do makes longer."""
    host = topology.cluster.host
    if host is not None and host.transfers_use_cores and host.starts_use_cores:
        return replace(best, floor=best.drain(topology) + start)
    return replace(best, latency=best.latency + start)


def _fastest(topology: Topology, candidates: Iterator[Transfer], start: Figure | None) -> Transfer:
    # min keeps the first of equals, so the order of declaration decides
    best = min(candidates, key=lambda transfer: transfer.seconds(topology))
    return best if start is None else _starting(topology, best, start.value)


def _label(algorithm: str, protocol: str | None) -> str:
    return algorithm if protocol is None else f"{algorithm}, {protocol}"


@dataclass(slots=True)
class _Load:
    """Bytes by wire; a protocol that carries a part of the bandwidth fills the wire by that much more."""

    topology: Topology
    protocol: str | None
    bytes: dict[int, float] = field(default_factory=dict)

    def add(self, source: int, target: int, size: float) -> None:
        for wire in self.topology.route(source, target):
            full = size / self.topology.wires[wire].speed(self.protocol).efficiency
            self.bytes[wire] = self.bytes.get(wire, 0.0) + full

    def items(self) -> tuple[tuple[int, float], ...]:
        return tuple(sorted(self.bytes.items()))


def _candidates(
    topology: Topology, kind: CollectiveKind, group: list[int], size: int, wire_bytes: int
) -> Iterator[Transfer]:
    known = topology.cluster.algorithms
    reduce_all = kind is CollectiveKind.ALL_REDUCE
    for protocol in (None, *topology.protocols()):
        if kind is CollectiveKind.ALL_TO_ALL:
            yield _direct(topology, group, size, 1, protocol, wire_bytes)
            continue
        rounds = 2 if reduce_all else 1
        one_node = topology.cluster.node_of(group[0]) == topology.cluster.node_of(group[-1])
        if Algorithm.DIRECT in known and one_node:
            yield _direct(topology, group, size, rounds, protocol, wire_bytes)
        if Algorithm.RING in known or not one_node:
            yield _levels(topology, group, size, rounds, protocol, wire_bytes, tree=False)
        if Algorithm.TREE in known and reduce_all:
            yield _levels(topology, group, size, rounds, protocol, wire_bytes, tree=True)
    if Algorithm.MULTICAST in known and reduce_all:
        yield from _multicast(topology, group, size, wire_bytes)


def _direct(
    topology: Topology, group: list[int], size: int, rounds: int, protocol: str | None, wire_bytes: int
) -> Transfer:
    load = _Load(topology, protocol)
    slowest = 0.0
    for source in group:
        for target in group:
            if source != target:
                load.add(source, target, rounds * size / len(group))
                slowest = max(slowest, topology.latency(source, target, protocol))
    return Transfer(rounds * slowest, load.items(), _label("direct", protocol), wire_bytes)


def _levels(
    topology: Topology,
    group: list[int],
    size: int,
    rounds: int,
    protocol: str | None,
    wire_bytes: int,
    *,
    tree: bool,
) -> Transfer:
    """A ring or tree in each node and another across nodes; `rounds` is 2 for an all-reduce and 1 for half of it."""
    load = _Load(topology, protocol)
    carried = rounds * size * (1.0 if tree else (len(group) - 1) / len(group))
    latency = 0.0
    for rings, share, hops in _rings(topology, group, tree):
        slowest = 0.0
        for ring in rings:
            for source, target in pairwise([*ring, ring[0]]):
                load.add(source, target, carried * share)
                slowest = max(slowest, topology.latency(source, target, protocol))
        latency += rounds * hops * slowest
    return Transfer(latency, load.items(), _label("tree" if tree else "ring", protocol), wire_bytes)


def _rings(topology: Topology, group: list[int], tree: bool) -> list[tuple[list[list[int]], float, int]]:
    """The levels: the rings of each, which run at once, the part of the bytes on each ring, and the hops of a chunk."""
    nodes: dict[int, list[int]] = {}
    for device in group:
        nodes.setdefault(topology.cluster.node_of(device), []).append(device)
    inside = list(nodes.values())
    whole = ceil(log2(len(group))) if tree else len(group) - 1
    if len({len(members) for members in inside}) > 1 or len(inside) == 1 or len(inside[0]) == 1:
        return [([group], 1.0, whole)]
    across = [list(place) for place in zip(*inside, strict=True)]
    m, g = len(inside), len(across)
    if tree:
        return [(inside, (g - 1) / g, ceil(log2(g))), (across, 1 / g, ceil(log2(m)))]
    return [(inside, (g - 1) / g, len(group) - m), (across, 1 / g, m - 1)]


def _multicast(topology: Topology, group: list[int], size: int, wire_bytes: int) -> Iterator[Transfer]:
    """In the switch of one node, where every wire to it can."""
    if topology.cluster.node_of(group[0]) != topology.cluster.node_of(group[-1]):
        return
    load = _Load(topology, None)
    carried = size * (1 + 1 / len(group))
    for source, target in pairwise([*group, group[0]]):
        load.add(source, target, carried)
    rates = [topology.wires[wire].multicast for wire, _ in load.items()]
    slow = min((rate for rate in rates if rate is not None), default=0.0)
    if slow and None not in rates:
        latency = 2 * topology.latency(group[0], group[1])
        yield Transfer(latency, load.items(), "multicast", wire_bytes, floor=carried / slow)
