"""Live memory by kind, from when storages are made and freed; what counts as what is said in `sim/lane.py`.

What is made and freed, and by which jobs, is the same for all devices of a lane: a `Ledger` holds it as arrays, so that
the times of one more device cost a few array operations. `reserved_memory` plays the same changes to a caching
allocator (`sim/allocator.py`): at one time what is freed goes before what is made, as a step's memory is there for the
next to take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.cluster import Device
from sennit.cost import workspace
from sennit.ir.dtype import TensorType
from sennit.ir.event import MemoryKind
from sennit.ir.event_rows import MemoryTrack
from sennit.ir.graph import OutputKind, Role
from sennit.ir.program import Compute
from sennit.sim.allocator import CachingAllocator
from sennit.sim.lane import LaneCode
from sennit.sim.optimizer import Optimizer

__all__ = ["Ledger", "ledger", "live_memory", "reserved_memory"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Changes of memory: those at the beginning, those at the start of a job, those at the end of the last of some
    jobs.

    `kind`, `size` and `item` (what is made and what is freed later are one) go through all three in this order;
    `ending` lists the jobs of the third, cut at `cuts`.
    """

    kind: NDArray[np.int64]
    size: NDArray[np.int64]
    item: NDArray[np.int64]
    at_once: int
    starting: NDArray[np.int64]
    ending: NDArray[np.int64]
    cuts: NDArray[np.int64]


def ledger(
    code: LaneCode, types: dict[str, TensorType], device: Device | None = None, optimizer: Optimizer | None = None
) -> Ledger:
    """With `device`, sizes are rounded up as it allocates them, and what its kernels take for themselves is staging
    while they run. With `optimizer`, its state is there all the time.
    """
    grain = int(device.allocation.value) if device is not None and device.allocation is not None else 1

    def rounded(size: int) -> int:
        return -(-size // grain) * grain

    kinds = list(MemoryKind)
    position = {kind: number for number, kind in enumerate(kinds)}
    staging = position[MemoryKind.STAGING]
    # a row is the kind, the size and the item
    at_once: list[tuple[int, int, int]] = []
    made: list[tuple[tuple[int, int, int], int]] = []
    gone: list[tuple[tuple[int, int, int], tuple[int, ...]]] = []
    items = 0
    for storage in code.storages:
        size, kind = rounded(types[storage.buffer].bytes), position[storage.kind]
        items += 1
        if storage.made is None:
            at_once.append((kind, size, items))
        else:
            made.append(((kind, size, items), storage.made))
        if storage.ends:
            gone.append(((kind, -size, items), storage.ends))
        elif storage.ends is not None:
            at_once.append((kind, -size, items))  # freed before anything ran
    for number, job in enumerate(code.jobs):
        size = rounded(types[job.staging].bytes) if job.staging is not None else 0
        if isinstance(job.step, Compute) and device is not None and device.allocation is not None:
            size = rounded(workspace(job.step, types))
        if size:
            items += 1
            made.append(((staging, size, items), number))
            gone.append(((staging, -size, items), (number,)))
    if optimizer is not None:
        trained = {item.path for item in code.lane.outputs if item.kind is OutputKind.GRADIENT}
        for item in code.lane.inputs:
            if item.role is Role.PARAM and item.path in trained:
                items += 1
                size = rounded(optimizer.bytes(types[item.buffer.name]))
                at_once.append((position[MemoryKind.OPTIMIZER], size, items))
    table = np.array([*at_once, *(row for row, _ in made), *(row for row, _ in gone)], dtype=np.int64).reshape(-1, 3)
    lengths = np.array([0, *(len(jobs) for _, jobs in gone)], dtype=np.int64)
    return Ledger(
        table[:, 0],
        table[:, 1],
        table[:, 2],
        len(at_once),
        np.array([job for _, job in made], dtype=np.int64),
        np.array([job for _, jobs in gone for job in jobs], dtype=np.int64),
        np.cumsum(lengths)[:-1],
    )


def live_memory(
    book: Ledger,
    task_of: NDArray[np.int64],
    start: NDArray[np.float64],
    stop: NDArray[np.float64],
    devices: tuple[int, ...],
) -> MemoryTrack:
    """One sample at each time at which memory changes, the same for all `devices`. Changes at one time count together:
    what a step frees is there for the next to take."""
    times = _times(book, task_of, start, stop)
    order = np.argsort(times, kind="stable")
    times = times[order]
    changes = np.zeros((len(times), len(MemoryKind)), dtype=np.int64)
    changes[np.arange(len(times)), book.kind[order]] = book.size[order]
    last = np.flatnonzero(np.append(np.diff(times) > 0, True)) if len(times) else np.zeros(0, dtype=np.int64)
    totals = np.cumsum(changes, axis=0)[last]
    keep = np.append(True, (np.diff(totals, axis=0) != 0).any(axis=1)) if len(last) else np.zeros(0, dtype=np.bool_)
    return MemoryTrack(devices, times[last][keep], totals[keep])


def reserved_memory(
    book: Ledger, task_of: NDArray[np.int64], start: NDArray[np.float64], stop: NDArray[np.float64]
) -> int:
    """Bytes that a caching allocator has taken from the driver at the end of the step."""
    times = _times(book, task_of, start, stop)
    born = dict(zip(book.item[book.size > 0].tolist(), times[book.size > 0].tolist(), strict=True))
    rows = []
    for time, size, item in zip(times.tolist(), book.size.tolist(), book.item.tolist(), strict=True):
        if size:
            # frees, then what is made, then what is made and freed at one time
            rows.append((time, 1 if size > 0 else 0 if born[item] < time else 2, item, size))
    allocator = CachingAllocator()
    for _, _, item, size in sorted(rows):
        if size > 0:
            allocator.allocate(item, size)
        else:
            allocator.release(item)
    return allocator.most_reserved


def _times(
    book: Ledger, task_of: NDArray[np.int64], start: NDArray[np.float64], stop: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of the ledger's changes."""
    ends = stop[task_of[book.ending]]
    lasts = np.maximum.reduceat(ends, book.cuts) if len(ends) else ends
    return np.concatenate([np.zeros(book.at_once), start[task_of[book.starting]], lasts])
