"""What the ranks of test_shm_offered.py do: exchanges in which each rank says of its own input where peers read it."""

from __future__ import annotations

import mmap
import os
import signal
import threading

import numpy as np
from shm_jobs import cut_up, draw, same
from shm_ranks import Exchange

from sennit.collective.runtime.reduce_numpy import held_dtype
from sennit.collective.runtime.shm_abi import Inputs, load_core
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.collective.runtime.shm_pages import PageMap
from sennit.collective.runtime.shm_plan import SharedCache
from sennit.collective.runtime.shm_segment import Capacity
from sennit.ir.dtype import DType
from sennit.ir.layout_numpy import Array

MIB = 1 << 20
NEAR = SharedCache(32 * MIB, keeps=24 * MIB)
SMALL = Capacity(slot=1 << 16, wide=0, flags=1024, ring=1 << 12, arena=4 * MIB)  # so that calls have many tiles


def choosing(
    rank: int, size: int, exchange: Exchange, offers: bool, capacity: Capacity = SMALL, threads: int = 1
) -> ShmGroup:
    """A group in which this rank takes its large arrays to lie in huge pages, or not to, whatever the kernel gives."""
    group = cut_up(rank, size, exchange, threads, capacity=capacity)
    group.cache = NEAR
    group._record.pagemap, group._record.huge = -1, offers
    return group


def exchanged(inputs: list[Array], rank: int, n: int) -> Array:
    return np.concatenate([array[rank * n : (rank + 1) * n] for array in inputs])


def check(group: ShmGroup, n: int, dtype: DType, seed: int, offers: bool) -> None:
    """Arrays apart; the output over the input, one element behind it, one part behind it; memory of the group."""
    rank, size = group.rank, group.size
    inputs = draw(seed, size, n * size, dtype)
    wanted, held = exchanged(inputs, rank, n), held_dtype(dtype)
    mine, out = inputs[rank].copy(), np.empty(n * size, held)
    same(group.all_to_all(mine, out, dtype=dtype), wanted, (n, dtype, seed, "apart"))
    (plan,) = group._ready.values()
    assert plan.record.direct == Inputs.EITHER
    assert plan.record.staged[0] == (not offers)
    mine[...] = 0  # all have read it
    for shift in (0, 1, n):
        for overlaps in (seed % size == rank, True):  # on one rank, and on all
            room = np.zeros(2 * n * size, held)
            room[: n * size] = inputs[rank]
            first = shift if overlaps else n * size
            target = room[first : first + n * size]
            group.all_to_all(room[: n * size], target, dtype=dtype)
            same(target, wanted, (n, dtype, seed, shift, overlaps))
            room[...] = 0
    inside = group.allocate(n * size * dtype.itemsize).view(held)
    inside[...] = inputs[rank]
    same(group.all_to_all(inside, out, dtype=dtype), wanted, (n, dtype, seed, "memory of the group"))
    group.forget_plans()


def exchanges(
    rank: int, size: int, exchange: Exchange, offering: list[int], cases: list[tuple[int, str]], threads: int = 1
) -> bool:
    with choosing(rank, size, exchange, rank in offering, threads=threads) as group:
        if not group.may_read:
            return False
        for seed, (n, dtype) in enumerate(cases):
            check(group, n, DType(dtype), seed, rank in offering)
    return True


def one_after_another(rank: int, size: int, exchange: Exchange, turns: int) -> bool:
    """Who offers changes from call to call, ranks come late, and overwrite their arrays as soon as a call returns."""
    n = MIB // 4 // size + 17
    with choosing(rank, size, exchange, True) as group:
        if not group.may_read:
            return False
        mine, out = np.empty(n * size, np.int32), np.empty(n * size, np.int32)
        for turn in range(turns):
            offering = np.random.default_rng(turn).random(size + 1) < (0.5 if turn % 2 else 0.9)
            group._record.huge = bool(offering[rank])
            if offering[size] and turn % size == rank:
                threading.Event().wait(0.002)
            mine[...] = turn * size + rank
            group.all_to_all(mine, out)
            mine[...] = -1
            np.testing.assert_array_equal(out, turn * size + np.repeat(np.arange(size), n))
            small = np.full(3, rank, np.int32)
            same(group.all_reduce(small), np.full(3, size * (size - 1) // 2, np.int32), turn)
    return True


def killed(rank: int, size: int, exchange: Exchange, victim: int) -> None:
    group = choosing(rank, size, exchange, rank != 0, Capacity())
    mine, out = np.ones(size << 20, np.float32), np.ones(size << 20, np.float32)
    if rank == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        group.all_to_all(mine, out)


def told_by_the_kernel(pages: str) -> int:
    """Of an array in such pages: 1 in huge ones, 0 in others, -1 if the kernel does not say. -2: it gave none that are
    huge.
    """
    library, nbytes = load_core(), 16 * MIB
    assert library is not None
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[...] = 1
    pagemap = PageMap()
    told = int(library.sennit_huge(pagemap.descriptor, array.ctypes.data, nbytes))
    pagemap.close()
    if pages == "huge" and not told:
        with open("/proc/self/smaps") as lines:
            sizes = [int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")]
        told = 0 if max(sizes) >= 12 << 10 else -2
    return told
