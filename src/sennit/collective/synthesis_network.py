"""The network that a collective is synthesised for: devices and switches, joined by links of whole-numbered capacity.

A device sends, receives, forwards and adds. A switch forwards only: it neither keeps nor copies. A link is directed;
its capacity counts `unit` bytes a second. Devices are vertices 0 to N - 1, which are the ranks; switches follow.

`network_of(topology)` takes the graph behind the routes of a cluster. A *shared* link (one wire for all its ends and
both directions) is drawn as a switch to which each of its ends has the same part of the wire, so that what is planned
never exceeds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from sennit.cluster import Topology
from sennit.errors import CollectiveError

__all__ = ["Arc", "Network", "network_of"]


@dataclass(frozen=True, slots=True)
class Arc:
    tail: int
    head: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Network:
    """`names` of the vertices, devices first; `node` of each device, for messages and for ordering choices."""

    names: tuple[str, ...]
    devices: int
    arcs: tuple[Arc, ...]
    unit: float = 1.0
    node: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.devices < 1 or self.devices > len(self.names):
            raise CollectiveError(
                f"a network of {len(self.names)} vertices has {self.devices} devices", fix="give at least one device"
            )
        seen: set[tuple[int, int]] = set()
        for arc in self.arcs:
            if not (0 <= arc.tail < len(self.names) and 0 <= arc.head < len(self.names)) or arc.tail == arc.head:
                raise CollectiveError(
                    f"a link joins vertex {arc.tail} to vertex {arc.head} of {len(self.names)}",
                    fix="join two different vertices of the network",
                )
            where = f"the link {self.names[arc.tail]} > {self.names[arc.head]}"
            if arc.capacity < 1:
                raise CollectiveError(f"its capacity is {arc.capacity}", where=where, fix="leave a dead link out")
            if (arc.tail, arc.head) in seen:
                raise CollectiveError("it is given twice", where=where, fix="give one link of their joint capacity")
            seen.add((arc.tail, arc.head))

    @classmethod
    def of(
        cls, devices: int, links: Mapping[tuple[str, str], int], unit: float = 1.0, *, both_ways: bool = True
    ) -> Network:
        """By name: `device 0` to `device N-1`, any other name is a switch.

        `both_ways`: a link is given once for both.
        """
        names = {f"device {rank}": rank for rank in range(devices)}
        capacities: Counter[tuple[int, int]] = Counter()
        for (left, right), capacity in links.items():
            tail, head = names.setdefault(left, len(names)), names.setdefault(right, len(names))
            capacities[tail, head] += capacity
            if both_ways:
                capacities[head, tail] += capacity
        arcs = tuple(Arc(tail, head, capacity) for (tail, head), capacity in capacities.items())
        return cls(tuple(names), devices, arcs, unit)

    def without(self, left: str, right: str) -> Network:
        """The network with the link between two vertices dead, both ways."""
        dead = {(left, right), (right, left)}
        kept = tuple(arc for arc in self.arcs if (self.names[arc.tail], self.names[arc.head]) not in dead)
        if len(kept) == len(self.arcs):
            near = sorted({self.names[arc.head] for arc in self.arcs if self.names[arc.tail] == left})
            raise CollectiveError(
                f"there is no link between {left!r} and {right!r}",
                fix=f"{left!r} has links to {', '.join(near)}" if near else f"{left!r} has no links",
            )
        return Network(self.names, self.devices, kept, self.unit, self.node)

    def reversed(self) -> Network:
        """Every link turned round: a tree that spreads in it collects in this one."""
        arcs = tuple(Arc(arc.head, arc.tail, arc.capacity) for arc in self.arcs)
        return Network(self.names, self.devices, arcs, self.unit, self.node)

    def bandwidth_out(self, inside: Iterable[int]) -> int:
        """The capacity of the links that leave a set of vertices."""
        within = set(inside)
        return sum(arc.capacity for arc in self.arcs if arc.tail in within and arc.head not in within)


def network_of(topology: Topology, links: Iterable[str] | None = None, *, resolution: float = 1e8) -> Network:
    """The devices of a cluster and its wires; of the named `links` only (such as `["nvlink"]`), where some are named.
    Bandwidths are rounded down to whole multiples of `resolution` bytes a second: fewer digits, fewer trees."""
    names = {f"device {rank}": rank for rank in range(topology.cluster.devices)}
    chosen = None if links is None else set(links)
    known = {topology.wires[edge.wire].link for edge in topology.edges()}
    if chosen is not None and not chosen <= known:
        raise CollectiveError(
            f"the cluster {topology.cluster.name!r} has no links {sorted(chosen - known)}",
            fix=f"name some of {', '.join(sorted(known))}",
        )
    edges = [edge for edge in topology.edges() if chosen is None or topology.wires[edge.wire].link in chosen]
    uses = Counter(edge.wire for edge in edges)
    rates: dict[tuple[int, int], float] = {}

    def add(left: str, right: str, rate: float) -> None:
        tail, head = names.setdefault(left, len(names)), names.setdefault(right, len(names))
        rates[tail, head] = rates.get((tail, head), 0.0) + rate

    for edge in edges:
        if uses[edge.wire] == 1:
            add(edge.tail, edge.head, topology.wires[edge.wire].bandwidth)
    joined = {
        wire: {end for edge in edges if edge.wire != wire for end in (edge.tail, edge.head)}
        for wire, count in uses.items()
        if count > 1
    }
    for wire in joined:
        ends = dict.fromkeys(end for edge in edges if edge.wire == wire for end in (edge.tail, edge.head))
        # a switch that is nothing but the middle of the bus needs no part of it
        ends = {
            end: None for end in ends if names.get(end, len(names)) < topology.cluster.devices or end in joined[wire]
        }
        for end in ends:
            part = topology.wires[wire].bandwidth / len(ends)
            add(end, topology.wires[wire].name, part)
            add(topology.wires[wire].name, end, part)
    whole = {ends: int(rate / resolution + 1e-6) for ends, rate in rates.items()}
    step = gcd(*whole.values()) if whole else 1
    if not step or not all(whole.values()):
        raise CollectiveError(
            f"a link of the cluster {topology.cluster.name!r} is slower than the resolution of {resolution:g} bytes/s",
            fix="give a smaller resolution",
        )
    arcs = tuple(Arc(tail, head, rate // step) for (tail, head), rate in whole.items())
    node = tuple(topology.cluster.node_of(rank) for rank in range(topology.cluster.devices))
    return Network(tuple(names), topology.cluster.devices, arcs, step * resolution, node)
