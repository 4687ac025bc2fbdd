"""Pieces of arrays on JAX devices: their positions, and how to take them apart and join them in few long loops.

**Positions.** Cut every dim at each place where a layout of a plan has the end of a digit. Where the cuts of a dim divide
one another, the dim is a product of positions (dim, stride, size), and each layout of the plan says of a position that it
lies on one axis or is local. A piece is an array of its local positions, row-major in some order.

**Loops.** What XLA makes of a copy on CPUs depends on how it is written, by a factor of four and more. A slice along dims
that are merged as far as they go is a memcpy of runs, and so is a concatenate that nothing is fused with. But a concatenate
of parts, transposed, and reshaped to fewer dims is one loop that divides to find each element's part. So the parts of an
exchange are cut, sent and joined in one shape (`Grid`): a dim begins where a position goes or comes, and nowhere else. What
is joined is then only ever reshaped to more dims, which is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

__all__ = ["Grid", "Piece", "Position", "Table", "cut", "held", "local", "of_device", "positions"]

Table = NDArray[np.int32]

# Slices at places that depend on the device are as many branches with fixed places, up to these.
BRANCHES = 16


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The digit of a dim from `stride` to `stride * size`."""

    dim: int
    stride: int
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one device holds: the elements of `value`, row-major, are those of the positions of `order`. Its dims are what the
    last operation left; each operation reshapes as it needs."""

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


# ---- parts of a piece ------------------------------------------------------------------------------------------------


def cut(
    piece: Piece,
    parts: Sequence[Mapping[Position, Table]],
    names: tuple[str, ...],
    *,
    starts: frozenset[Position] = frozenset(),
    branches: int = BRANCHES,
) -> list[Any]:
    """The parts at the given coordinates of positions: one coordinate of each for each device, or one for all.

    Slices whose place depends on the device are slow: XLA works out the place of every element. So there is a branch for
    each distinct choice, up to `branches` of them, in which all places are known."""
    tables = [table for taken in parts for table in taken.values() if table.ndim]
    if not tables:
        return [_slice(piece, taken, starts) for taken in parts]
    choices, firsts, chosen = np.unique(np.stack(tables), axis=1, return_index=True, return_inverse=True)
    if choices.shape[1] > branches:
        return [_dynamic_slice(piece, taken, names, starts) for taken in parts]

    def branch(device: int) -> Any:
        fixed = [
            {position: table[device] if table.ndim else table for position, table in taken.items()} for taken in parts
        ]
        return lambda value: [_slice(Piece(value, piece.order), taken, starts) for taken in fixed]

    which = np.asarray(chosen, dtype=np.int32).reshape(-1)
    found: list[Any] = lax.switch(of_device(which, names), [branch(int(first)) for first in firsts], piece.value)
    return found


def _slice(piece: Piece, taken: Mapping[Position, Table], starts: frozenset[Position]) -> Any:
    shape, firsts, sizes = _box(piece, taken, starts)
    ends = [int(first) + size for first, size in zip(firsts, sizes, strict=True)]
    return lax.slice(lax.reshape(piece.value, shape), [int(first) for first in firsts], ends)


def _dynamic_slice(
    piece: Piece, taken: Mapping[Position, Table], names: tuple[str, ...], starts: frozenset[Position]
) -> Any:
    shape, firsts, sizes = _box(piece, taken, starts)
    found = [of_device(first, names) if first.ndim and first.any() else np.int32(first.max()) for first in firsts]
    return lax.dynamic_slice(lax.reshape(piece.value, shape), found, sizes)


def _box(
    piece: Piece, taken: Mapping[Position, Table], starts: frozenset[Position]
) -> tuple[list[int], list[Table], list[int]]:
    """Dims of the piece, and where in each a part begins and how long it is. Kept neighbours are one dim, and so is a kept
    one with those above it that are taken; another dim begins at `starts`."""
    shape: list[int] = []
    firsts: list[Table] = []
    sizes: list[int] = []
    was_taken = False
    for position in piece.order:
        if not shape or (not was_taken and (position in taken or position in starts)):
            shape.append(1)
            firsts.append(np.zeros((), dtype=np.int32))
            sizes.append(1)
        shape[-1] *= position.size
        firsts[-1] = np.asarray(firsts[-1] * position.size + taken.get(position, 0), dtype=np.int32)
        if position not in taken:
            sizes[-1] *= position.size
        was_taken = position in taken
    return shape, firsts, sizes


def of_device(table: Table, names: tuple[str, ...]) -> Any:
    """This device's entry. Looked up, because arithmetic on the device's number would be fused into the copies that use it
    and be done for each element."""
    return lax.dynamic_index_in_dim(table, lax.axis_index(names), keepdims=False)


# ---- parts that are joined --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grid:
    """Parts of a piece of `order` in which the positions `gone` and `cut` are no longer, and which lie, joined along the
    positions `came`, in the order `result`. What is in both orders is so in the same sequence."""

    order: tuple[Position, ...]
    gone: tuple[Position, ...]
    cut: Mapping[Position, Table]
    came: tuple[Position, ...]
    result: tuple[Position, ...]

    @property
    def count(self) -> int:
        return prod(position.size for position in self.came)

    def _starts(self) -> frozenset[Position]:
        """The kept positions with which a dim begins: those behind one that goes or comes."""
        away = {*self.gone, *self.cut, *self.came}
        behind = [b for order in (self.order, self.result) for a, b in pairwise(order) if a in away and b not in away]
        return frozenset(behind)

    def _dims(self) -> tuple[list[int], list[tuple[int, int]]]:
        """The shape of a part, and for each run of positions that come how many blocks it is and the dim that it leads.
        Dims of size 1 would be in the way: XLA may give them another place in memory, and then copies."""
        starts = self._starts()
        shape = list[int]()
        runs = list[tuple[int, int]]()
        led, came_last = False, False
        for position in self.result:
            comes = position in self.came
            if not shape or (not came_last and (comes or position in starts)):
                if shape and shape[-1] == 1 and not led:
                    shape.pop()
                shape.append(1)
                led = comes
            if comes:
                blocks = runs.pop()[0] if came_last else 1
                runs.append((blocks * position.size, len(shape) - 1))
            else:
                shape[-1] *= position.size
            came_last = comes
        return shape, runs

    def parts(self, value: Any, numbers: Sequence[Table], names: tuple[str, ...]) -> list[Any]:
        """The parts with the given numbers, each one for each device or one for all."""
        taken = []
        for number in numbers:
            digits = np.unravel_index(number, [position.size for position in self.gone])
            tables = [np.asarray(digit, dtype=np.int32) for digit in digits]
            taken.append({**self.cut, **dict(zip(self.gone, tables, strict=True))})
        shape = self._dims()[0]
        found = cut(Piece(value, self.order), taken, names, starts=self._starts())
        return [lax.reshape(part, shape) for part in found]

    def in_one_dim(self) -> int | None:
        """The dim along which alone parts are joined, if it is one."""
        runs = self._dims()[1]
        return runs[0][1] if len(runs) == 1 else None

    def join(self, parts: Sequence[Any]) -> Piece:
        """The parts, numbered row-major over `came`. Along major dims first: so the runs of the last copy are longest."""
        shape, runs = self._dims()
        table = np.empty(len(parts), dtype=object)
        for index, part in enumerate(parts):
            table[index] = lax.reshape(part, shape)
        arrived = [position for position in self.result if position in self.came]
        table = table.reshape([position.size for position in self.came])
        table = table.transpose([self.came.index(position) for position in arrived])
        table = table.reshape([blocks for blocks, _ in runs])
        for _, dim in runs:
            joined = np.empty(table.shape[1:], dtype=object)
            for rest in np.ndindex(joined.shape):
                joined[rest] = lax.concatenate(list(table[(slice(None), *rest)]), dim)
            table = joined
        return Piece(table[()], self.result)
