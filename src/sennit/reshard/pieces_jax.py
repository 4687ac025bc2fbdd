"""Pieces of arrays on JAX devices: their positions, and how to take them apart and join them in few long loops.

**Positions.** Cut every dim at each place where a layout of a plan has the end of a digit. Where the cuts of a dim
divide one another, the dim is a product of positions (dim, stride, size), and each layout of the plan says of a
position that it lies on one axis or is local. A piece is an array of its local positions, row-major in some order.

**Loops.** What XLA makes of a copy on CPUs depends on how it is written, by a factor of four and more. A slice of an
array as it lies in memory is a memcpy of runs, and so is a concatenate that nothing is fused with. But where an array
is reshaped to fewer dims, XLA fuses that with the copy before it, into one loop that divides to find the place of each
element; and on a reshape that adds or drops dims of size 1 it may choose another order in memory, and copy once more.
So the parts of an exchange are cut, sent and joined in the dims of the array (`Frame`), wherever what goes and what
comes leads its dim, and nothing is reshaped at all. Blocks do; where digits of other strides do not, dims are merged as
far as they go.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.ir.layout import Layout, Split

try:
    import jax.lax
except ImportError as missing:
    raise ImportError('sennit.reshard.pieces_jax needs JAX: pip install "sennit[jax]"') from missing

lax: Any = jax.lax  # whose collectives have no types

__all__ = ["Frame", "Grid", "Piece", "Position", "Table", "cut", "frame", "held", "local", "of_device", "positions"]

Table = NDArray[np.int32]

# Slices at places that depend on the device are as many branches with fixed places, up to these: each takes time to
# compile.
BRANCHES = 4


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The digit of a dim from `stride` to `stride * size`."""

    dim: int
    stride: int
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one device holds: the elements of `value`, row-major, are those of the positions of `order`.

    Its dims are what the last operation left; each operation reshapes as it needs.
    """

    value: Any
    order: tuple[Position, ...]

    def arranged(self, order: Sequence[Position]) -> Piece:
        """The same piece in another order. Neighbours that stay neighbours move as one."""
        if tuple(order) == self.order:
            return self
        runs: list[list[int]] = []
        for position in order:
            index = self.order.index(position)
            if runs and runs[-1][-1] + 1 == index:
                runs[-1].append(index)
            else:
                runs.append([index])
        merged = sorted(runs)
        value = lax.reshape(self.value, [prod(self.order[index].size for index in run) for run in merged])
        return Piece(lax.transpose(value, [merged.index(run) for run in runs]), tuple(order))


def positions(layouts: Sequence[Layout]) -> tuple[Position, ...] | None:
    """The common positions of even layouts of one shape, dims first to last, major to minor; None where cuts clash."""
    found: list[Position] = []
    for dim, size in enumerate(layouts[0].shape):
        digits = {(digit.stride, digit.size) for layout in layouts for digit in layout.digits(dim)}
        cuts = sorted({1, size, *(s for s, _ in digits), *(s * n for s, n in digits)}, reverse=True)
        if any(major % minor for major, minor in pairwise(cuts)):
            return None
        found += [Position(dim, minor, major // minor) for major, minor in pairwise(cuts)]
    return tuple(found)


def local(layout: Layout, every: Sequence[Position]) -> tuple[Position, ...]:
    """The positions that no axis holds, in the order in which a plain piece has them."""
    taken = {(entry.dim, entry.stride) for _, entry in layout.entries if isinstance(entry, Split)}
    return tuple(position for position in every if (position.dim, position.stride) not in taken)


def held(layout: Layout, axis: str, every: Sequence[Position]) -> Position:
    """The position that an axis holds."""
    split = layout.split(axis)
    assert split is not None  # a step names only the axes that it moves
    return next(position for position in every if (position.dim, position.stride) == (split.dim, split.stride))


@dataclass(frozen=True, slots=True)
class Frame:
    """Which positions lie in one dim of the arrays that are cut and joined.

    As the array has them (`rank` dims); or merged: neighbours are one dim, and another begins with a position that goes
    or comes and behind it (`starts`).
    """

    starts: frozenset[Position] = frozenset()
    rank: int | None = None

    def dims(self, order: Sequence[Position], away: Container[Position]) -> list[int]:
        """The dim of each position; `away` are those that go or come."""
        if self.rank is not None:
            return [position.dim for position in order]
        found: list[int] = []
        was_away = False
        for position in order:
            begins = not was_away and (position in away or position in self.starts)
            found.append((found[-1] + begins) if found else 0)
            was_away = position in away
        return found

    def count(self, dims: Sequence[int]) -> int:
        return self.rank if self.rank is not None else (dims[-1] + 1 if dims else 0)


def frame(rank: int, orders: Sequence[tuple[Position, ...]], away: Sequence[Container[Position]]) -> Frame:
    """The frame for pieces of the given orders, of each of which some positions go or come."""
    if all(_leads(order, gone) for order, gone in zip(orders, away, strict=True)):
        return Frame(rank=rank)
    behind = [
        b for order, gone in zip(orders, away, strict=True) for a, b in pairwise(order) if a in gone and b not in gone
    ]
    return Frame(frozenset(behind))


def _leads(order: Sequence[Position], away: Container[Position]) -> bool:
    return not any(a.dim == b.dim and a not in away and b in away for a, b in pairwise(order))


# ---- parts of a piece ------------------------------------------------------------------------------------------------


def cut(
    piece: Piece,
    parts: Sequence[Mapping[Position, Table]],
    names: tuple[str, ...],
    *,
    frame: Frame,
    branches: int = BRANCHES,
) -> list[Any]:
    """The parts at the given coordinates of positions: one coordinate of each for each device, or one for all.

    Where the place depends on the device, XLA works out the place of every element, which on few cores takes twice as
    long. So there is a branch for each distinct choice, up to `branches` of them, in which all places are known.
    """
    tables = [table for taken in parts for table in taken.values() if table.ndim]
    if not tables:
        return [_slice(piece, taken, frame) for taken in parts]
    choices, firsts, chosen = np.unique(np.stack(tables), axis=1, return_index=True, return_inverse=True)
    if choices.shape[1] > branches:
        return [_dynamic_slice(piece, taken, names, frame) for taken in parts]

    def branch(device: int) -> Any:
        fixed = [
            {position: table[device] if table.ndim else table for position, table in taken.items()} for taken in parts
        ]
        return lambda value: [_slice(Piece(value, piece.order), taken, frame) for taken in fixed]

    which = np.asarray(chosen, dtype=np.int32).reshape(-1)
    found: list[Any] = lax.switch(of_device(which, names), [branch(int(first)) for first in firsts], piece.value)
    return found


def _slice(piece: Piece, taken: Mapping[Position, Table], frame: Frame) -> Any:
    shape, firsts, sizes = _box(piece, taken, frame)
    ends = [int(first) + size for first, size in zip(firsts, sizes, strict=True)]
    return lax.slice(lax.reshape(piece.value, shape), [int(first) for first in firsts], ends)


def _dynamic_slice(piece: Piece, taken: Mapping[Position, Table], names: tuple[str, ...], frame: Frame) -> Any:
    """First in the dims where the place depends on the device, then in the others: one after the other is faster than
    both in one `dynamic_slice`.
    """
    shape, firsts, sizes = _box(piece, taken, frame)
    depends = [first.ndim > 0 for first in firsts]
    found = [of_device(first, names) if first.ndim else np.int32(0) for first in firsts]
    lengths = [size if here else whole for size, whole, here in zip(sizes, shape, depends, strict=True)]
    value = lax.dynamic_slice(lax.reshape(piece.value, shape), found, lengths)
    begins = [0 if here else int(first) for first, here in zip(firsts, depends, strict=True)]
    return lax.slice(value, begins, [begin + size for begin, size in zip(begins, sizes, strict=True)])


def _box(piece: Piece, taken: Mapping[Position, Table], frame: Frame) -> tuple[list[int], list[Table], list[int]]:
    """Dims of the piece, and where in each a part begins and how long it is."""
    dims = frame.dims(piece.order, taken)
    shape, sizes = [1] * frame.count(dims), [1] * frame.count(dims)
    firsts: list[Table] = [np.zeros((), dtype=np.int32)] * frame.count(dims)
    for position, dim in zip(piece.order, dims, strict=True):
        shape[dim] *= position.size
        firsts[dim] = np.asarray(firsts[dim] * position.size + taken.get(position, 0), dtype=np.int32)
        if position not in taken:
            sizes[dim] *= position.size
    return shape, firsts, sizes


def of_device(table: Table, names: tuple[str, ...]) -> Any:
    """This device's entry.

    Looked up, because arithmetic on the device's number would be fused into the copies that use it and be done for each
    element.
    """
    return lax.dynamic_index_in_dim(table, lax.axis_index(names), keepdims=False)


# ---- parts that are joined -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grid:
    """Parts of a piece of `order`, without the positions `gone` and `cut`; joined along the positions `came` they have
    the order `result`. What is in both orders is so in the same sequence. `came` is in the order of the result, and
    parts are numbered row-major over it, as over `gone`.
    """

    order: tuple[Position, ...]
    gone: tuple[Position, ...]
    cut: Mapping[Position, Table]
    came: tuple[Position, ...]
    result: tuple[Position, ...]
    frame: Frame

    @property
    def count(self) -> int:
        return prod(position.size for position in self.came)

    def shape(self) -> list[int]:
        """The shape of a part."""
        dims = self.frame.dims(self.result, self.came)
        found = [1] * self.frame.count(dims)
        for position, dim in zip(self.result, dims, strict=True):
            found[dim] *= 1 if position in self.came else position.size
        return found

    def runs(self) -> list[tuple[int, int]]:
        """The dims that begin with positions that come, and how many blocks these are."""
        blocks: dict[int, int] = {}
        for position, dim in zip(self.result, self.frame.dims(self.result, self.came), strict=True):
            if position in self.came:
                blocks[dim] = blocks.get(dim, 1) * position.size
        return sorted(blocks.items())

    def run(self) -> int:
        """Elements of a part that lie in a row in the result too."""
        last = max(index for index, position in enumerate(self.result) if position in self.came)
        return prod(position.size for position in self.result[last + 1 :])

    def parts(self, value: Any, numbers: Sequence[Table], names: tuple[str, ...]) -> list[Any]:
        """The parts with the given numbers, each one for each device or one for all."""
        taken = []
        for number in numbers:
            digits = np.unravel_index(number, [position.size for position in self.gone])
            tables = [np.asarray(digit, dtype=np.int32) for digit in digits]
            taken.append({**self.cut, **dict(zip(self.gone, tables, strict=True))})
        found = cut(Piece(value, self.order), taken, names, frame=self.frame)
        return [lax.reshape(part, self.shape()) for part in found]

    def join(self, parts: Sequence[Any]) -> Piece:
        """All parts in order. Along major dims first: so the runs of the last copy are longest."""
        table = np.empty(len(parts), dtype=object)
        for number, part in enumerate(parts):
            table[number] = lax.reshape(part, self.shape())
        table = table.reshape([blocks for _, blocks in self.runs()])
        for dim, _ in self.runs():
            joined = np.empty(table.shape[1:], dtype=object)
            for rest in np.ndindex(joined.shape):
                joined[rest] = lax.concatenate(list(table[(slice(None), *rest)]), dim)
            table = joined
        return Piece(table[()], self.result)

    def place(self, gathered: Any) -> Piece:
        """All parts from where they lie one after the other along the first dim, each copied to its place."""
        shape, runs = self.shape(), dict(self.runs())
        value = lax.full([size * runs.get(dim, 1) for dim, size in enumerate(shape)], 0, gathered.dtype)
        for number, block in enumerate(np.ndindex(*runs.values())):
            at = dict(zip(runs, block, strict=True))
            part = lax.slice_in_dim(gathered, number * shape[0], (number + 1) * shape[0], axis=0)
            value = lax.dynamic_update_slice(value, part, [at.get(dim, 0) * size for dim, size in enumerate(shape)])
        return Piece(value, self.result)
