"""Regions of an index space: per dim a set of indices, written as disjoint half-open intervals in ascending order.

    region   := "(" (dim ("," dim)*)? ")"
    dim      := interval ("+" interval)* | "none"
    interval := START ":" STOP

A box has one interval per dim. The piece of a strided layout has several on the strided dim; a product of interval
unions expresses both exactly. Regions are the ground truth where sizes are uneven or pieces irregular: a set of
regions covers another if every index of it lies in one of them, and tiles it if in exactly one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from sennit.errors import LayoutError
from sennit.ir.text import Scanner

__all__ = ["Interval", "Region"]

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Region:
    dims: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        for dim, intervals in enumerate(self.dims):
            edges = [edge for interval in intervals for edge in interval]
            ascending = all(start < stop for start, stop in intervals) and edges == sorted(edges)
            touching = any(left[1] == right[0] for left, right in pairwise(intervals))
            if not ascending or touching or (edges and edges[0] < 0):
                raise LayoutError(
                    f"dim {dim} of a region is {list(intervals)}",
                    fix="give ascending, disjoint, non-touching intervals",
                )

    @classmethod
    def box(cls, starts: Sequence[int], stops: Sequence[int]) -> Region:
        return cls(tuple(((a, b),) if a < b else () for a, b in zip(starts, stops, strict=True)))

    @classmethod
    def full(cls, shape: Sequence[int]) -> Region:
        return cls.box([0] * len(shape), shape)

    @classmethod
    def of_indices(cls, dims: Iterable[NDArray[np.int64]]) -> Region:
        """From ascending index arrays, one per dim."""
        return cls(tuple(_runs(indices) for indices in dims))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.dims)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_box(self) -> bool:
        return all(len(intervals) <= 1 for intervals in self.dims)

    def intersect(self, other: Region) -> Region:
        return Region(tuple(_intersect(a, b) for a, b in zip(self.dims, other.dims, strict=True)))

    def contains(self, other: Region) -> bool:
        return self.intersect(other).size == other.size

    def indices(self) -> tuple[NDArray[np.int64], ...]:
        """Ascending indices per dim, for `array[np.ix_(*region.indices())]`."""
        empty = np.zeros(0, dtype=np.int64)
        return tuple(
            np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in intervals]) if intervals else empty
            for intervals in self.dims
        )

    def within(self, outer: Region) -> Region:
        """This region in the local indices of `outer`, whose piece holds it."""
        if not outer.contains(self):
            raise LayoutError(f"region {self} is not inside {outer}", fix="intersect the two first")
        # where this region is empty in one dim, it may lie outside in another
        inside = self.intersect(outer)
        return Region.of_indices(
            np.searchsorted(big, mine) for big, mine in zip(outer.indices(), inside.indices(), strict=True)
        )

    def __str__(self) -> str:
        return "(" + ",".join("+".join(f"{a}:{b}" for a, b in dim) if dim else "none" for dim in self.dims) + ")"

    @classmethod
    def read(cls, scanner: Scanner) -> Region:
        def interval() -> Interval:
            start = scanner.integer()
            scanner.expect(":")
            return start, scanner.integer()

        def dim() -> tuple[Interval, ...]:
            if scanner.accept_word("none"):
                return ()
            intervals = [interval()]
            while scanner.accept("+"):
                intervals.append(interval())
            return tuple(intervals)

        return cls(tuple(scanner.bracketed("(", ")", dim)))

    @classmethod
    def parse(cls, text: str) -> Region:
        return Scanner.whole(text, cls.read)


def _runs(indices: NDArray[np.int64]) -> tuple[Interval, ...]:
    if len(indices) == 0:
        return ()
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks))


def _intersect(left: tuple[Interval, ...], right: tuple[Interval, ...]) -> tuple[Interval, ...]:
    result: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            result.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(result)
