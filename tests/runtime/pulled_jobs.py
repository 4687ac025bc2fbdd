"""What the ranks of test_shm_pulled.py do: reductions of what peers have in their own memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from itertools import product

import numpy as np
from shm_jobs import allowed, cut_up, draw, same, total
from shm_ranks import Exchange

from sennit.collective.language import Builder, trace
from sennit.collective.library import nvls_reduce_scatter, read_reduce_scatter
from sennit.collective.runtime.code import INPUT, Code
from sennit.collective.runtime.code_verify import verify_code
from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.reduce_numpy import held_dtype
from sennit.collective.runtime.shm_abi import Reduction
from sennit.collective.runtime.shm_algorithms import build
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.collective.runtime.shm_segment import Capacity
from sennit.collective.runtime.shm_table import CodeRow, CodeTable
from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.dtype import DType
from sennit.ir.layout_numpy import Array

# pieces of a page or two, and tiles of as many sums, so that small arrays have many
SMALL = Capacity(slot=1 << 14, wide=0, flags=1024, ring=1 << 12, arena=1 << 20)
KINDS = (CollectiveName.ALL_REDUCE, CollectiveName.REDUCE, CollectiveName.REDUCE_SCATTER)


def table(size: int, names: tuple[str, ...]) -> CodeTable:
    def row(name: str) -> CodeRow:
        return CodeRow(CollectiveName(name.split()[0]), 0, name, lambda root: build(name, size, root))

    return CodeTable(tuple(map(row, names)))


SLICES = ("all_reduce slices", "reduce slices", "reduce_scatter")
WHOLE = ("all_reduce direct", "reduce direct", "reduce_scatter")


def forced(
    rank: int, size: int, exchange: Exchange, names: tuple[str, ...], capacity: Capacity = SMALL, threads: int = 1
) -> ShmGroup:
    """A group in which all of these read the memory of others."""
    group = cut_up(rank, size, exchange, threads, capacity=capacity)
    group.direct_from = 0
    group.table = table(size, names)
    return group


def room_for(inputs: Array, shift: int) -> Array:
    """A copy that begins `shift` bytes into a page, with space behind it."""
    space = np.zeros(2 * inputs.nbytes + 8192, np.uint8)
    first = (shift - space.ctypes.data) % 4096
    found = space[first : first + inputs.nbytes].view(inputs.dtype)
    found[...] = inputs
    return found


def check_all(group: ShmGroup, n: int, dtype: DType, reduction: Reduction, seed: int) -> None:
    """Arrays apart, one array, an output over the own part of the input, and one over another part of it."""
    rank, size, root = group.rank, group.size, seed % group.size
    what = (n, dtype, reduction, rank, size, seed)
    shift = (seed * 13 + rank * 40) % 4096 // dtype.itemsize * dtype.itemsize
    inputs, wide = draw(seed, size, n, dtype), draw(seed + 1, size, n * size, dtype)
    wanted = total(dtype, reduction, inputs)
    mine, out = room_for(inputs[rank], shift), np.empty_like(inputs[rank])
    same(group.all_reduce(mine, reduction, out=out, dtype=dtype), wanted, what)
    same(mine, inputs[rank], what)
    reduced = group.reduce(mine, root, reduction, out=out if rank == root else None, dtype=dtype)
    if reduced is not None:
        same(reduced, wanted, what)
    same(mine, inputs[rank], what)
    in_place = group.reduce(mine, root, reduction, dtype=dtype)
    if in_place is not None:
        same(mine, wanted, what)
    mine[...] = inputs[rank]
    same(group.all_reduce(mine, reduction, dtype=dtype), wanted, what)
    parts = [array[rank * n : (rank + 1) * n] for array in wide]
    mine = room_for(wide[rank], shift)
    same(group.reduce_scatter(mine, out, reduction, dtype=dtype), total(dtype, reduction, parts), what)
    same(mine, wide[rank], what)
    for first in (rank * n, (rank + 1) % size * n, 1 if n > 1 else 0):
        mine[...] = wide[rank]
        group.reduce_scatter(mine, mine[first : first + n], reduction, dtype=dtype)
        same(mine[first : first + n], total(dtype, reduction, parts), (what, first))


def every_type(
    rank: int, size: int, exchange: Exchange, counts: list[int], names: tuple[str, ...], threads: int = 1
) -> int | None:
    """The number of cases; None where the kernel does not let ranks read each other's memory."""
    checked = 0
    with forced(rank, size, exchange, names, threads=threads) as group:
        if not group.may_read:
            return None
        for n, dtype, reduction in product(counts, DType, Reduction):
            if allowed(dtype, reduction):
                check_all(group, n, dtype, reduction, seed=n + checked)
                checked += 1
        for kind in KINDS:
            for plan in group._plans.values():
                assert plan.record.direct, plan.text
            assert any(plan.text.startswith(kind.value) for plan in group._plans.values())
    return checked


