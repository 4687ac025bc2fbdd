"""Steps from one mesh to another: reduce on the source's mesh, exchange, gather on the target's mesh.

Replicas in the target receive 1/r each and gather among themselves, so that every element leaves the source's devices
once.
"""

from __future__ import annotations

from sennit.ir.layout import Layout, Pending, Split
from sennit.reshard.ends import Ends, become_partial, common_place, split_places
from sennit.reshard.redistribution import Step, StepKind

__all__ = ["shared_steps", "straight_steps"]


def shared_steps(ends: Ends) -> tuple[Step, ...] | None:
    """Every element crosses over once; None where no replica can share, for want of replicas or of digits that divide."""
    spread = _spread(ends.wanted)
    if spread == ends.wanted:
        return None
    steps = _resolve(ends.source)
    here = steps[-1].result if steps else ends.source
    gathered = tuple(name for name in spread.mesh.names if spread.entry(name) != ends.wanted.entry(name))
    steps.append(Step(StepKind.EXCHANGE, (), here, spread))
    steps.append(Step(StepKind.ALL_GATHER, gathered, spread, ends.wanted))
    become_partial(steps, ends)
    return tuple(steps)


def straight_steps(ends: Ends) -> tuple[Step, ...]:
    """Every replica receives all that it needs from the source."""
    steps = _resolve(ends.source)
    here = steps[-1].result if steps else ends.source
    steps.append(Step(StepKind.EXCHANGE, (), here, ends.wanted))
    become_partial(steps, ends)
    return tuple(steps)


def _resolve(source: Layout) -> list[Step]:
    """Reduce on the source's own mesh: scattered over its devices where a digit divides, else to all of them."""
    steps: list[Step] = []
    pending = [name for name, _ in source.pending]
    scattered = _spread(source, pending)
    taken = tuple(name for name in pending if isinstance(scattered.entry(name), Split))
    if taken:
        steps.append(Step(StepKind.REDUCE_SCATTER, taken, source, scattered))
    left = tuple(name for name in pending if name not in taken)
    if left:
        entries = {name: entry for name, entry in scattered.entries if not isinstance(entry, Pending)}
        steps.append(Step(StepKind.ALL_REDUCE, left, scattered, Layout.make(source.mesh, source.shape, entries)))
    return steps


def _spread(layout: Layout, axes: list[str] | None = None) -> Layout:
    """The layout with these axes (else all that replicate) on digits that they divide, where there are such."""
    if not layout.is_even or 0 in layout.shape:
        return layout
    mesh = layout.mesh
    sizes = tuple(axis.size for axis in mesh.axes)
    digits = split_places(layout)
    for name in [name for name in mesh.names if layout.entry(name) is None] if axes is None else axes:
        index = mesh.index(name)
        place = common_place(layout.shape, sizes, sizes[index], (digits,)) if sizes[index] > 1 else None
        if place is not None:
            digits[index] = place
            layout = layout.with_entry(name, Split(*place))
    return layout
