"""Groups of a step, compiled by Inductor one by one and timed on the device at hand: what `measured_search.py` asks
for.

Inputs are small random numbers that lie plainly in memory, as those that the estimator was trained on. On a GPU many
calls are one CUDA graph, so that the host does not count (`replay_times_torch.py`); on a CPU the time is that of the
thread, so that other processes do not. A group that the compiler refuses is named in the log and has no time.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sennit.cluster import Device
from sennit.cost.database import MeasuredKernel
from sennit.errors import PlanError
from sennit.fuse.kernel_torch import compile_kernel, is_worth_compiling, kernel_module, sample_inputs
from sennit.fuse.known_cost import Question
from sennit.fuse.replay_times_torch import captured, queued_seconds, replayed
from sennit.fuse.signature import signature
from sennit.ir.graph import Graph

__all__ = ["GroupTimer", "call_times", "device_at_hand"]


def device_at_hand(described: Device) -> torch.device:
    """The device of this machine that a cluster describes; refused where this machine has another."""
    if described.kind.startswith("CPU"):
        return torch.device("cpu")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    if described.kind.split()[0] not in name:
        raise PlanError(
            f"the cluster's device is {described.kind}, and this machine has {name}",
            where="--measure",
            fix="run this on a machine of the cluster, or leave --measure out",
        )
    return torch.device("cuda")


class GroupTimer:
    """Seconds of kernels of one graph; `measured` are the records of all that were timed, for a database."""

    def __init__(self, graph: Graph, device: torch.device, *, rounds: int = 7, compiled: bool = True) -> None:
        self.types, self.device, self.rounds, self.compiled = graph.types(), device, rounds, compiled
        self.measured: list[MeasuredKernel] = []

    def __call__(self, questions: Sequence[Question]) -> list[float | None]:
        return [self._one(question) for question in questions]

    def _one(self, question: Question) -> float | None:
        kernel, written = question
        module, reads, _ = kernel_module(kernel, written, self.device)
        inputs = sample_inputs(reads, self.types, self.device)
        compiled = self.compiled and is_worth_compiling(kernel, lone=self.device.type == "cuda")
        try:
            call = compile_kernel(module, inputs) if compiled else module.forward
            with torch.no_grad():
                times = call_times(call, inputs, self.device, self.rounds)
        except Exception as error:  # what a compiler cannot do is no fault of the search
            logging.getLogger(__name__).warning("a group of %d operators is not measured: %s", len(kernel.body), error)
            return None
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        found = MeasuredKernel(
            signature(kernel, written, self.types),
            (min(times), low, middle, high, max(times)),
            len(times),
            compiled=compiled,
        )
        self.measured.append(found)
        return found.seconds


def call_times(call: Callable[..., Any], inputs: Sequence[Tensor], device: torch.device, rounds: int) -> list[float]:
    """Seconds a call, of so many calls at a time that the clock's own cost does not count."""
    call(*inputs)
    if device.type == "cuda":
        return list(replayed(captured(call, [inputs], queued_seconds(lambda: call(*inputs))), rounds).times)
    start = time.thread_time()
    call(*inputs)
    calls = max(1, min(1000, int(2e-3 / max(time.thread_time() - start, 1e-7))))
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            call(*inputs)
        found.append((time.thread_time() - start) / calls)
    return found
