"""The normal form `slice* ; flat ; gather*` of a redistribution on one mesh: which axes to slice before, and gather
after.

Source S and target T are even and on one mesh of prime axes. A layout is a map from axes to *digits* (dim, stride); L
is the size of its pieces. The plan goes S -> S' -> T' -> T, where S' is S with more axes split (sliced, which moves
nothing), T' is T with more axes split (gathered at the end), and S' and T' have pieces of one size, so the step between
them is *flat*.

**Memory.** L(S') <= L(S) and L(S') = L(T') <= L(T): no piece is larger than max(L(S), L(T)).

**Bytes.** A device receives |T'(d) - S'(d)| in the flat step and L(T) - L(T') in the gather: together L(T) - |S'(d) ∩
T'(d)|. No plan receives less than L(T) - |S(d) ∩ T(d)|. So the aim is to keep the overlap S' ∩ T' as large as S ∩ T
was.

**Aligned digits: paths.** Where the digits of S and T have a common refinement, draw a graph with the axes and the
digits as nodes, an S-edge from each axis to the digit it splits in S, and a T-edge to the one it splits in T. A node
has one edge of each kind at most, so the graph is cycles and paths with alternating edges. The overlap is the product
of the digits that nobody splits, times 1/p for each digit whose two holders are different axes, but once less on each
cycle (around a cycle the last equality of coordinates follows from the others). A path from a digit to an axis has one
edge more of one kind:

    digit -S- axis -T- digit -S- ... -S- axis      the last axis is free in T: let it take the first digit in T'
    digit -T- axis -S- digit -T- ... -T- axis      the last axis is free in S: slice it onto the first digit in S'

Either closes the path to a cycle, splits no digit that was not split, and so costs no overlap; all other paths and
cycles have as many S-edges as T-edges. After `_close_paths` the two sizes are equal and the overlap is what it was: *on
aligned digits the constructive plan receives the minimum*. A path of one edge is the plain case: an axis that T wants
and S has free is sliced, one that S has and T does not want is gathered.

**Misaligned digits: search.** On dim 6, S = 2 blocks and T = 3 blocks have no common refinement. For a prime p of which
S' splits fewer axes than T', v_p(L(S')) > v_p(L(T')) >= 0, so some local factor of S' is divisible by p, and an axis of
size p is free: a slice is always possible, and so is a plan. Which axis and which digit matters for the overlap:
`search` goes best first over the slices that are missing. More slices never enlarge the overlap, so the overlap so far
bounds what can still be reached from above (equivalently: what every device lacks already bounds from below what it
will receive), and the first state without a missing slice is the best.

**Pending sums.** An axis that is pending in S counts as free: where it takes a digit in S', the slice is a
reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from math import gcd, prod

import numpy as np

from sennit.ir.labels import AxisDigit, Integers, device_labels, dim_pairs

__all__ = ["Digits", "NormalForm", "Place", "Problem", "constructive", "search"]

Place = tuple[int, int]
"""A dim and a stride."""

Digits = Mapping[int, Place]
"""For each axis that splits (by its position in the mesh) the digit that it takes."""

MOST_STATES = 400
"""States that the search looks at before it settles for the best way on from the best of them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Two even layouts on one mesh. `sizes` are those of the axes, all prime (or 1); `fixed` are axes that may take no
    digit, since they stay pending."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Digits
    target: Digits
    fixed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class NormalForm:
    """S' and T'. `searched` says that digits are misaligned, so that the choice of slices mattered."""

    sliced: Digits
    ungathered: Digits
    searched: bool


# ---- digits that both layouts can be cut at --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Segment:
    """The digits from stride `low` up to `high` of a dim: of one axis, or local."""

    low: int
    high: int
    axis: int | None


@dataclass(slots=True)
class _Slots:
    """The aligned digits that someone splits, by place: who splits them in S and who in T. `loose` axes split a digit
    that is misaligned with the other layout."""

    source: dict[Place, int] = field(default_factory=dict)
    target: dict[Place, int] = field(default_factory=dict)
    loose: set[int] = field(default_factory=set)


