"""What a small collective call costs in Python, and where: calls of 1 KiB between two ranks of this machine, in
microseconds, least of several batches.

    python benchmarks/collective/call_overhead.py [--ranks 2] [--json F]

| column | a call |
|---|---|
| torch | through torch.distributed, in a group whose backend returns at once: what no backend can go under |
| sennit | through torch.distributed, as it comes |
| in Python | the same without `shm_call.c`: the short way in Python (`express_torch.py`) |
| calls | `sennit.backend.calls`: tensors, without torch.distributed |
| numpy | `ShmGroup` on numpy arrays |
| in Python | the same without `shm_call.c` |
| core | `sennit_start` by ctypes, with addresses at hand |
| gloo | through torch.distributed, on gloo |

Below: an all-reduce in a group of one rank, where nothing is moved, and which goes the long way; and an asynchronous
one with its wait. Then torch's part of an all-reduce by the size of its tensor: from the end of one call of the backend
to the beginning of the next, medians. It does the same each time, but large tensors have pushed its code and data out
of the caches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import sennit.backend
from sennit.cluster.ranks_torch import GlooRanks

BATCHES, CALLS = 15, 400
BETWEEN = (1 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20)  # bytes
ELEMENTS = 256  # of the larger array of a call
COLUMNS = ("torch", "sennit", "in Python", "calls", "numpy", "in Python ", "core", "gloo")
METHODS = ("allreduce", "broadcast", "_allgather_base", "_reduce_scatter_base", "alltoall_base")
METHODS_OF_2_13 = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")

Calls = dict[str, Callable[[], object]]


def least(call: Callable[[], object]) -> float:
    """Microseconds of a call."""
    seconds = []
    for _ in range(3):
        call()  # the second and the third go shorter ways
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds.append((time.perf_counter() - start) / CALLS)
    return min(seconds) * 1e6


def through_torch(group: Any, size: int) -> Calls:
    whole, other, part = torch.ones(ELEMENTS), torch.ones(ELEMENTS), torch.ones(ELEMENTS // size)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first names are those of 2.13,
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # where the others warn each time
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
    }


def plain(group: Any, size: int) -> Calls:
    whole, other, part = torch.ones(ELEMENTS), torch.ones(ELEMENTS), torch.ones(ELEMENTS // size)
    calls = sennit.backend.calls(group)
    return {
        "all_reduce": lambda: calls.all_reduce(whole),
        "all_gather": lambda: calls.all_gather(whole, part),
        "reduce_scatter": lambda: calls.reduce_scatter(part, whole),
        "all_to_all": lambda: calls.all_to_all(other, whole),
        "broadcast": lambda: calls.broadcast(whole, 0),
    }


def from_numpy(shm: Any, size: int) -> Calls:
    whole, other, part = (np.ones(n, np.float32) for n in (ELEMENTS, ELEMENTS, ELEMENTS // size))
    return {
        "all_reduce": lambda: shm.all_reduce(whole),
        "all_gather": lambda: shm.all_gather(part, whole),
        "reduce_scatter": lambda: shm.reduce_scatter(whole, part),
        "all_to_all": lambda: shm.all_to_all(whole, other),
        "broadcast": lambda: shm.broadcast(whole, 0),
    }


def core_alone(shm: Any) -> Calls:
    """Of the plans that the calls from numpy have left."""
    whole, other = np.ones(ELEMENTS, np.float32), np.ones(ELEMENTS, np.float32)

    def call_of(name: str, plan: Any) -> Callable[[], object]:
        start, kept = shm.machine.library.sennit_start, (whole, whole if name in ("all_reduce", "broadcast") else other)
        words = shm.address, plan.address, *(array.ctypes.data for array in kept), plan.staged
        return lambda: (start(*words), kept)  # the arrays live as long as the call

    return {name: call_of(name, plan) for (name, *_), plan in shm._ready.items()}


def measure(rank: int, size: int) -> dict[str, list[float]]:
    """By collective: a time for each column."""
    warnings.simplefilter("ignore", FutureWarning)
    sennit.backend.register()
    torch.set_num_threads(1)
    group: Any = dist.new_group(list(range(size)), backend="sennit")
    gloo = dist.new_group(list(range(size)), backend="gloo")
    shm = group._communicator.group
    found: dict[str, dict[str, float]] = {}
    found["sennit"] = {name: least(call) for name, call in through_torch(group, size).items()}
    found["calls"] = {name: least(call) for name, call in plain(group, size).items()}
    found["numpy"] = {name: least(call) for name, call in from_numpy(shm, size).items()}
    found["core"] = {name: least(call) for name, call in core_alone(shm).items() if name in found["numpy"]}
    own = {name: group.__dict__.pop(name) for name in (*METHODS, *METHODS_OF_2_13) if name in group.__dict__}
    short, shm._shortcut = shm._shortcut, None
    found["in Python"] = {name: least(call) for name, call in through_torch(group, size).items()}
    found["in Python "] = {name: least(call) for name, call in from_numpy(shm, size).items()}
    group.__dict__.update(own)
    shm._shortcut = short
    found["gloo"] = {name: least(call) for name, call in through_torch(gloo, size).items()}
    for name in (*METHODS, *METHODS_OF_2_13):
        setattr(group, name, lambda *_: None)
    found["torch"] = {name: least(call) for name, call in through_torch(group, size).items()}
    return {name: [found[column][name] for column in COLUMNS] for name in found["torch"]}


def between(rank: int, size: int) -> dict[int, float]:
    """By bytes: microseconds between calls of the backend."""
    sennit.backend.register()
    torch.set_num_threads(1)
    group: Any = dist.new_group(list(range(size)), backend="sennit")
    found, now = dict[int, float](), time.perf_counter_ns
    for nbytes in BETWEEN:
        tensor, marks = torch.ones(nbytes // 4), list[tuple[int, int]]()
        for _ in range(4):
            dist.all_reduce(tensor, group=group)
        call = group.allreduce

        def timed(tensors: Any, opts: Any, call: Any = call, marks: list[tuple[int, int]] = marks) -> Any:
            begin = now()
            answer = call(tensors, opts)
            marks.append((begin, now()))
            return answer

        group.allreduce = timed
        for _ in range(max(20, min(200, (64 << 20) // nbytes))):
            dist.all_reduce(tensor, group=group)
        group.allreduce = call
        found[nbytes] = median((after[0] - before[1]) / 1e3 for before, after in pairwise(marks))
    return found


def alone() -> dict[str, float]:
    """In a group of one rank."""
    sennit.backend.register()
    torch.set_num_threads(1)
    dist.init_process_group("sennit", store=dist.HashStore(), rank=0, world_size=1)
    x, found = torch.ones(4), dict[str, float]()
    for name in ("sennit", "gloo"):
        group = dist.new_group(backend=name)
        found[f"{name}, one rank"] = least(lambda group=group: dist.all_reduce(x, group=group))  # type: ignore[misc]
        found[f"{name}, one rank, asynchronous"] = least(
            lambda group=group: dist.all_reduce(x, group=group, async_op=True).wait()  # type: ignore[misc]
        )
    dist.destroy_process_group()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="What a small collective call costs in Python.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with GlooRanks(options.ranks, preload=("sennit.collective.runtime.group_torch",)) as ranks:
        table = ranks.call(measure, options.ranks)[0]
        cold = ranks.call(between, options.ranks)[0]
    print(f"{4 * ELEMENTS} bytes, {options.ranks} ranks, torch {torch.__version__}: microseconds")
    print(f"{'':16}" + "".join(f"{column:>12}" for column in COLUMNS))
    for name, times in table.items():
        print(f"{name:16}" + "".join(f"{value:12.2f}" for value in times))
    single = alone()
    for name, value in single.items():
        print(f"{name:36} {value:8.2f}")
    for nbytes, value in cold.items():
        print(f"between calls of {nbytes >> 10:6d} KiB           {value:8.2f}")
    if options.json is not None:
        said = {"columns": COLUMNS, "table": table, "between": cold, **single}
        options.json.write_text(json.dumps(said, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
