"""A part of a local tensor, as a strided view: what a message is packed from and unpacked to.

A region of an array, seen inside the piece of a device, is per dim an ascending list of local indices. The digits of a
layout make these lists regular: nested runs of equal length and distance,

    indices = start + step_0 * [0, count_0) + step_1 * [0, count_1) + ...        major to minor

and a product of such lists is one strided view of the tensor: no index tensor, no gather kernel, one copy. A single
interval is the case of one run with step 1. An uneven dim can cut the last run short; such a list is not nested, and
its dim is taken by index instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sennit.ir.layout import Reduction
from sennit.ir.region import Region

__all__ = ["Selection", "combine", "widened"]

Run = tuple[int, int]  # count, step

_SHORT_RUN = 32  # bytes
_WIDE = (torch.complex128, torch.int64, torch.int32, torch.int16)  # 16, 8, 4 and 2 bytes


@dataclass(frozen=True, slots=True)
class _Pick:
    """The indices taken of one dim: nested runs from `start`, or `listed` where they are not nested."""

    start: int
    runs: tuple[Run, ...]
    listed: tuple[int, ...] | None = None

    @classmethod
    def of(cls, indices: NDArray[np.int64]) -> _Pick:
        runs = _nested_runs(indices)
        if runs is None:
            return cls(0, ((len(indices), 1),), tuple(int(index) for index in indices))
        return cls(int(indices[0]) if len(indices) else 0, runs)


@dataclass(frozen=True, slots=True)
class Selection:
    """Part of a tensor of shape `outer`; packed, it is a contiguous tensor of `elements` values in row-major order."""

    outer: tuple[int, ...]
    picks: tuple[_Pick, ...]
    elements: int
    is_dense: bool  # whether the values lie side by side in a contiguous tensor: then nothing is packed

    @classmethod
    def of(cls, part: Region, whole: Region) -> Selection:
        """`part` of an array, inside the piece that holds `whole`."""
        inside = zip(whole.indices(), part.indices(), strict=True)
        return cls.at(whole.shape, [np.searchsorted(big, mine) for big, mine in inside])

    @classmethod
    def at(cls, outer: tuple[int, ...], indices: Sequence[NDArray[np.int64]]) -> Selection:
        """By local indices, ascending, one array per dim."""
        picks = tuple(_Pick.of(mine) for mine in indices)
        elements = prod(len(mine) for mine in indices)
        return cls(outer, picks, elements, elements == 0 or _is_dense(outer, picks))

    @classmethod
    def flat(cls, size: int, start: int, stop: int) -> Selection:
        """Values `start` to `stop` of a tensor with one dim."""
        return cls((size,), (_Pick(start, ((stop - start, 1),)),), stop - start, True)

    def view(self, tensor: Tensor) -> Tensor:
        """The selected values without a copy; dims taken by index are left whole (`_by_index`)."""
        sizes: list[int] = []
        strides: list[int] = []
        offset = tensor.storage_offset()
        for dim, pick in enumerate(self.picks):
            stride = tensor.stride(dim)
            if pick.listed is not None:
                sizes.append(tensor.shape[dim])
                strides.append(stride)
                continue
            offset += pick.start * stride
            for count, step in pick.runs:
                sizes.append(count)
                strides.append(step * stride)
        return tensor.as_strided(sizes, strides, offset)

    def take(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """The values, flat and contiguous: a view of `tensor` where they already are, else packed (in `into`, if
        given).
        """
        if self.is_dense and tensor.is_contiguous():
            return self.view(tensor).reshape(-1)
        values = self._indexed(self.view(tensor))
        if into is None:
            return values.reshape(-1)
        combine(into.view(values.shape), values, None)
        return into

    def put(self, tensor: Tensor, values: Tensor, how: Reduction | None = None) -> None:
        """Write flat values, or combine them with what is there."""
        place = self.view(tensor)
        index = self._by_index()
        if index is None:
            combine(place, values.view(place.shape), how)
        else:
            parts = values.view([len(axis) for axis in index])
            mesh = torch.meshgrid(*(torch.tensor(axis, device=tensor.device) for axis in index), indexing="ij")
            if how is not None:
                current = place[mesh]
                combine(current, parts, how)
                parts = current
            place[mesh] = parts

    def copy(self, tensor: Tensor, to: Selection, output: Tensor, how: Reduction | None = None) -> None:
        """The values of this selection of `tensor` to those of another of `output`: one copy where runs allow it."""
        if self._by_index() is None and to._by_index() is None:
            values, place = self.view(tensor), to.view(output)
            if values.shape == place.shape:
                return combine(place, values, how)
            if place.is_contiguous():
                return combine(place.view(values.shape), values, how)
            if values.is_contiguous():
                return combine(place, values.view(place.shape), how)
        return to.put(output, self.take(tensor), how)

    def _indexed(self, view: Tensor) -> Tensor:
        dim = 0
        for pick in self.picks:
            if pick.listed is None:
                dim += len(pick.runs)
            else:
                view = view.index_select(dim, torch.tensor(pick.listed, device=view.device))
                dim += 1
        return view

    def _by_index(self) -> list[Sequence[int]] | None:
        """Indices into every dim of `view`, or None where no dim is taken by index."""
        if all(pick.listed is None for pick in self.picks):
            return None
        index: list[Sequence[int]] = []
        for pick in self.picks:
            if pick.listed is None:
                index += [range(count) for count, _ in pick.runs]
            else:
                index.append(pick.listed)
        return index


def combine(place: Tensor, values: Tensor, how: Reduction | None) -> None:
    """`place` becomes `values`, or its reduction with them."""
    match how:
        case None:
            place, values = widened(place, values)
            place.copy_(values)
        case Reduction.SUM:
            place.add_(values)
        case Reduction.PROD:
            place.mul_(values)
        case Reduction.MAX:
            torch.maximum(place, values, out=place)
        case Reduction.MIN:
            torch.minimum(place, values, out=place)


def widened(place: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same bytes as fewer, larger elements, where runs are short.

    A copy walks run by run, and of runs of 8 to 32 bytes it spends most of its time on getting from one to the next: as
    one or two elements each they take a half to a quarter of it.
    """
    if place.shape != values.shape or place.dtype != values.dtype or place.device.type != "cpu":
        return place, values
    while place.dim() and place.shape[-1] == 1:
        place, values = place.select(-1, 0), values.select(-1, 0)
    item = place.element_size()
    run = place.shape[-1] * item if place.dim() else 0
    if not item < run <= _SHORT_RUN or place.dtype.is_complex:
        return place, values
    for wide in _WIDE:
        ratio = wide.itemsize // item
        if ratio > 1 and run % wide.itemsize == 0 and _divides(place, ratio) and _divides(values, ratio):
            return place.view(wide), values.view(wide)
    return place, values


