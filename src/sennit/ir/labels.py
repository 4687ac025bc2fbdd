"""How the indices of one dim lie under two layouts at once.

Under a layout, index i of a dim has a *label*: the coordinates `(i // stride) % size` of the axes that split the dim,
as one mixed-radix number. A device has a label too, from its own coordinates, and holds the indices that have the same.
`DimPairs` counts the indices for each pair (label under the one layout, label under the other). It works on units of
the greatest common divisor of all strides, in which labels do not change, so its cost does not depend on how long the
dim is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from sennit.ir.layout import Layout
from sennit.ir.region import Interval

__all__ = ["AxisDigit", "DimPairs", "Integers", "device_labels", "digits_of", "dim_pairs"]

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AxisDigit:
    """An axis, by its position in the mesh, that splits a dim at a stride."""

    axis: int
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class DimPairs:
    """The pairs of labels that occur, ascending, as `label * needs + other label`; how many indices have each; and the
    pair of every unit of the dim. There are `haves` labels of the one layout and `needs` of the other.
    """

    size: int
    unit: int
    haves: int
    needs: int
    pairs: Integers
    counts: Integers
    units: Integers

    def overlap(self, have: Integers, need: Integers) -> Integers:
        """How many indices have both labels, for arrays of labels."""
        if not len(self.pairs):
            return np.zeros_like(have)
        wanted = have * self.needs + need
        found = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        return np.where(self.pairs[found] == wanted, self.counts[found], 0)

    def intervals(self) -> dict[tuple[int, int], tuple[Interval, ...]]:
        """The indices of each pair of labels."""
        found: dict[tuple[int, int], list[Interval]] = {}
        edges = [0, *(np.flatnonzero(np.diff(self.units)) + 1).tolist(), len(self.units)] if self.size else [0]
        for start, stop in pairwise(edges):
            have, need = divmod(int(self.units[start]), self.needs)
            found.setdefault((have, need), []).append((start * self.unit, min(stop * self.unit, self.size)))
        return {pair: tuple(intervals) for pair, intervals in found.items()}


def dim_pairs(size: int, have: Sequence[AxisDigit], need: Sequence[AxisDigit]) -> DimPairs:
    unit = gcd(*(digit.stride for digit in (*have, *need))) or max(size, 1)
    starts = np.arange(-(-size // unit), dtype=np.int64) * unit
    label = np.zeros_like(starts)
    for digit in (*have, *need):
        label = label * digit.size + starts // digit.stride % digit.size
    haves, needs = prod(digit.size for digit in have), prod(digit.size for digit in need)
    pairs, inverse = np.unique(label, return_inverse=True)
    counts = np.bincount(inverse, minlength=len(pairs)).astype(np.int64) * unit
    if size % unit:
        counts[inverse[-1]] -= unit - size % unit  # the last unit is short
    return DimPairs(size, unit, haves, needs, pairs, counts, label)


def digits_of(layout: Layout, dim: int) -> tuple[AxisDigit, ...]:
    """The digits of a dim, major to minor."""
    return tuple(AxisDigit(layout.mesh.index(d.axis), d.size, d.stride) for d in layout.digits(dim))


def device_labels(sizes: Sequence[int], digits: Sequence[AxisDigit]) -> Integers:
    """The label of each device of a mesh with axes of these sizes, devices in row-major order."""
    devices = np.arange(prod(sizes), dtype=np.int64)
    label = np.zeros_like(devices)
    for digit in digits:
        label = label * digit.size + devices // prod(sizes[digit.axis + 1 :]) % digit.size
    return label
