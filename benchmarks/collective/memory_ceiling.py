"""What the memory of this machine allows, beside what the runtime reaches: bounds of collectives between processes of
one host.

    python benchmarks/collective/memory_ceiling.py [--ranks 8 4] [--rounds 7] [--json F]

`memory_ceiling.c`, compiled here with `cc`, measures copies with all ranks at once, from their own memory and from the
caches of other cores, and an all-reduce written by hand for this one case. Then the core of the runtime runs the same
collectives (`ShmGroup` on numpy, f32, the all-reduce and the broadcast in place), in processes of its own. Each rank
runs on one core of its share.

**bound** is what must be moved, at the rates of these copies, one after another as one thread does them, without any
wait, and as if outputs were in a cache. Of n bytes of the larger array, by p ranks:

| | staged | added up | fetched | copied |
|---|---|---|---|---|
| all_reduce | n (p-1)/p | n | n (p-1)/p | |
| reduce_scatter | n (p-1)/p | n | | |
| all_gather | n / p | | n (p-1)/p | n / p |
| all_to_all, staged | n (p-1)/p | | n (p-1)/p | n / p |
| broadcast | | | n | |

or, of an all_to_all, n (p-1)/p pulled by the kernel and n / p copied, if that is less. **share** is the bound over the
time of the core; of the all-reduce the time by hand stands beside.
"""

from __future__ import annotations

import argparse
import json
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

SIZES = (64 << 10, 512 << 10, 4 << 20, 16 << 20)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
CASES = tuple((name, size) for name in COLLECTIVES for size in SIZES)


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
        for name, size in CASES:
            part, whole = np.zeros(size // 4 // ranks, np.float32), np.zeros(size // 4, np.float32)
            other = np.zeros(size // 4 if name == "all_to_all" else 0, np.float32)
            call = {
                "all_reduce": lambda whole=whole: group.all_reduce(whole),
                "reduce_scatter": lambda whole=whole, part=part: group.reduce_scatter(whole, part),
                "all_gather": lambda whole=whole, part=part: group.all_gather(part, whole),
                "all_to_all": lambda whole=whole, other=other: group.all_to_all(whole, other),
                "broadcast": lambda whole=whole: group.broadcast(whole, 0),
            }[name]
            calls = max(1, (4 << 20) // size)
            seconds = []
            for _ in range(rounds + 1):
                group.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    call()  # type: ignore[no-untyped-call]
                seconds.append((time.perf_counter() - begin) / calls)
            exchange(str(median(seconds[1:])).encode())
    pipe.close()


def bound_of(name: str, size: int, ranks: int, rate: dict[str, float]) -> float:
    """Microseconds."""
    others, own = size * (ranks - 1) / ranks, size / ranks
    moved = {
        "all_reduce": [("stage", others), ("add_up", size), ("fetch", others)],
        "reduce_scatter": [("stage", others), ("add_up", size)],
        "all_gather": [("stage", own), ("fetch", others), ("copy", own)],
        "all_to_all": [("stage", others), ("fetch", others), ("copy", own)],
        "broadcast": [("fetch", size)],
    }[name]
    found = sum(nbytes / rate[how] for how, nbytes in moved)
    if name == "all_to_all":
        found = min(found, others / rate["pull"] + own / rate["copy"])
    return found / 1e3


def by_core(ranks: int, rounds: int) -> dict[tuple[str, int], float]:
    """Microseconds by collective and bytes, of the slowest rank."""
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
    figures = answers[-len(CASES) :]  # what came before set up the group
    return {case: 1e6 * max(map(float, said)) for case, said in zip(CASES, figures, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="what was found, for reach.py")
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, load before {os.getloadavg()[0]:.1f}")
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="sennit-ceiling-") as folder:
        program = Path(folder) / "memory_ceiling"
        subprocess.run(["cc", "-O3", "-march=native", "-o", program, HERE / "memory_ceiling.c"], check=True)
        for ranks in options.ranks:
            hand, core = by_hand(program, ranks), by_core(ranks, options.rounds)
            meet = hand.pop(("meet", 0))
            rate = {what: size / time / 1e3 for (what, size), time in hand.items()}
            print(f"\n{ranks} ranks at once, GB/s of each:")
            print(f"   meet {meet:7.2f} us")
            for what in ("copy", "copy_past", "stage", "fetch", "add_up", "pull"):
                print(f"   {what:10} {rate[what]:7.1f}")
            print(f"{'':16}{'':12}{'bound us':>10}{'core':>10}{'share':>8}{'by hand':>10}")
            for name, size in CASES:
                bound, mine = bound_of(name, size, ranks, rate), core[name, size]
                record = {"ranks": ranks, "collective": name, "bytes": size, "meet": meet, "bound": bound, "core": mine}
                found.append(record | {"by hand": hand.get((name, size))})
                best = f"{hand[name, size]:10.1f}" if (name, size) in hand else ""
                print(f"{name:16}{size >> 10:8d} KiB{bound:10.1f}{mine:10.1f}{bound / mine:8.2f}{best}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
