"""What each device takes out of the memory of the others: a redistribution in one pass, where memory is shared.

Both layouts are even and of blocks on one mesh. Device d holds the box S(d) of the array and is to hold the box T(d).
Boxes of the source have one size, c, and tile the array (replicas hold the same box). So along dim i the interval of
T(d) is cut at the multiples of c_i, and T(d) is the disjoint union of the products of these cuts; each product lies in
one box of the source. Its holder is d itself where d has that box, else the holders of a box serve in turn. An axis
that both layouts have in the same place keeps its coordinate: what d wants is held by devices that differ from it in
the other axes alone, its *group*. Every element is read once and written once, nothing is packed, and nothing is
received that is not part of the result: the bytes are the least possible.

| value | says |
|---|---|
| `Cut` | elements along a dim, and where they begin in the piece of the holder |
| `Pull` | of one device: the cuts of every dim, in the order of its piece, and the holder of each product of cuts |

`take` is the meaning, on numpy arrays. `encode` flattens the pulls of all devices to the integers that `pull_core.c`
interprets:

    table  := rank, level, devices, members of a group, source stride * rank, target stride * rank, start * devices, pull * devices
    pull   := member, (count, (length, offset) * count) * rank, holder * (product of the counts)

Dims that both sides hold whole are one with the dim before them. Strides and offsets are in bytes, lengths in elements
but for the last dim, whose cuts are runs of bytes. `start` is where a device's pull begins, `member` its number in its
group; holders are such numbers. Dims up to `level` are walked; all runs of the dims behind it are listed once for each
product of cuts and copied for every index of those dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.errors import LayoutError
from sennit.ir.layout import Layout, Split

__all__ = ["Cut", "Pull", "encode", "firsts", "is_of_blocks", "pulls", "take"]

LISTED = 512  # runs that are listed at most: `pull_core.c` has room for as many


@dataclass(frozen=True, slots=True)
class Cut:
    length: int
    source: int


@dataclass(frozen=True, slots=True)
class Pull:
    """The holders are positions in the mesh, in row-major order of the cuts."""

    cuts: tuple[tuple[Cut, ...], ...]
    holders: tuple[int, ...]


def firsts(layout: Layout) -> list[tuple[int, ...]]:
    """The first index of each device's piece, per dim: among pieces of one form it names the piece."""
    found = []
    for point in layout.mesh.points():
        first = [0] * len(layout.shape)
        for name, entry in layout.entries:
            if isinstance(entry, Split):
                first[entry.dim] += point[layout.mesh.index(name)] * entry.stride
        found.append(tuple(first))
    return found


def is_of_blocks(layout: Layout) -> bool:
    """Whether every piece is a box: the digits of a dim follow one another from the major end."""
    for dim, size in enumerate(layout.shape):
        for digit in layout.digits(dim):
            if digit.size > 1 and digit.stride * digit.size != size:
                return False
            size = digit.stride if digit.size > 1 else size
    return True


def pulls(source: Layout, target: Layout) -> tuple[Pull, ...]:
    """What each device takes, by its position in the mesh."""
    for layout in (source, target):
        if layout.pending or not layout.is_even or not is_of_blocks(layout):
            raise LayoutError(
                f"layout {layout} is not one of even blocks that hold values",
                where=f"{source} -> {target} on mesh {source.mesh}",
                fix="plan it by steps (`sennit.reshard.plan`)",
            )
    have, want = source.local_shape(), target.local_shape()
    stays = [number for number, name in enumerate(source.mesh.names) if source.entry(name) == target.entry(name)]
    groups = [tuple(point[number] for number in stays) for point in source.mesh.points()]
    held: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for device, first in enumerate(firsts(source)):
        held.setdefault((groups[device], first), []).append(device)
    found = []
    for device, first in enumerate(firsts(target)):
        cuts = [_cuts(begin, *sizes) for begin, *sizes in zip(first, want, have, strict=True)]
        holders = []
        for boxes in product(*([box for box, _ in dim] for dim in cuts)):
            able = held[groups[device], boxes]
            holders.append(device if device in able else able[device % len(able)])
        found.append(Pull(tuple(tuple(cut for _, cut in dim) for dim in cuts), tuple(holders)))
    return tuple(found)


