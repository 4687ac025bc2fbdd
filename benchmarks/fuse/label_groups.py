"""Times of fused groups on a GPU: the data that the estimator of `fuse/` is trained on.

    python benchmarks/fuse/label_groups.py --graphs FOLDER --out FOLDER --seconds 420 --workers 14       # new groups

Captured training steps of several model families are read from a folder (`workloads.py` writes them). Groups are drawn
from them in turn (`drawn_groups.py`), compiled by Inductor, each by itself, and timed: replays of a CUDA graph of many
calls, queued behind a kernel that spins, so that the host does not count (`fuse/replay_times_torch.py`). Workers
compile in parallel. What runs on the GPU, also what Inductor times while it compiles, holds a lock (`device_lock.py`);
a worker whose GPU context is lost is replaced.

    python benchmarks/fuse/label_groups.py --relabel groups.jsonl.gz --out FOLDER --repeats 500          # the groups of a file, and what they are made of

labels, in this order, into files of the folder

    operators.jsonl.gz   the products of the groups as a compiler calls them there (`kernel_cost.called`), and every other operator compiled by itself: what `sennit profile` knows of a model before any of its groups is measured
    again.jsonl.gz       so many groups: how far this label and the one in `groups.jsonl.gz` are apart bounds what any estimator can show. Nothing that was compiled or tuned is kept, so the second time is from the start
    groups.jsonl.gz      the groups, those first that are in `again.jsonl.gz`

With `--unsure 0.03` only those that have one label, or two that are farther apart than 3 %: `merge_labels.py` makes one
of three. A file of operators is relabelled in the same way, with `--stages groups`.

A line is one label: the graph that the group came from, the group as a graph in text form, seconds, the quartiles of
its replays, the kernels that Inductor wrote for it (library calls not counted), seconds of compiling. What was timed
before the deadline is complete and readable. Indices are random places of the tables that they are for. With `--device
cpu` the same runs on the cores of the machine.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
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
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from device_lock import DeviceLock, on_own_stream, tune_alone
from drawn_groups import Drawn, drawn_groups, in_turns
from workloads import root_of, stored_graphs

Quartiles = tuple[float, float, float]
STAGES = ("operators", "again", "groups")


@dataclass(frozen=True)
class Job:
    """A group of a model, and the file that its label goes to."""

    model: str
    drawn: Drawn
    file: str = "groups"


def inputs_of(reads: tuple[str, ...], drawn: Drawn, device: str) -> list[Any]:
    """Small positive numbers, made where they are used; random places of the tables that indices are for
    (`look_up_indices.py`), other integers are zero.
    """
    import torch
    from look_up_indices import index_limits

    from sennit.capture.element_types import torch_dtype

    made, limits = [], index_limits(drawn.kernel, drawn.types)
    for name in reads:
        kind, dtype = drawn.types[name], torch_dtype(drawn.types[name].dtype)
        if dtype.is_floating_point:
            made.append(torch.rand(kind.shape, device=device, dtype=torch.float32).to(dtype))
        elif dtype is torch.bool:
            made.append(torch.rand(kind.shape, device=device) < 0.5)
        else:
            made.append(torch.randint(limits.get(name, 1), kind.shape, dtype=dtype, device=device))
    return made


def placed(module: Any, device: str) -> Any:
    """The module with the device named where a tensor is made from numbers: a graph does not say it."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(argument.name == "device" for argument in schema.arguments):
            node.kwargs = {**node.kwargs, "device": device}
    module.recompile()
    return module


def worker(jobs: Any, answers: Any, path: str, device: str) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch
    from torch._inductor import config, metrics

    from sennit.fuse.kernel_torch import compile_kernel, kernel_module

    torch.set_num_threads(1)
    config.compile_threads = 1
    config.fx_graph_cache = config.autotune_local_cache = False  # a second label is one from the start
    lock = DeviceLock(path)
    tune_alone(lock)
    while True:
        drawn = jobs.get()
        try:
            module, reads, _ = kernel_module(drawn.kernel, drawn.written)
            with lock:
                inputs = inputs_of(reads, drawn, device)
            start, before = time.perf_counter(), metrics.generated_kernel_count
            call = compile_kernel(placed(module, device), inputs)
            kernels = metrics.generated_kernel_count - before
            compiling = time.perf_counter() - start
            with torch.no_grad():
                seconds = timed_on_gpu(call, inputs, lock) if device == "cuda" else timed_on_cpu(call, inputs)
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


