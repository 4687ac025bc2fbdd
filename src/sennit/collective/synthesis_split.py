"""Switches taken out of a network without loss: links in and out of a switch become links between its neighbours.

Given capacities with which every device can get `share` from each root (so that the trees exist), replace y units of a
link u > w and of a link w > t by a link u > t of capacity y, until the switch w has no links out. A set X of vertices
that has a device in it and not the source loses y of its bandwidth in only if

    w in X, u and t not           or            u and t in X, w not,

so the most that can be split is its least surplus over those sets. Where a switch receives no less than it sends, some
pair can always be split (Bang-Jensen, Frank and Jackson, "Preserving and increasing local edge-connectivity in mixed
graphs", 1995; as used in section 5 of ForestColl, arXiv 2402.06787).

A maximum flow for each device, for each pair, is what makes this slow. Here the flows to all devices are kept, and a
split repairs them: flow over u > w > t moves to u > t at no cost, and what is still too much on u > w (or w > t) is
sent from u to w (from w to t) another way. What finds no other way, at most over the devices, is exactly by how much
the split was too large.

`balanced` trims a switch that sends more than it receives: without copying, it cannot fill those links. Which of them
to trim is a guess, in proportion; what that costs shows in the certificate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sennit.collective.synthesis_bound import rooted_residual
from sennit.collective.synthesis_flow import Residual, augment
from sennit.collective.synthesis_network import Arc, Network

__all__ = ["Paths", "balanced", "remove_switches"]

Capacities = dict[tuple[int, int], int]
Paths = dict[
    tuple[int, int], dict[tuple[int, ...], int]
]  # by (tail, head): the ways through switches, and how much of each


def balanced(network: Network) -> Network:
    """The network with no switch that sends more than it receives.

    First no link of a switch is left wider than what the switch gets from, or has to, its other neighbours: a PCIe link
    to a NIC is no wider than the NIC. That takes nothing from any flow.
    """
    capacities = {(arc.tail, arc.head): arc.capacity for arc in network.arcs}
    before: Capacities = {}
    while before != capacities:
        before = dict(capacities)
        for switch in range(network.devices, len(network.names)):
            inward = {ends: capacity for ends, capacity in capacities.items() if ends[1] == switch}
            out = {ends: capacity for ends, capacity in capacities.items() if ends[0] == switch}
            most_in, most_out = sum(inward.values()), sum(out.values())
            for tail, _ in inward:
                capacities[tail, switch] = min(inward[tail, switch], most_out - out.get((switch, tail), 0))
            for _, head in out:
                capacities[switch, head] = min(out[switch, head], most_in - inward.get((head, switch), 0))
        if before == capacities:  # all are as narrow as they can be: only now trim, and only one before looking again
            capacities.update(_trimmed_switch(capacities, range(network.devices, len(network.names))))
    arcs = tuple(Arc(tail, head, capacity) for (tail, head), capacity in capacities.items() if capacity)
    return Network(network.names, network.devices, arcs, network.unit, network.node)


def _trimmed_switch(capacities: Capacities, switches: Iterable[int]) -> Capacities:
    """The links out of the first switch that sends more than it receives, trimmed in proportion; rounding favours the
    first.
    """
    for switch in switches:
        total = sum(capacity for (_, head), capacity in capacities.items() if head == switch)
        out = {ends: capacity for ends, capacity in capacities.items() if ends[0] == switch}
        if (before := sum(out.values())) > total:
            after = {ends: capacity * total // before for ends, capacity in out.items()}
            for ends in list(after)[: total - sum(after.values())]:
                after[ends] += 1
            return after
    return {}


def remove_switches(
    network: Network, capacities: Capacities, roots: Sequence[int], share: int
) -> tuple[Capacities, Paths]:
    """Capacities between devices alone, with which every device still gets `share` from each root, and the ways they
    go.
    """
    splitter = _Splitter(network, capacities, roots, share)
    # those with few links first: a NIC between a device and a leaf has one choice
    degree = {w: sum(w in ends for ends in capacities) for w in range(network.devices, len(network.names))}
    for switch in sorted(degree, key=lambda w: (degree[w], w)):
        splitter.remove(switch)
    left = {ends: capacity for ends, capacity in splitter.capacities.items() if capacity}
    return left, {ends: splitter.paths[ends] for ends in left}


@dataclass(slots=True)
class _Splitter:
    network: Network
    capacities: Capacities
    roots: Sequence[int]
    share: int
    paths: Paths = field(default_factory=dict)
    flows: list[Residual] = field(default_factory=list)  # by device

    def __post_init__(self) -> None:
        self.capacities = {ends: capacity for ends, capacity in self.capacities.items() if capacity}
        self.paths = {(tail, head): {(tail, head): amount} for (tail, head), amount in self.capacities.items()}
        edges = [(tail, head, capacity) for (tail, head), capacity in self.capacities.items()]
        source, wanted = len(self.network.names), len(self.roots) * self.share
        for device in range(self.network.devices):
            residual = rooted_residual(source, edges, self.roots, self.share)
            got = augment(residual, source, device, wanted)
            assert got == wanted, f"{got} of {wanted} to device {device}: the share is above the cut bound"
            self.flows.append(residual)

    def remove(self, switch: int) -> None:
        heads = [head for (tail, head), left in self.capacities.items() if tail == switch and left]
        tails = [tail for (tail, head), left in self.capacities.items() if head == switch and left]
        for head in sorted(heads, key=lambda vertex: (vertex >= self.network.devices, vertex)):
            for tail in sorted(tails, key=lambda vertex: self._preference(vertex, switch, head)):
                while wanted := min(self.capacities[tail, switch], self.capacities[switch, head]):
                    amount = self._largest(tail, switch, head, wanted)
                    if not amount:
                        break
                    self._split(tail, switch, head, amount)
            assert not self.capacities[switch, head], "a balanced switch can always be split"
        for tail in tails:
            self.capacities[tail, switch] = 0

    def _preference(self, tail: int, switch: int, head: int) -> tuple[bool, bool, bool, int]:
        """Any order is right. First the neighbour just before, which leaves rings and so few links; a way out of a node
        and back into it late; back to where it came from last, which throws the capacity away."""
        devices, node = self.network.devices, self.network.node
        outside = not self.network.names[switch].startswith("node ")
        loops = outside and max(tail, head) < min(devices, len(node)) and node[tail] == node[head]
        return tail == head, loops, tail >= devices, (head - tail) % len(self.network.names)

    def _largest(self, tail: int, switch: int, head: int, wanted: int) -> int:
        """The most that can be split, up to `wanted`."""
        short = 0
        for residual in self.flows:
            if residual[tail][switch] < wanted or residual[switch][head] < wanted:
                trial = [dict(edges) for edges in residual]
                short = max(short, _shift(trial, tail, switch, head, wanted))
                if short == wanted:
                    break
        return wanted - short

    def _split(self, tail: int, switch: int, head: int, amount: int) -> None:
        for residual in self.flows:
            short = _shift(residual, tail, switch, head, amount)
            assert not short, "the split fits"
        first = _take(self.paths[tail, switch], amount)
        second = _take(self.paths[switch, head], amount)
        self.capacities[tail, switch] -= amount
        self.capacities[switch, head] -= amount
        if tail == head:
            return
        self.capacities[tail, head] = self.capacities.get((tail, head), 0) + amount
        _join(self.paths.setdefault((tail, head), {}), first, second)


def _shift(residual: Residual, tail: int, switch: int, head: int, amount: int) -> int:
    """Move capacity from tail > switch > head to tail > head, and the flow with it; how much of the flow finds no way."""
    residual[tail][switch] -= amount
    residual[switch][head] -= amount
    if tail != head:
        residual[tail][head] = residual[tail].get(head, 0) + amount
        residual[head].setdefault(tail, 0)
        both = min(-residual[tail][switch], -residual[switch][head])
        if both > 0:
            for left, right, moved in ((tail, switch, both), (switch, head, both), (tail, head, -both)):
                residual[left][right] += moved
                residual[right][left] -= moved
    for left, right in ((tail, switch), (switch, head)):
        excess = -residual[left][right]
        if excess > 0:
            residual[left][right] += excess
            residual[right][left] -= excess
            return excess - augment(residual, left, right, excess)
    return 0


def _take(pieces: dict[tuple[int, ...], int], amount: int) -> list[tuple[tuple[int, ...], int]]:
    taken: list[tuple[tuple[int, ...], int]] = []
    while amount:
        path, there = next(iter(pieces.items()))
        part = min(there, amount)
        taken.append((path, part))
        amount -= part
        if part == there:
            del pieces[path]
        else:
            pieces[path] = there - part
    return taken


def _join(
    into: dict[tuple[int, ...], int],
    first: list[tuple[tuple[int, ...], int]],
    second: list[tuple[tuple[int, ...], int]],
) -> None:
    while first and second:
        (before, left), (after, right) = first.pop(), second.pop()
        part = min(left, right)
        path = (*before, *after[1:])
        into[path] = into.get(path, 0) + part
        if left > part:
            first.append((before, left - part))
        if right > part:
            second.append((after, right - part))
