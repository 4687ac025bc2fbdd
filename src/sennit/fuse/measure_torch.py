"""Measuring a training step's kernels on the device at hand, into the database of `cost/database.py`.

A step runs kernel by kernel on the model's own values, so that inputs lie in memory as they do in training. A structure
that occurs in many layers is measured once, where it first occurs, `rounds` times: by events on a GPU, by the CPU time
of the thread on a CPU, where what else runs on the machine does not count. With `compiled`, groups of greedy fusion are
also compiled by Inductor, one by one, and measured; a group that Inductor refuses is left out and named. On a GPU so
are single operators, and products as a compiler calls them (`kernel_cost.called`): what the estimator of groups knows
most from. These are timed as replays of a CUDA graph, since a compiled step is one.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sennit.capture.element_types import torch_dtype
from sennit.cost.database import MeasuredKernel, Place
from sennit.fuse.kernel_cost import Estimate, called
from sennit.fuse.kernel_torch import compile_kernel, is_worth_compiling, kernel_module
from sennit.fuse.known_cost import Question
from sennit.fuse.measure_groups_torch import call_times
from sennit.fuse.model import Channel, StepModel
from sennit.fuse.moves import Limits, fused_greedily
from sennit.fuse.operator_class import PRODUCTS, moves_nothing, stem
from sennit.fuse.signature import signature
from sennit.ir.graph import Graph, Role
from sennit.ir.operators import is_view
from sennit.ir.strategy_check import Kernel

__all__ = ["measure_step", "place_of"]

Say = Callable[[str], None]


def place_of(device: torch.device) -> Place:
    """The device at hand, as the database names it."""
    if device.type == "cuda":
        return Place(torch.cuda.get_device_name(device), str(torch.__version__))
    return Place(f"CPU, {torch.backends.cpu.get_cpu_capability()}", str(torch.__version__), torch.get_num_threads())


class _Free:
    """No kernel costs anything: grouping greedily asks no times."""

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        return Estimate(0.0)


def measure_step(
    graph: Graph,
    state: Mapping[str, Tensor],
    device: torch.device,
    *,
    rounds: int = 7,
    compiled: bool = False,
    say: Say = lambda message: None,
) -> list[MeasuredKernel]:
    """Every operator of the graph by structure, and with `compiled` the groups too.

    `state` has parameters, buffers and inputs by path.
    """
    model = StepModel(graph, _Free(), Channel(0.0, 0.0))
    wanted: dict[
        int, list[tuple[Question, bool]]
    ] = {}  # by the last operator of a kernel: it runs when all that it reads is there
    for place in range(len(graph.ops)):
        wanted.setdefault(place, []).append((model.question(frozenset((place,))), False))
    if compiled:
        if device.type == "cuda":
            for place, question in _as_called(graph):
                wanted[place].append((question, True))
        for group in fused_greedily(model, Limits()).groups:
            wanted[max(group)].append((model.question(group), True))
    return _Walk(graph, state, device, rounds, say).measure(wanted)


def _as_called(graph: Graph) -> Iterator[tuple[int, Question]]:
    """Every operator that computes, by place; products with the views in front of them, with and without the bias that
    pointwise readers would add.
    """
    whole, types = Kernel(graph.ops), graph.types()
    for place, op in enumerate(graph.ops):
        if moves_nothing(op):
            continue
        results = frozenset(value.name for value in op.results)
        yield place, (Kernel((op,)), results)
        if stem(op.kind) in PRODUCTS:
            yield place, (called(op, whole, results, types), results)
            yield place, (called(op, whole, frozenset(), types), results)


class _Walk:
    """The step, operator by operator, with every value that a kernel may still want."""

    def __init__(self, graph: Graph, state: Mapping[str, Tensor], device: torch.device, rounds: int, say: Say) -> None:
        self.graph, self.device, self.rounds, self.say = graph, device, rounds, say
        self.types = graph.types()
        self.values: dict[str, Tensor] = {}
        for item in graph.inputs:
            kind = item.value.type
            tangent = item.role is Role.TANGENT
            ones = torch.ones(kind.shape, dtype=torch_dtype(kind.dtype), device=device)
            found = ones if tangent else state[item.path].detach().to(device)
            self.values[item.value.name] = found
        self.found: dict[tuple[str, tuple[tuple[int, ...], ...], bool], MeasuredKernel] = {}

    def measure(self, wanted: Mapping[int, Sequence[tuple[Question, bool]]]) -> list[MeasuredKernel]:
        last: dict[str, int] = {}
        for place, questions in wanted.items():
            for (kernel, _), _ in questions:
                for name in kernel.reads:
                    last[name] = max(last.get(name, 0), place)
        ending: dict[int, list[str]] = {}
        for name, place in last.items():
            ending.setdefault(place, []).append(name)
        with torch.no_grad():
            for place in range(len(self.graph.ops)):
                if place % 50 == 0:
                    self.say(f"measuring: operator {place} of {len(self.graph.ops)}, {len(self.found)} structures")
                for (kernel, written), compiled in wanted[place]:
                    self._one(kernel, written, compiled=compiled)
                for name in ending.get(place, ()):
                    self.values.pop(name, None)
        return list(self.found.values())

    def _one(self, kernel: Kernel, written: frozenset[str], *, compiled: bool) -> None:
        everything = frozenset(value.name for op in kernel.body for value in op.results)
        module, reads, writes = kernel_module(kernel, written if compiled else everything, self.device)
        inputs = [self.values[name] for name in reads]
        if not compiled:
            self.values.update(zip(writes, module.forward(*inputs), strict=True))
        lone = self.device.type == "cuda"
        if all(is_view(op.kind) for op in kernel.body):
            return
        if compiled and not (
            is_worth_compiling(kernel, lone=lone) or (lone and stem(kernel.body[-1].kind) in PRODUCTS)
        ):
            return
        strides = tuple(tuple(value.stride()) for value in inputs)
        plain = all(value.is_contiguous() for value in inputs)
        key = (signature(kernel, written, self.types), () if plain else strides, compiled)
        if key in self.found:
            return
        if compiled:
            try:
                times = call_times(compile_kernel(module, inputs), inputs, self.device, self.rounds)
            except Exception as error:  # what a compiler cannot do is no fault of the profile
                logging.getLogger(__name__).warning("a group of %d operators is left out: %s", len(kernel.body), error)
                return
        else:
            times = self._times(module.forward, inputs)
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        self.found[key] = MeasuredKernel(
            key[0], (min(times), low, middle, high, max(times)), len(times), key[1], compiled
        )

    def _times(self, call: Any, inputs: Sequence[Tensor]) -> list[float]:
        """Seconds a call, of so many calls at a time that the clock's own cost does not count."""
        call(*inputs)
        calls = max(1, min(200, int(5e-4 / max(self._timed(call, inputs, 1), 1e-7))))
        return [self._timed(call, inputs, calls) for _ in range(self.rounds)]

    def _timed(self, call: Any, inputs: Sequence[Tensor], calls: int) -> float:
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event
            start, end = event(enable_timing=True), event(enable_timing=True)
            start.record()
            for _ in range(calls):
                call(*inputs)
            end.record()
            torch.cuda.synchronize(self.device)
            return float(start.elapsed_time(end)) / 1e3 / calls
        begin = time.thread_time()
        for _ in range(calls):
            call(*inputs)
        return (time.thread_time() - begin) / calls
