"""Why two labels of one group differ: the same groups, compiled again and again and timed in several ways.

    python benchmarks/fuse/label_noise.py groups.jsonl.gz --again again.jsonl.gz --out noise.jsonl.gz [--count 60 --workers 14]      # measures
    python benchmarks/fuse/label_noise.py --show noise.jsonl.gz                                                                     # the parts of the difference

Half of the groups are those whose two labels differ most. Each is compiled in two processes that share no cache, and is
timed there

    by events       a replay of a CUDA graph between two events, the device idle before: the host's launch of the graph is in it
    behind a spin   the same, queued behind a kernel that spins (`fuse/replay_times_torch.py`)
    in turns        as behind a spin, on copies of the inputs which do not fit the cache together

twice with other memory for the inputs, at three times: while the other processes compile and have Inductor tune kernels
on the device as it likes to (tuned beside); while they compile, and the device is used under the lock only (busy); and
when they are done (quiet). So the difference of two times of one group has parts: memory, what else goes on,
compilation. Kernels that Inductor tuned are written down with what it chose.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
from device_lock import DeviceLock, on_own_stream, tune_alone
from drawn_groups import Drawn
from gpu_workers import copies
from label_groups import drawn_of, inputs_of, placed

DEVICE = "cuda"
WAYS = ("by events", "behind a spin", "in turns")


def chosen(first: Path, again: Path, count: int) -> list[tuple[str, float]]:
    """(text of a group, how far its labels are apart): the worst, and as many others."""
    with gzip.open(first, "rt") as lines:
        before = {row["graph"]: row["seconds"] for row in map(json.loads, lines)}
    with gzip.open(again, "rt") as lines:
        after = {row["graph"]: row["seconds"] for row in map(json.loads, lines)}
    pairs = [
        (text, abs(before[text] / after[text] - 1)) for text in after if text in before and "aten.clone" not in text
    ]
    pairs.sort(key=lambda item: -item[1])
    rest = pairs[count // 2 :]
    return pairs[: count // 2] + rest[:: max(1, len(rest) // (count - count // 2))][: count - count // 2]


@dataclass(frozen=True)
class Group:
    """A group, compiled; `kernels` as `Tuned.taken` has them, seconds of compiling, and how often Inductor timed
    something while it compiled.
    """

    drawn: Drawn
    reads: tuple[str, ...]
    call: Any
    rough: float
    kernels: list[tuple[str, int, str]]
    compiling: float
    timings: int


class Tuned:
    """The compiled kernels of this process, as Inductor makes them, and what it chose for each."""

    def __init__(self) -> None:
        from torch._inductor.runtime.benchmarking import benchmarker
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        self.kernels: list[Any] = []
        first = CachingAutotuner.__init__

        def made(kernel: Any, *args: Any, **kwargs: Any) -> None:
            first(kernel, *args, **kwargs)
            self.kernels.append((kernel, len(kernel.configs or ())))

        CachingAutotuner.__init__ = made  # type: ignore[method-assign]
        self.timings = 0
        sort = type(benchmarker)
        times = sort.benchmark_gpu

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.timings += 1
            return times(*args, **kwargs)

        sort.benchmark_gpu = counted  # type: ignore[method-assign]

    def taken(self) -> list[tuple[str, int, str]]:
        """(kernel, configurations that were tried, the one that was kept) since the last call."""
        found = [
            (kernel.fn.__name__, count, re.sub(r"\s+", " ", str(kernel.launchers[0].config)))
            for kernel, count in self.kernels
            if kernel.launchers
        ]
        self.kernels = []
        return found


def by_events(call: Any, inputs: list[Any], rounds: int = 9) -> list[float]:
    """As labels were made at first: each replay between two events, with nothing queued before it."""
    import torch

    def between(run: Any) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    for _ in range(3):
        call(*inputs)
    torch.cuda.synchronize()
    launches = max(3, min(100, int(2e-3 / max(between(lambda: call(*inputs)), 1e-5))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call(*inputs)
    graph.replay()
    return [between(graph.replay) / launches for _ in range(rounds)]


def timed(call: Any, drawn: Drawn, reads: tuple[str, ...], way: str, rough: float) -> tuple[list[float], float]:
    """Seconds of replays, and the clock where it is known."""
    from sennit.fuse.replay_times_torch import captured, replayed

    inputs = inputs_of(reads, drawn, DEVICE)
    if way == "by events":
        return by_events(call, inputs), 0.0
    turns = [inputs, *(copies(inputs) if way == "in turns" else ())]
    found = replayed(captured(call, turns, rough))
    return list(found.times), found.clock


def worker(number: int, texts: list[str], folder: str, barrier: Any) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor{number}"
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton{number}"
    import torch
    from torch._inductor import config

    torch.set_num_threads(1)
    config.fx_graph_cache = config.autotune_local_cache = False  # what is compiled a second time is so from the start
    tuned, lock = Tuned(), DeviceLock(f"{folder}/lock")
    with Path(f"{folder}/{number}.jsonl").open("w") as out, torch.no_grad():
        for when in ("tuned beside", "busy"):
            groups = []
            for text in texts:
                try:
                    group = compiled(drawn_of(text), lock, tuned, beside=when == "tuned beside")
                except Exception as error:  # the other processes wait for this one
                    row = {"group": text, "error": f"{type(error).__name__}: {str(error)[:300]}"}
                    out.write(json.dumps(row) + "\n")
                    continue
                groups.append(group)
                measure(group, when, number, lock, out)
            barrier.wait()
            if when == "tuned beside":
                tune_alone(lock)
        for group in groups:
            measure(group, "quiet", number, lock, out)


def compiled(drawn: Drawn, lock: DeviceLock, tuned: Tuned, *, beside: bool) -> Group:
    from torch._inductor import standalone_compile

    from sennit.fuse.kernel_torch import compile_kernel, kernel_module
    from sennit.fuse.replay_times_torch import queued_seconds

    module, reads, _ = kernel_module(drawn.kernel, drawn.written)
    module = placed(module, DEVICE)
    with lock:
        inputs = inputs_of(reads, drawn, DEVICE)
    tuned.timings, start = 0, time.perf_counter()
    if beside:
        call: Any = standalone_compile(module, inputs, dynamic_shapes="from_example_inputs")
    else:
        call = compile_kernel(module, inputs)
    compiling, timings = time.perf_counter() - start, tuned.timings
    with lock:
        with on_own_stream():
            call(*inputs)
        rough = queued_seconds(lambda: call(*inputs))
    return Group(drawn, reads, call, rough, tuned.taken(), compiling, timings)


def measure(group: Group, when: str, number: int, lock: DeviceLock, out: Any) -> None:
    import torch

    for turn in range(2):
        apart = torch.empty(turn * 37_000_000, dtype=torch.uint8, device=DEVICE)  # so that inputs lie elsewhere
        found = {}
        for way in WAYS:
            with lock:
                found[way] = timed(group.call, group.drawn, group.reads, way, group.rough)
            torch.cuda.empty_cache()
        row = {"group": group.drawn.key, "worker": number, "when": when, "turn": turn, "kernels": group.kernels}
        row |= {"compiling": group.compiling, "timings": group.timings}
        out.write(json.dumps(row | {"times": found}) + "\n")
        out.flush()
        del apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--again", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=105.0)
    arguments = parser.parse_args()
    if arguments.show is None:
        measure_all(arguments)
    show(arguments.show or arguments.out)


def measure_all(arguments: Any) -> None:
    groups = chosen(arguments.data, arguments.again, arguments.count)
    lists: list[list[str]] = [[] for _ in range(arguments.workers)]
    for place, (text, _) in enumerate(groups):
        lists[place % arguments.workers].append(text)
        lists[(place + arguments.workers // 2) % arguments.workers].append(text)
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        barrier = context.Barrier(arguments.workers)
        workers = [
            context.Process(target=worker, args=(number, texts, folder, barrier), daemon=True)
            for number, texts in enumerate(lists)
        ]
        for process in workers:
            process.start()
        for process in workers:
            process.join(max(0.1, deadline - time.monotonic()))
        for process in workers:
            process.kill()
        apart = dict(groups)
        with gzip.open(arguments.out, "wt") as out:
            for number in range(arguments.workers):
                for line in Path(f"{folder}/{number}.jsonl").read_text().splitlines():
                    row = json.loads(line)
                    out.write(json.dumps(row | {"apart": apart[row["group"]]}) + "\n")


# ---- the parts of the difference -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """One time of a group: by which process, beside what, and with which of its inputs."""

    worker: int
    when: str
    turn: int
    seconds: float


def part_of(one: Timing, two: Timing) -> str | None:
    """What differs between two timings, if it is one thing."""
    if one.worker != two.worker:
        return f"compiled twice, {one.when}" if one.when == two.when else None
    if one.when != two.when:
        return "busy and quiet" if one.turn == two.turn and "tuned beside" not in (one.when, two.when) else None
    return f"other memory, {one.when}"


def show(path: Path) -> None:
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    failed = [row for row in rows if "error" in row]
    rows = [row for row in rows if "error" not in row]
    print(f"{len({row['group'] for row in rows})} groups, {len(rows)} timings, {len(failed)} failed")
    for row in failed[:5]:
        print(f"  {row['error']}")
    for way in WAYS:
        for name, quantile in (("median", 0.5), ("lower quartile", 0.25), ("least", 0.0)):
            timings: dict[str, list[Timing]] = defaultdict(list)
            for row in rows:
                seconds = float(np.quantile(row["times"][way][0], quantile))
                timings[row["group"]].append(Timing(row["worker"], row["when"], row["turn"], seconds))
            parts: dict[str, list[float]] = defaultdict(list)
            for found in timings.values():
                for one, two in combinations(found, 2):
                    if (part := part_of(one, two)) is not None:
                        parts[part].append(abs(one.seconds / two.seconds - 1))
            for part, errors in sorted(parts.items()):
                apart = f"median {100 * np.median(errors):5.2f} %   p90 {100 * np.quantile(errors, 0.9):5.2f} %"
                print(f"  {way:14s} {name:14s} {part:22s} {len(errors):4d}: {apart}")
    clocks = [1e-6 * clock for row in rows for _, clock in row["times"].values() if clock]
    if clocks:
        print(f"  clock {min(clocks):.0f} to {max(clocks):.0f} MHz, median {statistics.median(clocks):.0f}")
    show_tuned(rows)


def show_tuned(rows: list[Any]) -> None:
    """What Inductor tuned while others used the device: how often it kept another configuration in the other process,
    and what that makes of the times. (What is compiled again in a process has its kernels from before, and they are not
    written down again.)
    """
    beside = [row for row in rows if row["when"] == "tuned beside" and row["turn"] == 0]
    by_group: dict[str, list[Any]] = defaultdict(list)
    for row in beside:
        by_group[row["group"]].append(row)
    apart: dict[bool, list[float]] = {True: [], False: []}
    for one, two in (found for found in by_group.values() if len(found) == 2):
        kept = [[(name, config) for name, _, config in row["kernels"]] for row in (one, two)]
        seconds = [float(np.median(row["times"]["behind a spin"][0])) for row in (one, two)]
        apart[kept[0] == kept[1]].append(abs(seconds[0] / seconds[1] - 1))
    several = sum(any(count > 1 for _, count, _ in found[0]["kernels"]) for found in by_group.values())
    print(f"  of {len(by_group)} groups, {several} have a kernel with several configurations")
    for same, errors in apart.items():
        if errors:
            spread = f"median {100 * np.median(errors):5.2f} %   p90 {100 * np.quantile(errors, 0.9):5.2f} %"
            print(f"  {'the same' if same else 'others'} were kept, {len(errors)} groups: {spread}")


if __name__ == "__main__":
    main()
