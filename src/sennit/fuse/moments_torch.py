"""Moments of what a device does, and the seconds between them.

On a CPU a moment is read off the wall clock. A GPU works behind the host: there a moment is an event in its stream, and
noting one does not make the host wait, so that steps overlap as they do in training.

**Of several ranks**, with e[r][i] the end of step i on rank r, counted from a barrier, step i takes

    max_r e[r][i] - max_r e[r][i - 1]

from when all have ended the one before until all have ended it. The greatest of the ranks' own steps,
max_r (e[r][i] - e[r][i - 1]), is more than that where ranks do not end a step together: one is ahead now and then, and
the other catches up.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Moments", "of_all_ranks", "wall"]


class Moments:
    """Noted one after another on one device, on the stream that is current."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._noted: list[Any] = []

    def note(self) -> None:
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self._noted.append(event)
        else:
            self._noted.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each moment to the next. Waits until the device has come to the last."""
        if self.device.type == "cuda":
            self._noted[-1].synchronize()
            return [1e-3 * start.elapsed_time(stop) for start, stop in pairwise(self._noted)]
        return [stop - start for start, stop in pairwise(self._noted)]


def of_all_ranks(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The seconds of each step from those of this rank's own, the first of them since a barrier: see above."""
    ends = torch.tensor(seconds, dtype=torch.float64).cumsum(0).to(device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    found: list[float] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return found


def wall(device: torch.device) -> float:
    """The wall clock, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
