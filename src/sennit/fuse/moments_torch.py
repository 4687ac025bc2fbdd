"""Moments of what a device does, and the seconds between them.

On a CPU a moment is read off the wall clock. A GPU works behind the host: there a moment is an event in its stream, and
noting one does not make the host wait, so that steps overlap as they do in training.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

__all__ = ["Moments", "wall"]


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


def wall(device: torch.device) -> float:
    """The wall clock, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
