"""Collectives synthesised for a network: trees that reach the cut bound, and the certificate that says so.

An all-gather is a broadcast from every device at once. With x* the rate of the cut bound (`synthesis_bound.py`), each
device's shard is cut into `share` parts, each part goes down its own tree, and all trees run at once at the same rate:

    1/x* = p/q in lowest terms;    g = gcd(q, all capacities);    share = q/g;    a link of capacity b holds b p/g trees.

1. `cut_bound`: x*, exactly, with the cut that sets it.
2. `remove_switches`: capacities between devices alone, in which the trees still exist.
3. `pack_trees`: the trees.
   Where all devices are roots and the network has symmetries, 2 and 3 are done for one device of each orbit (`synthesis_symmetry.py`,
   `synthesis_orbit.py`), if that gives the same rate; it does for clusters of identical nodes.
4. `synthesize`: the moves, level by level of all trees, and a certificate: the time of the trees on the *links of the
   network*, added up
   from the finished trees, beside the cut.

A broadcast is the same with one root. A reduce-scatter (a reduce) runs the trees of the reversed network backwards. An
all-reduce is a reduce-scatter and then an all-gather: its bound is the sum of the two, so it is the best of that form,
which for the bottleneck of a single device is the best of all (Patarasuk and Yuan 2009).

The exact number of trees can be large where capacities have no common measure. `trees` limits it: links then hold whole
numbers of trees of the largest rate at which that many from each root fit, and the ratio in the certificate falls below
1.

After Zhao et al., "ForestColl: Throughput-Optimal Collective Communications on Heterogeneous Network Fabrics", arXiv
2402.06787; the search, the splitting and the moves are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd

from sennit.collective.synthesis_bound import Cut, cut_bound, rooted_residual
from sennit.collective.synthesis_flow import augment
from sennit.collective.synthesis_moves import all_gather_moves, all_reduce_moves, reduce_scatter_moves
from sennit.collective.synthesis_network import Network
from sennit.collective.synthesis_orbit import orbit_trees
from sennit.collective.synthesis_pack import Tree, pack_trees
from sennit.collective.synthesis_split import balanced, remove_switches
from sennit.collective.synthesis_symmetry import Symmetries, symmetries
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["Certificate", "Forest", "Synthesis", "Way", "spanning_forest", "synthesize"]


@dataclass(frozen=True, slots=True)
class Way:
    """`count` trees go from the first to the last vertex of `path`, through the switches between."""

    path: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Forest:
    """`share` trees from each root in `network`, and the ways over its links that carry them.

    `cut` limits the network.
    """

    network: Network
    roots: tuple[int, ...]
    share: int
    trees: tuple[Tree, ...]
    ways: tuple[Way, ...]
    cut: Cut

    def load(self) -> dict[tuple[int, int], int]:
        """Trees by link of the network."""
        load: dict[tuple[int, int], int] = {}
        for way in self.ways:
            for ends in pairwise(way.path):
                load[ends] = load.get(ends, 0) + way.count
        return load

    @property
    def rate(self) -> Fraction:
        """Capacity units at which each root's shard spreads: the fullest link decides."""
        load = self.load()
        fullest = max(Fraction(load.get((arc.tail, arc.head), 0), arc.capacity) for arc in self.network.arcs)
        return self.share / fullest


@dataclass(frozen=True, slots=True)
class Certificate:
    """`algbw` is bytes of the collective's array a second, for arrays so large that starting up does not count.

    `bound` is what no algorithm exceeds, because of the cuts: the bytes that must leave each, over the links that leave
    it.
    """

    collective: CollectiveName
    algbw: float
    bound: float
    cuts: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.algbw / self.bound

    @property
    def optimal(self) -> bool:
        return self.ratio > 1 - 1e-9

    def __str__(self) -> str:
        word = "optimal" if self.optimal else f"{self.ratio:.4f} of the bound"
        lines = [f"{self.collective.value}: {self.algbw / 1e9:.2f} GB/s, bound {self.bound / 1e9:.2f} GB/s ({word})"]
        return "\n".join([*lines, *(f"  limited by {cut}" for cut in self.cuts)])


@dataclass(frozen=True, slots=True)
class Synthesis:
    algorithm: Algorithm
    certificate: Certificate
    forests: tuple[Forest, ...]


def spanning_forest(
    network: Network, roots: Sequence[int] | None = None, *, trees: int | None = None, quotient: bool = True
) -> Forest:
    """Trees from each of `roots` (all devices, where none are named) at the best rate; at most `trees` from each.

    `quotient=False` does not look for symmetries.
    """
    chosen = tuple(range(network.devices)) if roots is None else tuple(roots)
    if network.devices < 2 or not chosen or not all(0 <= root < network.devices for root in chosen):
        raise CollectiveError(
            f"trees from roots {list(chosen)} in a network of {network.devices} devices",
            fix="give two devices or more, and roots among them",
        )
    if trees is not None and trees < 1:
        raise CollectiveError(f"at most {trees} trees from each root", fix="allow 1 or more")
    if quotient and len(set(chosen)) == network.devices:
        group = symmetries(network)
        if len(group.elements) > 1:
            forest = _by_symmetry(network, chosen, group, trees)
            if forest is not None:
                return forest
    cut = cut_bound(network, chosen)
    usable = balanced(network)
    ratio = cut_bound(usable, chosen).ratio
    common = gcd(ratio.denominator, *(arc.capacity for arc in usable.arcs))
    share = ratio.denominator // common
    scale = Fraction(ratio.numerator, common)
    if trees is not None and trees < share:
        share, scale = trees, _scale_for(usable, chosen, trees, trees * ratio)
    capacities = {(arc.tail, arc.head): int(arc.capacity * scale) for arc in usable.arcs}
    between, paths = remove_switches(usable, capacities, chosen, share)
    packed = pack_trees(network.devices, between, chosen, share)
    used: dict[tuple[int, int], int] = {}
    for tree in packed:
        for ends in tree.edges:
            used[ends] = used.get(ends, 0) + tree.count
    ways = [way for ends, count in used.items() for way in _ways(paths[ends], count)]
    return Forest(network, chosen, share, tuple(packed), tuple(ways), cut)


