"""ZeRO-2 and 3 with micro-batches: gradients scattered one by one, and in buckets.

    python benchmarks/plan/zero.py                        # a GPT on four ranks, on gloo and on our backend; steps of all ways in turns
    python benchmarks/plan/zero.py --threads 4 --json f   # ranks of four threads each
    python benchmarks/plan/zero.py --simulate             # a larger GPT on a DGX H100, simulated
    python benchmarks/plan/zero.py --calls                # gloo's reduce-scatter, and what stands for it

The ways of a step:

- `one by one`: each gradient is scattered by itself and added up in the next line, on gloo by its own reduce-scatter:
  as it was;
- `one by one, all-to-all` (gloo): the same, by an all-to-all and an addition (`run/distributed.py`);
- `buckets`: what ranks do now (`kernels/buckets.py`, `kernels/sums_behind.py`).

A step is the forward and the backward pass of a batch, from a barrier to the gradients, the slowest rank's; it is shown
as the median, and as the median of the ratios to the way before in the same turn. `sent` counts the reduce-scatter
calls of a rank. Memory is what a step makes at its peak on rank 0 (`StorageMeter`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import sennit
import sennit.kernels.buckets
from sennit.capture import capture
from sennit.cluster import load
from sennit.cluster.ranks_torch import GlooRanks
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, CollectiveKind
from sennit.kernels import in_buckets
from sennit.plan import lower, propagate, zoo
from sennit.run.distributed import ProcessCommunicator
from sennit.sim import simulate

CONFIG = GPTConfig(vocabulary=4096, context=128, width=256, heads=8, layers=8)
BATCH = 16
KEYS = ("backend", "level", "way", "batches", "threads", "bytes")
WAYS = {"gloo": ("one by one", "one by one, all-to-all", "buckets"), "sennit": ("one by one", "buckets")}
PRELOAD = ("sennit.backend", "sennit.run.parallelize", "torch.export", "torch._dynamo", "torch._functorch.aot_autograd")


class SennitRanks(GlooRanks):
    backend = "sennit"


@contextlib.contextmanager
def as_before(way: str) -> Iterator[None]:
    """What is compiled and run inside goes this way."""
    terms, scatter = sennit.kernels.buckets._terms, ProcessCommunicator.reduce_scatter
    if way != "buckets":
        sennit.kernels.buckets._terms = lambda lane: set()
    if way == "one by one":
        ProcessCommunicator.reduce_scatter = library_reduce_scatter
    try:
        yield
    finally:
        sennit.kernels.buckets._terms, ProcessCommunicator.reduce_scatter = terms, scatter


def library_reduce_scatter(self, group, tensor, op):
    if len(self.scattering) == 2:
        self.scattering.popleft().wait()
    self.scattering.append(self._reduce_scatter(group, tensor, op))
    return self.scattering[-1]


# ---- steps on ranks --------------------------------------------------------------------------------------------------


def steps(rank: int, level: int, batches: int, turns: int, threads: int) -> dict[str, dict]:
    torch.set_num_threads(threads)
    backend = dist.get_backend()
    torch.manual_seed(0)
    module, batch = GPT(CONFIG), random_batch(CONFIG, BATCH)
    models, found, calls = {}, {}, [0]
    counted = ProcessCommunicator._reduce_scatter, ProcessCommunicator.all_to_all

    def counting(function):
        def call(*args):
            calls[0] += 1
            return function(*args)

        return call

    for way in WAYS[backend]:
        with as_before(way):
            plan = functools.partial(zoo.zero, level=level)
            models[way] = sennit.parallelize(module, batch, plan=plan, mesh=f"dp=4;mb={batches}")
            with models[way].measuring_memory():
                models[way](*batch).backward()
            memory = models[way].memory_report().measured_step
            models[way].zero_grad()
            calls[0] = 0
            ProcessCommunicator._reduce_scatter, ProcessCommunicator.all_to_all = map(counting, counted)
            loss = models[way](*batch)
            loss.backward()
            ProcessCommunicator._reduce_scatter, ProcessCommunicator.all_to_all = counted
            models[way].zero_grad()
        found[way] = {"calls": calls[0], "memory": memory, "loss": loss.item(), "seconds": []}
    for _ in range(turns):
        for way, model in models.items():
            with as_before(way):
                dist.barrier()
                start = time.perf_counter()
                model(*batch).backward()
                found[way]["seconds"].append(time.perf_counter() - start)
                model.zero_grad()
    return found


def measured(options: argparse.Namespace) -> list[dict]:
    rows = []
    print("| backend | ZeRO | way | calls | step, s | over the way before, median (quartiles) | MB at its peak |")
    print("|---|---|---|---|---|---|---|")
    for backend in options.backends:
        with {"gloo": GlooRanks, "sennit": SennitRanks}[backend](4, timeout=600.0, preload=PRELOAD) as ranks:
            for level in options.levels:
                answers = ranks.call(steps, level, options.batches, options.turns, options.threads)
                before: list[float] = []
                for way in WAYS[backend]:
                    seconds = [
                        max(times) for times in zip(*(answer[way]["seconds"] for answer in answers), strict=True)
                    ]
                    row = {"backend": backend, "level": level, "way": way, **answers[0][way], "seconds": seconds}
                    row |= {"batches": options.batches, "threads": options.threads}
                    rows.append(row)
                    show(row, before)
                    before = seconds
    return rows


def show(row: dict, before: list[float]) -> None:
    ratio = ""
    if before:
        low, middle, high = statistics.quantiles([a / b for a, b in zip(before, row["seconds"], strict=True)], n=4)
        ratio = f"{middle:.2f}x ({low:.2f} to {high:.2f})"
    print(
        f"| {row['backend']} | {row['level']} | {row['way']} | {row['calls']} | {statistics.median(row['seconds']):.3f} | {ratio} | {row['memory'] / 1e6:.1f} |",
        flush=True,
    )


# ---- the rest --------------------------------------------------------------------------------------------------------


def simulated() -> list[dict]:
    config = GPTConfig(vocabulary=50304, context=1024, width=2048, heads=16, layers=24)
    with torch.device("meta"):
        tokens = torch.zeros((64, config.context), dtype=torch.int64)
        graph = capture(GPT(config).to(torch.bfloat16), (tokens, tokens))
    cluster, rows = load("dgx-h100"), []
    print("| ZeRO | micro-batches | one by one, ms | buckets, ms | | scatters | messages |")
    print("|---|---|---|---|---|---|---|")
    for level in (2, 3):
        for batches in (2, 8):
            program = lower(propagate(zoo.zero(graph, Mesh.parse(f"dp=8;mb={batches}"), level=level)))
            spans, counts = {}, {}
            for way in ("one by one", "buckets"):
                with as_before(way):
                    joined = in_buckets(program)
                spans[way] = simulate(joined, cluster).span
                counts[way] = sum(
                    isinstance(step, Collective) and step.kind is CollectiveKind.REDUCE_SCATTER
                    for step in joined.lanes[0].steps
                )
            rows.append({"level": level, "batches": batches, "spans": spans, "counts": counts})
            before, after = spans["one by one"], spans["buckets"]
            print(
                f"| {level} | {batches} | {1e3 * before:.1f} | {1e3 * after:.1f} | {before / after:.3f}x | {counts['one by one']} | {counts['buckets']} |",
                flush=True,
            )
    return rows


def calls(rank: int, size: int, threads: int) -> dict[str, float]:
    """Microseconds of a call from one barrier to the next, the median."""
    torch.set_num_threads(threads)
    members = dist.get_world_size()
    given, result, received = torch.randn(members, size), torch.empty(size), torch.empty(members, size)

    def library() -> None:
        dist.reduce_scatter(result, list(given))

    def ours() -> None:
        dist.all_to_all_single(received, given)
        total = received[0] + received[1]
        for piece in received[2:]:
            total += piece

    times: dict[str, list[float]] = {"reduce_scatter": [], "all_to_all and add": []}
    for _ in range(30):
        for name, call in zip(times, (library, ours), strict=True):
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(found) for name, found in times.items()}


def called(options: argparse.Namespace) -> list[dict]:
    rows = []
    print("| KiB on a rank | gloo's reduce-scatter, us | all-to-all and add, us | |")
    print("|---|---|---|---|")
    with GlooRanks(4) as ranks:
        for size in (16, 256, 4096, 65536, 1 << 20):
            found = ranks.call(calls, size, options.threads)[0]
            library, ours = found.values()
            rows.append({"bytes": 16 * size, **found})
            print(f"| {16 * size / 1024:g} | {library:.0f} | {ours:.0f} | {library / ours:.1f}x |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--levels", nargs="+", type=int, choices=(2, 3), default=[2, 3])
    parser.add_argument("--batches", type=int, default=4, help="micro-batches")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    machine = f"torch {torch.__version__}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    print(machine)
    kind = "simulated" if options.simulate else "calls" if options.calls else "steps"
    rows = simulated() if options.simulate else called(options) if options.calls else measured(options)
    if options.json is not None:
        keep(options.json, machine, kind, rows)


def keep(path: Path, machine: str, kind: str, rows: list[dict]) -> None:
    """Add rows to a file, in place of those of the same machine that say the same."""

    def key(row: dict) -> tuple:
        return row["machine"], row["kind"], *(row.get(name) for name in KEYS)

    new = [{"machine": machine, "kind": kind, **row} for row in rows]
    held = json.loads(path.read_text()) if path.exists() else []
    held = [row for row in held if key(row) not in {key(row) for row in new}]
    path.write_text(json.dumps([*held, *new], indent=1) + "\n")


if __name__ == "__main__":
    main()
