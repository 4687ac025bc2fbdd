"""Times the shared-memory runtime against gloo and against memcpy, and counts what starting and stopping groups leaves
behind.

    python benchmarks/collective/shm_core.py                      2, 4 and 8 ranks, all_reduce of 1 KiB to 64 MiB
    python benchmarks/collective/shm_core.py --collective all_gather --ranks 4
    python benchmarks/collective/shm_core.py --limits --ranks 4   each algorithm by itself: where the table should change over
    python benchmarks/collective/shm_core.py --cycles 1000        start and stop groups

A figure is the least of several batches, of the slowest rank in each; batches of the systems take turns, so that a busy
machine treats them alike. "cpu" is the processor time of all ranks together, the least of the batches: what the
collective costs, where wall time is mostly that of others. "memcpy" is the time of one rank alone to copy the same
bytes once, private memory to private memory: no collective can be faster. The first lines say on what it ran, and how
busy that was: with fewer cores than ranks, times are those of the scheduler too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.shm_abi import Reduction
from sennit.collective.runtime.shm_algorithms import build
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.ir.dtype import DType

Call = Callable[[], object]
SIZES = tuple(1 << shift for shift in range(10, 27, 2))


def exchange(data: bytes) -> list[bytes]:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, data)
    return [said for said in gathered if isinstance(said, bytes)]


def start(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )


def calls(group: ShmGroup, collective: str, size: int) -> dict[str, Call]:
    """The same collective by each system; `size` is the bytes of the largest buffer of a rank."""
    n, ranks = size // 4, group.size
    part = max(1, n // ranks)
    whole, piece, other = (
        np.ones(part * ranks, np.float32),
        np.ones(part, np.float32),
        np.ones(part * ranks, np.float32),
    )
    tw, tp, to = (torch.ones_like(torch.from_numpy(array)) for array in (whole, piece, other))
    match collective:
        case "all_reduce":
            flat, tensor = np.ones(n, np.float32), torch.ones(n)
            return {
                "sennit": lambda: group.all_reduce(flat, Reduction.MAX),  # MAX: the values stay as they are
                "gloo": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX),
            }
        case "all_gather":
            return {
                "sennit": lambda: group.all_gather(piece, whole),
                "gloo": lambda: dist.all_gather_into_tensor(tw, tp),
            }
        case "reduce_scatter":
            return {
                "sennit": lambda: group.reduce_scatter(whole, piece, Reduction.MAX),
                "gloo": lambda: dist.reduce_scatter_tensor(tp, tw, dist.ReduceOp.MAX),
            }
        case "all_to_all":
            return {
                "sennit": lambda: group.all_to_all(whole, other),
                "gloo": lambda: dist.all_to_all_single(to, tw),
            }
        case "broadcast":
            return {
                "sennit": lambda: group.broadcast(whole, 0),
                "gloo": lambda: dist.broadcast(tw, 0),
            }
    raise SystemExit(f"no {collective}: use all_reduce, all_gather, reduce_scatter, all_to_all or broadcast")


def algorithms(group: ShmGroup, size: int) -> dict[str, Call]:
    n = size // 4
    flat = np.ones(n, np.float32)
    found: dict[str, Call] = {}
    for name in ("all_reduce direct", "all_reduce slices"):
        code = encode_pull(build(name, group.size))
        found[name] = lambda code=code: group.run(  # type: ignore[misc]
            code, flat.ctypes.data, flat.ctypes.data, n, DType.F32, Reduction.MAX
        )
    return found


@dataclass
class Timing:
    """Seconds of one call, the least of the batches: of the slowest rank, and of the processors of all."""

    wall: float = float("inf")
    cpu: float = float("inf")


def batches(group: ShmGroup, systems: dict[str, Call], seconds: float) -> dict[str, Timing]:
    """All ranks do as many calls in a batch."""
    best = {name: Timing() for name in systems}
    counts: dict[str, int] = {}
    for name, call in systems.items():
        call()
        begin = time.perf_counter()
        call()
        took = np.array([time.perf_counter() - begin], dtype=np.float64)
        group.all_reduce(took, Reduction.MAX)
        counts[name] = int(min(200, max(1, seconds / 10 / took[0])))
    for _ in range(10):
        for name, call in systems.items():
            group.barrier()
            begin, used = time.perf_counter(), time.process_time()
            for _ in range(counts[name]):
                call()
            wall = np.array([(time.perf_counter() - begin) / counts[name]])
            cpu = np.array([(time.process_time() - used) / counts[name]])
            group.all_reduce(wall, Reduction.MAX)
            group.all_reduce(cpu)
            best[name] = Timing(min(best[name].wall, float(wall[0])), min(best[name].cpu, float(cpu[0])))
    return best


def copy_time(size: int) -> float:
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(count := max(1, (1 << 22) // size)):
            np.copyto(target, source)
        best = min(best, (time.perf_counter() - begin) / count)
    return best


def work(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    start(rank, ranks, folder)
    with ShmGroup.create(rank, ranks, exchange, timeout=300) as group:
        if arguments.cycles:
            count_cycles(rank, ranks, arguments.cycles)
        for size in SIZES if not arguments.cycles else ():
            if not arguments.least <= size <= arguments.most:
                continue
            systems = algorithms(group, size) if arguments.limits else calls(group, arguments.collective, size)
            if arguments.alone:
                systems.pop("gloo", None)
            found = batches(group, systems, arguments.seconds)
            alone = np.array([copy_time(size) if rank == 0 else 0.0])
            group.all_reduce(alone)
            if rank == 0:
                row = "  ".join(f"{name} {t.wall * 1e6:9.1f} (cpu {t.cpu * 1e6:9.1f})" for name, t in found.items())
                rates = ""
                if "gloo" in found:
                    mine, theirs = found["sennit"], found["gloo"]
                    rates = f"gloo takes {theirs.wall / mine.wall:5.1f}x (cpu {theirs.cpu / mine.cpu:5.1f}x)"
                print(f"{ranks} ranks  {size:>9} B  us: {row}  memcpy {alone[0] * 1e6:8.1f}  {rates}", flush=True)
    dist.destroy_process_group()


def count_cycles(rank: int, ranks: int, count: int) -> None:
    """Groups that start, work and stop: what is open and named before and after."""

    def once() -> None:
        with ShmGroup.create(rank, ranks, exchange, timeout=60) as group:
            array = np.ones(256, np.float32)
            group.all_reduce(array)

    once()
    opened = len(os.listdir("/proc/self/fd"))
    begin = time.perf_counter()
    for _ in range(count):
        once()
    seconds = time.perf_counter() - begin
    left = [name for name in os.listdir("/dev/shm") if name.startswith("sennit")]
    if rank == 0:
        now = len(os.listdir("/proc/self/fd"))
        print(
            f"{ranks} ranks  {count} groups started and stopped, {seconds / count * 1e3:.2f} ms each; descriptors "
            f"{opened} before, {now} after; names in /dev/shm: {left}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--collective", default="all_reduce")
    parser.add_argument("--least", type=int, default=SIZES[0], help="bytes")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each system and size")
    parser.add_argument("--alone", action="store_true", help="without gloo")
    parser.add_argument("--limits", action="store_true", help="each all_reduce algorithm by itself")
    parser.add_argument("--cycles", type=int, default=0, help="start and stop so many groups instead")
    arguments = parser.parse_args()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f} before it began; torch {torch.__version__}; {arguments.collective}")
    for ranks in arguments.ranks:
        with TemporaryDirectory() as folder:
            processes.spawn(work, (ranks, folder, arguments), nprocs=ranks)
            assert not [p for p in Path("/dev/shm").iterdir() if p.name.startswith("sennit")]


if __name__ == "__main__":
    main()