def _cuts(begin: int, length: int, piece: int) -> list[tuple[int, Cut]]:
    """The interval cut at multiples of `piece`: the first index of the box, and what is taken of it."""
    found = []
    end = begin + length
    while begin < end:
        box = begin // piece * piece
        stop = min(end, box + piece)
        found.append((box, Cut(stop - begin, begin - box)))
        begin = stop
    return found


def take(pull: Pull, pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The piece that a device ends with, of the pieces of all."""
    shape = [sum(cut.length for cut in dim) for dim in pull.cuts]
    result = np.empty(shape, pieces[0].dtype)
    ends = [np.cumsum([cut.length for cut in dim]).tolist() for dim in pull.cuts]
    for holder, numbers in zip(pull.holders, product(*(range(len(dim)) for dim in pull.cuts)), strict=True):
        cuts = [dim[number] for dim, number in zip(pull.cuts, numbers, strict=True)]
        there = tuple(slice(cut.source, cut.source + cut.length) for cut in cuts)
        here = tuple(
            slice(dim[number] - cut.length, dim[number]) for dim, number, cut in zip(ends, numbers, cuts, strict=True)
        )
        result[here] = pieces[holder][there]
    return result


# ---- as integers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim of both pieces, and each device's cuts of it."""

    have: int
    want: int
    cuts: tuple[tuple[Cut, ...], ...]

    def times(self, size: int) -> _Dim:
        scaled = tuple(tuple(Cut(cut.length * size, cut.source * size) for cut in cuts) for cuts in self.cuts)
        return _Dim(self.have * size, self.want * size, scaled)


def encode(source: Layout, target: Layout, groups: Sequence[Sequence[int]], itemsize: int) -> NDArray[np.int64]:
    """The pulls of all devices as integers. `groups` are the positions of those that differ in the axes that change."""
    found = pulls(source, target)
    member = {device: number for group in groups for number, device in enumerate(group)}
    dims = [_Dim(1, 1, ((Cut(1, 0),),) * len(found))]
    sizes = zip(source.shape, source.local_shape(), target.local_shape(), strict=True)
    for dim, (size, have, want) in enumerate(sizes):
        whole = have == want == size
        if whole and len(dims) > 1:
            dims[-1] = dims[-1].times(size)
        else:
            dims.append(_Dim(have, want, tuple(pull.cuts[dim] for pull in found)))
    if len(dims) == 1:
        dims.append(dims[0])  # an array without dims
    elif len(dims) > 2:
        dims.pop(0)
    dims[-1] = dims[-1].times(itemsize)
    table = [len(dims), _level(dims), len(found), len(groups[0])]
    for side in ("have", "want"):
        lengths = [getattr(dim, side) for dim in dims]
        table += [prod(lengths[number + 1 :]) for number in range(len(dims))]
    bodies = [
        [member[device], *_body(dims, device), *(member[holder] for holder in pull.holders)]
        for device, pull in enumerate(found)
    ]
    start = len(table) + len(found)
    for body in bodies:
        table.append(start)
        start += len(body)
    return np.array([*table, *(number for body in bodies for number in body)], dtype=np.int64)


def _level(dims: Sequence[_Dim]) -> int:
    """The first dim behind which there are few enough runs to list."""
    runs = max(map(len, dims[-1].cuts))
    level = len(dims) - 2
    while level > 0 and runs * dims[level].want <= LISTED:
        runs *= dims[level].want
        level -= 1
    return level


def _body(dims: Sequence[_Dim], device: int) -> list[int]:
    body: list[int] = []
    for number, dim in enumerate(dims):
        stride = prod(later.have for later in dims[number + 1 :])
        body.append(len(dim.cuts[device]))
        for cut in dim.cuts[device]:
            body += [cut.length, cut.source * stride]
    return body
