"""One process at a time on the device.

A lock on a file, which the system releases if its holder dies.

Inductor times things too: products with and without padding while it compiles, kernels that have several configurations
(most have two or more) when they are first called. Whatever another process measures at that moment takes up to twice
its time. And what it chooses then is not always what is fastest: of 36 groups that were compiled in two processes, 9
came out otherwise in the other, and were 4.5 % apart in the median and 21 % at p90; those with the same configurations
0.5 % and 2.0 % (`label_noise.py`). `tune_alone` has it take the lock, and gives it times by replays of a graph, as
labels are timed (`graphed_seconds`): what it chooses between is called on a stream of its own, since kernels on the
default stream are in no graph (`on_own_stream`). Times of twenty launches that are queued behind a spin of a
millisecond made it keep kernels of 11.6 us where others take 2.3: a busy host may not be done with them by then.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
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


def tune_alone(lock: DeviceLock) -> None:
    """All that Inductor times in this process from now on."""
    from torch._inductor.runtime.benchmarking import benchmarker

    from sennit.fuse.replay_times_torch import graphed_seconds

    def milliseconds(_: Any, run: Any, *args: Any, **options: Any) -> Any:
        with lock:
            found = 1e3 * graphed_seconds(run)
        return [found] if options.get("return_mode") == "all" else found

    type(benchmarker).benchmark_gpu = milliseconds  # type: ignore[method-assign]


@contextmanager
def on_own_stream() -> Iterator[None]:
    """What is called inside is on a stream of its own, after all that was queued before."""
    import torch

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield
    torch.cuda.synchronize()