def _by_symmetry(network: Network, roots: tuple[int, ...], group: Symmetries, trees: int | None) -> Forest | None:
    """The forest at the cut bound, made for one device of each orbit; None where that does not reach the bound."""
    cut = cut_bound(network, roots, group.representatives)
    exact = cut.ratio.denominator // gcd(cut.ratio.denominator, *(arc.capacity for arc in network.arcs))
    shares = [share for share in (*range(1, 9), exact) if trees is None or share <= trees]
    found = orbit_trees(network, group, cut.ratio, tuple(sorted(set(shares))))
    if found is None:
        return None
    ways = tuple(Way(path, count) for path, count in found.paths.items())
    forest = Forest(network, roots, found.share, found.trees, ways, cut)
    return forest if forest.rate * cut.ratio == 1 else None


def _ways(pieces: dict[tuple[int, ...], int], count: int) -> list[Way]:
    """The first of the pieces, of `count` in all; short ones first."""
    ways: list[Way] = []
    for path, there in sorted(pieces.items(), key=lambda piece: (len(piece[0]), piece[0])):
        if count:
            ways.append(Way(path, min(there, count)))
            count -= ways[-1].count
    return ways


def _scale_for(network: Network, roots: Sequence[int], share: int, least: Fraction) -> Fraction:
    """Close to the smallest scale at which links of floor(capacity * scale) hold `share` trees from each root."""

    def holds(scale: Fraction) -> bool:
        edges = [(arc.tail, arc.head, int(arc.capacity * scale)) for arc in network.arcs]
        source, wanted = len(network.names), share * len(roots)
        return all(
            augment(rooted_residual(source, edges, roots, share), source, device, wanted) == wanted
            for device in range(network.devices)
        )

    low, high = least, least
    while not holds(high):
        low, high = high, high * 3 / 2
    while high - low > least / 512:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def synthesize(
    network: Network,
    collective: CollectiveName,
    *,
    root: int | None = None,
    in_place: bool = False,
    trees: int | None = None,
) -> Synthesis:
    """An all-gather, reduce-scatter, all-reduce, broadcast or reduce at the best rate that the network allows."""
    ranks = network.devices
    rooted = collective in (CollectiveName.BROADCAST, CollectiveName.REDUCE)
    roots = None if not rooted else [root if root is not None else 0]
    match collective:
        case CollectiveName.ALL_GATHER | CollectiveName.BROADCAST:
            forest = spanning_forest(network, roots, trees=trees)
            forests: tuple[Forest, ...] = (forest,)
            chunks = forest.share
        case CollectiveName.REDUCE_SCATTER | CollectiveName.REDUCE:
            forest = spanning_forest(network.reversed(), roots, trees=trees)
            forests = (forest,)
            chunks = forest.share
        case CollectiveName.ALL_REDUCE:
            down = spanning_forest(network, trees=trees)
            same = set(network.arcs) == set(network.reversed().arcs)
            up = down if same else spanning_forest(network.reversed(), trees=trees)
            forests = (up, down)
            chunks = ranks * up.share * down.share // gcd(up.share, down.share)
        case _:
            raise CollectiveError(
                f"{collective.value} has no trees",
                fix="synthesise all_gather, reduce_scatter, all_reduce, broadcast or reduce; "
                "for all_to_all use synthesize_all_to_all",
            )
    spec = CollectiveSpec(collective, ranks, chunks, roots[0] if roots else None, in_place)
    match collective:
        case CollectiveName.ALL_GATHER | CollectiveName.BROADCAST:
            moves, scratch = all_gather_moves(spec, forests[0].trees)
        case CollectiveName.ALL_REDUCE:
            moves, scratch = all_reduce_moves(spec, forests[0].trees, forests[1].trees)
        case _:
            moves, scratch = reduce_scatter_moves(spec, forests[0].trees)
    algorithm = Algorithm(f"forest_{collective.value}", spec, moves, scratch)
    return Synthesis(algorithm, _certify(network, collective, forests), forests)


def _certify(network: Network, collective: CollectiveName, forests: tuple[Forest, ...]) -> Certificate:
    """Seconds for an array of one byte add up over the phases; each root's shard is 1/roots of it."""
    took = bound = 0.0
    cuts: dict[str, None] = {}
    for forest in forests:
        unit, roots = forest.network.unit, len(forest.roots)
        took += 1 / (float(forest.rate) * unit * roots)
        bound += float(forest.cut.ratio) / unit / roots
        cuts[_describe(forest, backwards=forest.network.arcs != network.arcs)] = None
    return Certificate(collective, 1 / took, 1 / bound, tuple(cuts))


def _describe(forest: Forest, *, backwards: bool) -> str:
    """A cut in words, by the smaller of its two sides; `backwards` where the forest is of the reversed network."""
    network, cut = forest.network, forest.cut
    inside = [network.names[vertex] for vertex in cut.vertices]
    outside = [name for name in network.names if name not in set(inside)]
    small = len(inside) <= len(outside)
    side, members = "out of" if small != backwards else "into", inside if small else outside
    names = ", ".join(members[:8]) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
    rate = cut.bandwidth * network.unit / 1e9
    return f"{cut.roots} of {len(forest.roots)} shards over {rate:.1f} GB/s {side} {{{names}}}"
