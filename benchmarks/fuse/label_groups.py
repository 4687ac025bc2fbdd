"""Times of fused groups on a GPU: the data that the estimator of `fuse/` is trained on.

    python benchmarks/fuse/label_groups.py --graphs FOLDER --out groups.jsonl.gz --seconds 420 --workers 12

Captured training steps of several model families are read from a folder (`workloads.py` writes them). Groups are drawn from them in turn (`drawn_groups.py`), compiled by Inductor, each by
itself, and timed with CUDA events: the median over replays of a CUDA graph of many launches, so that the host does not count. Workers compile in parallel. What runs on the GPU (tuning of
the compiled kernels, timing) holds a lock on a file, which the system releases if its holder dies; a worker whose GPU context is lost is replaced.

A line of the output is one group: the graph it came from, the group as a graph in text form, the median and quartiles of seconds, the kernels that Inductor wrote for it (library calls not counted), seconds of
compiling. What was timed before the deadline is complete and readable. With `--device cpu` the same runs on the cores of the machine.

    python benchmarks/fuse/label_groups.py --again groups.jsonl.gz --every 10 --out again.jsonl.gz

compiles and times groups of a file once more: how far two labels of one group are apart bounds what any estimator can reach.

    python benchmarks/fuse/label_groups.py --operators groups.jsonl.gz --out operators.jsonl.gz

times each operator of the groups of a file by itself, as torch runs it and compiled ("compiled" says which; `--known` names a file of such labels that are not made again). It is what `sennit profile` knows of a model before any group is measured.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from drawn_groups import Drawn, drawn_groups, in_turns
from workloads import root_of, stored_graphs

Quartiles = tuple[float, float, float]
Job = tuple[str, Drawn, bool]  # the model, the group, whether it is compiled


@contextmanager
def held(path: str) -> Iterator[None]:
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def inputs_of(reads: tuple[str, ...], drawn: Drawn, device: str) -> list[Any]:
    """Small positive numbers, made where they are used; indices are zero, which every table has."""
    import torch

    from sennit.capture.element_types import torch_dtype

    made = []
    for name in reads:
        kind, dtype = drawn.types[name], torch_dtype(drawn.types[name].dtype)
        if dtype.is_floating_point:
            made.append(torch.rand(kind.shape, device=device, dtype=torch.float32).to(dtype))
        elif dtype is torch.bool:
            made.append(torch.rand(kind.shape, device=device) < 0.5)
        else:
            made.append(torch.zeros(kind.shape, dtype=dtype, device=device))
    return made


def placed(module: Any, device: str) -> Any:
    """The module with the device named where a tensor is made from numbers: a graph does not say it."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(argument.name == "device" for argument in schema.arguments):
            node.kwargs = {**node.kwargs, "device": device}
    module.recompile()
    return module


def worker(jobs: Any, answers: Any, lock: str, device: str) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch
    from torch._inductor import config, metrics

    from sennit.fuse.kernel_torch import compile_kernel, kernel_module

    torch.set_num_threads(1)
    config.compile_threads = 1
    while True:
        drawn, compiled = jobs.get()
        try:
            module, reads, _ = kernel_module(drawn.kernel, drawn.written)
            with held(lock):
                inputs = inputs_of(reads, drawn, device)
            start, before = time.perf_counter(), metrics.generated_kernel_count
            module = placed(module, device)
            call = compile_kernel(module, inputs) if compiled else module.forward
            kernels = metrics.generated_kernel_count - before
            compiling = time.perf_counter() - start
            with held(lock), torch.no_grad():
                call(*inputs)  # tunes what it launches
                seconds = timed_on_gpu(call, inputs) if device == "cuda" else timed_on_cpu(call, inputs)
            answers.put((drawn.key, seconds, (compiling, kernels), None))
        except Exception as error:
            answers.put((drawn.key, None, (0.0, 0), f"{type(error).__name__}: {str(error)[:300]}"))
            if "CUDA error" in str(error):  # nothing runs in this process any more
                answers.close()
                answers.join_thread()
                os._exit(1)
        finally:
            inputs, call = [], None
            if device == "cuda":
                torch.cuda.empty_cache()


def timed_on_gpu(call: Any, inputs: list[Any], rounds: int = 9, others: tuple[list[Any], ...] = ()) -> Quartiles:
    """Seconds a call: lower quartile, median, upper quartile. With `others`, further inputs like these, calls take them in turns: what a call reads is then not in the cache from the one before."""
    import torch

    for _ in range(3):
        call(*inputs)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(*inputs)
    end.record()
    torch.cuda.synchronize()
    launches = max(3, min(100, int(2.0 / max(start.elapsed_time(end), 0.01))))
    turns = [inputs, *others]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the host's part of a call is longer than small kernels are
        for turn in range(launches):
            call(*turns[turn % len(turns)])
    graph.replay()
    found: list[float] = []
    for _ in range(rounds):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / launches / 1e3)
    low, median, high = statistics.quantiles(found, n=4)
    return low, median, high


