"""A captured training step on a device, run as a chain of kernels under any strategy: what `gpu_fusion.py` times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_workers import Job, Layout, is_compiled
from label_groups import placed

from sennit.fuse.known_cost import KnownCost, Question
from sennit.fuse.model import Channel, StepModel
from sennit.fuse.operator_class import moves_nothing, stem
from sennit.fuse.signature import signature
from sennit.ir.graph import Graph, Input, Ref, Role
from sennit.ir.strategy import Strategy
from sennit.ir.strategy_check import Kernel, kernels

Chain = list[Any]  # (call, values read, values written, values that nothing reads any more), kernel by kernel


def without_draws(graph: Graph) -> Graph:
    """Random numbers as inputs."""
    drawn = [op for op in graph.ops if op.kind == "sennit.uniform"]
    inputs = tuple(Input(Role.INPUT, value, f"drawn {value.name}") for op in drawn for value in op.results)
    names = {op.name for op in drawn}
    return replace(graph, inputs=(*graph.inputs, *inputs), ops=tuple(op for op in graph.ops if op.name not in names))


def index_bounds(graph: Graph) -> dict[str, int]:
    """For inputs that are indices, how large they may be: the least of the tables that they, or views of them, are
    looked up in.
    """
    types = graph.types()
    base = {item.value.name: item.value.name for item in graph.inputs}
    found: dict[str, int] = {}
    for op in graph.ops:
        reads = [base.get(name) for name in op.reads]
        if (moves_nothing(op) or stem(op.kind) == "where") and any(reads):
            base.update((value.name, next(name for name in reads if name)) for value in op.results)
        names = [arg.name for arg in op.args if isinstance(arg, Ref)]
        if stem(op.kind) == "embedding":
            sizes = [(names[1], types[names[0]].shape[0])]
        elif stem(op.kind) == "gather":
            sizes = [(names[1], types[names[0]].shape[op.args[1]])]  # type: ignore[index]
        else:
            continue
        for name, size in sizes:
            if base.get(name):
                found[base[name]] = min(size, found.get(base[name], size))
    return found


class Subject:
    """A graph on the device: its inputs, how each value lies in memory, and its costs."""

    def __init__(self, name: str, graph: Graph, device: str, weights: Path | None, cluster: str) -> None:
        from sennit.cluster import load
        from sennit.fuse.compiled_cost import Compiled
        from sennit.fuse.kernel_cost import Staged

        self.name, self.graph, self.device = name, graph, device
        self.types = graph.types()
        self.outputs = {output.name for output in graph.outputs}
        self.inputs = self._inputs()
        staged = Staged.of(graph, load(cluster).device)
        estimator: Any = Compiled(staged)
        if weights is not None:
            from sennit.fuse.estimator_torch import LearnedCost

            estimator = LearnedCost.load(weights, staged)
        self.cost = KnownCost(self.types, estimator, {})
        self.model = StepModel(graph, self.cost, Channel(0.0, 0.0))
        self.layouts: dict[str, Layout] = {}
        self.reference = run_all(self.chain(Strategy("none"), compiled=False), self.inputs, self._keep)

    def _inputs(self) -> dict[str, Any]:
        import torch

        from sennit.capture.element_types import torch_dtype

        torch.manual_seed(0)
        bounds = index_bounds(self.graph)
        made: dict[str, Any] = {}
        for item in self.graph.inputs:
            dtype, shape = torch_dtype(item.value.type.dtype), item.value.type.shape
            if not dtype.is_floating_point:
                top = bounds.get(item.value.name, 1)
                made[item.value.name] = torch.randint(0, top, shape, device=self.device).to(dtype)
            elif item.role is Role.TANGENT:
                made[item.value.name] = torch.ones(shape, device=self.device, dtype=dtype)
            else:
                is_param = item.role is Role.PARAM
                value = (
                    torch.randn(shape, device=self.device) * 0.05 if is_param else torch.rand(shape, device=self.device)
                )
                made[item.value.name] = value.to(dtype)
        return made

    def _keep(self, name: str, value: Any) -> None:
        self.layouts[name] = (tuple(value.shape), tuple(value.stride()), value.dtype)

    def values(self, names: Sequence[str]) -> list[Any]:
        """Tensors that lie as these values do."""
        from gpu_workers import made

        return [made(self.layouts[name], self.device) for name in names]

    def questions(self, strategy: Strategy) -> list[Question]:
        found = kernels(strategy, self.graph)
        readers: dict[str, list[int]] = {}
        for place, kernel in enumerate(found):
            for name in kernel.reads:
                readers.setdefault(name, []).append(place)
        asked = []
        for place, kernel in enumerate(found):
            own = (value.name for op in kernel.ops for value in op.results)
            written = frozenset(n for n in own if n in self.outputs or any(r != place for r in readers.get(n, ())))
            asked.append((kernel, written))
        return asked

    def job(self, kernel: Kernel, written: frozenset[str], *, timed: bool = True) -> Job:
        key = signature(kernel, written, self.types)
        return Job(key, kernel, written, tuple(self.layouts[name] for name in kernel.reads), timed)

    def chain(self, strategy: Strategy, *, compiled: bool) -> Chain:
        from sennit.fuse.kernel_torch import compile_kernel, kernel_module

        steps = [(*kernel_module(kernel, written), kernel, written) for kernel, written in self.questions(strategy)]
        found = with_ends(
            [(placed(module, self.device).forward, reads, writes) for module, reads, writes, _, _ in steps],
            self.outputs,
        )
        if not compiled:
            return found
        artifacts: dict[Any, Any] = {}

        def compile_one(place: int, inputs: list[Any]) -> Any:
            """For inputs that lie as these do: what a compiled kernel writes may lie otherwise than what torch writes."""
            module, _, _, kernel, written = steps[place]
            if not is_compiled(kernel, self.device):
                return found[place][0]
            lie = tuple((tuple(value.shape), tuple(value.stride()), value.dtype) for value in inputs)
            key = (signature(kernel, written, self.types), lie)
            if key not in artifacts:
                artifacts[key] = compile_kernel(module, inputs)
            return artifacts[key]

        return compiled_chain(found, self.inputs, compile_one)

    def whole(self) -> Job:
        """The step as one graph."""
        return self.job(Kernel(self.graph.ops), frozenset(self.outputs), timed=False)

    def whole_chain(self) -> Chain:
        """The step as Inductor compiles it when it is handed all of it."""
        from sennit.fuse.kernel_torch import compile_kernel, kernel_module

        job = self.whole()
        module, reads, writes = kernel_module(job.kernel, job.written)
        call = compile_kernel(placed(module, self.device), [self.inputs[name] for name in reads])
        return with_ends([(call, reads, writes)], self.outputs)


def with_ends(found: list[Any], outputs: set[str]) -> Chain:
    last = {name: place for place, (_, reads, writes) in enumerate(found) for name in (*reads, *writes)}
    ends: dict[int, list[str]] = {}
    for name, place in last.items():
        if name not in outputs:
            ends.setdefault(place, []).append(name)
    return [(*item, ends.get(place, [])) for place, item in enumerate(found)]


def compiled_chain(chain: Chain, inputs: dict[str, Any], compile_one: Callable[[int, list[Any]], Any]) -> Chain:
    """The chain with each call made for the values that reach it, by running it once."""
    import torch

    values, made_calls = dict(inputs), []
    with torch.no_grad():
        for place, (_, reads, writes, ends) in enumerate(chain):
            call = compile_one(place, [values[name] for name in reads])
            values.update(zip(writes, call(*[values[name] for name in reads]), strict=True))
            made_calls.append((call, reads, writes, ends))
            for name in ends:
                values.pop(name, None)
    return made_calls


def run_all(chain: Chain, inputs: dict[str, Any], see: Callable[[str, Any], None] | None = None) -> dict[str, Any]:
    import torch

    values = dict(inputs)
    if see is not None:
        for name, value in values.items():
            see(name, value)
    with torch.no_grad():
        for call, reads, writes, ends in chain:
            results = call(*[values[name] for name in reads])
            for name, value in zip(writes, results, strict=True):
                values[name] = value
                if see is not None:
                    see(name, value)
            for name in ends:
                values.pop(name, None)
    return values


class Player:
    """A chain ready to be replayed: one CUDA graph, or plain calls on a CPU.

    `off` is the greatest difference of its results from no fusion, over the greatest value.
    """

    def __init__(self, subject: Subject, chain: Chain) -> None:
        import torch

        self.subject, self.kernels = subject, len(chain)
        self.off = difference(run_all(chain, subject.inputs), subject.reference, sorted(subject.outputs))
        self.play: Callable[[], Any] = lambda: run_all(chain, subject.inputs)
        if subject.device == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                kept = run_all(chain, subject.inputs)
            del kept
            self.play = self.graph.replay

    def seconds(self) -> float:
        import torch

        if self.subject.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        self.play()
        if self.subject.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def replayed(players: dict[str, Player], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in players}
    for turn in range(rounds + 2):
        for name, player in players.items():
            seconds = player.seconds()
            if turn >= 2:
                times[name].append(seconds)
    return times


def difference(values: dict[str, Any], reference: dict[str, Any], outputs: list[str]) -> float:
    """The greatest, over the greatest value of the same result; results that are zero but for rounding do not count."""
    sizes = {
        name: float(reference[name].float().abs().max()) for name in outputs if reference[name].is_floating_point()
    }
    least = 1e-4 * statistics.median(sizes.values())
    return max(
        float((values[name].float() - reference[name].float()).abs().max()) / size
        for name, size in sizes.items()
        if size > least
    )