def timed_on_gpu(call: Any, inputs: list[Any], lock: DeviceLock, others: tuple[list[Any], ...] = ()) -> Quartiles:
    """Seconds a call: lower quartile, median, upper quartile.

    With `others`, further inputs like these, calls take them in turns: what a call reads is then not in the cache from
    the one before.
    """
    from sennit.fuse.replay_times_torch import captured, queued_seconds, replayed

    with lock:
        with on_own_stream():
            call(*inputs)  # tunes what it launches
        rough = queued_seconds(lambda: call(*inputs))
    graph = captured(call, [inputs, *others], rough)
    with lock:
        return replayed(graph).quartiles


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
    parser.add_argument("--graphs", type=Path, help="captured steps to draw new groups from")
    parser.add_argument("--relabel", type=Path, help="label the groups of this file, and their operators")
    parser.add_argument("--repeats", type=int, default=500, help="of those, so many twice")
    parser.add_argument("--stages", nargs="*", default=STAGES, choices=STAGES, help="what to relabel, in this order")
    parser.add_argument(
        "--look-ups", action="store_true", help="relabel only what has look-ups by indices from outside"
    )
    parser.add_argument(
        "--unsure", type=float, metavar="APART", help="relabel only what has one label, or two so far apart"
    )
    parser.add_argument("--products", choices=("none", "only"), help="relabel only what has no product, or has one")
    parser.add_argument("--skip", type=Path, help="relabel only what is of no structure of this file")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--only", nargs="*", help="models, as gpt2 or vit; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if (arguments.graphs is None) == (arguments.relabel is None):
        parser.error("one of --graphs and --relabel")
    deadline = time.monotonic() + arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    jobs = known_groups(arguments) if arguments.graphs is None else new_groups(arguments)
    with tempfile.NamedTemporaryFile() as lock:
        counts, reasons = label(jobs, arguments, deadline, lock.name)
    print(f"{counts['timed']} groups timed, {counts['failed']} failed, {counts['replaced']} workers replaced")
    for reason, count in reasons.most_common(8):
        print(f"  {count} x {reason}")


def known_groups(arguments: Any) -> Iterator[Job]:
    """The groups of a file: their operators, some of them, and all.

    Read when the first is asked for: workers start meanwhile.
    """
    rows = [row for row in rows_of(arguments.relabel) if not arguments.only or root_of(row["from"]) in arguments.only]
    rows = [row for row in rows if arguments.unsure is None or is_unsure(row, arguments.unsure)]
    rows = [row for row in rows if arguments.products is None or has_product(row) is (arguments.products == "only")]
    if arguments.skip is not None:
        known = {structure(row) for row in rows_of(arguments.skip)}
        rows = [row for row in rows if structure(row) not in known]
    # in an order that is the same for every file, look-ups first: what a deadline leaves is drawn from all models
    rows.sort(key=lambda row: hashlib.sha256(row["graph"].encode()).hexdigest())
    groups = sorted((Job(row["from"], drawn_of(row["graph"])) for row in rows), key=lambda job: not looks_up(job))
    again = [Job(job.model, replace(job.drawn, key=f"{job.drawn.key} again"), "again") for job in groups]
    stages = {"operators": lone_operators(groups), "again": iter(again[: arguments.repeats]), "groups": iter(groups)}
    wanted = chain.from_iterable(stages[name] for name in arguments.stages)
    yield from (job for job in wanted if not arguments.look_ups or looks_up(job))


def is_unsure(row: Any, apart: float) -> bool:
    """Whether there is one label of it, or two that are farther apart than that.

    What an estimator says of it is not asked.
    """
    labels = row.get("labels", ())
    return len(labels) < 2 or max(labels) > (1 + apart) * min(labels)


