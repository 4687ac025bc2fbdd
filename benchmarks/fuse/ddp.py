"""`sennit.DataParallel` against DDP where the network is slow, side by side in one run.

    python benchmarks/fuse/ddp.py [--ranks 2] [--rate 1gbit] [--links namespaces | paced] [--models gpt conv bert lstm] [--ratio 0.7] [--compiled] [--json out.json]

Each rank has one core (`slow_links.py`). A model's batch is chosen such that computing takes `--ratio` of the time of
communicating, alone: 0.7 is where overlap matters most, and the batch is printed. Variants:

| variant | is |
|---|---|
| DDP n MB | DistributedDataParallel with that bucket size |
| DDP n MB, network first | the same with gloo's threads before the model's, as ours has them (`fuse/network_threads.py`): what of our gain is that alone |
| no overlap | gradients summed in one collective after the backward pass |
| none | ours with every gradient a bucket by itself, waits in the step |
| tensor only | ours, buckets tuned, waits in the step |
| across steps | ours, buckets tuned, waits where tuning puts them: the default of `DataParallel` |
| DDP compiled, op only, joint, joint + across steps | the same with compiled kernels (`--compiled`, needs a C++ compiler) |

Every round runs all of them in turn, some steps each, starting with another one; the first two steps of a turn are left
out. Printed: median and least milliseconds a step, how many of them the rank's core was busy (where that is far below
the median of computing, something else ran on the machine), the share of the core's time in which it did anything at
all, the kernel's work for packets and other ranks of the core included, the bounds by computing and communicating alone (and for
one core, where the network's own work adds to computing), that of a step which waits for its own gradients (eager
torch's time to its first gradient, and then all bytes), and ours over the best DDP of the sweep, beside the targets;
also a step that one in ten exceeds, and a step's page faults. All variants keep freed memory with the process, as
`DataParallel` does (`fuse/kept_memory.py`; `--give-back` leaves the allocator as it is, for all of them). Times of
compiled variants are compared with each other and with DDP compiled.

With `--json` the file is written after tuning and after each round, and what it holds is gone on from: batch, figures
alone and tuned strategies are kept, and the rounds of another run are added to those before. So a long measurement can
be had in parts. `--spread FILE ...` prints the two gains of all such runs. `--rounds 0` tunes and measures nothing. `--ordinary` leaves gloo's threads as they come, in all
variants: what a user has who may not prefer them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from slow_links import link_parser, pace, pin, run

CAPS = (1, 5, 25, 100)  # MB
CAPS_FEW = (1, 5)  # with the network's threads first, and compiled
TARGETS = {"over the best DDP": 1.25, "of the full-overlap bound": 1.10, "of the tight bound": 1.02}


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from sennit.fuse.kept_memory import keep_memory
    from sennit.fuse.network_threads import Preference, network_first
    from sennit.fuse.serial_group_torch import serial_group

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pin(rank, count, arguments.cores)
    torch.set_num_threads(1)
    if not arguments.give_back:
        keep_memory()
    dist.init_process_group("gloo")
    before: list[Any] = [json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}]
    dist.broadcast_object_list(before, 0)
    results: dict[str, Any] = before[0]
    group = serial_group()
    pace()
    preference = Preference.NONE if arguments.ordinary else network_first()
    if rank == 0:
        print(f"the network's threads first: {preference.value}; {arguments.cores} core(s) a rank")
    for name in arguments.models:
        found = results[name] = results.get(name) or alone(name, rank, group, arguments)
        for _ in compare(name, rank, group, arguments, found):
            if rank == 0 and arguments.json:
                arguments.json.write_text(json.dumps(results))
        if rank == 0 and found["times"]:
            report(name, found)
    if rank == 0:
        Path(os.environ["SENNIT_BENCH_OUT"]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def compare(name: str, rank: int, group: Any, arguments: argparse.Namespace, found: dict[str, Any]) -> Iterator[None]:
    """Adds to the figures of one model; pauses after tuning and after each round."""
    rows = build_rows(name, rank, found["batch"])
    variants, tuned = make_variants(name, rank, group, arguments, found)
    found["tried"] |= tuned
    found["preferences"] = {
        title: model.preference.value for title, (model, _) in variants.items() if hasattr(model, "preference")
    }
    found["strategies"] |= {
        title: str(model.strategy) for title, (model, _) in variants.items() if hasattr(model, "strategy")
    }
    yield
    pace()  # groups for buffers were made
    for turn in range(arguments.rounds):
        for title, figures in measure(variants, rows, arguments, turn).items():
            for figure, values in figures.items():
                found.setdefault(figure, {}).setdefault(title, []).extend(values)
        if rank == 0:
            medians = (f"{title} {1e3 * statistics.median(spent):.0f}" for title, spent in found["times"].items())
            print(f"  medians after round {turn + 1}, ms: {', '.join(medians)}", flush=True)
        yield


def alone(name: str, rank: int, group: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """What computing and communicating take by themselves, and the batch for their ratio."""
    import torch.distributed as dist
    from network_models import build

    model, _ = build(name, rank, 2)
    size = sum(p.numel() for p in model.parameters())
    communicate = seconds_of(lambda flat: dist.all_reduce(flat, group=group), size)
    for _ in range(3):  # a core may be slow for the seconds in which a batch is chosen
        batch = arguments.batch or batch_for(name, rank, arguments.ratio * communicate)
        compute, first = compute_alone(name, rank, batch)
        if arguments.batch or abs(compute / (arguments.ratio * communicate) - 1) < 0.15:
            break
    found = {
        "megabytes": size * 4 / 1e6,
        "batch": batch,
        "ranks": arguments.ranks,
        "cores": arguments.cores,
        "communicate": communicate,
        "network": seconds_lost(group, size),
        "compute": compute,
        "first": first,
    }
    if rank == 0:
        print(f"{name}: {found}", flush=True)
    return {**found, "times": {}, "processor": {}, "tried": {}, "strategies": {}}


def build_rows(name: str, rank: int, batch: int) -> tuple[Any, ...]:
    from network_models import build

    return build(name, rank, batch)[1]


def seconds_of(collective: Any, size: int) -> float:
    """Median seconds of a collective on so many numbers, the slowest rank's."""
    import torch
    import torch.distributed as dist

    flat, spent = torch.zeros(size), []
    for _ in range(6):
        dist.barrier()
        start = time.perf_counter()
        collective(flat)
        spent.append(time.perf_counter() - start)
    return agreed(statistics.median(spent[1:]))


