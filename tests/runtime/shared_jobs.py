"""What the ranks of test_shm_shared.py do: collectives whose inputs lie in memory of the group on some ranks."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
from shm_jobs import check_moves, check_reductions, cut_up, draw, same, total
from shm_ranks import Exchange

from sennit.collective.runtime.reduce_numpy import held_dtype
from sennit.collective.runtime.shm_abi import Reduction
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.collective.runtime.shm_segment import Capacity
from sennit.ir.dtype import DType
from sennit.ir.layout_numpy import Array

MIB = 1 << 20
SMALL = Capacity(slot=1 << 14, wide=0, flags=1024, ring=1 << 12, arena=4 * MIB)  # so that calls have many tiles
OVERWRITTEN = 85


class Places:
    """Arrays of one rank: in memory of the group, or its own."""

    def __init__(self, group: ShmGroup, inside: bool) -> None:
        self.group, self.inside = group, inside

    def empty(self, n: int, dtype: DType) -> Array:
        held = held_dtype(dtype)
        return self.group.allocate(n * dtype.itemsize).view(held) if self.inside else np.empty(n, held)

    def holding(self, values: Array, dtype: DType) -> Array:
        array = self.empty(values.size, dtype)
        array[...] = values
        return array


def check_apart(group: ShmGroup, places: Places, n: int, dtype: DType, seed: int) -> None:
    """Inputs are overwritten as soon as a call returns: all have read them."""
    rank, size, reduction = group.rank, group.size, Reduction.MAX
    wide, small = draw(seed, size, n * size, dtype), draw(seed + 1, size, n, dtype)
    mine = [array[rank * n : (rank + 1) * n] for array in wide]
    root = seed % size
    out, long = np.empty(n, held_dtype(dtype)), np.empty(n * size, held_dtype(dtype))
    given = places.holding(small[rank], dtype)
    same(group.all_gather(given, long, dtype=dtype), np.concatenate(small), (n, dtype, "all_gather"))
    given.view(np.uint8)[...] = OVERWRITTEN
    given = places.holding(wide[rank], dtype)
    same(group.all_to_all(given, long, dtype=dtype), np.concatenate(mine), (n, dtype, "all_to_all"))
    given.view(np.uint8)[...] = OVERWRITTEN
    given = places.holding(wide[rank], dtype)
    group.reduce_scatter(given, out, reduction, dtype=dtype)
    same(out, total(dtype, reduction, mine), (n, dtype, "reduce_scatter"))
    given.view(np.uint8)[...] = OVERWRITTEN
    given = places.holding(small[rank], dtype)
    group.all_reduce(given, reduction, out=out, dtype=dtype)
    same(out, total(dtype, reduction, small), (n, dtype, "all_reduce"))
    given.view(np.uint8)[...] = OVERWRITTEN
    given = places.holding(small[rank], dtype)
    same(group.broadcast(given, root, dtype=dtype), small[root], (n, dtype, "broadcast"))
    given.view(np.uint8)[...] = OVERWRITTEN
    given = places.holding(wide[rank], dtype)
    group.scatter(given if rank == root else None, root, out, dtype=dtype)
    same(out, wide[root][rank * n : (rank + 1) * n], (n, dtype, "scatter"))
    given.view(np.uint8)[...] = OVERWRITTEN


def check_over(group: ShmGroup, places: Places, n: int, dtype: DType, seed: int) -> None:
    """The output over the input: where it may be, one element behind that, and one part behind it."""
    rank, size, reduction = group.rank, group.size, Reduction.MIN
    wide, small = draw(seed, size, n * size, dtype), draw(seed + 1, size, n, dtype)
    mine = [array[rank * n : (rank + 1) * n] for array in wide]
    given = places.holding(small[rank], dtype)
    same(group.all_reduce(given, reduction, dtype=dtype), total(dtype, reduction, small), (n, dtype, "all_reduce"))
    for shift in (0, 1, n):
        room = places.empty(2 * n * size + 1, dtype)
        room[: n * size] = wide[rank]
        out = room[shift : shift + n * size]
        group.all_to_all(room[: n * size], out, dtype=dtype)
        same(out, np.concatenate(mine), (n, dtype, shift, "all_to_all"))
        for first in (shift, rank * n + shift):
            room[: n * size] = wide[rank]
            out = room[first : first + n]
            group.reduce_scatter(room[: n * size], out, reduction, dtype=dtype)
            same(out, total(dtype, reduction, mine), (n, dtype, first, "reduce_scatter"))
            room[first : first + n] = small[rank]
            group.all_gather(room[first : first + n], room[: n * size], dtype=dtype)
            same(room[: n * size], np.concatenate(small), (n, dtype, first, "all_gather"))


def collectives(
    rank: int,
    size: int,
    exchange: Exchange,
    inside: list[int],
    cases: list[tuple[int, str]],
    compiled: bool,
    threads: int = 1,
) -> int:
    """Returns how many of the plans have peers read what lies in the segment."""
    shared = 0
    with cut_up(rank, size, exchange, threads, compiled, SMALL) as group:
        group.shared_from = 0
        places = Places(group, rank in inside)
        for seed, (n, name) in enumerate(cases):
            check_apart(group, places, n, DType(name), seed)
            check_over(group, places, n, DType(name), seed)
            shared += sum(bool(plan.record.shared) for plan in group._ready.values())
            check_reductions(group, n, DType(name), Reduction.MAX, seed)
            check_moves(group, n, DType(name), seed)
            group.forget_plans()
    return shared


def one_after_another(rank: int, size: int, exchange: Exchange, turns: int, threads: int = 1) -> None:
    """Who has the input in memory of the group changes from call to call, ranks come late, and overwrite their arrays
    as soon as a call returns; small calls between them are staged.
    """
    n = 5003
    with cut_up(rank, size, exchange, threads, capacity=SMALL) as group:
        group.shared_from = 4 * n
        arrays = [np.empty(n * size, np.int32), group.allocate(4 * n * size).view(np.int32)]
        sums, long = np.empty(n, np.int32), np.empty(n * size, np.int32)
        for turn in range(turns):
            choice = np.random.default_rng(turn)
            mine = arrays[int(choice.random(size)[rank] < 0.6)]
            if choice.random() < 0.3 and turn % size == rank:
                threading.Event().wait(0.002)
            mine[...] = turn * size + rank
            group.reduce_scatter(mine, sums)
            mine[...] = -1
            np.testing.assert_array_equal(sums, size * turn * size + size * (size - 1) // 2)
            mine[:n] = rank
            group.all_gather(mine[:n], long)
            mine[...] = -1
            np.testing.assert_array_equal(long, np.repeat(np.arange(size), n))
            same(group.all_reduce(np.full(3, rank)), np.full(3, size * (size - 1) // 2), turn)


def killed(rank: int, size: int, exchange: Exchange, victim: int) -> None:
    group = ShmGroup.create(rank, size, exchange, timeout=60)
    mine, out = group.allocate(size << 20).view(np.float32), np.ones(size << 18, np.float32)
    mine[...] = 1
    if rank == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        group.all_to_all(mine, out)