def _segments(problem: Problem, digits: Digits, dim: int) -> list[_Segment]:
    """The whole dim, minor to major."""
    segments: list[_Segment] = []
    at = 1
    for stride, axis in sorted((stride, axis) for axis, (there, stride) in digits.items() if there == dim):
        if problem.sizes[axis] == 1:
            continue
        if stride > at:
            segments.append(_Segment(at, stride, None))
        at = stride * problem.sizes[axis]
        segments.append(_Segment(stride, at, axis))
    if at < problem.shape[dim]:
        segments.append(_Segment(at, problem.shape[dim], None))
    return segments


def _cuttable(segments: Iterable[_Segment], at: int) -> bool:
    """Whether a layout can be cut at a stride without splitting an axis."""
    for segment in segments:
        if segment.low <= at <= segment.high:
            if at in (segment.low, segment.high):
                return True
            return segment.axis is None and at % segment.low == 0 and segment.high % at == 0
    return True  # a dim of one index


def _slots(problem: Problem) -> _Slots:
    slots = _Slots()
    for dim, size in enumerate(problem.shape):
        have, need = _segments(problem, problem.source, dim), _segments(problem, problem.target, dim)
        edges = {size} | {edge for segment in have + need for edge in (segment.low, segment.high)}
        # a cut inside two local segments: as high up as both go
        edges |= {gcd(mine.high, yours.high) for mine in have for yours in need if mine.axis is yours.axis is None}
        cuts = [1]
        for edge in sorted(edges):
            if edge > cuts[-1] and edge % cuts[-1] == 0 and _cuttable(have, edge) and _cuttable(need, edge):
                cuts.append(edge)
        for low, high in pairwise(cuts):
            mine = [s.axis for s in have if s.axis is not None and low <= s.low < high]
            yours = [s.axis for s in need if s.axis is not None and low <= s.low < high]
            if all(problem.sizes[axis] == high // low for axis in mine + yours):
                slots.source.update(((dim, low), axis) for axis in mine)
                slots.target.update(((dim, low), axis) for axis in yours)
            else:
                slots.loose.update(mine, yours)
    return slots


# ---- the constructive plan -------------------------------------------------------------------------------------------


def constructive(problem: Problem) -> NormalForm:
    """Close the paths; where digits are misaligned, then take the first slice that is possible, again and again."""
    sliced, ungathered, aligned = _close_paths(problem)
    while not aligned and (lack := _lacking(problem, sliced, ungathered)) is not None:
        side, prime = lack
        grown = (sliced, ungathered)[side]
        axis, place = next(_slices(problem, grown, (ungathered, sliced)[side], prime))
        grown[axis] = place
    return NormalForm(sliced, ungathered, searched=not aligned)


def _close_paths(problem: Problem) -> tuple[dict[int, Place], dict[int, Place], bool]:
    """S' and T' after closing every path from a digit to a free axis, and whether that was all (no loose axis)."""
    slots = _slots(problem)
    sliced, ungathered = dict(problem.source), dict(problem.target)
    for place, axis in slots.source.items():
        if place not in slots.target:
            _close(axis, place, slots.source, problem.target, ungathered, problem.fixed)
    for place, axis in slots.target.items():
        if place not in slots.source:
            _close(axis, place, slots.target, problem.source, sliced, problem.fixed)
    return sliced, ungathered, not slots.loose


def _close(
    axis: int,
    place: Place,
    holders: Mapping[Place, int],
    other: Digits,
    grown: dict[int, Place],
    fixed: frozenset[int],
) -> None:
    """Follow the path that begins at `place`, held by `axis` in one layout; `other` has the edges of the other layout."""
    while axis in other:
        following = holders.get(other[axis])
        if following is None:
            return  # ends at a digit: as many edges of either kind; or at a loose one
        axis = following
    if axis not in fixed:
        grown[axis] = place


# ---- misaligned digits -----------------------------------------------------------------------------------------------


def _lacking(problem: Problem, sliced: Digits, ungathered: Digits) -> tuple[int, int] | None:
    """Which of the two splits too few axes (0 or 1), and of which prime; the largest such prime."""
    have = sorted(problem.sizes[axis] for axis in sliced)
    need = sorted(problem.sizes[axis] for axis in ungathered)
    for prime in sorted({*have, *need}, reverse=True):
        if prime > 1 and have.count(prime) != need.count(prime):
            return (0 if have.count(prime) < need.count(prime) else 1), prime
    return None


def _slices(problem: Problem, grown: Digits, other: Digits, prime: int) -> Iterator[tuple[int, Place]]:
    """The ways to split one more axis of size `prime`: every free axis on every local factor, at the places that
    matter: the major end of the factor and next to where axes of the other layout begin and end.
    """
    free = [
        axis
        for axis, size in enumerate(problem.sizes)
        if size == prime and axis not in grown and axis not in problem.fixed
    ]
    # an axis that the other layout splits is the better choice: its coordinates can agree
    free.sort(key=lambda axis: axis not in other)
    for dim in range(len(problem.shape)):
        axes = [segment for segment in _segments(problem, other, dim) if segment.axis is not None]
        edges = {edge for segment in axes for edge in (segment.low, segment.high)}
        for segment in _segments(problem, grown, dim):
            if segment.axis is not None or (segment.high // segment.low) % prime:
                continue
            strides = {segment.high // prime, *edges, *(edge // prime for edge in edges if edge % prime == 0)}
            for stride in sorted(strides, reverse=True):
                inside = stride >= segment.low and stride % segment.low == 0 and segment.high % (stride * prime) == 0
                if stride and inside:
                    for axis in free:
                        yield axis, (dim, stride)


def search(problem: Problem) -> NormalForm:
    """The normal form with the largest overlap.

    The constructive one where all digits are aligned: that is proven best.
    """
    sliced, ungathered, aligned = _close_paths(problem)
    if aligned:
        return NormalForm(sliced, ungathered, searched=False)
    overlaps = _Overlaps(problem)
    start = (tuple(sorted(sliced.items())), tuple(sorted(ungathered.items())))
    # best overlap first; among equal ones the deeper, then the one found first
    queue = [(-overlaps.total(sliced, ungathered), 0, 0, start)]
    seen = {start}
    while True:
        _, depth, _, (left, right) = heappop(queue)
        sliced, ungathered = dict(left), dict(right)
        lack = _lacking(problem, sliced, ungathered)
        if lack is None:
            return NormalForm(sliced, ungathered, searched=True)
        side, prime = lack
        if len(seen) > MOST_STATES:
            queue.clear()  # go on from here alone
        for axis, place in _slices(problem, (sliced, ungathered)[side], (ungathered, sliced)[side], prime):
            grown = {**(sliced, ungathered)[side], axis: place}
            pair = (grown, ungathered) if side == 0 else (sliced, grown)
            state = (tuple(sorted(pair[0].items())), tuple(sorted(pair[1].items())))
            if state not in seen:
                seen.add(state)
                heappush(queue, (-overlaps.total(*pair), depth - 1, len(seen), state))


# ---- overlap ---------------------------------------------------------------------------------------------------------


class _Overlaps:
    """Overlaps of pairs of layouts that differ in a few digits: dims that did not change are not counted again."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._tables: dict[tuple[int, tuple[AxisDigit, ...], tuple[AxisDigit, ...]], Integers] = {}

    def total(self, source: Digits, target: Digits) -> int:
        """The elements that devices have in both, of all devices together."""
        product = np.ones(prod(self._problem.sizes), dtype=np.int64)
        for dim, size in enumerate(self._problem.shape):
            have, need = self._of_dim(source, dim), self._of_dim(target, dim)
            key = (dim, have, need)
            if key not in self._tables:
                self._tables[key] = self._overlap(size, have, need)
            product = product * self._tables[key]
        return int(product.sum())

    def _overlap(self, size: int, have: tuple[AxisDigit, ...], need: tuple[AxisDigit, ...]) -> Integers:
        sizes = self._problem.sizes
        return dim_pairs(size, have, need).overlap(device_labels(sizes, have), device_labels(sizes, need))

    def _of_dim(self, digits: Digits, dim: int) -> tuple[AxisDigit, ...]:
        return tuple(
            AxisDigit(axis, self._problem.sizes[axis], stride)
            for axis, (there, stride) in sorted(digits.items())
            if there == dim
        )
