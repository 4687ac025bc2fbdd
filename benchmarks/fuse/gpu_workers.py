"""Processes that compile groups through Inductor and time them, one at a time on the device.

In a step most of what a kernel reads was written long before, and what it writes is read long after. So calls take
turns with copies of their inputs that do not fit the cache together: timed again and again on the same values, kernels
look faster than they are in a step (by 12 to 16 % over a whole one), small ones most, and a search would fuse too
little.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from device_lock import DeviceLock, tune_alone
from label_groups import placed, timed_on_cpu, timed_on_gpu

from sennit.ir.strategy_check import Kernel

Layout = tuple[tuple[int, ...], tuple[int, ...], Any]  # shape, strides, dtype


@dataclass(frozen=True)
class Job:
    """`timed` is false for what only has to be in Inductor's cache."""

    key: str
    kernel: Kernel
    written: frozenset[str]
    inputs: tuple[Layout, ...]
    timed: bool = True


def made(layout: Layout, device: str) -> Any:
    import torch

    shape, strides, dtype = layout
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    # a value that is broadcast has several elements in one place
    memory = torch.zeros(extent, dtype=dtype, device=device)
    if dtype.is_floating_point:
        memory.uniform_(0.0, 1.0)
    return memory.as_strided(shape, strides)


def is_compiled(kernel: Kernel, device: str) -> bool:
    from sennit.fuse.kernel_torch import is_worth_compiling

    return is_worth_compiling(kernel, lone=device == "cuda")


def copies(inputs: Sequence[Any], touched: int = 150_000_000) -> tuple[list[Any], ...]:
    """Further inputs that lie as these do, so many that all of them together do not fit the cache of the device."""
    import torch

    size = sum(value.untyped_storage().nbytes() for value in inputs)
    count = min(64, touched // max(size, 1))

    def copy(value: Any) -> Any:
        memory = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device=value.device)
        memory.copy_(torch.tensor([], dtype=torch.uint8, device=value.device).set_(value.untyped_storage()))
        return memory.view(value.dtype).as_strided(value.shape, value.stride())

    return tuple([copy(value) for value in inputs] for _ in range(count))


def worker(jobs: Any, answers: Any, path: str, device: str) -> None:
    import torch
    from torch._inductor import config

    from sennit.fuse.kernel_torch import compile_kernel, kernel_module

    torch.set_num_threads(1)
    config.compile_threads = 1
    lock = DeviceLock(path)
    tune_alone(lock)
    while True:
        job = jobs.get()
        if job is None:
            return
        try:
            module = placed(kernel_module(job.kernel, job.written)[0], device)
            with lock:
                inputs = [made(layout, device) for layout in job.inputs]
            call = compile_kernel(module, inputs) if is_compiled(job.kernel, device) else module.forward
            seconds = 0.0
            if job.timed:
                with torch.no_grad():
                    if device == "cuda":
                        with lock:
                            others = copies(inputs)
                        found = timed_on_gpu(call, inputs, lock, others)
                    else:
                        found = timed_on_cpu(call, inputs)
                    seconds = found[1]
            answers.put((job.key, seconds, None))
        except Exception as error:
            answers.put((job.key, None, f"{type(error).__name__}: {str(error)[:300]}"))
        finally:
            inputs, others, call = [], (), None
            if device == "cuda":
                torch.cuda.empty_cache()


class Pool:
    """Processes that compile and time."""

    def __init__(self, count: int, device: str, lock: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.jobs, self.answers = context.Queue(), context.Queue()
        self.workers = [
            context.Process(target=worker, args=(self.jobs, self.answers, lock, device), daemon=True)
            for _ in range(count)
        ]
        for process in self.workers:
            process.start()

    def run(self, work: Sequence[Job], deadline: float) -> dict[str, float]:
        """Seconds by key, of what was timed before the deadline. What cannot be compiled is named."""
        for job in work:
            self.jobs.put(job)
        found: dict[str, float] = {}
        missing = {job.key for job in work}
        while missing:
            try:
                key, seconds, error = self.answers.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                print(f"  {len(missing)} groups were not timed in time", flush=True)
                break
            if key not in missing:  # of a run that was cut short
                continue
            missing.discard(key)
            if error is not None:
                print(f"  a group is left out: {error}", flush=True)
            else:
                found[key] = seconds
        return found

    def stop(self) -> None:
        for process in self.workers:
            process.kill()
