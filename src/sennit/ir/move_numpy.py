"""The numpy meaning of sennit's own local operators (`ir/program.py`): what one device does with its own pieces.

Each takes the buffers that it reads, the buffer that it writes and the pieces of one device, and moves indices as the
layouts say, at the times of the buffers. What the layouts do not allow is a `LayoutError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from sennit.errors import LayoutError
from sennit.ir.layout_numpy import Array, identity_of, reduce_arrays, regroup
from sennit.ir.program import Buffer

__all__ = ["move"]


def move(kind: str, sources: Sequence[Buffer], result: Buffer, pieces: Sequence[Array], device: int) -> Array:
    """The piece of `result` on `device`, from its pieces of `sources`."""
    match kind:
        case "sennit.take":
            return _take(sources[0], result, pieces[0], device)
        case "sennit.slice" | "sennit.partial":
            return _cut(sources[0], result, pieces[0], device)
        case "sennit.accumulate":
            return _accumulate(sources[0], sources[1], pieces[0], pieces[1])
        case "sennit.concat":
            return _concat(sources, result, pieces, device)
        case _:
            raise AssertionError(f"no local operator: {kind}")


def _take(source: Buffer, result: Buffer, piece: Array, device: int) -> Array:
    """The part of the piece that belongs to the result here, whatever its mesh."""
    before, after = source.layout.region(source.point(device)), result.layout.region(result.point(device))
    return np.asarray(piece[np.ix_(*after.within(before).indices())])


def _cut(source: Buffer, result: Buffer, piece: Array, device: int) -> Array:
    """The part of the piece that the new layout leaves here; the identity off coordinate 0 of a new pending axis."""
    mesh, point = result.layout.mesh, result.point(device)
    if source.layout.mesh.in_space() != mesh.in_space():
        raise LayoutError(f"{source.describe()} lies on mesh {source.layout.mesh}, {result.describe()} on {mesh}")
    before = source.layout.on(mesh)
    part = np.asarray(piece[np.ix_(*result.layout.region(point).within(before.region(point)).indices())])
    for axis, op in result.layout.pending:
        if before.entry(axis) is None and point[mesh.index(axis)] != 0:
            part = np.full_like(part, identity_of(op, part.dtype))
    return part


def _accumulate(total: Buffer, part: Buffer, left: Array, right: Array) -> Array:
    """The reduction over the pending time axis on which the two differ. A time must not count twice."""
    old, new = dict(total.times), dict(part.times)
    differ = [(axis, op) for axis, op in part.layout.pending if axis in new and old.get(axis) != new[axis]]
    if len(differ) != 1 or set(old.get(differ[0][0], ())) & set(new[differ[0][0]]):
        raise LayoutError(f"{total.describe()} and {part.describe()} are not different times of one pending axis")
    return reduce_arrays(differ[0][1], left, right)


def _concat(sources: Sequence[Buffer], result: Buffer, pieces: Sequence[Array], device: int) -> Array:
    """Each piece at its own indices, which ascend; all times of the split axes must be there."""
    layout = sources[0].layout
    axes = tuple(a.name for a in layout.mesh.time if layout.split(a.name) and result.layout.entry(a.name) is None)
    at = {source.point(device): piece for source, piece in zip(sources, pieces, strict=True)}
    times = prod(layout.mesh.size(axis) for axis in axes)
    if len(at) != times or len(pieces) != times:
        raise LayoutError(f"{len(pieces)} pieces at {len(at)} times, where {result.describe()} is made of {times}")
    return regroup(layout, result.layout, axes, at)[sources[0].point(device)]
