"""Builds of the core side by side, their calls made in a loop of C: what a change of `shm_core.c` is worth.

    python benchmarks/collective/core_loop.py [--ranks 4] [--sizes 1K 8K] [--collectives all_gather ...] [--rounds 9] [--builds NAME=SO_OR_FOLDER ...]

A build is a compiled core, or a folder with its sources, which is compiled as setup.py does. `own` is the one of this
tree. All builds run the same plans of one group, on the same arrays, in turns, so they must agree on what lies in
shared memory. Microseconds of a call, median of the rounds, of the slowest rank; each rank has its share of the cores.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from shm_variants import placed, run_ranks, scale

from sennit.collective.runtime.shm_abi import load_core
from sennit.collective.runtime.shm_group import ShmGroup

HERE = Path(__file__).resolve().parent
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
FLAGS = ["-O3", "-std=gnu11", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]


def compiled(source: Path, folder: Path, name: str) -> str:
    found = folder / f"{name}.so"
    subprocess.run(["cc", *FLAGS, "-o", str(found), str(source)], check=True)
    return str(found)


def rank_main(
    rank: int,
    size: int,
    pipe: Connection[object, object],
    options: argparse.Namespace,
    loop: str,
    builds: dict[str, str],
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // size)
    first = rank * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])

    def exchange(told: bytes) -> list[bytes]:
        pipe.send(told)
        gathered: list[bytes] = pipe.recv()  # type: ignore[assignment]
        return gathered

    own = load_core()
    assert own is not None
    cores_of = {"own": own, **{name: ctypes.CDLL(path) for name, path in builds.items()}}
    starts = {
        name: tuple(ctypes.cast(entry, ctypes.c_void_p) for entry in (core.sennit_start, core.sennit_run))
        for name, core in cores_of.items()
    }
    run = ctypes.CDLL(loop).calls_in_a_loop
    run.restype = ctypes.c_double
    run.argtypes = [*[ctypes.c_void_p] * 6, ctypes.c_int32, ctypes.c_int32]
    with ExitStack() as stack:
        group = stack.enter_context(ShmGroup.create(rank, size, exchange, timeout=60))
        for name in options.collectives:
            for text in options.sizes:
                whole, part = scale(text) // 4, scale(text) // 4 // size
                source = placed(part if name == "all_gather" else whole, 16)
                target = source
                if name not in ("all_reduce", "broadcast"):
                    target = placed(part if name == "reduce_scatter" else whole, 16)
                group.forget_plans()
                root = (0,) if name == "broadcast" else ()
                getattr(group, name)(source, *root, *([] if target is source else [target]))
                (plan,) = group._ready.values()
                count = max(3, min(400, (16 << 20) // scale(text)))
                times: dict[str, list[float]] = {build: [] for build in starts}
                for _ in range(options.rounds):
                    for build, start in starts.items():
                        words = *start, group.address, plan.address, source.ctypes.data, target.ctypes.data, plan.staged
                        run(*words, 1)
                        group.barrier()
                        times[build].append(run(*words, count))
                mine = " ".join(str(statistics.median(found)) for found in times.values())
                everyone = [[float(word) for word in told.split()] for told in exchange(mine.encode())]
                if rank == 0:
                    slowest = [max(column) for column in zip(*everyone, strict=True)]
                    cells = "".join(f"  {build:>10} {value:9.2f}" for build, value in zip(times, slowest, strict=True))
                    print(f"{name:15}{size:3}{text:>6}{cells}", flush=True)
    pipe.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Calls of the core in a loop of C.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", nargs="+", default=["1K", "8K"])
    parser.add_argument("--collectives", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--builds", nargs="+", default=[], help="NAME=a compiled core, or a folder with its sources")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sennit-core-loop-") as name:
        folder = Path(name)
        loop = compiled(HERE / "core_loop.c", folder, "loop")
        given = dict(text.split("=", 1) for text in options.builds)
        builds = {
            label: compiled(Path(path) / "shm_core.c", folder, label) if Path(path).is_dir() else path
            for label, path in given.items()
        }
        return run_ranks(rank_main, options.ranks, (options, loop, builds))


if __name__ == "__main__":
    sys.exit(main())