def examples(rank: int, size: int, exchange: Exchange, cases: list[tuple[int, str, str, int]], slot: int) -> int | None:
    """Cases that somebody drew: elements, type, reduction, seed; with pauses of some ranks."""
    capacity = Capacity(slot=slot, wide=0, flags=1024, ring=1 << 12, arena=1 << 20)
    with forced(rank, size, exchange, SLICES, capacity) as group:
        if not group.may_read:
            return None
        for n, dtype, reduction, seed in cases:
            check_all(group, n, DType(dtype), Reduction(reduction), seed)
    return len(cases)


def memory_of_the_group(rank: int, size: int, exchange: Exchange) -> bool:
    """Inputs of some ranks, or of all, lie in memory that the group gave."""
    with forced(rank, size, exchange, SLICES) as group:
        if not group.may_read:
            return False
        for n, some in product((7, 9001), (range(1), range(size))):
            inputs, wide = draw(n, size, n, DType.F32), draw(n + 1, size, n * size, DType.F32)
            held = held_dtype(DType.F32)
            mine = group.allocate(4 * n).view(held) if rank in some else np.empty(n, held)
            long = group.allocate(4 * n * size).view(held) if rank in some else np.empty(n * size, held)
            mine[...], long[...] = inputs[rank], wide[rank]
            same(group.all_reduce(mine), total(DType.F32, Reduction.SUM, inputs), n)
            wanted = total(DType.F32, Reduction.SUM, [array[rank * n : (rank + 1) * n] for array in wide])
            same(group.reduce_scatter(long, np.empty(n, held)), wanted, n)
            same(group.reduce_scatter(long, long[rank * n : (rank + 1) * n]), wanted, n)
    return True


def two_slices(b: Builder) -> None:
    """An all_reduce whose ranks add up two chunks each, in one step and in two."""
    for rank in range(b.ranks):
        b.scratch(rank, "sum", 2)
        width = 1 + rank % 2
        for first in range(0, 2, width):
            total = b.chunk(0, "input", 2 * rank + first, width).copy(to=rank, buffer="sum", index=first)
            for peer in range(1, b.ranks):
                b.chunk(peer, "input", 2 * rank + first, width).reduce(into=total)
    for rank in range(b.ranks):
        for peer in range(b.ranks):
            b.chunk(peer, "sum", 0, 2).copy(to=rank, buffer="output", index=2 * peer)


def several_chunks(size: int) -> list[Code]:
    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, size, 2 * size)
    made = [trace(two_slices, spec, "two slices"), read_reduce_scatter(size, instances=2), nvls_reduce_scatter(size)]
    return [encode_pull(algorithm) for algorithm in made]


def codes_of_several_chunks(rank: int, size: int, exchange: Exchange) -> bool:
    """In place where the code may, and apart: the bits of the same code staged, since each has an order of its own."""
    with forced(rank, size, exchange, SLICES) as group:
        if not group.may_read:
            return False
        for code, n in product(several_chunks(size), (1, 100, 8191, 40_000)):
            verify_code(code)
            parts = code.parts(rank, INPUT)
            inputs = draw(n, size, parts * n, DType.F32)
            wanted, sums = np.empty(n, np.float32), total(DType.F32, Reduction.SUM, inputs)
            group.direct_from = 1 << 40
            group.forget_plans()
            group.run(code, inputs[rank].ctypes.data, wanted.ctypes.data, n, DType.F32, Reduction.SUM)
            np.testing.assert_allclose(wanted, sums if parts == 1 else sums[rank * n : (rank + 1) * n], atol=1e-5)
            group.direct_from = 0
            group.forget_plans()
            plan = group.plan(code, n, DType.F32, Reduction.SUM)
            assert plan.record.direct
            assert plan.record.piece
            mine, out = room_for(inputs[rank], 4 * rank), np.empty(n, np.float32)
            over = plan.loaded.overlaid  # None: then it takes a copy
            for target in (out, mine[(over or 0) * n :][:n]):
                group.run_plan(plan, mine.ctypes.data, target.ctypes.data)
                same(target, wanted, (code.name, n, rank))
    return True