def _divides(tensor: Tensor, ratio: int) -> bool:
    """Whether so many elements may be taken as one, everywhere."""
    *others, last = tensor.stride()
    return last == 1 and tensor.storage_offset() % ratio == 0 and all(stride % ratio == 0 for stride in others)


def _nested_runs(indices: NDArray[np.int64]) -> tuple[Run, ...] | None:
    """Runs that make `indices`, major to minor, or None where they are not nested."""
    if len(indices) < 2:
        return ((len(indices), 1),)
    steps = np.diff(indices)
    breaks = np.flatnonzero(steps != steps[0])
    length = len(indices) if len(breaks) == 0 else int(breaks[0]) + 1
    if length == len(indices):
        return ((length, int(steps[0])),)
    if len(indices) % length:
        return None
    rows = indices.reshape(-1, length)
    if not np.array_equal(rows - rows[:, :1], np.broadcast_to(rows[0] - rows[0, 0], rows.shape)):
        return None
    major = _nested_runs(rows[:, 0])
    return None if major is None else (*major, (length, int(steps[0])))


def _is_dense(outer: tuple[int, ...], picks: tuple[_Pick, ...]) -> bool:
    """Whether the view of a contiguous tensor is itself contiguous."""
    stride, packed = 1, 1
    for size, pick in zip(reversed(outer), reversed(picks), strict=True):
        if pick.listed is not None:
            return False
        for count, step in reversed(pick.runs):
            if count > 1 and step * stride != packed:
                return False
            packed *= count
        stride *= size
    return True
