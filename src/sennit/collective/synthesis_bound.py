"""How fast a network can spread data: the cut bound, found exactly.

Each *root* device holds a shard of one byte, which every device must get. For a set S of vertices that leaves a device
out, the shards of the roots in S must cross the links that leave S, whose capacity is B(S). So no algorithm is faster
than

    1 / x*  =  max over S that leave a device out of  |roots in S| / B(S)       seconds a byte of shard

and an all-gather of M bytes over N roots takes at least M / N / x*. Section 3 of ForestColl (Zhao et al., arXiv
2402.06787) shows that trees reach it, where every switch sends as much as it receives.

`cut_bound` finds the maximum by Newton's method on ratios (Dinkelbach) instead of a binary search: it starts with a
cut, asks by maximum flow whether any cut is worse, and goes on with that one. Each round is exact in integers, and the
answer is a cut, which anyone can check by adding up its links. The question for the ratio p/q: with a source that has
an edge of capacity q to each root and links of p times their capacity, does every device get a flow of q * roots? If
not, the minimum cut is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from sennit.collective.synthesis_flow import Residual, add_edge, augment, reachable
from sennit.collective.synthesis_network import Network
from sennit.errors import CollectiveError

__all__ = ["Cut", "cut_bound", "rooted_residual"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A set of vertices with `roots` roots in it and links of total capacity `bandwidth` out of it."""

    vertices: tuple[int, ...]
    roots: int
    bandwidth: int

    @property
    def ratio(self) -> Fraction:
        return Fraction(self.roots, self.bandwidth)


def cut_bound(network: Network, roots: Sequence[int], devices: Sequence[int] | None = None) -> Cut:
    """The cut with the most roots for its bandwidth.

    `devices`: one of each orbit, where symmetries of the network that keep the roots map them to all others: a cut that
    leaves another device out is then the image of one that leaves one of these out.
    """
    asked = range(network.devices) if devices is None else devices
    worst = _cut_of(network, roots, [roots[0]] if network.devices > 1 else [])
    for device in asked:
        around = _cut_of(network, roots, [v for v in range(len(network.names)) if v != device])
        worst = max(worst, around, key=lambda cut: cut.ratio)
    settled = 0
    turn = 0
    while settled < len(asked):  # every device passes with the same ratio
        cut = _worse_cut(network, roots, asked[turn], worst.ratio)
        if cut is None:
            settled += 1
            turn = (turn + 1) % len(asked)
        else:
            worst, settled = cut, 0
    return worst


def _worse_cut(network: Network, roots: Sequence[int], device: int, ratio: Fraction) -> Cut | None:
    capacities = [(arc.tail, arc.head, arc.capacity * ratio.numerator) for arc in network.arcs]
    residual = rooted_residual(len(network.names), capacities, roots, ratio.denominator)
    source, wanted = len(network.names), len(roots) * ratio.denominator
    if augment(residual, source, device, wanted) == wanted:
        return None
    return _cut_of(network, roots, sorted(reachable(residual, source) - {source}))


def rooted_residual(
    vertices: int, capacities: Sequence[tuple[int, int, int]], roots: Sequence[int], share: int
) -> Residual:
    """The links, and a source (the vertex after the last) with an edge of capacity `share` to each root."""
    residual: Residual = [{} for _ in range(vertices + 1)]
    for tail, head, capacity in capacities:
        add_edge(residual, tail, head, capacity)
    for root in roots:
        add_edge(residual, vertices, root, share)
    return residual


def _cut_of(network: Network, roots: Sequence[int], vertices: Sequence[int]) -> Cut:
    inside = set(vertices)
    bandwidth = network.bandwidth_out(inside)
    held = sum(root in inside for root in roots)
    if held and not bandwidth:
        left_out = next(v for v in range(network.devices) if v not in inside)
        raise CollectiveError(
            f"{network.names[left_out]} cannot be reached from {network.names[next(r for r in roots if r in inside)]}",
            where="the links of the network",
            fix="join them by links, directly or through switches",
        )
    return Cut(tuple(vertices), held, max(bandwidth, 1))
