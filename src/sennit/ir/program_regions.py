"""Regions of many devices at once: whether each device of a lane has the indices that its piece of another buffer
needs.

Per dim, a device has a label under each layout: the mixed-radix number of its coordinates on the axes that split the
dim, time axes at the times of the buffer among them (`labels.py`). The need is within what is there if and only if, in
every dim, all indices with the one label have the other too, or the need is empty. Labels are counted once for all
devices, so this does not depend on how long the dims are, and takes a few array operations for a thousand devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sennit.ir.labels import AxisDigit, Integers, dim_pairs
from sennit.ir.mesh import AxisKind
from sennit.ir.program import Buffer

__all__ = ["coordinates_on", "first_device_lacking", "is_all"]


def coordinates_on(buffer: Buffer, axis: str, devices: Sequence[int]) -> list[int]:
    """Where each device lies on an axis; on a time axis, the first time of the buffer."""
    mesh = buffer.layout.mesh
    if mesh.axis(axis).kind is AxisKind.TIME:
        return [dict(buffer.times).get(axis, (0,))[0]] * len(devices)
    position = {device: place for place, device in enumerate(mesh.devices)}
    minor = 1
    for other in mesh.space[mesh.index(axis) + 1 :]:
        minor *= other.size
    return [position[device] // minor % mesh.size(axis) for device in devices]


def is_all(source: Buffer, taken: Buffer) -> bool:
    """Whether a `sennit.take` takes all that each device has: what is taken lies within it, so sizes tell where they
    are even.
    """
    even = source.layout.is_even and taken.layout.is_even
    return even and source.layout.local_shape() == taken.layout.local_shape()


def first_device_lacking(source: Buffer, result: Buffer, devices: Sequence[int]) -> int | None:
    """The first device whose piece of `result` has an index that its piece of `source` has not; None where there is
    none.
    """
    empty = np.zeros(len(devices), dtype=np.bool_)
    lacking = np.zeros(len(devices), dtype=np.bool_)
    for dim, length in enumerate(source.layout.shape):
        pairs = dim_pairs(length, _digits(source, dim), _digits(result, dim))
        have, need = _labels(source, dim, devices), _labels(result, dim, devices)
        needed = np.bincount(pairs.pairs % pairs.needs, pairs.counts, pairs.needs).astype(np.int64)[need]
        empty |= needed == 0
        lacking |= pairs.overlap(have, need) < needed
    bad = np.flatnonzero(lacking & ~empty)
    return devices[int(bad[0])] if len(bad) else None


def _digits(buffer: Buffer, dim: int) -> tuple[AxisDigit, ...]:
    mesh = buffer.layout.mesh
    return tuple(AxisDigit(mesh.index(d.axis), d.size, d.stride) for d in buffer.layout.digits(dim))


def _labels(buffer: Buffer, dim: int, devices: Sequence[int]) -> Integers:
    label = np.zeros(len(devices), dtype=np.int64)
    for digit in buffer.layout.digits(dim):
        label = label * digit.size + np.array(coordinates_on(buffer, digit.axis, devices), dtype=np.int64)
    return label
