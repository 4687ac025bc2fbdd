"""The reference meaning of a redistribution: all devices in one process, on numpy arrays.

A collective step is `layout_numpy.regroup`, an exchange its `transfers`. Consecutive exchanges of parts of the array
(streaming under a budget) fill one result. The largest piece that is held at any time is counted as it happens, and is
what the certificate's `peak` is tested against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sennit.errors import LayoutError
from sennit.ir.exchange import transfers
from sennit.ir.layout import Layout
from sennit.ir.layout_numpy import Array, Pieces, regroup
from sennit.ir.mesh import Point
from sennit.reshard.redistribution import Redistribution, Step, StepKind

__all__ = ["NumpyRun", "run_numpy", "trace_numpy"]


@dataclass(frozen=True, slots=True)
class NumpyRun:
    """The pieces of the target, and the most elements that one device held in one piece."""

    pieces: Mapping[Point, Array]
    peak: int


def run_numpy(redistribution: Redistribution, pieces: Pieces) -> dict[Point, Array]:
    """The pieces of the target, from those of the source: keys are points of the two meshes, not refined."""
    return dict(trace_numpy(redistribution, pieces).pieces)


def trace_numpy(redistribution: Redistribution, pieces: Pieces) -> NumpyRun:
    """The same, with the peak."""
    source, target = redistribution.source, redistribution.target
    for point in source.mesh.points():
        if point not in pieces or pieces[point].shape != source.local_shape(point):
            raise LayoutError(
                f"there is no piece of shape {list(source.local_shape(point))} at {point}",
                where=f"layout {source} on mesh {source.mesh}",
                fix="give one piece for each point of the source's mesh",
            )
    # refining a mesh keeps the row-major order of its points
    held: dict[Point, Array] = {
        fine: pieces[coarse] for fine, coarse in zip(source.mesh.refined().points(), source.mesh.points(), strict=True)
    }
    peak = _largest(held)
    filling: dict[Point, Array] | None = None  # the result of exchanges of parts, while they last
    for position, step in enumerate(redistribution.steps):
        if step.kind is StepKind.EXCHANGE:
            into = _empty(step.result, held) if filling is None else filling
            exchange_numpy(step, held, into)
            following = redistribution.steps[position + 1 : position + 2]
            unfinished = any(step.continues_in(later) for later in following)
            filling = into if unfinished else None
            held = held if unfinished else into
            peak = max(peak, _largest(into))
        else:
            held = regroup(step.source, step.result, step.axes, held)
            peak = max(peak, _largest(held))
    return NumpyRun(dict(zip(target.mesh.points(), (held[key] for key in sorted(held)), strict=True)), peak)


def exchange_numpy(step: Step, held: Pieces, into: dict[Point, Array]) -> None:
    """Copy what one exchange moves from the pieces of its source into those of its result."""
    for transfer in transfers(step.source, step.result, step.region):
        sender = step.source.mesh.coordinate(transfer.sender)
        receiver = step.result.mesh.coordinate(transfer.receiver)
        if not step.source.shape:
            into[receiver][...] = held[sender]
            continue
        taken = transfer.region.within(step.source.region(sender)).indices()
        put = transfer.region.within(step.result.region(receiver)).indices()
        into[receiver][np.ix_(*put)] = held[sender][np.ix_(*taken)]


def _empty(layout: Layout, held: Pieces) -> dict[Point, Array]:
    dtype = next(iter(held.values())).dtype
    return {point: np.empty(layout.local_shape(point), dtype) for point in layout.mesh.points()}


def _largest(pieces: Pieces) -> int:
    return max((piece.size for piece in pieces.values()), default=0)
