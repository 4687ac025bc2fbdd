"""Several tensors in one flat one, so that one collective carries them all: the numpy meaning of the operators around
it.

With p pieces for the p members of a group, the flat tensor is p rows, one for each member: row r has piece r of the
first tensor, then piece r of the second, ... So a reduce-scatter of the rows leaves each member its pieces of all
tensors side by side, and a gather of such rows brings every piece of every tensor. With one piece the row is the
tensors themselves.

| step | reads | makes |
|---|---|---|
| `sennit.pack([%a, %b], p, [[dim, inner], ...])` | tensors | the rows |
| `sennit.parts(%row)` | one row | what is in it, as views |
| `sennit.join(%rows, p, [[dim, inner], ...])` | p rows | the tensors, copied: the inverse of `pack` |

A piece is taken between the outer and the inner elements of one dim, local size outer * p * inner (`run/rank.py`). What
the rows are made of are local pieces, whatever other axes split them: their layouts say nothing about the tensors in
them. A sum is taken element by element, so an element of the flat tensor is the sum of the same terms as in its own
tensor. It has the same bits where the order of the terms depends on the member that keeps it alone, and not on where in
the message it lies: so on ranks in one process, on gloo (`run/distributed.py`) and on the backend "sennit"; NCCL
promises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from sennit.errors import GraphError
from sennit.ir.layout_numpy import Array

__all__ = ["join", "pack", "parts"]

Cut = tuple[int, int]  # the dim that pieces are taken from, and how many elements of it lie below


def pack(tensors: Sequence[Array], pieces: int, cuts: Sequence[Cut]) -> Array:
    """The rows, one behind another. `cuts` has one for each tensor; with one piece there is nothing to cut."""
    if pieces == 1:
        return np.concatenate([tensor.reshape(-1) for tensor in tensors])
    rows = [_apart(tensor, pieces, *cut).reshape(pieces, -1) for tensor, cut in zip(tensors, cuts, strict=True)]
    return np.concatenate(rows, axis=1).reshape(-1)


def parts(row: Array, shapes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
    """What lies in a row, in order."""
    sizes = [prod(shape) for shape in shapes]
    if sum(sizes) != row.size:
        raise GraphError(f"a row of {row.size} elements is to be parts of {sizes}")
    cut = np.split(row.reshape(-1), np.cumsum(sizes)[:-1])
    return tuple(part.reshape(shape) for part, shape in zip(cut, shapes, strict=True))


def join(rows: Array, pieces: int, cuts: Sequence[Cut], shapes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
    """The tensors, of these shapes, whose pieces the rows hold."""
    found: list[Array] = []
    start, table = 0, rows.reshape(pieces, -1)
    for shape, (dim, inner) in zip(shapes, cuts, strict=True):
        size = prod(shape) // pieces
        outer = shape[dim] // (pieces * inner)
        piece = (pieces, *shape[:dim], outer, inner, *shape[dim + 1 :])
        found.append(np.moveaxis(table[:, start : start + size].reshape(piece), 0, dim + 1).reshape(shape))
        start += size
    if start != table.shape[1]:
        raise GraphError(f"rows of {table.shape[1]} elements are joined to tensors that have {start} in each")
    return tuple(found)


def _apart(tensor: Array, pieces: int, dim: int, inner: int) -> Array:
    """The pieces of a tensor, stacked."""
    shape = tensor.shape
    return np.moveaxis(tensor.reshape(*shape[:dim], -1, pieces, inner, *shape[dim + 1 :]), dim + 1, 0)
