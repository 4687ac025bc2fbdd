"""What the memory of this machine allows, beside what the runtime reaches: the bound of an all-reduce between processes of one host.

    python benchmarks/collective/memory_ceiling.py [--ranks 8 4] [--rounds 7]

`memory_ceiling.c`, compiled here with `cc`, measures copies alone and with all ranks at once, between the caches of cores, and an all-reduce written by hand for this one case. Then the
core of the runtime runs the same all-reduce (`ShmGroup` on numpy, in place, f32), in processes of its own. **share** is the time by hand over the time of the core: 1.00 would be an
interpreter, with its checks and its waits that sleep, that costs nothing.

An all-reduce of n bytes by slices moves, for each rank: n read and staged, n fetched from other cores and added up, n (p-1)/p fetched from other cores and written. **bound** is the sum of
these at the rates of `stage`, `add_up` and `fetch`, without any wait.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "src"))

SIZES = (64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20)


def by_hand(program: Path, ranks: int) -> dict[tuple[str, int], float]:
    """Microseconds by what and bytes."""
    done = subprocess.run([program, str(ranks)], capture_output=True, text=True, timeout=300, check=True)
    found: dict[tuple[str, int], float] = {}
    for line in done.stdout.splitlines():
        if line.startswith("#"):
            print("   " + line)
            continue
        what, size, microseconds = line.split()
        found[what, int(size)] = float(microseconds)
    return found


def rank_main(rank: int, ranks: int, rounds: int, pipe: Connection[object, object]) -> None:
    from sennit.collective.runtime.shm_group import ShmGroup

    def exchange(data: bytes) -> list[bytes]:
        pipe.send(data)
        return pipe.recv()  # type: ignore[return-value]

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank * max(1, len(cores) // ranks) % len(cores)]})
    with ShmGroup.create(rank, ranks, exchange, timeout=120) as group:
        for size in SIZES:
            array = np.zeros(size // 4, np.float32)
            calls = max(1, (4 << 20) // size)
            seconds = []
            for _ in range(rounds + 1):
                group.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    group.all_reduce(array)
                seconds.append((time.perf_counter() - begin) / calls)
            exchange(str(median(seconds[1:])).encode())
    pipe.close()


def by_core(ranks: int, rounds: int) -> dict[int, float]:
    """Microseconds by bytes, of the slowest rank."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(ranks):
        near, far = context.Pipe()
        processes.append(context.Process(target=rank_main, args=(rank, ranks, rounds, far), daemon=True))
        processes[-1].start()
        far.close()
        pipes.append(near)
    answers: list[list[bytes]] = []
    try:
        while True:
            answers.append([pipe.recv() for pipe in pipes])
            for pipe in pipes:
                pipe.send(answers[-1])
    except EOFError:
        pass
    for process in processes:
        process.join(10)
    figures = answers[-len(SIZES) :]  # what came before set up the group
    return {size: 1e6 * max(map(float, said)) for size, said in zip(SIZES, figures, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, load before {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="sennit-ceiling-") as folder:
        program = Path(folder) / "memory_ceiling"
        subprocess.run(["cc", "-O3", "-march=native", "-o", program, HERE / "memory_ceiling.c"], check=True)
        for ranks in options.ranks:
            hand, core = by_hand(program, ranks), by_core(ranks, options.rounds)
            rate = {what: size / time / 1e3 for (what, size), time in hand.items()}
            print(f"\n{ranks} ranks at once, GB/s of each:")
            for what in ("copy", "copy_past", "stage", "fetch", "add_up", "pull"):
                print(f"   {what:10} {rate[what]:7.1f}")
            print(f"{'all_reduce':>12} {'bound us':>10} {'by hand':>10} {'core':>10} {'share':>7} {'GB/s':>7}")
            for size in SIZES:
                fetched = size * (ranks - 1) / ranks
                bound = size / rate["stage"] / 1e3 + size / rate["add_up"] / 1e3 + fetched / rate["fetch"] / 1e3
                mine, best = core[size], hand["all_reduce", size]
                print(
                    f"{size >> 10:8d} KiB {bound:10.1f} {best:10.1f} {mine:10.1f} {best / mine:7.2f} {size / mine / 1e3:7.2f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