def seconds_lost(group: Any, size: int) -> float:
    """Seconds of its core that a thread which computes loses to a collective on so many numbers beside it: time on the
    wall less processor time.
    """
    import torch
    import torch.distributed as dist

    flat, factor, lost = torch.zeros(size), torch.randn(192, 192), []
    for _ in range(5):
        dist.barrier()
        start, own = time.perf_counter(), time.thread_time()
        work = dist.all_reduce(flat, group=group, async_op=True)
        while not work.is_completed():
            torch.mm(factor, factor)
        lost.append((time.perf_counter() - start) - (time.thread_time() - own))
        work.wait()
    return agreed(max(0.0, statistics.median(lost)))


def agreed(seconds: float) -> float:
    import torch
    import torch.distributed as dist

    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def compute_alone(name: str, rank: int, batch: int, rounds: int = 5) -> tuple[float, float]:
    """Least seconds of a step without communication, eager, and of its beginning until a gradient is there; the slowest
    rank's.
    """
    import torch
    from network_models import build

    model, rows = build(name, rank, batch)
    optimizer, spent = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), []
    first, made = [], list[float]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: made.append(time.thread_time()))
    for _ in range(rounds):
        made.clear()
        start = time.thread_time()
        model(*rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        spent.append(time.thread_time() - start)
        first.append(made[0] - start)
    return agreed(min(spent)), agreed(min(first))


def batch_for(name: str, rank: int, seconds: float) -> int:
    """The batch with which a step's computing takes so long, by the line through a small batch and the one found last.

    Small batches leave caches and vector units idle, so the line is drawn again through the batch that it gives, until
    it gives the same one: each is timed once more for that, and the least of its times counts.
    """
    least: dict[int, float] = {}

    def spent(batch: int) -> float:
        least[batch] = min(compute_alone(name, rank, batch)[0], least.get(batch, float("inf")))
        return least[batch]

    small, batch = 2, 8
    for _ in range(5):
        low, high, before = spent(small), spent(batch), batch
        slope = (high - low) / (batch - small)
        batch = max(small + 1, round(small + (seconds - low) / max(slope, 1e-9)))
        if batch == before:
            break
    return batch


def make_variants(
    name: str, rank: int, group: Any, arguments: argparse.Namespace, found: dict[str, Any]
) -> tuple[dict[str, tuple[Any, Any]], dict[str, Any]]:
    """By title: what is called, and its optimizer.

    And what tuning tried, with simulated and measured seconds. Strategies of a run before are taken from what was
    `found`.
    """
    import torch
    from network_models import build
    from torch.nn.parallel import DistributedDataParallel

    from sennit.fuse.data_parallel_torch import DataParallel
    from sennit.fuse.network_threads import Preference
    from sennit.fuse.tune_torch import Tuning
    from sennit.ir.strategy import Bucket, Part, Strategy

    tuning = Tuning(turns=arguments.turns, steps=arguments.trial_steps)
    batch = found["batch"]
    variants: dict[str, tuple[Any, Any]] = {}
    tried: dict[str, Any] = {}

    def add(title: str, wrap: Any) -> None:
        begun = time.perf_counter()
        model, rows = build(name, rank, batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        wrapped = wrap(model, optimizer, rows)
        variants[title] = (wrapped, optimizer)
        if getattr(wrapped, "tried", ()):
            tried[title] = [
                (trial.strategy.name, len(trial.strategy.buckets), trial.simulated, trial.measured)
                for trial in wrapped.tried
            ]
        if rank == 0:
            print(f"  {title}: made in {time.perf_counter() - begun:.1f} s", flush=True)

    def ours(title: str, **options: Any) -> None:
        options = {"network_first": not arguments.ordinary, **options}
        if title in found["strategies"]:
            options = {**options, "strategy": Strategy.parse(found["strategies"][title])}
            options["network_first"] = found["preferences"][title] != Preference.NONE.value
        add(
            title,
            lambda model, optimizer, rows: DataParallel(
                model,
                optimizer,
                sample=rows,
                group=group,
                tuning=tuning,
                keep_freed_memory=not arguments.give_back,
                **options,
            ),
        )

    def apart(strategy: Strategy) -> Strategy:
        parts = [part for bucket in strategy.buckets for part in bucket.parts]
        paths = dict.fromkeys(part.path for part in parts)
        return Strategy("none", strategy.groups, tuple(Bucket((Part(path),)) for path in paths))

    for cap in arguments.caps:
        add(f"DDP {cap} MB", lambda model, _, __, cap=cap: DistributedDataParallel(model, bucket_cap_mb=cap))
    for cap in CAPS_FEW:
        if cap not in arguments.caps or arguments.ordinary:
            continue
        variants[f"DDP {cap} MB, network first"] = variants[f"DDP {cap} MB"]
    add("no overlap", lambda model, _, __: model)
    ours("across steps")
    if arguments.ablation:
        ours("tensor only", across_steps=False)
        alike = variants["tensor only"][0]
        ours("none", strategy=apart(alike.strategy), network_first=alike.preference is not Preference.NONE)
    if arguments.compiled:
        for cap in CAPS_FEW:
            add(
                f"compiled DDP {cap} MB",
                lambda model, _, __, cap=cap: torch.compile(DistributedDataParallel(model, bucket_cap_mb=cap)),
            )
        ours("joint", across_steps=False, compile_kernels=True)
        ours("joint + across steps", compile_kernels=True)
        alike = variants["joint"][0]
        is_first = alike.preference is not Preference.NONE
        ours("op only", strategy=apart(alike.strategy), compile_kernels=True, network_first=is_first)
    return variants, tried


def measure(
    variants: dict[str, tuple[Any, Any]], rows: tuple[Any, ...], arguments: argparse.Namespace, turn: int
) -> dict[str, dict[str, list[float]]]:
    """Of some steps of each variant: seconds on the wall and of this rank's core, the network's threads included, and
    page faults of the model's thread.
    """
    import resource

    import torch.distributed as dist

    from sennit.fuse.network_threads import Preference, network_first, ordinary

    found: dict[str, dict[str, list[float]]] = {}
    order = list(variants)
    order = order[turn % len(order) :] + order[: turn % len(order)]
    for title in order:
        model, optimizer = variants[title]
        # ours as tuning left it; theirs as it comes, unless the title says otherwise
        preference = getattr(model, "preference", Preference.NONE)
        (network_first if "first" in title or preference is not Preference.NONE else ordinary)()
        figures = found[title] = {"times": [], "processor": [], "faults": [], "busy": []}
        dist.barrier()
        idle, begun = idle_seconds(), time.perf_counter()
        for step in range(arguments.steps):
            start, used = time.perf_counter(), time.process_time()
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            model(*rows).backward()
            if title == "no overlap":
                reduce_after(model)
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                figures["times"].append(time.perf_counter() - start)
                figures["processor"].append(time.process_time() - used)
                figures["faults"].append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults)
        figures["busy"].append(1 - (idle_seconds() - idle) / (time.perf_counter() - begun))
        if hasattr(model, "flush"):
            model.flush()
    return found


def idle_seconds() -> float:
    """In which the cores of this rank had nothing to do, on average, as the kernel counts them: in hundredths."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = [int(row[4]) + int(row[5]) for row in rows if row[0] in cores]
    return statistics.mean(ticks) / os.sysconf("SC_CLK_TCK")


def reduce_after(model: Any) -> None:
    import torch
    import torch.distributed as dist

    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat.div_(dist.get_world_size()))
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


def best_of_sweep(medians: dict[str, float]) -> str:
    """DDP with the best of its bucket sizes, as it comes."""
    sweep = {title: value for title, value in medians.items() if title.startswith("DDP") and "first" not in title}
    return min(sweep, key=sweep.__getitem__)


def spread(files: list[Path]) -> None:
    """The gains of several runs, from the least to the best."""
    gains: dict[str, list[tuple[float, float]]] = {}
    for file in files:
        for title, found in json.loads(file.read_text()).items():
            medians = {variant: statistics.median(values) for variant, values in found["times"].items()}
            ours, bound = medians["across steps"], max(found["compute"], found["communicate"])
            over = medians[best_of_sweep(medians)] / ours
            gains.setdefault(title.split(",")[0], []).append((over, ours / bound))
    for name, pairs in gains.items():
        over, of = sorted(pair[0] for pair in pairs), sorted(pair[1] for pair in pairs)
        print(
            f"{name:6s} {len(pairs):2d} runs  {over[0]:.2f} to {over[-1]:.2f} x the best DDP  "
            f"{of[-1]:.2f} to {of[0]:.2f} of the bound"
        )


def report(name: str, found: dict[str, Any]) -> None:
    medians = {title: statistics.median(values) for title, values in found["times"].items()}
    best = best_of_sweep(medians)
    bound = max(found["compute"], found["communicate"])
    shared = max(found["compute"] + found["network"], found["communicate"])
    print(
        f"\n{name}: {found['megabytes']:.0f} MB of gradients, batch {found['batch']}, {found['cores']} core(s) a rank; computing alone {1e3 * found['compute']:.0f} ms, "
        f"communicating alone {1e3 * found['communicate']:.0f} ms, of which {1e3 * found['network']:.0f} ms of a core that computes beside it; "
        f"full-overlap bound {1e3 * bound:.0f} ms, on one core {1e3 * shared:.0f} ms"
    )
    for title, value in sorted(medians.items(), key=lambda item: item[1]):
        least, used = min(found["times"][title]), statistics.median(found["processor"][title])
        most = sorted(found["times"][title])[int(0.9 * len(found["times"][title]))]
        faults = statistics.median(found.get("faults", {}).get(title, [0]))
        shares = found.get("busy", {}).get(title)
        busy = f", busy for {statistics.median(shares):.0%}" if shares else ""
        print(
            f"  {title:24s} {1e3 * value:8.1f} ms median {1e3 * least:8.1f} least {1e3 * most:8.1f} exceeded by a tenth "
            f"{1e3 * used:7.1f} of the core{busy} {faults:6.0f} faults  "
            f"{medians[best] / value:5.2f} x {best}  {value / bound:5.2f} of the bound"
        )
    ours = medians["across steps"]
    print(f"  target {TARGETS['over the best DDP']:.2f} x the best DDP: {medians[best] / ours:.2f}")
    print(f"  target {TARGETS['of the full-overlap bound']:.2f} of the full-overlap bound: {ours / bound:.2f}")
    if "first" in found and "tensor only" in medians:
        tight = max(found["compute"], found["first"] + found["communicate"])
        print(
            f"  waits in the step: no gradient before {1e3 * found['first']:.0f} ms, so none is shorter than {1e3 * tight:.0f} ms; "
            f"target {TARGETS['of the tight bound']:.2f} of it: {medians['tensor only'] / tight:.2f}, DDP {medians[best] / tight:.2f}"
        )
    preferred = {title: value for title, value in medians.items() if title.startswith("DDP") and "first" in title}
    if preferred:
        print(f"  over the best DDP with the network's threads first: {min(preferred.values()) / ours:.2f}")
    print(f"  {clock_error(found['tried'])}")
    for title, trials in found["tried"].items():
        print(f"  {title} has the network's threads first: {found.get('preferences', {}).get(title, 'real time')}")
        print(f"  {title} was chosen among (simulated ms, measured ms without updates):")
        for strategy, buckets, simulated, measured in trials:
            print(f"    {strategy:24s} {buckets:3d} buckets {1e3 * simulated:8.1f} {1e3 * measured:8.1f}")
    sys.stdout.flush()


def clock_error(tried: dict[str, Any]) -> str:
    """How far the clock is from what tuning measured, over the candidates without compiled kernels, and whether it
    ranks those of "across steps".
    """
    trials = {
        title: [(simulated, measured) for _, _, simulated, measured in tried.get(title, ()) if measured]
        for title in ("tensor only", "across steps")
    }
    errors = sorted(abs(one - other) / other for pairs in trials.values() for one, other in pairs)
    if len(trials["across steps"]) < 2:
        return "the clock: too few candidates were run"
    signs = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in itertools.combinations(trials["across steps"], 2)]
    tau = 2 * sum(signs) / len(signs) - 1
    p95 = errors[int(0.95 * len(errors))]
    return f"the clock over {len(errors)} candidates: median error {statistics.median(errors):.1%}, p95 {p95:.1%}; tau of those across steps {tau:.2f}"


def main() -> None:
    parser = link_parser(__doc__, timeout=1500.0)
    parser.add_argument("--models", nargs="*", default=["gpt", "conv", "bert", "lstm"])
    parser.add_argument("--ratio", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=None, help="rows of a rank's batch, in place of --ratio")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--caps", type=int, nargs="*", default=list(CAPS), help="bucket sizes of the sweep, MB")
    parser.add_argument("--give-back", action="store_true", help="the allocator as it is")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--ordinary", action="store_true", help="gloo's threads as they come")
    parser.add_argument("--no-ablation", dest="ablation", action="store_false", help='without "tensor only" and "none"')
    parser.add_argument("--turns", type=int, default=4, help="turns of tuning's trials")
    parser.add_argument("--trial-steps", type=int, default=3, help="steps of a trial in a turn")
    parser.add_argument("--cores", type=int, default=1, help="cores of a rank")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", action="store_true", help="print what --json holds, and run nothing")
    parser.add_argument("--spread", type=Path, nargs="+", metavar="FILE", help="print the gains of several runs")
    arguments = parser.parse_args()
    if arguments.spread:
        spread(arguments.spread)
        return
    if arguments.show:
        for name, found in json.loads(arguments.json.read_text()).items():
            if found["times"]:
                report(name, found)
        return
    run(arguments, rank_main)


if __name__ == "__main__":
    main()
