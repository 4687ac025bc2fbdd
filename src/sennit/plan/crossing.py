"""How a value gets from the mesh of one stage to that of another.

Let a value lie on mesh P under layout A, and let a stage on mesh C need it under layout B. A device holds the indices
of its region. Three ways, the cheapest that works:

- *send*: P and C have the same axes, lie on different devices, and each is one lane: every device sends its piece,
  redistributed to B's
  entries on P, to the device with its coordinates;
- *take*: every device of C is one of P, and holds there what it needs here, once sums that are pending over P's axes
  are reduced: no
  transfer at all;
- *exchange*: sums are reduced on P, scattered over its devices where a digit divides; then regions go point to point.
  Where
  B is replicated over an axis of C, each replica gets its part and they gather among themselves: no index crosses twice.

The time axes are those of both meshes, and their entries are kept: a micro-batch crosses as a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from sennit.ir.layout import Entry, Layout, Pending, Split
from sennit.ir.mesh import AxisKind, Point

__all__ = ["Crossing", "Way", "cross", "is_here"]


class Way(Enum):
    SEND = "send"
    TAKE = "take"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True)
class Crossing:
    """Redistribute to `given` on the source's mesh, move, and have `landed` on the target's."""

    way: Way
    given: Layout
    landed: Layout


def cross(source: Layout, need: Layout, *, pairwise: bool) -> Crossing:
    """From `source` on its mesh to what `need` says on another.

    `pairwise`: each mesh is one lane, and they share no device.
    """
    if pairwise and source.mesh.axes == need.mesh.axes:
        return Crossing(Way.SEND, need.on(source.mesh), need)
    landed = _without_pending(need)
    whole = _without_pending(source)
    if is_here(whole, landed):
        return Crossing(Way.TAKE, whole, landed)
    return Crossing(Way.EXCHANGE, _scattered(source), _spread(landed))


def _space(layout: Layout) -> list[str]:
    return [axis.name for axis in layout.mesh.axes if axis.kind is AxisKind.SPACE and axis.size > 1]


def _without_pending(layout: Layout) -> Layout:
    """What is pending in space, reduced."""
    space = set(_space(layout))
    kept = [(axis, entry) for axis, entry in layout.entries if axis not in space or not isinstance(entry, Pending)]
    return Layout(layout.mesh, layout.shape, tuple(kept))


def _scattered(layout: Layout) -> Layout:
    """What is pending in space, reduced to pieces where a digit divides, else to all."""
    pending = [axis for axis in _space(layout) if isinstance(layout.entry(axis), Pending)]
    result = _without_pending(layout)
    for axis in pending:
        result = _with_block(result, axis)
    return result


def _spread(layout: Layout) -> Layout:
    """Replicas share the array where a digit divides."""
    for axis in _space(layout):
        if layout.entry(axis) is None:
            layout = _with_block(layout, axis)
    return layout


def _with_block(layout: Layout, axis: str) -> Layout:
    """The axis on the least digits of the first dim that it divides; the layout as it is where it divides none."""
    size = layout.mesh.size(axis)
    for dim, length in enumerate(layout.shape):
        block = min([length, *(digit.stride for digit in layout.digits(dim) if digit.size > 1)])
        entry: Entry = Split(dim, block // size)
        if block and block % size == 0 and layout.with_entry(axis, entry).is_even:
            return layout.with_entry(axis, entry)
    return layout


def is_here(source: Layout, target: Layout) -> bool:
    """Whether each device of the target holds its piece of it in its piece of the source."""
    if not set(target.mesh.devices) <= set(source.mesh.devices):
        return False
    seen: set[tuple[Point, Point]] = set()
    for device in target.mesh.devices:
        there = source.mesh.coordinate(device) + (0,) * len(source.mesh.time)
        here = target.mesh.coordinate(device) + (0,) * len(target.mesh.time)
        there, here = _digits(source, there), _digits(target, here)
        if (there, here) in seen:
            continue
        seen.add((there, here))
        for dim in range(len(source.shape)):
            if not np.isin(target.indices(dim, here), source.indices(dim, there), assume_unique=True).all():
                return False
    return True


def _digits(layout: Layout, point: Point) -> Point:
    """The point with zeros on the axes that split nothing: devices that differ only there hold the same."""
    return tuple(digit if layout.split(axis.name) else 0 for axis, digit in zip(layout.mesh.axes, point, strict=True))