def structure(row: Any) -> str:
    from sennit.fuse.signature import signature

    drawn = drawn_of(row["graph"])
    return signature(drawn.kernel, drawn.written, drawn.types)


def has_product(row: Any) -> bool:
    """Whether a library does some of it, which Inductor does not tune."""
    from sennit.fuse.operator_class import PRODUCTS, stem

    return any(stem(op.kind) in PRODUCTS for op in drawn_of(row["graph"]).kernel.body)


def looks_up(job: Job) -> bool:
    """Whether what is timed depends on which places of a table its indices name."""
    from look_up_indices import index_limits

    return any(limit > 1 for limit in index_limits(job.drawn.kernel, job.drawn.types).values())


def drawn_of(text: str) -> Drawn:
    from sennit.ir.graph import Graph
    from sennit.ir.strategy_check import Kernel

    graph = Graph.parse(text)
    return Drawn(text, Kernel(graph.ops), frozenset(output.name for output in graph.outputs), graph.types())


def lone_operators(groups: list[Job]) -> Iterator[Job]:
    """Every operator of the groups once, products as they are called, and first."""
    from sennit.fuse.kernel_cost import called
    from sennit.fuse.operator_class import PRODUCTS, moves_nothing, stem
    from sennit.fuse.signature import signature
    from sennit.ir.strategy_check import Kernel

    found: dict[str, Job] = {}
    for job in groups:
        kernel, written, types = job.drawn.kernel, job.drawn.written, job.drawn.types
        for op in kernel.body:
            if moves_nothing(op):
                continue
            alone = called(op, kernel, written, types) if stem(op.kind) in PRODUCTS else Kernel((op,))
            results = frozenset(value.name for value in op.results)
            key = signature(alone, results, types)
            found.setdefault(key, Job(job.model, Drawn(key, alone, results, types), "operators"))
    yield from sorted(found.values(), key=lambda job: stem(job.drawn.kernel.body[-1].kind) not in PRODUCTS)


def rows_of(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt") as lines:
        yield from map(json.loads, lines)


def new_groups(arguments: Any) -> Iterator[Job]:
    """New groups of the graphs of a folder."""
    found = {
        name: graph
        for name, graph in stored_graphs(arguments.graphs)
        if not arguments.only or root_of(name) in arguments.only
    }
    if not found:
        raise SystemExit(f"{arguments.graphs} has no captures; make them with benchmarks/fuse/workloads.py")
    print(f"{len(found)} graphs: {', '.join(found)}", flush=True)
    drawn = in_turns({name: drawn_groups(graph, seed) for seed, (name, graph) in enumerate(found.items())})
    return (Job(name, group) for name, group in drawn)


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
    files: dict[str, Any] = {}
    with ExitStack() as opened:
        while (more or out_of) and time.monotonic() < deadline:
            while more and len(out_of) < 4 * arguments.workers:
                if (job := next(groups, None)) is None:
                    more = False
                    break
                out_of[job.drawn.key] = job
                jobs.put(job.drawn)
            for place, process in enumerate(workers):
                if not process.is_alive():
                    counts["replaced"] += 1
                    workers[place] = start()
            try:
                key, seconds, (compiling, kernels), error = answers.get(timeout=1.0)
            except queue.Empty:
                continue
            done = out_of.pop(key)
            if seconds is None:
                counts["failed"] += 1
                reasons[error] += 1
                continue
            counts["timed"] += 1
            low, median, high = seconds
            row = {
                "from": done.model,
                "seconds": median,
                "quartiles": [low, high],
                "kernels": kernels,
                "compiling": round(compiling, 3),
                "graph": done.drawn.text(),
            }
            if done.file not in files:
                path = arguments.out / f"{done.file}.jsonl.gz"
                files[done.file] = opened.enter_context(gzip.open(path, "wt"))
            files[done.file].write(json.dumps(row) + "\n")
            if counts["timed"] % 500 == 0:
                print(f"{counts['timed']} timed, {counts['failed']} failed", flush=True)
    for process in workers:
        process.kill()
    return counts, reasons


if __name__ == "__main__":
    main()
