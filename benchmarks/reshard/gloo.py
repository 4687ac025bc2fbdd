"""Redistribution on gloo, side by side in one process group: sennit against DTensor.

    python benchmarks/reshard/gloo.py --ranks 8 --problems 64 --mebibytes 16 --json out.json

Peers, all on the same DTensors, through the function that DTensor itself redistributes with:

- stock: torch's default planner; on CPU its all-to-all is an all-gather and a chunk;
- patched: the same with a real all_to_all_single in that place, which gloo has;
- min-cost: torch's graph planner, patched alike;
- messages: sennit's plan by gloo's messages only, over loopback;
- groups: sennit's plan through gloo's own collectives, where the plan has any;
- cheaper: messages or groups, as calibration found cheaper for each step: what runs where no memory is shared.

"sennit" is what `sennit.redistribute` does on one host: through memory that the ranks share. That needs the compiled
core (`make install` builds it; by hand: `cc -O3 -std=gnu11 -fwrapv -fno-math-errno -fno-trapping-math -shared -fPIC -o
_shm_core.so shm_core.c` in `src/sennit/collective/runtime`); without it this stops, since the column would be another.

Every repetition runs all of them, in a rotating order, after a barrier; the time of one is that of the slowest rank,
and a problem's time is the median over the repetitions. "again" is sennit measured a second time: its spread is the
noise of the machine. Results are compared with the definition (the slice of the array that a rank should have) before
anything is timed, and a peer that is wrong on a problem is listed and not timed there.

Needs torch and numpy; start-up takes some seconds a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
with contextlib.suppress(ImportError):
    import msgspec  # noqa: F401
if "msgspec" not in sys.modules:
    # clusters are described with it; this benchmark calibrates by itself and describes none
    stand_in = types.ModuleType("msgspec")
    stand_in.Struct = type("Struct", (), {"__init_subclass__": classmethod(lambda cls, **options: None)})  # type: ignore[attr-defined]
    sys.modules["msgspec"] = stand_in

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

TARGETS = {  # spec: against patched DTensor at 8 ranks
    "patched": {"geo": 4.0, "best": 20.0, "worst": 0.95},
}
OURS = "sennit"


# ---- problems --------------------------------------------------------------------------------------------------------


def factorisations(count: int) -> list[tuple[int, ...]]:
    found = [(count,)]
    for first in range(2, count):
        if count % first == 0:
            found += [(first, *rest) for rest in factorisations(count // first) if len(rest) < 3]
    return found


def random_problem(seed: int, ranks: int, elements: int) -> dict[str, Any]:
    """Mesh sizes, shape, and per axis the dim that it shards or None, before and after; some sources have pending sums."""
    chance = random.Random(seed)
    mesh = chance.choice(factorisations(ranks))
    dims = chance.randint(2, 4)
    while True:
        source, target = ([chance.choice([None, *range(dims)]) for _ in mesh] for _ in range(2))
        if source != target:
            break
    shape = []
    for dim in range(dims):
        need = [math.prod(size for size, at in zip(mesh, side, strict=True) if at == dim) for side in (source, target)]
        shape.append(math.lcm(*need) * chance.choice((1, 2, 3, 4)))
    grown = chance.randrange(dims)
    shape[grown] *= max(1, round(elements / math.prod(shape)))
    pending = [at is None and chance.random() < 0.3 for at in source]
    return {"seed": seed, "mesh": mesh, "shape": shape, "source": source, "target": target, "pending": pending}


def title(problem: dict[str, Any]) -> str:
    def side(dims: list[int | None], pending: list[bool] | None = None) -> str:
        marks = ["R" if dim is None else f"S{dim}" for dim in dims]
        if pending:
            marks = ["P" if waits else mark for mark, waits in zip(marks, pending, strict=True)]
        return "".join(marks)

    sizes, shape = ("x".join(map(str, problem[key])) for key in ("mesh", "shape"))
    return f"{sizes} {shape} {side(problem['source'], problem['pending'])}->{side(problem['target'])}"


# ---- peers -----------------------------------------------------------------------------------------------------------


def real_all_to_all(tensor: Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Tensor:
    """What torch does on accelerators, with gloo's all_to_all_single."""
    count = mesh.size(mesh_dim)
    sent = torch.stack(tensor.chunk(count, shard_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=mesh.get_group(mesh_dim))
    return torch.cat(received.unbind(0), gather_dim)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    from torch.distributed.tensor import placement_types

    before = placement_types.shard_dim_alltoall
    placement_types.shard_dim_alltoall = real_all_to_all
    try:
        yield
    finally:
        placement_types.shard_dim_alltoall = before


def peers_of(
    mesh: Any, local: Tensor, specs: tuple[Any, Any], executors: dict[str, Any]
) -> dict[str, Callable[[], Tensor]]:
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    from sennit.reshard.dtensor_torch import lower_specs

    def ours(name: str) -> Tensor:
        served = lower_specs(executors[name], *specs)
        return executors[name].start_lowered(served.lowered, local).wait()

    def torch_own(graph: bool | None, patch: bool) -> Tensor:
        with patched() if patch else contextlib.nullcontext():
            return redistribute_local_tensor(local, *specs, use_graph_based_transform=graph)

    return {
        OURS: lambda: ours(OURS),
        "stock": lambda: torch_own(None, False),
        "patched": lambda: torch_own(None, True),
        "min-cost": lambda: torch_own(True, True),
        "messages": lambda: ours("messages"),
        "groups": lambda: ours("groups"),
        "cheaper": lambda: ours("cheaper"),
        "again": lambda: ours(OURS),
    }


def inputs_of(problem: dict[str, Any], mesh: Any) -> tuple[Tensor, tuple[Any, Any], Tensor]:
    """This rank's piece, the two specs, and the piece that must come out."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size(problem["shape"])
    whole = torch.arange(shape.numel(), dtype=torch.float32).remainder_(1 << 20).reshape(shape)

    def piece(dims: list[int | None]) -> Tensor:
        part = whole
        for axis, dim in enumerate(dims):
            if dim is not None:
                part = part.chunk(mesh.size(axis), dim)[mesh.get_local_rank(axis)]
        return part.clone(memory_format=torch.contiguous_format)

    def placements(dims: list[int | None], pending: list[bool]) -> tuple[Any, ...]:
        return tuple(
            Partial() if waits else Replicate() if dim is None else Shard(dim)
            for dim, waits in zip(dims, pending, strict=True)
        )

    meta = TensorMeta(shape, whole.stride(), whole.dtype)
    nothing = [False] * len(problem["target"])
    specs = tuple(
        DTensorSpec(mesh, placements(dims, pending), tensor_meta=meta)
        for dims, pending in ((problem["source"], problem["pending"]), (problem["target"], nothing))
    )
    local = piece(problem["source"])
    if any(waits and mesh.get_local_rank(axis) for axis, waits in enumerate(problem["pending"])):
        local.zero_()
    return local, (specs[0], specs[1]), piece(problem["target"])


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(
    problem: dict[str, Any], meshes: dict[tuple[int, ...], Any], executors: dict[str, Any], repeats: int
) -> dict[str, Any]:
    from torch.distributed.tensor import DeviceMesh

    from sennit.ir.layout_torch import from_placements
    from sennit.reshard.dtensor_torch import mesh_of

    sizes = tuple(problem["mesh"])
    if sizes not in meshes:
        meshes[sizes] = DeviceMesh("cpu", torch.arange(math.prod(sizes)).reshape(sizes))
    mesh = meshes[sizes]
    local, specs, want = inputs_of(problem, mesh)
    layouts = [from_placements(mesh_of(mesh), tuple(problem["shape"]), spec.placements) for spec in specs]
    redistribution = executors[OURS].planned(layouts[0], layouts[1], 4)
    # the groups of one are those of the other: both make the same plan
    executors["groups"].groups.prepare(executors["groups"].planned(layouts[0], layouts[1], 4))
    runs = peers_of(mesh, local, specs, executors)
    right: dict[str, bool] = {}
    for name, run in runs.items():
        agreed = torch.tensor(int(torch.equal(run(), want)))
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        right[name] = bool(agreed)
    names = [name for name in runs if right[name]]
    seconds = torch.zeros(len(names), repeats, dtype=torch.float64)
    for repeat in range(repeats):
        for place in range(len(names)):
            which = (place + repeat) % len(names)
            dist.barrier()
            start = time.perf_counter()
            runs[names[which]]()
            seconds[which, repeat] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    certificate = redistribution.certificate
    return {
        "problem": problem,
        "title": title(problem),
        "seconds": {name: float(seconds[place].median()) for place, name in enumerate(names)},
        "wrong": [name for name in runs if not right[name]],
        "kind": certificate.candidate.value,
        "steps": [step.kind.value for step in redistribution.steps],
        "predicted": certificate.seconds,
        "predicted_messages": executors["messages"].planned(layouts[0], layouts[1], 4).certificate.seconds,
        "received": certificate.received,
        "received_bound": certificate.received_bound,
    }


def rank_main(rank: int, arguments: argparse.Namespace, store: str) -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks, timeout=limit)
    from sennit.collective.runtime.shm_posts import HostMemory
    from sennit.reshard.calibrate_torch import calibrate
    from sennit.reshard.execute_torch import Executor
    from sennit.reshard.groups_torch import Transport

    timing, by_messages = calibrate(shared=HostMemory), calibrate()
    executors = {
        OURS: Executor(timing=timing, staging=arguments.staging, shared=HostMemory),
        "messages": Executor(timing=by_messages, staging=arguments.staging, transport=Transport.POINT_TO_POINT),
        "groups": Executor(timing=by_messages, transport=Transport.GROUPS),
        "cheaper": Executor(timing=by_messages, staging=arguments.staging),
    }
    executors["cheaper"].groups.known = executors["groups"].groups.known
    assert executors[OURS].shared.reaches(tuple(range(arguments.ranks)), executors[OURS].wire), "no shared memory"
    meshes: dict[tuple[int, ...], Any] = {}
    elements = int(arguments.mebibytes * 2**20) // 4
    found = []
    began = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.problems):
        stop = torch.tensor(int(time.monotonic() - began > arguments.seconds))
        dist.broadcast(stop, 0)
        if stop:
            break
        found.append(measure(random_problem(seed, arguments.ranks, elements), meshes, executors, arguments.repeats))
        if rank == 0:
            print(line_of(found[-1]), flush=True)
    if rank == 0:
        summary = summarise(found)
        costs = {"shared memory": costs_of(timing), "messages": costs_of(by_messages)}
        print(f"\ncalibrated: {json.dumps(costs)}")
        print_summary(summary, arguments)
        if arguments.json:
            text = json.dumps(
                {"arguments": vars(arguments), "timing": costs, "summary": summary, "problems": found}, indent=1
            )
            Path(arguments.json).write_text(text, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def costs_of(timing: Any) -> dict[str, Any]:
    """The figures of a `LinkCost` or a `SharedCost`, in microseconds, nanoseconds and GB/s; of collectives those
    through a group, then those by messages.
    """
    found: dict[str, Any] = {"alpha_us": timing.alpha * 1e6, "gamma_GBps": 1e-9 / timing.gamma}
    if hasattr(timing, "delta"):
        return {**found, "delta_ns": timing.delta * 1e9}
    found["beta_GBps"] = 1e-9 / timing.beta
    for cost in timing.collectives:
        ways = ((cost.group_alpha, cost.group_beta), (cost.messages_alpha, cost.messages_beta))
        found[cost.kind.value] = [[round(alpha * 1e6, 1), round(1e-9 / beta, 3)] for alpha, beta in ways]
    return found


# ---- reporting -------------------------------------------------------------------------------------------------------


def line_of(result: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {seconds * 1e3:7.2f}" for name, seconds in result["seconds"].items())
    wrong = f"  WRONG: {', '.join(result['wrong'])}" if result["wrong"] else ""
    return f"{result['problem']['seed']:4d} {result['title']:44s} {result['kind']:12s} ms: {times}{wrong}"


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    timed = [result for result in found if OURS in result["seconds"]]
    peers: dict[str, Any] = {}
    for name in sorted({name for result in timed for name in result["seconds"]} - {OURS}):
        ratios = {
            result["title"]: result["seconds"][name] / result["seconds"][OURS]
            for result in timed
            if name in result["seconds"]
        }
        peers[name] = {
            "problems": len(ratios),
            "geo": math.exp(statistics.fmean(map(math.log, ratios.values()))),
            "best": max(ratios.values()),
            "worst": min(ratios.values()),
            "lost": {key: ratio for key, ratio in sorted(ratios.items(), key=lambda pair: pair[1]) if ratio < 0.95},
            "wrong": [result["title"] for result in found if name in result["wrong"]],
        }
    moving = [result for result in timed if result["received_bound"]]
    return {
        "peers": peers,
        "problems": len(found),
        "wrong": [result["title"] for result in found if OURS in result["wrong"]],
        "prediction": rank_correlation([(r["predicted"], r["seconds"][OURS]) for r in timed]),
        "prediction_messages": rank_correlation([(r["predicted_messages"], r["seconds"]["messages"]) for r in timed]),
        "received_over_minimum": math.exp(
            statistics.fmean(math.log(r["received"] / r["received_bound"]) for r in moving)
        )
        if moving
        else 1.0,
    }


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [(order.index(v) + len(order) - 1 - order[::-1].index(v)) / 2 for v in values]

    left, right = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    try:
        return statistics.correlation(left, right)
    except statistics.StatisticsError:
        return float("nan")


def print_summary(summary: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"\n{arguments.ranks} gloo ranks, {summary['problems']} problems of about {arguments.mebibytes} MiB, float32")
    print("time of the peer over sennit's: above 1 sennit is faster\n")
    print(
        f"{'peer':10s} {'geo':>7s} {'best':>7s} {'worst':>7s}  {'target geo / best / worst':28s} {'lost':>5s} {'wrong':>6s}"
    )
    for name, peer in summary["peers"].items():
        target = TARGETS.get(name)
        wanted = f">= {target['geo']:g} / {target['best']:g} / {target['worst']:g}" if target else "-"
        print(
            f"{name:10s} {peer['geo']:7.2f} {peer['best']:7.2f} {peer['worst']:7.2f}  {wanted:28s} "
            f"{len(peer['lost']):5d} {len(peer['wrong']):6d}"
        )
    print(f"\nsennit wrong: {len(summary['wrong'])} (target 0)")
    print(f"predicted against measured time, rank correlation: {summary['prediction']:.2f} (target 0.9)")
    print(f"the same for messages: {summary['prediction_messages']:.2f}")
    print(f"received over the minimum, geo: {summary['received_over_minimum']:.3f}")
    for name in ("stock", "patched", "min-cost", "messages", "groups"):
        peer = summary["peers"].get(name)
        if peer and (peer["lost"] or peer["wrong"]):
            print(f"\nlost to {name} (ratio below 0.95):")
            for key, ratio in peer["lost"].items():
                print(f"  {ratio:5.2f}  {key}")
            for key in peer["wrong"]:
                print(f"  {name} is wrong on {key}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Redistribution on gloo: sennit against DTensor, in one process group."
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--mebibytes", type=float, default=16.0, help="size of the array")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no problem after this long")
    parser.add_argument("--staging", type=int, default=8 << 20, help="bytes that sennit may stage")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (arguments, str(Path(folder) / "store")), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
