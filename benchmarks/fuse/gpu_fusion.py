"""One GPU: kernels chosen by the search against those of Inductor's default, for the same graphs, measured.

    python benchmarks/fuse/gpu_fusion.py --graphs FOLDER --weights estimator_h200.pt --only "llama bfloat16" "gpt2 bfloat16" --seconds 230

For each captured training step (forward and backward, no optimizer):

    no fusion    every operator by itself, as torch runs it
    greedy       every operator with what it reads, wherever that is legal, each group compiled by itself
    search       what the search finds: first by the estimator; then the groups that it chose are compiled and timed, and it searches again with what was measured
    Inductor     the whole graph handed to Inductor: its default fusion

All four run as one CUDA graph each, so that the host does not count, and are replayed in turns; the table has the median of a replay. Results are compared with those of "no fusion".
Random numbers are inputs here: torch draws them in a kernel of their own in all four. Workers compile and time groups in parallel, one at a time on the GPU; what they compiled
comes from Inductor's cache after that. With `--device cpu` the same runs on a CPU, without CUDA graphs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from label_groups import held, placed, timed_on_cpu, timed_on_gpu
from workloads import stored_graphs

from sennit.fuse.known_cost import KnownCost, Question
from sennit.fuse.model import Channel, Grouping, StepModel
from sennit.fuse.moves import Limits, fused_greedily
from sennit.fuse.search import SearchOptions, search
from sennit.fuse.signature import signature
from sennit.ir.graph import Graph, Input, Role
from sennit.ir.strategy import Strategy
from sennit.ir.strategy_check import Kernel, kernels

Layout = tuple[tuple[int, ...], tuple[int, ...], Any]  # shape, strides, dtype


@dataclass(frozen=True)
class Job:
    """`timed` is false for what only has to be in the cache."""

    key: str
    kernel: Kernel
    written: frozenset[str]
    inputs: tuple[Layout, ...]
    timed: bool = True


def without_draws(graph: Graph) -> Graph:
    """Random numbers as inputs."""
    drawn = [op for op in graph.ops if op.kind == "sennit.uniform"]
    inputs = tuple(Input(Role.INPUT, value, f"drawn {value.name}") for op in drawn for value in op.results)
    names = {op.name for op in drawn}
    return replace(graph, inputs=(*graph.inputs, *inputs), ops=tuple(op for op in graph.ops if op.name not in names))


# ---- workers ---------------------------------------------------------------------------------------------------------------


def made(layout: Layout, device: str) -> Any:
    import torch

    shape, strides, dtype = layout
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    memory = torch.zeros(
        extent, dtype=dtype, device=device
    )  # a value that is broadcast has several elements in one place
    if dtype.is_floating_point:
        memory.uniform_(0.0, 1.0)
    return memory.as_strided(shape, strides)


def worker(jobs: Any, answers: Any, lock: str, device: str) -> None:
    import torch
    from torch._inductor import config

    from sennit.fuse.kernel_torch import compile_kernel, kernel_module

    torch.set_num_threads(1)
    config.compile_threads = 1
    while True:
        job = jobs.get()
        if job is None:
            return
        try:
            module = placed(kernel_module(job.kernel, job.written)[0], device)
            with held(lock):
                inputs = [made(layout, device) for layout in job.inputs]
            call = compile_kernel(module, inputs) if is_compiled(job.kernel) else module.forward
            seconds = 0.0
            if job.timed:
                with held(lock), torch.no_grad():
                    call(*inputs)
                    found = timed_on_gpu(call, inputs) if device == "cuda" else timed_on_cpu(call, inputs)
                    seconds = found[1]
            answers.put((job.key, seconds, None))
        except Exception as error:
            answers.put((job.key, None, f"{type(error).__name__}: {str(error)[:300]}"))
        finally:
            inputs, call = [], None
            if device == "cuda":
                torch.cuda.empty_cache()


def is_compiled(kernel: Kernel) -> bool:
    from sennit.fuse.kernel_torch import is_worth_compiling

    return is_worth_compiling(kernel)


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


# ---- one graph -------------------------------------------------------------------------------------------------------------


class Subject:
    """A graph on the device: its inputs, how each value lies in memory, and its costs."""

    def __init__(self, name: str, graph: Graph, device: str, weights: Path | None, cluster: str) -> None:
        import torch

        from sennit.capture.element_types import torch_dtype
        from sennit.cluster import load
        from sennit.fuse.kernel_cost import Staged

        self.name, self.graph, self.device = name, graph, device
        self.types = graph.types()
        torch.manual_seed(0)
        self.inputs: dict[str, Any] = {}
        for item in graph.inputs:
            dtype, shape = torch_dtype(item.value.type.dtype), item.value.type.shape
            if dtype.is_floating_point:
                value = (
                    torch.rand(shape, device=device)
                    if item.role is not Role.PARAM
                    else torch.randn(shape, device=device) * 0.05
                )
                self.inputs[item.value.name] = (
                    torch.ones(shape, device=device, dtype=dtype) if item.role is Role.TANGENT else value.to(dtype)
                )
            else:
                self.inputs[item.value.name] = torch.zeros(shape, dtype=dtype, device=device)
        staged = Staged.of(graph, load(cluster).device)
        estimator: Any = staged
        if weights is not None:
            from sennit.fuse.estimator_torch import LearnedCost

            estimator = LearnedCost.load(weights, staged)
        self.cost = KnownCost(self.types, estimator, {})
        self.model = StepModel(graph, self.cost, Channel(0.0, 0.0))
        self.layouts: dict[str, Layout] = {}
        self.reference = run_all(self.chain(Strategy("none"), compiled=False), self.inputs, self._keep)

    def _keep(self, name: str, value: Any) -> None:
        self.layouts[name] = (tuple(value.shape), tuple(value.stride()), value.dtype)

    def questions(self, strategy: Strategy) -> list[Question]:
        outputs = {output.name for output in self.graph.outputs}
        found = kernels(strategy, self.graph)
        readers: dict[str, list[int]] = {}
        for place, kernel in enumerate(found):
            for name in kernel.reads:
                readers.setdefault(name, []).append(place)
        asked = []
        for place, kernel in enumerate(found):
            own = (value.name for op in kernel.ops for value in op.results)
            written = frozenset(n for n in own if n in outputs or any(r != place for r in readers.get(n, ())))
            asked.append((kernel, written))
        return asked

    def job(self, kernel: Kernel, written: frozenset[str], *, timed: bool = True) -> Job:
        key = signature(kernel, written, self.types)
        return Job(key, kernel, written, tuple(self.layouts[name] for name in kernel.reads), timed)

    def chain(
        self, strategy: Strategy, *, compiled: bool
    ) -> list[tuple[Any, tuple[str, ...], tuple[str, ...], list[str]]]:
        """(call, reads, writes, values that nothing reads any more), kernel by kernel."""
        from sennit.fuse.kernel_torch import compile_kernel, kernel_module

        found = []
        artifacts: dict[Any, Any] = {}
        for kernel, written in self.questions(strategy):
            module, reads, writes = kernel_module(kernel, written)
            call: Any = placed(module, self.device).forward
            if compiled and is_compiled(kernel):
                lie = tuple(self.layouts[name] for name in reads)
                key = (signature(kernel, written, self.types), lie)
                if key not in artifacts:
                    artifacts[key] = compile_kernel(module, [made(layout, self.device) for layout in lie])
                call = artifacts[key]
            found.append((call, reads, writes))
        return with_ends(found, {output.name for output in self.graph.outputs})

    def whole(self) -> Job:
        kernel = Kernel(self.graph.ops)
        return self.job(kernel, frozenset(output.name for output in self.graph.outputs), timed=False)


def with_ends(found: list[Any], outputs: set[str]) -> list[Any]:
    last = {name: place for place, (_, reads, writes) in enumerate(found) for name in (*reads, *writes)}
    ends: dict[int, list[str]] = {}
    for name, place in last.items():
        if name not in outputs:
            ends.setdefault(place, []).append(name)
    return [(*item, ends.get(place, [])) for place, item in enumerate(found)]


def run_all(
    chain: Sequence[Any], inputs: dict[str, Any], see: Callable[[str, Any], None] | None = None
) -> dict[str, Any]:
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


def replayed(
    subject: Subject, variants: dict[str, list[Any]], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each variant, in turns; and the greatest difference of its results from no fusion, over the greatest value."""
    import torch

    outputs = [output.name for output in subject.graph.outputs]
    off: dict[str, float] = {}
    plays: dict[str, Callable[[], Any]] = {}
    for name, chain in variants.items():
        values = run_all(chain, subject.inputs)
        off[name] = difference(values, subject.reference, outputs)
        del values
        plays[name] = lambda chain=chain: run_all(chain, subject.inputs)
        if subject.device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = run_all(chain, subject.inputs)
            del kept
            plays[name] = graph.replay
    times: dict[str, list[float]] = {name: [] for name in plays}
    for _ in range(rounds + 2):
        for name, play in plays.items():
            if subject.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            play()
            if subject.device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[2:]) for name, found in times.items()}, off


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


