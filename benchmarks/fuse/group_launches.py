"""What Inductor writes for groups, and how long each of its kernels takes: where an estimate by parts
(`fuse/compiled_cost.py`) goes wrong.

    python benchmarks/fuse/group_launches.py groups.jsonl.gz --operators operators.jsonl.gz --out launches.jsonl.gz --seconds 100 --workers 15

Groups of a file of labels that have no product are compiled anew, those first whose estimate by parts is off by more
than `--off`, with as many of the others between them; or with `--groups FILE` those whose hashes it has, in its order.
A line of the result is one group:

    graph, seconds (its label), guessed (by parts, its operators measured)
    launches    of each kernel: name, microseconds, grid, block, registers, shared memory in bytes; by torch's profiler, the median of a few calls
    code        what Inductor wrote

Workers compile in parallel; profiling holds the lock of the device (`device_lock.py`).
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
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from device_lock import DeviceLock, on_own_stream, tune_alone
from estimator_data import described, lone_operators
from label_groups import drawn_of, inputs_of, placed, rows_of

CALLS = 5


def guessed(text: str, operators: Path) -> float | None:
    """Seconds by parts, the operators measured; None for a group with a product."""
    from sennit.fuse.compiled_cost import Compiled
    from sennit.fuse.compiled_parts import Sort
    from sennit.fuse.kernel_cost import Roofline, Staged
    from sennit.ir.graph import Graph
    from sennit.ir.strategy_check import Kernel

    graph = Graph.parse(text)
    device, costs = described("h200x8")
    staged = Staged(Roofline.of(graph, device), costs, lone_operators(operators))
    split = Compiled(staged).split(Kernel(graph.ops), frozenset(output.name for output in graph.outputs))
    return None if any(part.sort is Sort.LIBRARY for part in split.parts) or not split.parts else split.seconds


def hash_of(text: str) -> str:
    """A group's name in files of launches."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def wanted(arguments: Any) -> list[dict[str, Any]]:
    """The groups to look at: those that are off, and others, in turns."""
    if arguments.groups is not None:
        rows = {hash_of(row["graph"]): row for row in rows_of(arguments.data)}
        order = arguments.groups.read_text().split()
        kept = ("graph", "from", "seconds")
        return [{key: rows[name][key] for key in kept} for name in order if name in rows]
    off, near = [], []
    for row in islice(rows_of(arguments.data), arguments.limit):
        guess = guessed(row["graph"], arguments.operators)
        if guess is None:
            continue
        item = {"graph": row["graph"], "from": row["from"], "seconds": row["seconds"], "guessed": guess}
        (off if abs(guess / row["seconds"] - 1) > arguments.off else near).append(item)
    print(f"{len(off)} groups without a product are off by more than {100 * arguments.off:.0f} %, {len(near)} are not")
    step = max(1, len(near) // max(1, len(off)))
    turns = list(zip(off, near[::step], strict=False))
    return [item for pair in turns for item in pair] + off[len(turns) :]


def launched(call: Any, inputs: list[Any], folder: Path) -> list[dict[str, Any]]:
    """The kernels of a call, each with the median of its times."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call(*inputs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            call(*inputs)
        torch.cuda.synchronize()
    path = folder / f"{os.getpid()}.json"
    found.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if "grid" in event.get("args", {})]
    events.sort(key=lambda event: event["ts"])
    count = len(events) // CALLS
    return [
        {
            "name": events[place]["name"],
            "us": statistics.median(event["dur"] for event in events[place::count]),
            "grid": events[place]["args"]["grid"],
            "block": events[place]["args"]["block"],
            "registers": events[place]["args"].get("registers per thread"),
            "shared": events[place]["args"].get("shared memory"),
        }
        for place in range(count)
    ]


def worker(jobs: Any, answers: Any, path: str, device: str) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    from sennit.fuse.kernel_torch import compile_kernel, kernel_module

    torch.set_num_threads(1)
    config.compile_threads = 1
    config.fx_graph_cache = config.autotune_local_cache = False
    code: list[str] = []
    GraphLowering.save_output_code = staticmethod(code.append)  # type: ignore[method-assign,assignment]
    lock = DeviceLock(path)
    tune_alone(lock)
    while True:
        place, text = jobs.get()
        try:
            code.clear()
            drawn = drawn_of(text)
            module, reads, _ = kernel_module(drawn.kernel, drawn.written)
            with lock:
                inputs = inputs_of(reads, drawn, device)
            call = compile_kernel(placed(module, device), inputs)
            with torch.no_grad(), lock:
                with on_own_stream() if device == "cuda" else nullcontext():
                    call(*inputs)  # tunes what it launches
                found = launched(call, inputs, Path(path).parent) if device == "cuda" else []
            answers.put((place, found, "\n".join(code), None))
        except Exception as error:
            answers.put((place, [], "", f"{type(error).__name__}: {str(error)[:300]}"))
        finally:
            inputs, call = [], None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--operators", type=Path, help="times of lone operators")
    parser.add_argument("--groups", type=Path, help="hashes of the groups to look at, with or without products")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--off", type=float, default=0.08)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--limit", type=int, help="so many groups of the file, its first")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="a CPU gives the code alone")
    arguments = parser.parse_args()
    if (arguments.operators is None) == (arguments.groups is None):
        parser.error("one of --operators and --groups")
    deadline = time.monotonic() + arguments.seconds
    context = multiprocessing.get_context("spawn")
    jobs, answers = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=worker, args=(jobs, answers, f"{folder}/lock", arguments.device), daemon=True)
            for _ in range(arguments.workers)
        ]
        for process in processes:
            process.start()
        groups = wanted(arguments)
        for place, group in enumerate(groups):
            jobs.put((place, group["graph"]))
        failed = done = 0
        with gzip.open(arguments.out, "wt") as out:
            while done + failed < len(groups) and time.monotonic() < deadline:
                try:
                    place, launches, code, error = answers.get(timeout=1.0)
                except queue.Empty:
                    continue
                if error is not None:
                    failed += 1
                    print(error, flush=True)
                    continue
                done += 1
                out.write(json.dumps({**groups[place], "launches": launches, "code": code}) + "\n")
        for process in processes:
            process.kill()
    print(f"{done} of {len(groups)} groups, {failed} failed", flush=True)


if __name__ == "__main__":
    main()