def timed_on_cpu(call: Any, inputs: list[Any], rounds: int = 7) -> Quartiles:
    """CPU time of the thread: other processes of the machine do not count."""
    start = time.thread_time()
    call(*inputs)
    launches = max(1, min(1000, int(0.005 / max(time.thread_time() - start, 1e-6))))
    found: list[float] = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(launches):
            call(*inputs)
        found.append((time.thread_time() - start) / launches)
    low, median, high = statistics.quantiles(found, n=4)
    return low, median, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--again", type=Path, help="label groups of this file once more")
    parser.add_argument("--operators", type=Path, help="label the operators of the groups of this file")
    parser.add_argument("--known", type=Path, help="labels of operators that are there")
    parser.add_argument("--every", type=int, default=10, help="of those, one in so many")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--only", nargs="*", help="models, as gpt2 or vit; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds

    with tempfile.NamedTemporaryFile() as lock:
        groups: Iterator[Job]
        if arguments.again is not None:
            groups = ((name, drawn, True) for name, drawn in labelled(arguments.again, arguments.every))
        elif arguments.operators is not None:
            groups = lone_operators(arguments.operators, arguments.known)
        else:
            groups = ((name, drawn, True) for name, drawn in new_groups(arguments))
        counts, reasons = label(groups, arguments, deadline, lock.name)
    print(f"{counts['timed']} groups timed, {counts['failed']} failed, {counts['replaced']} workers replaced")
    for reason, count in reasons.most_common(8):
        print(f"  {count} x {reason}")


def labelled(path: Path, every: int) -> Iterator[tuple[str, Drawn]]:
    """Every so many-th group of a file of labels."""
    from sennit.ir.graph import Graph
    from sennit.ir.strategy_check import Kernel

    with gzip.open(path, "rt") as lines:
        for place, line in enumerate(lines):
            # a copy is laid out in order now; the first labels were made when it was not
            if place % every == 0 or "aten.clone" in line:
                row = json.loads(line)
                graph = Graph.parse(row["graph"])
                written = frozenset(output.name for output in graph.outputs)
                yield row["from"], Drawn(str(place), Kernel(graph.ops), written, graph.types())


def lone_operators(path: Path, labelled: Path | None) -> Iterator[Job]:
    """Every operator of the groups of a file once as it is, then once compiled, but for what has a label."""
    from sennit.fuse.operator_class import moves_nothing
    from sennit.fuse.signature import signature
    from sennit.ir.graph import Graph
    from sennit.ir.strategy_check import Kernel

    found: dict[str, tuple[str, Drawn]] = {}
    known: set[tuple[str, bool]] = set()
    for row in rows_of(labelled) if labelled is not None else ():
        graph = Graph.parse(row["graph"])
        written = frozenset(output.name for output in graph.outputs)
        known.add((signature(Kernel(graph.ops), written, graph.types()), row.get("compiled", True)))
    for row in rows_of(path):
        graph = Graph.parse(row["graph"])
        types = graph.types()
        for op in graph.ops:
            kernel, written = Kernel((op,)), frozenset(value.name for value in op.results)
            if moves_nothing(op) or (key := signature(kernel, written, types)) in found:
                continue
            found[key] = (row["from"], Drawn(key, kernel, written, types))
    for compiled in (False, True):
        for key, (name, drawn) in found.items():
            if (key, compiled) not in known:
                yield name, replace(drawn, key=f"{key} {compiled}"), compiled


def rows_of(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt") as lines:
        yield from map(json.loads, lines)


def new_groups(arguments: Any) -> Iterator[tuple[str, Drawn]]:
    """New groups of the graphs of a folder."""
    found = {
        name: graph
        for name, graph in stored_graphs(arguments.graphs)
        if not arguments.only or root_of(name) in arguments.only
    }
    if not found:
        raise SystemExit(f"{arguments.graphs} has no captures; make them with benchmarks/fuse/workloads.py")
    print(f"{len(found)} graphs: {', '.join(found)}", flush=True)
    return in_turns({name: drawn_groups(graph, seed) for seed, (name, graph) in enumerate(found.items())})


def label(groups: Iterator[Job], arguments: Any, deadline: float, lock: str) -> tuple[Any, Any]:
    context = multiprocessing.get_context("spawn")
    jobs, answers = context.Queue(), context.Queue()

    def start() -> Any:
        process = context.Process(target=worker, args=(jobs, answers, lock, arguments.device), daemon=True)
        process.start()
        return process

    workers = [start() for _ in range(arguments.workers)]
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    out_of: dict[str, Job] = {}
    more = True
    with gzip.open(arguments.out, "wt") as out:
        while (more or out_of) and time.monotonic() < deadline:
            while more and len(out_of) < 4 * arguments.workers:
                if (job := next(groups, None)) is None:
                    more = False
                    break
                out_of[job[1].key] = job
                jobs.put(job[1:])
            for place, process in enumerate(workers):
                if not process.is_alive():
                    counts["replaced"] += 1
                    workers[place] = start()
            try:
                key, seconds, (compiling, kernels), error = answers.get(timeout=1.0)
            except queue.Empty:
                continue
            name, drawn, compiled = out_of.pop(key)
            if seconds is None:
                counts["failed"] += 1
                reasons[error] += 1
                continue
            counts["timed"] += 1
            low, median, high = seconds
            row = {
                "from": name,
                "seconds": median,
                "quartiles": [low, high],
                "kernels": kernels,
                "compiling": round(compiling, 3),
                "graph": drawn.text(),
            } | ({} if compiled else {"compiled": False})
            out.write(json.dumps(row) + "\n")
            if counts["timed"] % 500 == 0:
                print(f"{counts['timed']} timed, {counts['failed']} failed", flush=True)
    for process in workers:
        process.kill()
    return counts, reasons


if __name__ == "__main__":
    main()
