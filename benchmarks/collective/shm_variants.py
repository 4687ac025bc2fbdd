"""The constants of `shm_plan.py`, measured: the same collective staged or direct, its output past the cache or through
it, with smaller or larger tiles.

    python benchmarks/collective/shm_variants.py [--ranks 8] [--sizes 512K 4M 16M] [--collectives all_gather ...] [--rounds 7] [--only-chosen | --sums] [--switches] [--pages huge] [--shared] [--written] [--rings 0 8192 ...] [--threads 1 2 4] [--apart 1000]

| variant | is |
|---|---|
| chosen | what the plan does by itself |
| staged, direct | through slots of shared memory, or read in the memory of the other process |
| past, cached | of `staged`: outputs are written past the cache, or through it |
| direct N, past | of sums: read in the memory of the other process N KiB of each rank at a time, and tiles of so many sums; outputs past the cache |
| shared | as chosen, with `--shared`: the input lies in memory of the group, `ShmGroup.allocate`, and is read there |
| 2 chosen, 2 staged | as chosen with so many threads a rank, and staged in as many strips, with `--threads` |
| whole | of a broadcast: the root's array staged by the root alone, where the plan has slices |
| tile N | of `staged`, as chosen, with at most N KiB of a slot |
| ring N | staged, in a group of its own, whose tiles go round in N KiB; `slots`: in slots; `past`: outputs are written past the cache |

With `--written` a call takes as long as it and filling the input do: lines that a peer has read must be taken from it
again, as in programs that compute what they send.

`--pages` says whether arrays lie in pages of 2 MiB or of 4 KiB; numpy's own have the first from 4 MiB on where the
kernel gives them to who asks. `--switches` adds how often a call gave its core away, of the rank that did so most:
asleep, and for others (voluntary and other switches of the kernel's count).

All variants are plans of one group, on the same arrays, in turns; each rank has its share of the cores. Microseconds of
a call, median of the rounds, of the slowest rank, the core called by ctypes.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sennit.collective.runtime import shm_plan
from sennit.collective.runtime.shm_abi import Inputs
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.collective.runtime.shm_plan import Plan
from sennit.collective.runtime.shm_segment import Capacity
from sennit.collective.runtime.shm_table import default_table

Made = tuple[ShmGroup, Plan]
MOVES = ("all_gather", "all_to_all", "broadcast")
SUMS = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce")
NEVER = 1 << 40
HUGE_PAGE = 2 << 20
TILES = (96, 192, 288, 384, 640, 1024)


def scale(text: str) -> int:
    return int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]


@contextmanager
def changed(**constants: object) -> Iterator[None]:
    before = {name: getattr(shm_plan, name) for name in constants}
    for name, value in constants.items():
        setattr(shm_plan, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(shm_plan, name, value)


def variants(
    group: ShmGroup,
    name: str,
    source: np.ndarray,
    target: np.ndarray,
    only_chosen: bool,
    direct: int | None = None,
    sums: bool = False,
    threads: list[int] | None = None,
) -> dict[str, Plan]:
    def made(direct_from: int | None, **constants: object) -> Plan:
        group.direct_from = direct_from
        group.forget_plans()
        with changed(**constants):
            getattr(group, name)(
                *((source, 0) if name in ROOTED else (source,)), *([] if target is source else [target])
            )
        (plan,) = group._ready.values()
        return plan

    found = {"chosen": made(direct)}
    if direct is not None:
        return found
    if threads:
        return found | in_strips(group, name, made, threads, only_chosen)
    if name == "broadcast":
        chosen, group.table = group.table, default_table(group.size, group.cores)
        found["whole"] = made(None)
        group.table = chosen
    if sums:
        found |= ways_of_sums(name, made)
    if only_chosen or sums:
        return found
    if name in MOVES and group.may_read:
        found["direct"] = made(0)
    if name in (*MOVES, "all_reduce"):
        for label, past in (("past", 1), ("cached", 0)):
            found[label] = with_outputs(made(NEVER), past)
    for kibibytes in TILES:
        used = kibibytes << 10
        found[f"tile {kibibytes}"] = made(
            NEVER, _SLOT_USED=used, _SLOT_OF={}, _SLOT_OF_TURNS=used, _SLOT_OF_NEAR_TURNS=used
        )
    group.direct_from = None
    group.forget_plans()
    return found


def with_outputs(plan: Plan, past: int) -> Plan:
    """Its output past the cache, or through it."""
    for strip in plan.strips:
        strip.large = strip.vast = past
    return plan


def in_strips(
    group: ShmGroup, name: str, made: Callable[..., Plan], threads: list[int], only_chosen: bool
) -> dict[str, Plan]:
    found: dict[str, Plan] = {}
    most = group.threads
    for count in threads:
        group.threads, group.strip_bytes = min(count, most), None
        found[f"{count} chosen"] = made(None)
        if only_chosen:
            continue
        group.strip_bytes = 1
        found[f"{count} staged"] = made(NEVER)
        if name in MOVES:
            for label, past in (("past", 1), ("cached", 0)):
                found[f"{count} {label}"] = with_outputs(made(NEVER), past)
        if name in ("all_to_all", "all_gather", "reduce_scatter") and group.may_read:
            found[f"{count} direct"] = made(0)
    group.threads, group.strip_bytes = most, None
    return found


def ways_of_sums(name: str, made: Callable[..., Plan]) -> dict[str, Plan]:
    found = {"staged": made(NEVER)}
    for kibibytes in (64, 128):
        plan = made(0, _PIECE=kibibytes << 10, _PIECES=1 << 20, _SUMS=kibibytes << 10)
        found[f"direct {kibibytes}"] = with_outputs(plan, 0)
    if name != "reduce_scatter":
        found["past"] = with_outputs(made(0), 1)
    return found


def staged_bits(plan: Plan) -> int:
    """Of a rank that has no output too."""
    return int(plan.touched[0] and plan.record.direct != Inputs.DIRECT) if plan.staged is None else plan.staged


def in_rings(groups: dict[str, ShmGroup], name: str, source: np.ndarray, target: np.ndarray) -> dict[str, Made]:
    found: dict[str, Made] = {}
    for label, group in groups.items():
        for past in (0, 1) if name in MOVES else (0,):
            group.direct_from = NEVER
            plan = with_outputs(variants(group, name, source, target, True, NEVER)["chosen"], past)
            found[f"{label} past" if past else label] = group, plan
    return found


def placed(elements: int, offset: int, pages: str = "numpy") -> np.ndarray:
    """An array that begins so many bytes after the beginning of a line; of a page of 2 MiB, where it lies in `huge` or
    `small` pages and not where numpy puts it.
    """
    if pages == "numpy":
        space = np.ones(elements + 32, np.float32)
        first = (offset - space.ctypes.data) % 64 // 4
        return space[first : first + elements]
    memory = mmap.mmap(-1, 4 * elements + 2 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
    space = np.frombuffer(memory, np.float32)
    first = (offset - space.ctypes.data) % HUGE_PAGE // 4
    space[first : first + elements] = 1.0
    return space[first : first + elements]


def counted() -> tuple[int, int]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw, used.ru_nivcsw


def rank_main(
    rank: int,
    size: int,
    pipe: Connection,
    sizes: list[str],
    names: list[str],
    rounds: int,
    only_chosen: bool,
    sums: bool,
    switches: bool,
    offset: int,
    pages: str,
    rings: list[int],
    shared: bool,
    written: bool,
    threads: list[int],
    apart: float,
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // size)
    first = rank * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])

    def exchange(told: bytes) -> list[bytes]:
        pipe.send(told)
        gathered: list[bytes] = pipe.recv()
        return gathered

    with ExitStack() as stack:

        def made(capacity: Capacity | None = None) -> ShmGroup:
            most = max(threads, default=None)
            created = ShmGroup.create(rank, size, exchange, timeout=60, capacity=capacity, threads=most)
            return stack.enter_context(created)

        group = made()
        groups = {f"ring {n}" if n else "slots": made(Capacity(wide=n << 10)) for n in rings}
        for label, each in groups.items():
            each.ring_from = NEVER if label == "slots" else 0
        start = group.machine.library.sennit_start  # type: ignore[attr-defined]
        for name in names:
            for text in sizes:
                part = scale(text) // 4 // size
                whole = part * size
                source = placed(part if name == "all_gather" else whole, offset, pages)
                target = source
                if name not in ("all_reduce", "broadcast", "reduce"):
                    target = placed(part if name == "reduce_scatter" else whole, offset, pages)
                if groups:
                    plans = in_rings(groups, name, source, target)
                else:
                    found = variants(group, name, source, target, only_chosen, None, sums and name in SUMS, threads)
                    plans = {label: (group, plan) for label, plan in found.items()}
                places = dict.fromkeys(plans, (source, target))
                if shared:
                    inside = group.allocate(source.nbytes).view(np.float32)
                    inside[...] = source
                    group.shared_from = 0
                    plans["shared"] = group, variants(group, name, source, target, True)["chosen"]
                    places["shared"] = inside, inside if target is source else target
                    group.shared_from = None
                times: dict[str, list[float]] = {label: [] for label in plans}
                often = max(3, min(100, (16 << 20) // scale(text)))
                begin, before = 0.0, counted()
                for _ in range(rounds):
                    for label, (where, plan) in plans.items():
                        given, taken = places[label]
                        at = 0 if name == "reduce" and rank else taken.ctypes.data
                        words = where.address, plan.address, given.ctypes.data, at, staged_bits(plan)
                        between = 0.0
                        for turn in range(often + 1):
                            if turn == 1:  # the first one fills the caches
                                group.barrier()
                                begin = time.perf_counter()
                            if apart:
                                ended = time.perf_counter()
                                while time.perf_counter() - ended < apart * 1e-6:
                                    pass
                                between += time.perf_counter() - ended if turn else 0.0
                            if written:
                                given.fill(turn)
                            if status := start(*words):
                                where.finish_plan(plan, status)
                        times[label].append((time.perf_counter() - begin - between) / often * 1e6)
                made = rounds * (often + 1) * len(plans)
                gave = [(after - sooner) / made for after, sooner in zip(counted(), before, strict=True)]
                mine = [statistics.median(times[label]) for label in plans] + gave
                everyone = [
                    [float(word) for word in told.split()] for told in exchange(" ".join(map(str, mine)).encode())
                ]
                if rank == 0:
                    slowest = [max(column) for column in zip(*everyone, strict=True)]
                    labels = [*plans, "asleep", "for others"]
                    shown = list(zip(labels, slowest, strict=True))[: None if switches else -2]
                    cells = "".join(f"  {label:>10} {value:8.1f}" for label, value in shown)
                    print(f"{name:15}{size:3}{text:>6}{cells}", flush=True)
    pipe.close()


def run_ranks(target: Callable[..., None], count: int, words: tuple[object, ...]) -> int:
    """Processes that run target(rank, count, pipe, *words) and tell each other bytes through their pipes, until they
    are done; their greatest exit status.
    """
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(count)]
    started = [context.Process(target=target, args=(rank, count, pairs[rank][1], *words)) for rank in range(count)]
    for process, (_, far) in zip(started, pairs, strict=True):
        process.start()
        far.close()
    try:
        while True:
            told = [near.recv() for near, _ in pairs]
            for near, _ in pairs:
                near.send(told)
    except EOFError:  # they are done
        pass
    for process in started:
        process.join()
    return max(abs(process.exitcode or 0) for process in started)


def main() -> int:
    parser = argparse.ArgumentParser(description="Variants of plans, in turns.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sizes", nargs="+", default=["512K", "4M", "16M"])
    parser.add_argument("--collectives", nargs="+", default=[*MOVES, "all_reduce", "reduce_scatter"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only-chosen", action="store_true", help="to compare builds of the core")
    parser.add_argument("--sums", action="store_true", help="of reductions: staged, and read in other processes")
    parser.add_argument("--switches", action="store_true")
    parser.add_argument("--pages", choices=["numpy", "huge", "small"], default="numpy", help="that arrays lie in")
    parser.add_argument("--shared", action="store_true", help="arrays in memory of the group too")
    parser.add_argument("--written", action="store_true", help="each rank writes its input before each call")
    parser.add_argument("--rings", type=int, nargs="+", default=[], help="KiB of staging")
    parser.add_argument("--threads", type=int, nargs="+", default=[], help="of each rank")
    parser.add_argument("--apart", type=float, default=0.0, help="microseconds that ranks compute between two calls")
    parser.add_argument(
        "--offset", type=int, default=16, help="bytes from the beginning of a line to that of an array; numpy's have 16"
    )
    options = parser.parse_args()
    words: tuple[object, ...] = (
        options.sizes,
        options.collectives,
        options.rounds,
        options.only_chosen,
        options.sums,
        options.switches,
    )
    words += options.offset, options.pages, options.rings, options.shared, options.written, options.threads
    words += (options.apart,)
    return run_ranks(rank_main, options.ranks, words)


if __name__ == "__main__":
    sys.exit(main())
