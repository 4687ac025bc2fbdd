"""Strategies enforced on a slow network: how far the clock is from what they take, and whether they train as DDP does.

    python benchmarks/fuse/enforced.py [--ranks 2] [--rate 1gbit] [--links namespaces | paced] [--model gpt] [--batch 4] [--strategies 50] [--steps 6] [--sleep] [--json out.json]

The candidates of tuning (buckets as ready are DDP's), and random strategies: gradients, some of them cut, in buckets of
random sizes between a gradient and a third of all bytes, in the order in which they are made, in an order by need, or
in a random one that ranks can still follow; waits in the step, in the next, or mixed.

1. Each is simulated on this machine's measurements (`measured_model`) and run for some steps without updates. Printed:
   median and p95 of |simulated - measured| / measured, and Kendall's tau between the two, over all pairs and over those
   that were measured 2 % apart or more; and, as what the machine allows, the same between two visits: each strategy is
   run for a part of the steps, then all others are, then it is once more (`--visits`), with buffers of its own each time; what
   a clock without error would reach, by drawing visits and their steps anew; and the clock against the quietest of the
   visits, since what else the machine does makes steps longer, not shorter.
   How even the machine is says a product in a loop on each rank's core, with nothing beside it, before the strategies and after: its median time, and the time that one in ten exceeds, over the least.
   With `--sleep` kernels sleep for their measured time (`sleeping.py`): what is compared is the network and the order of things, on a machine that does other work too.
2. Each trains three steps of SGD with momentum from the same start. Printed: how many end in DDP's parameters to the
   last bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sleeping import let_kernels_sleep, shortened, stand_apart
from slow_links import link_parser, pace, pin, run

APART = 0.02  # many strategies take the same time; their order is the machine's noise
TARGETS = {"median": 0.03, "p95": 0.08, "tau": 0.9}


def random_buckets(model: Any, seed: int) -> tuple[Any, ...]:
    """Buckets as the module's text says."""
    from sennit.fuse.bucket_search import arranged
    from sennit.fuse.model import Grouping, KernelOrder
    from sennit.ir.strategy import Bucket, Part, WaitAt

    draw = random.Random(seed)
    total = sum(size for _, _, size in model.gradients)
    cap = total * 10 ** draw.uniform(-2.0, -0.5)
    waits = draw.choice([(WaitAt.STEP,), (WaitAt.NEXT,), (WaitAt.STEP, WaitAt.NEXT)])
    buckets: list[Bucket] = []
    parts: list[Part] = []
    held = 0.0
    for path, _, size in model.gradients:
        pieces = max(1, round(size / cap)) if draw.random() < 0.5 else 1
        count = model.elements[path]
        for piece in range(pieces):
            span = (count * piece // pieces, count * (piece + 1) // pieces) if pieces > 1 else None
            parts.append(Part(path, span))
            held += size / pieces
            if held >= cap:
                buckets.append(Bucket(tuple(parts), draw.choice(waits)))
                parts, held = [], 0.0
    if parts:
        buckets.append(Bucket(tuple(parts), draw.choice(waits)))
    match draw.choice(["made", "need", "random"]):
        case "need":
            order = model.order(Grouping())
            seconds = model.kernel_seconds(order, Grouping())
            return tuple(arranged(KernelOrder(model, order, seconds), tuple(buckets)))
        case "random":
            for place in range(len(buckets) - 1):  # near neighbours: far ones would only wait
                if draw.random() < 0.3:
                    buckets[place : place + 2] = buckets[place : place + 2][::-1]
    return tuple(buckets)


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from sennit.fuse.serial_group_torch import serial_group

    rank = int(os.environ["RANK"])
    if not arguments.sleep:
        pin(rank, int(os.environ["WORLD_SIZE"]), arguments.cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = serial_group()
    pace()
    noise = [unevenness(group)]
    found: dict[str, Any] = {"strategies": compare(rank, group, arguments)}
    found["noise"] = [*noise, unevenness(group)]
    if rank == 0:
        report(found)
        Path(os.environ["SENNIT_BENCH_OUT"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def unevenness(group: Any, seconds: float = 2.0) -> tuple[float, float]:
    """Of a product in a loop on this core, alone: its median time over the least, and the time that one in ten exceeds
    over the least; of the rank on which that is greatest.
    """
    import torch
    import torch.distributed as dist

    left, right, spent = torch.randn(128, 512), torch.randn(512, 512), []
    dist.barrier(group)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(10):
            torch.mm(left, right)
        spent.append(time.perf_counter() - start)
    spent.sort()
    own = torch.tensor([spent[len(spent) // 2] / spent[0], spent[int(0.9 * len(spent))] / spent[0]])
    dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
    median, tenth = own.tolist()
    return median, tenth


def compare(rank: int, group: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from network_models import build
    from torch.nn.parallel import DistributedDataParallel

    from sennit.fuse.data_parallel_torch import DataParallel
    from sennit.fuse.model import Grouping, StepModel
    from sennit.fuse.profile_torch import MeasuredCost, measure_channel
    from sennit.fuse.tune_torch import Tuning, candidates, measured_model, timed_steps
    from sennit.ir.strategy import Strategy

    def wrapped() -> tuple[Any, Any]:
        model, rows = build(arguments.model, rank, arguments.batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return DataParallel(model, optimizer, sample=rows, group=group, tuning=Tuning(turns=0)), optimizer

    def train(model: Any, optimizer: Any) -> dict[str, Any]:
        torch.manual_seed(rank)
        for _ in range(3):
            model(*rows).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {key: value.clone() for key, value in model.state_dict().items()}

    model, rows = build(arguments.model, rank, arguments.batch)
    ddp = DistributedDataParallel(model)
    begin = {key: value.clone() for key, value in ddp.state_dict().items()}
    pace()
    expected = train(ddp, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    owner, optimizer = wrapped()
    pace()
    inputs = owner.signature.flatten(rows)
    with torch.no_grad():
        step = measured_model(owner, inputs, Tuning())
    seconds = dict(step.cost.seconds)
    if arguments.sleep:  # the same on all ranks, and nothing shares a core
        stand_apart()
        shared: list[Any] = [(seconds, measure_channel(group, beside_computing=False))]
        dist.broadcast_object_list(shared, 0)
        seconds, channel = shared[0]
        step = StepModel(owner.graph, MeasuredCost(seconds), channel, packed=owner.packed)
        seconds = shortened(owner, inputs, seconds)
    # steps are timed without updates, so the clock's have none
    without = replace(step.channel, update_per_byte=0.0)
    still = StepModel(owner.graph, step.cost, without, step.in_rows, step.packed, step.uses, step.per_block)
    told: list[Any] = [[str(trial.strategy) for trial in candidates(step, Grouping(), across_steps=True)]]
    told[0] += [str(Strategy(f"random {seed}", (), random_buckets(step, seed))) for seed in range(arguments.strategies)]
    dist.broadcast_object_list(told, 0)
    if rank == 0:
        print(f"  {step.channel}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    begun = time.monotonic()
    for visit, text in itertools.product(range(arguments.visits), told[0]):
        late = torch.tensor([float(time.monotonic() - begun > arguments.seconds)])
        dist.all_reduce(late)
        if late.item():
            break
        strategy = Strategy.parse(text)
        owner.use(strategy)
        if arguments.sleep:
            let_kernels_sleep(owner, seconds)
        with torch.no_grad():
            times = timed_steps(owner, inputs, arguments.steps // arguments.visits)
        item = found.setdefault(
            strategy.name,
            {
                "name": strategy.name,
                "buckets": len(strategy.buckets),
                "late": sum(bucket.wait.value == "next" for bucket in strategy.buckets),
                "simulated": still.step_time(Grouping(), strategy.buckets).seconds,
                "times": [],
                "halves": [],
                "equal": None,  # not tried
            },
        )
        item["times"] += times
        item["halves"].append(statistics.median(times))
        item |= {"measured": statistics.median(item["times"]), "least": min(item["times"])}
        if arguments.bits and visit == 0:
            owner.use(strategy)
            owner.load_state_dict(begin)
            optimizer.state.clear()
            state = train(owner, optimizer)
            item["equal"] = all(torch.equal(state[key], expected[key]) for key in expected)
    return list(found.values())


def agreement(pairs: list[tuple[float, float]], apart: float = 0.0) -> float:
    signs = [
        (one[0] - other[0]) * (one[1] - other[1])
        for one, other in itertools.combinations(pairs, 2)
        if abs(one[1] - other[1]) >= apart * min(one[1], other[1])
    ]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / max(1, len(signs))


def deviation(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Median and p95 of |one - other| / other."""
    errors = sorted(abs(one - other) / other for one, other in pairs)
    return statistics.median(errors), errors[int(0.95 * (len(errors) - 1))]


def halves_of(visits: int) -> list[tuple[int, ...]]:
    """All ways to take half of the visits; each stands for two, as what is left is the other half."""
    return [half for half in itertools.combinations(range(visits), visits // 2) if 0 in half]


def between_halves(found: list[dict[str, Any]], visits: int, half: tuple[int, ...]) -> tuple[float, float, float]:
    """Median and p95 of how far the steps of these visits are from those of as many others, and Kendall's tau; each
    strategy by the median of its steps, as against the clock.
    """
    other = tuple(visit for visit in range(visits) if visit not in half)[: len(half)]
    pairs = [(of_visits(item, visits, half), of_visits(item, visits, other)) for item in found]
    return (*deviation(pairs), agreement(pairs))


def without_error(found: list[dict[str, Any]], visits: int, draws: int = 100) -> float:
    """Kendall's tau of a clock that knows the median of each strategy, against as many steps again: visits, and steps of
    each, drawn anew out of those that were made. The medians are a little further apart than they are without noise, so
    a clock cannot be expected to reach more.
    """
    draw = random.Random(0)

    def again(item: dict[str, Any]) -> float:
        count = len(item["times"]) // visits
        drawn = [draw.randrange(visits) * count for _ in range(visits)]
        return statistics.median(item["times"][first + draw.randrange(count)] for first in drawn for _ in range(count))

    return statistics.mean(agreement([(item["measured"], again(item)) for item in found]) for _ in range(draws))


def of_visits(item: dict[str, Any], visits: int, wanted: tuple[int, ...]) -> float:
    count = len(item["times"]) // visits
    return statistics.median([value for visit in wanted for value in item["times"][visit * count :][:count]])


def report(result: dict[str, Any]) -> None:
    found: list[dict[str, Any]] = result["strategies"]
    for item in sorted(found, key=lambda item: item["measured"]):
        print(
            f"  {item['name']:24s} {item['buckets']:3d} buckets, {item['late']:3d} late: simulated {1e3 * item['simulated']:7.1f} ms, measured {1e3 * item['measured']:7.1f} ms (least {1e3 * item['least']:7.1f}), "
            f"{ {None: '', True: 'DDP to the last bit', False: 'NOT EQUAL to DDP'}[item['equal']] }"
        )
    noise = ", ".join(f"median {median:.2f}, one in ten above {tenth:.2f}" for median, tenth in result["noise"])
    print(f"{len(found)} strategies; a product in a loop, before and after, over its least time: {noise}")
    pairs = [(item["simulated"], item["measured"]) for item in found]
    median, p95 = deviation(pairs)
    print(f"  median error {median:.1%} (target {TARGETS['median']:.0%})")
    print(f"  p95 error {p95:.1%} (target {TARGETS['p95']:.0%})")
    print(
        f"  Kendall's tau {agreement(pairs):.2f} (target {TARGETS['tau']}), {agreement(pairs, APART):.2f} over pairs that were measured {APART:.0%} apart or more"
    )
    visits = max(len(item.get("halves", ())) for item in found)
    twice = [item for item in found if len(item.get("halves", ())) == visits > 1]
    if twice:
        quiet = [(item["simulated"], min(item["halves"])) for item in twice]
        median, p95 = deviation(quiet)
        print(
            f"  against the quieter visit: {median:.1%}, p95 {p95:.1%}, tau {agreement(quiet):.2f}, {agreement(quiet, APART):.2f} over pairs {APART:.0%} apart"
        )
        halves = [between_halves(twice, visits, half) for half in halves_of(visits)]
        median, p95, tau = (statistics.mean(column) for column in zip(*halves, strict=True))
        print(f"  one half of the {visits} visits against the other: {median:.1%} apart, p95 {p95:.1%}, tau {tau:.2f}")
        print(f"  a clock that knew each median, against steps drawn anew: tau {without_error(twice, visits):.2f}")
    if tried := [item["equal"] for item in found if item["equal"] is not None]:
        print(f"  equal to DDP after three steps: {sum(tried)} of {len(tried)} (target all)")
    sys.stdout.flush()


def main() -> None:
    parser = link_parser(__doc__, timeout=1500.0)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--strategies", type=int, default=50)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--visits", type=int, default=2, help="in which these steps are made, all others between them")
    parser.add_argument("--no-bits", dest="bits", action="store_false", help="time only")
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no strategy after so many")
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--cores", type=int, default=1, help="cores of a rank")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", action="store_true", help="print what --json holds, and run nothing")
    arguments = parser.parse_args()
    if arguments.show:
        report(json.loads(arguments.json.read_text()))
        return
    run(arguments, rank_main)


if __name__ == "__main__":
    main()
