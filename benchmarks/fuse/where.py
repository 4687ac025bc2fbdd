"""Where a step's time goes: the clock's account beside the real one, strategy by strategy.

    python benchmarks/fuse/where.py [--links namespaces | paced] [--rate 1gbit] [--models gpt conv] [--cores 1] [--batch 5] [--steps 8] [--strategies 3] [--named TEXT] [--random 4 42] [--buckets] [--sleep]

For some strategies of tuning, ours in the step and across steps, one step of the steady state is taken apart: how long
the model's thread computed and how long it waited, how long the channel carried something and how long it had nothing
to carry. A bucket's end is noted by a callback of its collective. Medians over steps, of the first rank, each beside
what the clock says from this machine's measurements. Steps are without updates. `--strategies 3` takes the three that
the clock puts first, `--named` those whose name has this text, `--random` random ones of `enforced.py` by their
numbers, too. `--buckets` also prints, bucket by bucket in the order in which they travel: when it was ready from the
start of the step, how long it was carried and waited for, and how long the thread computed from the event before (a
wait's end, a bucket's issue) to this one. With `--cores 2` a rank has two cores, so that the network's threads need not
share one with the model's. `--ordinary` leaves the network's threads ordinary ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from enforced import random_buckets
from sleeping import let_kernels_sleep, shortened, stand_apart
from slow_links import link_parser, pace, pin, run


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from sennit.fuse.serial_group_torch import serial_group

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not arguments.sleep:
        pin(rank, count, arguments.cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = serial_group()
    pace()
    found: dict[str, Any] = {}
    for name in arguments.models:
        found[name] = account(name, rank, group, arguments)
    if rank == 0:
        Path(os.environ["SENNIT_BENCH_OUT"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def account(name: str, rank: int, group: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from network_models import build

    from sennit.fuse.data_parallel_torch import DataParallel
    from sennit.fuse.model import Grouping, StepModel
    from sennit.fuse.profile_torch import MeasuredCost, measure_channel
    from sennit.fuse.tune_torch import Tuning, candidates, measured_model
    from sennit.ir.strategy import Strategy

    model, rows = build(name, rank, arguments.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    owner = DataParallel(
        model,
        optimizer,
        sample=rows,
        group=group,
        tuning=Tuning(turns=0),
        network_first=not arguments.ordinary,
    )
    pace()
    inputs = owner.signature.flatten(rows)
    with torch.no_grad():
        step = measured_model(owner, inputs, Tuning())
    if arguments.sleep:  # the same on all ranks, and nothing shares a core
        stand_apart()
        shared: list[Any] = [(dict(step.cost.seconds), measure_channel(group, beside_computing=False))]
        dist.broadcast_object_list(shared, 0)
        step = StepModel(owner.graph, MeasuredCost(shared[0][0]), shared[0][1], packed=owner.packed)
        slept = shortened(owner, inputs, shared[0][0])
    trials = [
        trial for trial in candidates(step, Grouping(), across_steps=True) if arguments.named in trial.strategy.name
    ]
    trials = trials[: arguments.strategies]
    drawn = [Strategy(f"random {seed}", (), random_buckets(step, seed)) for seed in arguments.random]
    told: list[Any] = [[str(strategy) for strategy in (*(trial.strategy for trial in trials), *drawn)]]
    dist.broadcast_object_list(told, 0)
    if rank == 0:
        print(
            f"\n{name}, batch {arguments.batch}, {arguments.cores} core(s) a rank, network threads: {owner.preference.value}"
        )
        print(f"  {step.channel}")
    found: list[dict[str, Any]] = []
    for text in told[0]:
        strategy = Strategy.parse(text)
        owner.use(strategy)
        if arguments.sleep:
            let_kernels_sleep(owner, slept)
        with torch.no_grad():
            real, of_buckets = measured(owner, inputs, arguments.steps)
        simulated, told_of_buckets = told_by_clock(step, strategy.buckets)
        found.append({"name": strategy.name, "buckets": len(strategy.buckets), "clock": simulated, "real": real})
        if rank == 0:
            print(f"  {strategy.name:26s} {len(strategy.buckets):3d} buckets  {pairs(simulated, real)}", flush=True)
            if arguments.buckets:
                for bucket, one, other in zip(strategy.buckets, told_of_buckets, of_buckets, strict=True):
                    size = step.carried(bucket) / 1e6
                    first = bucket.parts[0]
                    print(
                        f"    {size:5.2f} MB {bucket.wait.value} {pairs(one, other)}  {first.path} {first.span or ''} +{len(bucket.parts) - 1}"
                    )
    return found


def pairs(simulated: dict[str, float], real: dict[str, float]) -> str:
    return "  ".join(f"{key} {1e3 * simulated[key]:6.1f} -> {1e3 * real[key]:6.1f}" for key in simulated)


def told_by_clock(step: Any, buckets: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
    from dataclasses import replace

    from sennit.fuse.clock import Activity, steady_state, traced
    from sennit.fuse.model import Grouping, KernelOrder

    order = step.order(Grouping())
    timing = KernelOrder(step, order, step.kernel_seconds(order, Grouping())).timing(buckets)
    timing = replace(timing, buckets=tuple(replace(bucket, update=0.0) for bucket in timing.buckets))
    length = steady_state(timing, step.channel.sharing)
    spans = traced(timing, step.channel.sharing, steps=2)
    first = [span for span in spans if span.start < length.seconds]
    carried = {span.number: span for span in spans if span.activity is Activity.BUCKET and span.start > 0.0}
    busy = sum(min(span.stop, length.seconds) - span.start for span in first if span.activity is Activity.BUCKET)
    kernels = {span.number: span for span in first if span.activity is Activity.KERNEL}
    waits = {span.number: span for span in first if span.activity is Activity.WAIT}
    issues = [kernels[bucket.ready].stop for bucket in timing.buckets]
    events = sorted([0.0, *issues, *(span.stop for span in waits.values())])
    found: list[dict[str, float]] = []
    for number, at in enumerate(issues):
        since = max(event for event in events if event < at)
        one = {"ready": at, "computed": at - since, "carried": carried[number].stop - carried[number].start}
        start, stop = (waits[number].start, waits[number].stop) if number in waits else (0.0, 0.0)
        into = max((event for event in events if event < start), default=start)
        found.append({**one, "until the wait": start - into, "waited": stop - start})
    return account_of(length.seconds, length.waited, busy), found


class Noted:
    """What a channel did when: buckets issued, carried and waited for, step by step."""

    def __init__(self, channel: Any) -> None:
        self.issued: list[tuple[int, float]] = []
        self.done: list[float] = []
        self.waits: list[tuple[int, float, float]] = []
        self.numbers = {id(slot): number for number, slot in enumerate(channel.slots)}
        plain_wait, plain_issue = channel.wait, channel._issue

        def wait(number: int) -> None:
            start = time.perf_counter()
            plain_wait(number)
            self.waits.append((number, start, time.perf_counter()))

        def issue(slot: Any) -> None:
            self.issued.append((self.numbers[id(slot)], time.perf_counter()))
            plain_issue(slot)
            slot.work.get_future().add_done_callback(lambda _: self.done.append(time.perf_counter()))

        channel.wait, channel._issue = wait, issue

    def carried(self) -> list[tuple[int, float, float]]:
        """Buckets on the channel, which takes one at a time."""
        found: list[tuple[int, float, float]] = []
        for (number, start), stop in zip(self.issued, self.done, strict=True):
            found.append((number, max(start, found[-1][2]) if found else start, stop))
        return found


def measured(owner: Any, inputs: Any, steps: int) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The same of steps that run; and of each bucket."""
    import torch
    import torch.distributed as dist

    from sennit.fuse.tune_torch import drop_gradients

    noted = Noted(owner.gradients.channel)
    dist.barrier(owner.group)
    ends: list[float] = []
    for _ in range(steps + 2):
        values = owner.run_forward(inputs)
        drop_gradients(owner)
        owner.run_backward(values, torch.ones(()))
        ends.append(time.perf_counter())
    owner.flush()
    drop_gradients(owner)
    busy = noted.carried()
    rows: list[dict[str, float]] = []
    of_buckets: dict[int, list[dict[str, float]]] = {}
    for start, stop in itertools.pairwise(ends[1:]):
        carried = sum(max(0.0, min(end, stop) - max(begin, start)) for _, begin, end in busy)
        waits = {number: (begin, end) for number, begin, end in noted.waits if start < end <= stop}
        length, waiting = stop - start, sum(end - begin for begin, end in waits.values())
        rows.append(account_of(length, waiting, carried))
        issues = {number: at for number, at in noted.issued if start < at <= stop}
        spans = {number: end - begin for number, begin, end in busy if start < begin <= stop}
        events = sorted([start, *issues.values(), *(end for _, end in waits.values())])
        for number, at in issues.items():
            since = max(event for event in events if event < at)
            wait = waits.get(number, (0.0, 0.0))
            into = max((event for event in events if event < wait[0]), default=wait[0])
            one = {"ready": at - start, "computed": at - since, "carried": spans.get(number, 0.0)}
            one |= {"until the wait": wait[0] - into, "waited": wait[1] - wait[0]}
            of_buckets.setdefault(number, []).append(one)
    return medians(rows), [medians(of_buckets[number]) for number in sorted(of_buckets)]


def account_of(length: float, waiting: float, carrying: float) -> dict[str, float]:
    return {
        "step": length,
        "waiting": waiting,
        "computing": length - waiting,
        "carrying": carrying,
        "idle": length - carrying,
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = link_parser(__doc__, timeout=600.0)
    parser.add_argument("--models", nargs="*", default=["gpt"])
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--strategies", type=int, help="so many of tuning's, the best by the clock")
    parser.add_argument("--named", default="", help="only those of tuning's whose name has this text")
    parser.add_argument("--random", type=int, nargs="*", default=(), help="random strategies of enforced.py, too")
    parser.add_argument("--buckets", action="store_true", help="also bucket by bucket")
    parser.add_argument("--sleep", action="store_true", help="kernels sleep for their measured time")
    parser.add_argument("--ordinary", action="store_true")
    parser.add_argument("--json", type=Path)
    run(parser.parse_args(), rank_main)


if __name__ == "__main__":
    main()