def study(subject: Subject, pool: Pool, arguments: Any, deadline: float) -> None:
    model, graph = subject.model, subject.graph
    print(f"{subject.name}: {len(graph.ops)} operators", flush=True)
    greedy = model.strategy("greedy", fused_greedily(model, Limits()), ())
    none = model.strategy("none", Grouping(), ())
    options = SearchOptions(seconds=arguments.search_seconds, tensors=False, across_steps=False, patience=100_000)
    pool.jobs.put(subject.whole())  # into the cache, while the search goes on
    known: set[str] = set()
    found = search(model, options, name="search")
    print(f"  by the estimator: {1e3 * found.seconds:.3f} ms, {found.tried} candidates", flush=True)
    for turn in range(arguments.rounds):
        wanted = {}
        for strategy in (found.strategy, greedy, none):
            for kernel, written in subject.questions(strategy):
                job = subject.job(kernel, written)
                if job.key not in known:
                    wanted[job.key] = job
        start = time.monotonic()
        measured = pool.run(list(wanted.values()), min(deadline, start + arguments.measure_seconds))
        known.update(wanted)
        estimated = [subject.cost.estimate(wanted[key].kernel, wanted[key].written).seconds for key in measured]
        errors = [
            abs(guess - seconds) / seconds
            for guess, seconds in zip(estimated, measured.values(), strict=True)
            if seconds > 0
        ]
        for key, seconds in measured.items():
            subject.cost.learn(wanted[key].kernel, wanted[key].written, seconds)
        model.forget()
        found = search(model, replace(options, seed=turn + 1), name="search")
        if errors:
            print(
                f"  measured {len(measured)} groups in {time.monotonic() - start:.0f} s, estimates off by {100 * statistics.median(errors):.1f} % in the median; "
                f"now {1e3 * found.seconds:.3f} ms, {found.tried} candidates",
                flush=True,
            )
    start = time.monotonic()
    last = {
        job.key: job
        for job in (subject.job(*question) for question in subject.questions(found.strategy))
        if job.key not in known
    }
    pool.run([replace(job, timed=False) for job in last.values()], deadline)
    variants = {
        "no fusion": subject.chain(none, compiled=False),
        "greedy": subject.chain(greedy, compiled=True),
        "search": subject.chain(found.strategy, compiled=True),
    }
    from sennit.fuse.kernel_torch import compile_kernel, kernel_module

    job = subject.whole()
    module, reads, writes = kernel_module(job.kernel, job.written)
    call = compile_kernel(placed(module, subject.device), [subject.inputs[name] for name in reads])
    variants["Inductor"] = with_ends([(call, reads, writes)], {output.name for output in graph.outputs})
    print(f"  compiled in {time.monotonic() - start:.0f} s", flush=True)
    times, off = replayed(subject, variants, arguments.replays)
    best = times["Inductor"]
    for name, seconds in times.items():
        print(
            f"  {name:10s} {1e3 * seconds:9.3f} ms   {best / seconds:5.2f} x Inductor   {len(variants[name]):5d} kernels   results differ by {off[name]:.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--only", nargs="+", default=["llama bfloat16", "gpt2 bfloat16", "vit bfloat16"])
    parser.add_argument("--seconds", type=float, default=230.0, help="no further graph is begun after this")
    parser.add_argument("--search-seconds", type=float, default=6.0)
    parser.add_argument("--measure-seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cluster", default="h200x8", help="the cluster description whose device this is")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # shared with the workers
        lock = f"{folder}/lock"
        pool = Pool(arguments.workers, arguments.device, lock)
        try:
            graphs = {name: graph for name, graph in stored_graphs(arguments.graphs) if name in arguments.only}
            for name in arguments.only:
                if time.monotonic() > deadline:
                    print(f"{name}: no time left", flush=True)
                    continue
                subject = Subject(
                    name, without_draws(graphs[name]), arguments.device, arguments.weights, arguments.cluster
                )
                study(subject, pool, arguments, deadline + 60)
        finally:
            pool.stop()


if __name__ == "__main__":
    main()
