"""Run a subject on a runtime, check it and time it. See `measure.py`.

A time is that of one call, all ranks begun together: each rank waits at a barrier, then times a batch of calls; the
slowest rank counts. Small arrays have larger batches, so that the clock and the barrier do not show. On the GPU a batch
is a CUDA graph, timed by its own events.

Ranks are processes held by `GlooRanks`; one call of it measures all sizes of a subject.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from sennit.cluster.ranks_torch import GlooRanks
from sennit.collective.runtime.code import Code
from sennit.collective.runtime.code_numpy import run_code
from sennit.collective.runtime.gpu_torch import GpuGroup, GpuKernels
from sennit.collective.runtime.measure import (
    Floats,
    Request,
    Runtime,
    Times,
    buffers_for,
    code_for,
    elements_of,
    expected_outputs,
    random_inputs,
    schedule_for,
    wrong_ranks,
)
from sennit.collective.runtime.p2p_plan import plan_p2p
from sennit.collective.runtime.p2p_torch import run_plan_p2p
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.ir.dtype import DType
from sennit.ir.layout import Reduction

__all__ = ["Bench"]

SEED = 20
WORK = 4 << 20  # bytes that a batch moves, about


class Bench:
    """A runtime ready to measure. Use it with `with`: its processes end there."""

    def __init__(self, runtime: Runtime, ranks: int, *, timeout: float = 120.0) -> None:
        self.runtime = runtime
        self.kernels = GpuKernels.here() if runtime is Runtime.GPU else None
        processes = runtime in (Runtime.SHM, Runtime.P2P)
        self.processes = GlooRanks(ranks, timeout=timeout, preload=[__name__]) if processes else None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.processes is not None:
            self.processes.stop()

    @property
    def machine(self) -> str:
        """What it runs on, in a few words."""
        if self.runtime is Runtime.GPU:
            return str(torch.cuda.get_device_name())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return f"{cores} cores"

    def measure(self, request: Request) -> list[Times]:
        """By size."""
        match self.runtime:
            case Runtime.NUMPY:
                return _in_this_process(request, Runtime.NUMPY, _numpy_runner)
            case Runtime.GPU:
                assert self.kernels is not None
                return _on_gpu(request, self.kernels)
            case Runtime.SHM:
                assert self.processes is not None
                return Times.slowest(self.processes.call(shm_rank, request))
            case Runtime.P2P:
                assert self.processes is not None
                return Times.slowest(self.processes.call(p2p_rank, request))


def batch_of(nbytes: int) -> int:
    """Calls of a batch; the same on all ranks."""
    return max(1, min(50, WORK // max(1, nbytes)))


# ---- all ranks in this process ---------------------------------------------------------------------------------------

Runner = Callable[[Code, list[Floats], int], Callable[[], list[Floats]]]


def _in_this_process(request: Request, runtime: Runtime, runner: Runner) -> list[Times]:
    code = code_for(request.subject, runtime)
    found = []
    for nbytes in request.sizes:
        elements = elements_of(code, nbytes)
        inputs = random_inputs(code, elements, SEED)
        run = runner(code, inputs, elements)
        outputs = run()
        wrong = wrong_ranks(outputs, expected_outputs(code, inputs, elements)) if request.check else ()
        seconds = []
        for _ in range(request.repeat):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        found.append(Times(nbytes, tuple(seconds), wrong))
    return found


def _numpy_runner(code: Code, inputs: list[Floats], elements: int) -> Callable[[], list[Floats]]:
    return lambda: [array.astype(np.float32) for array in run_code(code, inputs, elements)]


def _on_gpu(request: Request, kernels: GpuKernels) -> list[Times]:
    code = code_for(request.subject, Runtime.GPU)
    group = GpuGroup(code, kernels)
    found = []
    for nbytes in request.sizes:
        elements = elements_of(code, nbytes)
        given = random_inputs(code, elements, SEED)
        inputs, outputs = _on_device(code, given, elements, kernels.device)
        group.run(inputs, outputs)
        group.check()
        host = [output.cpu().numpy() for output in outputs]
        wrong = wrong_ranks(host, expected_outputs(code, given, elements)) if request.check else ()
        seconds = _times_on_gpu(lambda: group.run(inputs, outputs), nbytes, request.repeat)  # noqa: B023
        group.check()
        found.append(Times(nbytes, tuple(seconds), wrong))
    return found


def _on_device(
    code: Code, given: list[Floats], elements: int, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    inputs, outputs = [], []
    for rank, array in enumerate(given):
        source, target = buffers_for(code, rank, array, elements)
        if not code.collective.in_place:
            inputs.append(torch.from_numpy(source).to(device))
            outputs.append(torch.from_numpy(target).to(device))
            continue
        whole = torch.from_numpy(max(source, target, key=len)).to(device)
        first = abs(target.ctypes.data - source.ctypes.data) // source.itemsize
        larger, smaller = whole, whole[first : first + min(len(source), len(target))]
        inputs.append(larger if len(source) >= len(target) else smaller)
        outputs.append(larger if len(target) >= len(source) else smaller)
    return inputs, outputs


def _times_on_gpu(call: Callable[[], None], nbytes: int, repeat: int) -> list[float]:
    """A batch is replayed as one CUDA graph: what Python spends on a launch is not in it."""
    batch = batch_of(nbytes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(batch):
            call()
    seconds = []
    for _ in range(repeat):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        seconds.append(float(first.elapsed_time(last)) / 1e3 / batch)
    return seconds


# ---- a process a rank ------------------------------------------------------------------------------------------------


def shm_rank(rank: int, request: Request) -> list[Times]:
    """On each rank: run the request in shared memory."""
    code = code_for(request.subject, Runtime.SHM)
    with ShmGroup.create(rank, code.ranks, _gather, timeout=60.0) as group:

        def call(source: Floats, target: Floats, elements: int) -> None:
            addresses = source.ctypes.data, target.ctypes.data
            group.run(code, *addresses, elements, DType.F32, Reduction.SUM)

        return [_on_rank(rank, code, nbytes, request, call, group.barrier) for nbytes in request.sizes]


def p2p_rank(rank: int, request: Request) -> list[Times]:
    """On each rank: run the request's schedule with messages."""
    schedule = schedule_for(request.subject)
    code, plan = code_for(schedule, Runtime.P2P), plan_p2p(schedule, rank)

    def call(source: Floats, target: Floats, elements: int) -> None:
        run_plan_p2p(plan, torch.from_numpy(source), torch.from_numpy(target))

    return [_on_rank(rank, code, nbytes, request, call, dist.barrier) for nbytes in request.sizes]


def _gather(told: bytes) -> list[bytes]:
    found: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(found, told)
    return found


def _on_rank(
    rank: int,
    code: Code,
    nbytes: int,
    request: Request,
    call: Callable[[Floats, Floats, int], None],
    barrier: Callable[[], object],
) -> Times:
    elements = elements_of(code, nbytes)
    inputs = random_inputs(code, elements, SEED)
    source, target = buffers_for(code, rank, inputs[rank], elements)
    call(source, target, elements)
    wrong: tuple[int, ...] = ()
    if request.check:
        goal = expected_outputs(code, inputs, elements)[rank]
        wrong = (rank,) if wrong_ranks([target], [goal]) else ()
    batch = batch_of(nbytes)
    seconds = []
    for _ in range(request.repeat):
        barrier()
        start = time.perf_counter()
        for _ in range(batch):
            call(source, target, elements)
        seconds.append((time.perf_counter() - start) / batch)
    return Times(nbytes, tuple(seconds), wrong)
