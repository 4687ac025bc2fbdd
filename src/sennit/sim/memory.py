"""Live memory by kind, from when storages are made and freed; what counts as what is said in `sim/lane.py`.

What is made and freed, and by which jobs, is the same for all devices of a lane: a `Ledger` holds it as arrays, so that the
times of one more device cost a few array operations.
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
from sennit.sim.lane import LaneCode
from sennit.sim.optimizer import Optimizer

__all__ = ["Ledger", "ledger", "live_memory"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Changes of memory: those at the beginning, those at the start of a job, those at the end of the last of some jobs.

    `kind` and `size` go through all three in this order; `ending` lists the jobs of the third, cut at `cuts`.
    """

    kind: NDArray[np.int64]
    size: NDArray[np.int64]
    at_once: int
    starting: NDArray[np.int64]
    ending: NDArray[np.int64]
    cuts: NDArray[np.int64]


def ledger(
    code: LaneCode, types: dict[str, TensorType], device: Device | None = None, optimizer: Optimizer | None = None
) -> Ledger:
    """With `device`, sizes are rounded up as it allocates them, and what its kernels take for themselves is staging while they run.
    With `optimizer`, its state is there all the time."""
    grain = int(device.allocation.value) if device is not None and device.allocation is not None else 1

    def rounded(size: int) -> int:
        return -(-size // grain) * grain

    kinds = list(MemoryKind)
    position = {kind: number for number, kind in enumerate(kinds)}
    staging = position[MemoryKind.STAGING]
    at_once: list[tuple[int, int]] = []
    made: list[tuple[int, int, int]] = []
    gone: list[tuple[int, int, tuple[int, ...]]] = []
    for storage in code.storages:
        size, kind = rounded(types[storage.buffer].bytes), position[storage.kind]
        if storage.made is None:
            at_once.append((kind, size))
        else:
            made.append((kind, size, storage.made))
        if storage.ends:
            gone.append((kind, -size, storage.ends))
        elif storage.ends is not None:
            at_once.append((kind, -size))  # freed before anything ran
    for number, job in enumerate(code.jobs):
        size = rounded(types[job.staging].bytes) if job.staging is not None else 0
        if isinstance(job.step, Compute) and device is not None and device.allocation is not None:
            size = rounded(workspace(job.step, types))
        if size:
            made.append((staging, size, number))
            gone.append((staging, -size, (number,)))
    if optimizer is not None:
        trained = {item.path for item in code.lane.outputs if item.kind is OutputKind.GRADIENT}
        at_once += [
            (position[MemoryKind.OPTIMIZER], rounded(optimizer.bytes(types[item.buffer.name])))
            for item in code.lane.inputs
            if item.role is Role.PARAM and item.path in trained
        ]
    rows = [*at_once, *((kind, size) for kind, size, _ in made), *((kind, size) for kind, size, _ in gone)]
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)
    lengths = np.array([0, *(len(jobs) for _, _, jobs in gone)], dtype=np.int64)
    return Ledger(
        table[:, 0],
        table[:, 1],
        len(at_once),
        np.array([job for _, _, job in made], dtype=np.int64),
        np.array([job for _, _, jobs in gone for job in jobs], dtype=np.int64),
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
    begins = start[task_of[book.starting]]
    ends = stop[task_of[book.ending]]
    lasts = np.maximum.reduceat(ends, book.cuts) if len(ends) else ends
    times = np.concatenate([np.zeros(book.at_once), begins, lasts])
    order = np.argsort(times, kind="stable")
    times = times[order]
    changes = np.zeros((len(times), len(MemoryKind)), dtype=np.int64)
    changes[np.arange(len(times)), book.kind[order]] = book.size[order]
    last = np.flatnonzero(np.append(np.diff(times) > 0, True)) if len(times) else np.zeros(0, dtype=np.int64)
    totals = np.cumsum(changes, axis=0)[last]
    keep = np.append(True, (np.diff(totals, axis=0) != 0).any(axis=1)) if len(last) else np.zeros(0, dtype=np.bool_)
    return MemoryTrack(devices, times[last][keep], totals[keep])
