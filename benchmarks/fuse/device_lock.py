"""One process at a time on the device.

A lock on a file, which the system releases if its holder dies. Inductor also runs things on the device while it compiles: it times products with and without padding, and kernels that have several configurations. Whatever another process measures at
that moment takes up to twice its time, and what Inductor finds then is as wrong, so that it chooses otherwise than it would alone. `hold_while_tuning` has it take the lock for that."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import Any


class DeviceLock:
    """Held in a `with`; by whoever holds it, again at no cost."""

    def __init__(self, path: str) -> None:
        self.path, self.depth = path, 0
        self.file: Any = None

    def __enter__(self) -> None:
        if self.depth == 0:
            self.file = Path(self.path).open("w")
            fcntl.flock(self.file, fcntl.LOCK_EX)
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.file.close()


def hold_while_tuning(lock: DeviceLock) -> None:
    """Of this process, for all that is compiled from now on."""
    from torch._inductor.runtime.benchmarking import benchmarker

    sort = type(benchmarker)
    times = sort.benchmark_gpu

    def alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return times(*args, **kwargs)

    sort.benchmark_gpu = alone  # type: ignore[method-assign]
