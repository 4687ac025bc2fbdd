"""Why the same all-reduce takes longer in one group than in the next: many short groups, one after another, with what
may decide it beside each.

    python benchmarks/collective/group_speeds.py [--ranks 8] [--seconds 40] [--json F]

All groups live in the same processes, one at a time. Of each: on which cores its ranks are (`even`: 0, 2, ...; `odd`;
`first`: 0 to p-1; `share`: two each, the kernel chooses), whether its arrays begin at a line, and then, in the same
tenth of a second,

| column | is |
|---|---|
| 512K, 4M | microseconds of an all-reduce, the slowest rank |
| clock | nanoseconds of 1000 additions that wait for each other, the slowest and the fastest rank: the frequency of the cores |
| cache | GB/s of a copy of 128 KiB that stays in the cache of a core, the slowest and the fastest rank |
| memory | GB/s of a copy of 8 MiB, all ranks at once, the slowest and the fastest |
| colours | pages of a rank's staging of the most frequent colour of the second-level cache (2 MiB, 16 ways), the worst rank, over the mean; by /proc/self/pagemap, for root |
| nodes | from and to which gibibyte of physical memory the pages of all ranks' staging go |

First come the latencies between all pairs of cores, which show threads of one core, and parts of a chip.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sennit.collective.runtime.shm_group import ShmGroup

PLACES = ("share", "even", "odd", "first")
PROGRAM = r"""
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }
double clock_of(void)
{
    double begin = now();
    uint64_t x = (uint64_t)begin;
    for (int k = 0; k < 100000; k++)
        __asm__ volatile("add $1, %0" : "+r"(x));
    return (now() - begin) / 100;
}
double copies(char *to, char *from, int64_t bytes, int times)
{
    double begin = now();
    for (int k = 0; k < times; k++) {
        memcpy(to, from, bytes);
        __asm__ volatile("" ::: "memory");
    }
    return bytes * (double)times / (now() - begin);
}
void answer(_Atomic uint64_t *word, int times)
{
    for (int k = 0; k < times; k++) {
        while (atomic_load_explicit(word, memory_order_acquire) != 2 * k + 1)
            ;
        atomic_store_explicit(word, 2 * k + 2, memory_order_release);
    }
}
double ask(_Atomic uint64_t *word, int times)
{
    double begin = now();
    for (int k = 0; k < times; k++) {
        atomic_store_explicit(word, 2 * k + 1, memory_order_release);
        while (atomic_load_explicit(word, memory_order_acquire) != 2 * k + 2)
            ;
    }
    return (now() - begin) / times;
}
"""


def load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    for name in ("clock_of", "copies", "ask"):
        getattr(library, name).restype = ctypes.c_double
    library.copies.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.answer.argtypes = library.ask.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return library


def cores_of(place: str, rank: int, ranks: int, cores: list[int]) -> set[int]:
    if place == "first":
        return {cores[rank % len(cores)]}
    share = max(1, len(cores) // ranks)
    own = cores[rank * share % len(cores) :][:share]
    return {own[0]} if place == "even" else {own[-1]} if place == "odd" else set(own)


def frames(address: int, nbytes: int) -> list[int]:
    """The numbers of the physical pages; empty where they are not told."""
    try:
        with open("/proc/self/pagemap", "rb") as table:
            table.seek(address // 4096 * 8)
            words = struct.unpack(f"<{nbytes // 4096}Q", table.read(nbytes // 4096 * 8))
    except OSError:
        return []
    return [word & (1 << 55) - 1 for word in words if word >> 63 and word & (1 << 55) - 1]


def array_at(elements: int, aligned: bool) -> np.ndarray:
    space = np.ones(elements + 64, np.float32)
    first = (-space.ctypes.data % 64) // 4 + (0 if aligned else 4)
    return space[first : first + elements]


def rank_main(rank: int, ranks: int, seconds: float, library: str, pipe: Connection) -> None:
    own, cores = load(library), sorted(os.sched_getaffinity(0))

    def exchange(told: bytes) -> list[bytes]:
        pipe.send(told)
        return pipe.recv()  # type: ignore[no-any-return]

    end = time.monotonic() + seconds
    source, target = (np.ones(8 << 20, np.uint8) for _ in range(2))
    turn = 0
    for turn in range(1_000_000):
        for place, aligned in product(PLACES, (False, True)):
            if exchange(b"1" if time.monotonic() < end else b"")[0] == b"":
                pipe.close()
                return
            os.sched_setaffinity(0, cores_of(place, rank, ranks, cores))
            found: dict[str, object] = {"turn": turn, "place": place, "aligned": aligned}
            with ShmGroup.create(rank, ranks, exchange, timeout=60) as group:
                for text, nbytes, often in (("512K", 512 << 10, 40), ("4M", 4 << 20, 6)):
                    array, times = array_at(nbytes // 4, aligned), []
                    for _ in range(3):
                        group.all_reduce(array)
                        group.barrier()
                        begin = time.perf_counter()
                        for _ in range(often):
                            group.all_reduce(array)
                        times.append((time.perf_counter() - begin) / often * 1e6)
                    found[text] = statistics.median(times)
                    array[:] = 1
                group.barrier()
                found["clock"] = own.clock_of()
                found["core"] = next(iter(os.sched_getaffinity(0))) if place != "share" else _core_now()
                found["cache"] = own.copies(target.ctypes.data, source.ctypes.data, 128 << 10, 50)
                group.barrier()
                found["memory"] = own.copies(target.ctypes.data, source.ctypes.data, 8 << 20, 2)
                layout = group._segment.layout
                first = group._segment.address + layout.staging + rank * layout.staging_step
                pages = [f for slot in range(4) for f in frames(first + slot * layout.capacity.slot, 288 << 10)]
                colours = [0] * 32
                for frame in pages:
                    colours[frame % 32] += 1
                found["colours"] = max(colours) * 32 / len(pages) if pages else 0.0
                found["nodes"] = [min(pages) >> 18, max(pages) >> 18] if pages else []
            exchange(json.dumps(found).encode())


def _core_now() -> int:
    return int(ctypes.CDLL(None).sched_getcpu())


def latencies(library: str) -> list[list[float]]:
    """Nanoseconds of a way there and back, by core and core."""
    own, cores = load(library), sorted(os.sched_getaffinity(0))
    import mmap

    memory = mmap.mmap(-1, 4096)
    word = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    found = [[0.0] * len(cores) for _ in cores]
    for one, two in product(range(len(cores)), repeat=2):
        if one >= two:
            continue
        times = []
        for _ in range(2):
            memory[:65] = bytes(65)
            if (child := os.fork()) == 0:
                os.sched_setaffinity(0, {cores[two]})
                memory[64] = 1
                own.answer(word, 2000)
                os._exit(0)
            os.sched_setaffinity(0, {cores[one]})
            while not memory[64]:
                pass
            times.append(own.ask(word, 2000))
            os.waitpid(child, 0)
        found[one][two] = found[two][one] = min(times)
    os.sched_setaffinity(0, cores)
    return found


def row_of(told: list[dict[str, object]]) -> dict[str, object]:
    """A group, of what its ranks said."""
    row = {key: told[0][key] for key in ("turn", "place", "aligned")}
    for key in ("512K", "4M", "colours"):
        row[key] = max(said[key] for said in told)  # type: ignore[type-var]
    for key in ("clock", "cache", "memory"):
        row[key] = [f(said[key] for said in told) for f in (min, max)]  # type: ignore[type-var]
    row["cores"] = [said["core"] for said in told]
    places = [place for said in told for place in said["nodes"]]  # type: ignore[attr-defined]
    row["nodes"] = [min(places), max(places)] if places else []
    return row


def shown(row: dict[str, object]) -> str:
    pairs = "".join(f"  {key} {row[key][0]:6.1f}-{row[key][1]:6.1f}" for key in ("clock", "cache", "memory"))  # type: ignore[index]
    return (
        f"{row['time']:6.2f} {row['place']:6} {'line' if row['aligned'] else '  16'}  512K {row['512K']:7.1f}  4M {row['4M']:8.1f}"
        f"{pairs}  colours {row['colours']:4.2f}  nodes {row['nodes']}  cores {row['cores']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Many short groups, and what may decide their speed.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sennit-speeds-") as folder:
        code, library = Path(folder) / "speeds.c", str(Path(folder) / "speeds.so")
        code.write_text(PROGRAM)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, code], check=True)
        matrix = latencies(library)
        print("latencies, there and back, ns:")
        for line in matrix:
            print(" ".join(f"{value:5.0f}" for value in line), flush=True)
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for rank in range(options.ranks):
            near, far = context.Pipe()
            words = rank, options.ranks, options.seconds, library, far
            processes.append(context.Process(target=rank_main, args=words, daemon=True))
            processes[-1].start()
            far.close()
            pipes.append(near)
        rows, begin = [], time.monotonic()
        try:
            while True:
                told = [pipe.recv() for pipe in pipes]
                if told[0].startswith(b'{"turn"'):
                    rows.append(row_of([json.loads(said) for said in told]) | {"time": time.monotonic() - begin})
                    print(shown(rows[-1]), flush=True)
                for pipe in pipes:
                    pipe.send(told)
        except (EOFError, BrokenPipeError):
            pass
        for process in processes:
            process.join(10)
    if options.json is not None:
        options.json.write_text(json.dumps({"latencies": matrix, "groups": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