def changed_at_once(rank: int, size: int, exchange: Exchange, turns: int, threads: int = 1) -> bool:
    """Each rank overwrites its arrays as soon as a call returns: by then all peers have read them."""
    n = 30_001
    with forced(rank, size, exchange, SLICES, threads=threads) as group:
        if not group.may_read:
            return False
        mine, long, out = np.empty(n, np.int32), np.empty(n * size, np.int32), np.empty(n, np.int32)
        for turn in range(turns):
            mine[...], long[...] = turn + rank, turn * rank
            group.all_reduce(mine)
            assert (mine == size * turn + size * (size - 1) // 2).all()
            group.reduce_scatter(long, out)
            long[...] = -1
            assert (out == turn * size * (size - 1) // 2).all()
    return True


def unreadable_for_a_while(rank: int, size: int, exchange: Exchange) -> int | None:
    """The third quarter of a peer's input cannot be read at first.

    The root's output is its input, of which the first half has its sums by then: nothing may be added twice. The bytes
    that were reduced when the root first waited.
    """
    n = 16 * mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * n)
    array = np.frombuffer(memory, np.int32)
    array[...] = np.arange(n) + rank
    with forced(rank, size, exchange, WHOLE) as group:
        if not group.may_read:
            return None
        half = array.ctypes.data + 2 * n

        def protect(readable: bool) -> None:
            if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(half), ctypes.c_size_t(n), 3 * readable):
                raise OSError(ctypes.get_errno(), "mprotect")

        if rank:
            protect(False)
            threading.Timer(0.2, protect, (True,)).start()
        plan = group.plan(group.code(CollectiveName.REDUCE, 4 * n, 0), n, DType.I32, Reduction.SUM)
        place = array.ctypes.data
        status = group.machine.start(group._record, group.address, plan, place, 0 if rank else place, 0)
        reduced = int(plan.record.tiles[0].reduced)
        if status:
            group.finish_plan(plan, status)
        wanted = size * np.arange(n) + size * (size - 1) // 2 if rank == 0 else np.arange(n) + rank
        np.testing.assert_array_equal(array, wanted)
    return reduced


def closed_to_others(rank: int, size: int, exchange: Exchange) -> bool:
    """Inputs that this process may read and the kernel does not read for others: pages that may only be written, which
    x86 lets their owner read.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    n = 5003
    room = 4 * n * size

    def made() -> Array:
        address = libc.mmap(None, room, mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        return np.frombuffer((ctypes.c_char * room).from_address(address), np.int32)

    with forced(rank, size, exchange, (*SLICES, "all_to_all")) as group:
        if not group.may_read:
            return False
        for closed in (range(1), range(size)):
            wide = draw(n, size, n * size, DType.I32)
            parts = [array[rank * n : (rank + 1) * n] for array in wide]
            array = made() if rank in closed else np.empty(n * size, np.int32)
            for turn in range(3):  # the short way comes second
                array[...] = wide[rank]
                same(group.reduce_scatter(array, np.empty(n, np.int32)), total(DType.I32, Reduction.SUM, parts), turn)
                same(group.all_to_all(array, np.empty(n * size, np.int32)), np.concatenate(parts), turn)
                same(group.all_reduce(array), total(DType.I32, Reduction.SUM, wide), turn)
    return True


def killed(rank: int, size: int, exchange: Exchange, victim: int, kind: str) -> None:
    """The victim ends while others read its memory to add it up."""
    group = ShmGroup.create(rank, size, exchange, timeout=30)
    group.direct_from = 0
    group.table = table(size, SLICES)
    long, part = np.ones(size << 20, np.float32), np.ones(1 << 20, np.float32)
    if rank == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        if kind == "reduce_scatter":
            group.reduce_scatter(long, part)
        else:
            group.all_reduce(long)
