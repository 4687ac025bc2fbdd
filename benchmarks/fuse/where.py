"""Where a step's time goes: the clock's account beside the real one, strategy by strategy.

    python benchmarks/fuse/where.py [--links namespaces | paced] [--rate 1gbit] [--models gpt conv] [--cores 1] [--batch 5] [--steps 8] [--strategies 3] [--sleep]

For some strategies of tuning, ours in the step and across steps, one step of the steady state is taken apart: how long the model's thread computed and how long it waited, how long the channel carried something and how long it had nothing to
carry. A bucket's end is noted by a callback of its collective. Medians over steps, of the first rank, each beside what the clock says from this machine's measurements. Steps are without updates.
`--strategies 3` takes the three that the clock puts first. With `--cores 2` a rank has two cores, so that the network's threads need not share one with the model's. `--ordinary` leaves the network's threads ordinary ones.
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

from sleeping import let_kernels_sleep, shortened, stand_apart
from slow_links import pace, pin, run


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from sennit.fuse.serial_group_torch import serial_group

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not arguments.sleep:
        pin(rank, count, arguments.cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = serial_group()
    pace()
    found: dict[str, Any] = {}
    with sdpa_kernel(SDPBackend.MATH):
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
    trials = candidates(step, Grouping(), across_steps=True)[: arguments.strategies]
    told: list[Any] = [[str(trial.strategy) for trial in trials]]
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
            real = measured(owner, inputs, arguments.steps)
        simulated = told_by_clock(step, strategy.buckets)
        found.append({"name": strategy.name, "buckets": len(strategy.buckets), "clock": simulated, "real": real})
        if rank == 0:
            pairs = "  ".join(f"{key} {1e3 * simulated[key]:6.1f} -> {1e3 * real[key]:6.1f}" for key in simulated)
            print(f"  {strategy.name:26s} {len(strategy.buckets):3d} buckets  {pairs}", flush=True)
    return found


def told_by_clock(step: Any, buckets: Any) -> dict[str, float]:
    from dataclasses import replace

    from sennit.fuse.clock import Activity, steady_state, traced
    from sennit.fuse.model import Grouping, KernelOrder

    order = step.order(Grouping())
    timing = KernelOrder(step, order, step.kernel_seconds(order, Grouping())).timing(buckets)
    timing = replace(timing, buckets=tuple(replace(bucket, update=0.0) for bucket in timing.buckets))
    length = steady_state(timing, step.channel.sharing)
    spans = traced(timing, step.channel.sharing, steps=1)
    carried = sum(span.stop - span.start for span in spans if span.activity is Activity.BUCKET)
    return {
        "step": length.seconds,
        "waiting": length.waited,
        "computing": length.seconds - length.waited,
        "carrying": carried,
        "idle": length.seconds - carried,
    }


def measured(owner: Any, inputs: Any, steps: int) -> dict[str, float]:
    """The same of steps that run."""
    import torch
    import torch.distributed as dist

    from sennit.fuse.tune_torch import drop_gradients

    channel = owner.gradients.channel
    waited, issued, done = [0.0], [], []
    plain_wait, plain_issue = channel.wait, channel._issue

    def wait(number: int) -> None:
        start = time.perf_counter()
        plain_wait(number)
        waited[0] += time.perf_counter() - start

    def issue(slot: Any) -> None:
        issued.append(time.perf_counter())
        plain_issue(slot)
        slot.work.get_future().add_done_callback(lambda _: done.append(time.perf_counter()))

    channel.wait, channel._issue = wait, issue
    rows: list[dict[str, float]] = []
    dist.barrier(owner.group)
    ends: list[tuple[float, float]] = []
    for _ in range(steps + 2):
        values = owner.run_forward(inputs)
        drop_gradients(owner)
        owner.run_backward(values, torch.ones(()))
        ends.append((time.perf_counter(), waited[0]))
    owner.flush()
    drop_gradients(owner)
    busy: list[tuple[float, float]] = []
    for start, stop in zip(issued, done, strict=True):
        busy.append((max(start, busy[-1][1]) if busy else start, stop))
    for (start, before), (stop, after) in itertools.pairwise(ends[1:]):
        carried = sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in busy)
        length, waiting = stop - start, after - before
        rows.append(
            {
                "step": length,
                "waiting": waiting,
                "computing": length - waiting,
                "carrying": carried,
                "idle": length - carried,
            }
        )
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--congestion", help="TCP's congestion control in the namespaces, in place of the machine's")
    parser.add_argument("--links", choices=["namespaces", "paced"], default="namespaces")
    parser.add_argument("--models", nargs="*", default=["gpt"])
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--strategies", type=int, help="so many of tuning's, the best by the clock")
    parser.add_argument("--sleep", action="store_true", help="kernels sleep for their measured time")
    parser.add_argument("--ordinary", action="store_true")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    run(parser.parse_args(), rank_main)


if __name__ == "__main__":
    main()
