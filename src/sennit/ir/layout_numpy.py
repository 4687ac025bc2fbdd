"""The reference meaning of a layout, on numpy arrays: cut an array into its pieces, and put pieces together again.

These two functions are the oracle for every executor: a redistribution from s to t is right if and only if
`assemble(t, result) == assemble(s, input)` and every piece has the shape that t gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.errors import LayoutError
from sennit.ir.layout import Layout, Pending, Reduction
from sennit.ir.mesh import Point

__all__ = ["Array", "Pieces", "assemble", "distribute", "identity_of", "reduce_arrays", "regroup"]

Array = NDArray[Any]
Pieces = Mapping[Point, Array]


def distribute(array: Array, layout: Layout) -> dict[Point, Array]:
    """The pieces of an array. Pending parts: the values on coordinate 0, the identity of the reduction elsewhere."""
    if array.shape != layout.shape:
        raise LayoutError(f"an array of shape {list(array.shape)} under a layout of shape {list(layout.shape)}")
    pieces: dict[Point, Array] = {}
    for point in layout.mesh.points():
        piece = array[np.ix_(*layout.region(point).indices())] if array.ndim else array.copy()
        for axis, op in layout.pending:
            if point[layout.mesh.index(axis)] != 0:
                piece = np.full_like(piece, identity_of(op, piece.dtype))
        pieces[point] = piece
    return pieces


def assemble(layout: Layout, pieces: Pieces) -> Array:
    """The array that pieces stand for. Replicas must agree (bitwise), or the pieces are not of this layout."""
    parts: dict[tuple[int, ...], Array] = {}  # coordinates on the axes that are not pending -> reduced piece
    pending = [layout.mesh.index(axis) for axis, _ in layout.pending]
    for point in layout.mesh.points():
        piece = pieces[point]
        if piece.shape != layout.local_shape(point):
            raise LayoutError(
                f"the piece at {point} has shape {list(piece.shape)}, not {list(layout.local_shape(point))}"
            )
        key = tuple(0 if position in pending else digit for position, digit in enumerate(point))
        parts[key] = piece if key not in parts else reduce_arrays(_single_reduction(layout), parts[key], piece)
    result = np.empty(layout.shape, dtype=next(iter(pieces.values())).dtype)
    written = np.zeros(layout.shape, dtype=np.bool_)
    for point, part in parts.items():
        where = np.ix_(*layout.region(point).indices()) if layout.shape else ()
        seen = written[where]
        if not np.array_equal(result[where][seen], part[seen], equal_nan=part.dtype.kind == "f"):
            raise LayoutError(f"replicas of layout {layout} disagree at {point}")
        result[where] = part
        written[where] = True
    assert written.all()  # digits cover every index
    return result


def _single_reduction(layout: Layout) -> Reduction:
    ops = {entry.op for _, entry in layout.entries if isinstance(entry, Pending)}
    if len(ops) != 1:
        raise LayoutError(
            f"layout {layout} mixes reductions", fix="resolve one of them first: sum and max do not commute"
        )
    return ops.pop()


def reduce_arrays(op: Reduction, left: Array, right: Array) -> Array:
    match op:
        case Reduction.SUM:
            return np.asarray(left + right)
        case Reduction.MAX:
            return np.maximum(left, right)
        case Reduction.MIN:
            return np.minimum(left, right)
        case Reduction.PROD:
            return np.asarray(left * right)


def identity_of(op: Reduction, dtype: np.dtype[Any]) -> Any:
    """The value that a reduction leaves unchanged."""
    lowest, highest = (-np.inf, np.inf) if dtype.kind == "f" else (0, 1)
    if dtype.kind in "iu":
        lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
    return {Reduction.SUM: 0, Reduction.PROD: 1, Reduction.MAX: lowest, Reduction.MIN: highest}[op]


def regroup(source: Layout, target: Layout, axes: tuple[str, ...], pieces: Pieces) -> dict[Point, Array]:
    """What any collective over `axes` means: inside each group of points that agree on all other axes, put the pieces
    together as `source` says and cut them as `target` says. The other axes must not change."""
    moving = [source.mesh.index(axis) for axis in axes]
    groups: dict[Point, list[Point]] = {}
    for point in pieces:
        groups.setdefault(tuple(-1 if i in moving else digit for i, digit in enumerate(point)), []).append(point)
    result: dict[Point, Array] = {}
    for members in groups.values():
        whole = _fill_group(source, axes, {point: pieces[point] for point in members})
        for point in members:
            piece = whole[np.ix_(*target.region(point).indices())] if source.shape else whole.copy()
            for axis in axes:
                entry = target.entry(axis)
                if isinstance(entry, Pending) and point[source.mesh.index(axis)] != 0:
                    piece = np.full_like(piece, identity_of(entry.op, piece.dtype))
            result[point] = piece
    return result


def _fill_group(source: Layout, axes: tuple[str, ...], pieces: Pieces) -> Array:
    """An array of the full shape that holds what one group holds, reduced over the pending axes among `axes`."""
    ops = {entry.op for axis in axes if isinstance(entry := source.entry(axis), Pending)}
    if len(ops) > 1:
        raise LayoutError(f"a group over {list(axes)} of {source} mixes reductions")
    dtype = next(iter(pieces.values())).dtype
    whole, written = np.zeros(source.shape, dtype), np.zeros(source.shape, np.bool_)
    replicated = [source.mesh.index(axis) for axis in axes if source.entry(axis) is None]
    for point in sorted(pieces):
        if any(point[position] for position in replicated):
            continue  # one replica speaks for all
        where = np.ix_(*source.region(point).indices()) if source.shape else ()
        if ops and written[where].all():
            whole[where] = reduce_arrays(next(iter(ops)), whole[where], pieces[point])
        else:
            whole[where] = pieces[point]
        written[where] = True
    return whole
