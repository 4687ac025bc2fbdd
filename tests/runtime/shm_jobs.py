"""What the ranks of the tests do.

Inputs follow from seeds, so each rank knows those of all and checks its own result.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import signal
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from shm_ranks import Exchange, descriptors, segments

from sennit.collective.compile import compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import (
    all_pairs_all_reduce,
    nvls_all_reduce,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
)
from sennit.collective.runtime import shm_segment
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.encode_schedule import encode_schedule
from sennit.collective.runtime.reduce_numpy import divide, held_dtype, reduce_all
from sennit.collective.runtime.shm_abi import Reduction
from sennit.collective.runtime.shm_algorithms import build
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.collective.runtime.shm_plan import SharedCache
from sennit.collective.runtime.shm_segment import Capacity
from sennit.collective.runtime.shm_table import CodeRow, CodeTable, default_table, tuned_table
from sennit.collective.selection import Row, SelectionTable
from sennit.errors import RunError
from sennit.ir.collective import Algorithm, CollectiveName
from sennit.ir.dtype import DType
from sennit.ir.layout import Reduction as LayoutReduction
from sennit.ir.layout_numpy import Array

# so that small arrays have many tiles, which go round often
SMALL = Capacity(slot=1 << 14, wide=0, flags=1024, ring=1 << 12, arena=1 << 20)

BITWISE = (Reduction.BAND, Reduction.BOR, Reduction.BXOR)


def allowed(dtype: DType, reduction: Reduction) -> bool:
    return not (reduction in BITWISE and dtype.is_float) and not (reduction is Reduction.AVG and dtype is DType.BOOL)


def draw(seed: int, size: int, elements: int, dtype: DType) -> list[Array]:
    """One array for each rank: any bits for integers, numbers of moderate size for floats."""
    generator = np.random.default_rng(seed)
    held = held_dtype(dtype)
    if dtype is DType.BF16:
        wide = [generator.normal(size=elements).astype(np.float32) for _ in range(size)]
        return [(array.view(np.uint32) >> 16).astype(np.uint16) for array in wide]
    if dtype.is_float:
        return [generator.normal(size=elements).astype(held) for _ in range(size)]
    if dtype is DType.BOOL:
        return [generator.integers(0, 2, elements).astype(held) for _ in range(size)]
    low, high = np.iinfo(held).min, np.iinfo(held).max
    return [generator.integers(low, high, elements, dtype=held, endpoint=True) for _ in range(size)]


def total(dtype: DType, reduction: Reduction, arrays: list[Array]) -> Array:
    result = reduce_all(dtype, reduction, arrays)
    return divide(dtype, result, len(arrays)) if reduction is Reduction.AVG else result


def same(left: Array, right: Array, what: object) -> None:
    np.testing.assert_array_equal(left.view(np.uint8), right.view(np.uint8), err_msg=str(what))


def check_reductions(group: ShmGroup, n: int, dtype: DType, reduction: Reduction, seed: int) -> None:
    rank, size = group.rank, group.size
    what = (n, dtype, reduction, rank, size)
    inputs = draw(seed, size, n, dtype)
    wanted = total(dtype, reduction, inputs)
    mine = inputs[rank].copy()
    group.all_reduce(mine, reduction, dtype=dtype)
    same(mine, wanted, what)
    kept, out = inputs[rank].copy(), np.empty_like(inputs[rank])
    group.all_reduce(kept, reduction, out=out, dtype=dtype)
    same(out, wanted, what)
    same(kept, inputs[rank], what)
    root = seed % size
    reduced = group.reduce(kept, root, reduction, dtype=dtype)
    if reduced is not None:
        same(reduced, wanted, what)
    wide = draw(seed, size, n * size, dtype)
    group.reduce_scatter(wide[rank].copy(), out, reduction, dtype=dtype)
    same(out, total(dtype, reduction, [array[rank * n : (rank + 1) * n] for array in wide]), what)


def check_moves(group: ShmGroup, n: int, dtype: DType, seed: int) -> None:
    rank, size = group.rank, group.size
    what, root = (n, dtype, rank, size), seed % size
    inputs, wide = draw(seed, size, n, dtype), draw(seed + 1, size, n * size, dtype)
    out = np.empty(n * size, dtype=held_dtype(dtype))
    group.all_gather(inputs[rank].copy(), out, dtype=dtype)
    same(out, np.concatenate(inputs), what)
    out[...] = 0
    out[rank * n : (rank + 1) * n] = inputs[rank]
    group.all_gather(out[rank * n : (rank + 1) * n], out, dtype=dtype)  # in place
    same(out, np.concatenate(inputs), what)
    group.all_to_all(wide[rank].copy(), out, dtype=dtype)
    same(out, np.concatenate([array[rank * n : (rank + 1) * n] for array in wide]), what)
    one = inputs[rank].copy()
    group.broadcast(one, root, dtype=dtype)
    same(one, inputs[root], what)
    gathered = group.gather(inputs[rank], root, out if rank == root else None, dtype=dtype)
    if gathered is not None:
        same(gathered, np.concatenate(inputs), what)
    group.scatter(wide[rank] if rank == root else None, root, one, dtype=dtype)
    same(one, wide[root][rank * n : (rank + 1) * n], what)


def cut_up(
    rank: int, size: int, exchange: Exchange, threads: int, compiled: bool = True, capacity: Capacity = SMALL
) -> ShmGroup:
    """A group that cuts all calls into so many strips, however small they are."""
    group = ShmGroup.create(rank, size, exchange, timeout=60, capacity=capacity, compiled=compiled, threads=threads)
    group.strip_bytes = 1
    return group


def matrix(
    rank: int,
    size: int,
    exchange: Exchange,
    compiled: bool,
    sizes: list[int],
    dtypes: list[str],
    threads: int = 1,
) -> int:
    """Every collective, reduction and type given, at every size given."""
    checked = 0
    with cut_up(rank, size, exchange, threads, compiled) as group:
        for n, dtype in product(sizes, map(DType, dtypes)):
            for reduction in Reduction:
                if allowed(dtype, reduction):
                    check_reductions(group, n, dtype, reduction, seed=n + checked)
                    checked += 1
            check_moves(group, n, dtype, seed=n)
            group.barrier()
    return checked


def library_codes(rank: int, size: int, exchange: Exchange, compiled: bool) -> int:
    """Algorithms of the library in all three lowerings, in place and out of place, in memory of the group and of the
    user.
    """
    made: list[Algorithm] = [
        ring_all_reduce(size, channels=2),
        ring_all_reduce(size, in_place=True),
        all_pairs_all_reduce(size),
        all_pairs_all_reduce(size, in_place=True),
        ring_reduce_scatter(size, in_place=True),
        tree_broadcast(size, root=1, pieces=3),
        nvls_all_reduce(size, in_place=True),  # a switch is played by the machine
    ]
    checked = 0
    with ShmGroup.create(rank, size, exchange, timeout=60, capacity=SMALL, compiled=compiled) as group:
        for number, algorithm in enumerate(made):
            spec = algorithm.collective
            codes = [
                encode(compile_one_sided(algorithm)),
                encode_pull(algorithm),
                encode_schedule(compile_algorithm(algorithm)),
            ]
            for code, n, shared in product(codes, (5, 4099), (False, True)):
                parts = [code.parts(rank, buffer) for buffer in (0, 1)]
                inputs = draw(number, size, parts[0] * n, DType.I32)
                length = max(parts) * n if spec.in_place else (parts[0] + parts[1]) * n
                array: Any = group.allocate(4 * length).view(np.int32) if shared else np.zeros(length, dtype=np.int32)
                start = 0 if spec.in_place else parts[0] * n
                if spec.in_place and parts[1] < parts[0]:
                    start = rank * n
                array[: parts[0] * n] = inputs[rank]
                target = array[start : start + parts[1] * n]
                group.run(code, array.ctypes.data, target.ctypes.data, n, DType.I32, Reduction.SUM)
                if spec.name is CollectiveName.BROADCAST:
                    wanted = inputs[1]
                else:
                    wanted = total(DType.I32, Reduction.SUM, inputs)
                    wanted = wanted[rank * n : (rank + 1) * n] if parts[1] < parts[0] else wanted
                same(target, wanted, (algorithm.name, code.name, n, shared, rank))
                checked += 1
    return checked


def direct(rank: int, size: int, exchange: Exchange, counts: list[int], cache: int, threads: int = 1) -> bool:
    """Calls in which ranks read each other's own memory, mixed with others.

    False where the kernel does not let them. With a small cache what they read goes through staging.
    """
    with cut_up(rank, size, exchange, threads) as group:
        if not group.may_read:
            return False
        group.direct_from, group.cache = 256, SharedCache(cache)
        for n, dtype in product(counts, (DType.U8, DType.F64)):
            check_moves(group, n, dtype, seed=n)
            check_reductions(group, n, dtype, Reduction.MAX, seed=n)
            wide = draw(n, size, n * size, dtype)
            wanted = np.concatenate([array[rank * n : (rank + 1) * n] for array in wide])
            for shift in (0, 1, n * size):  # the output over the input, beside it, and behind it
                room = np.zeros(2 * n * size + 1, dtype=held_dtype(dtype))
                room[: n * size] = wide[rank]
                group.all_to_all(room[: n * size], room[shift : shift + n * size], dtype=dtype)
                same(room[shift : shift + n * size], wanted, (n, dtype, shift))
            inside = group.allocate(n * size * dtype.itemsize).view(held_dtype(dtype))
            inside[...] = wide[rank]
            out = np.empty_like(inside)
            group.all_to_all(inside, out, dtype=dtype)
            same(out, wanted, (n, dtype, "memory of the group"))
        by_slices = CodeRow(CollectiveName.BROADCAST, 0, "slices", lambda root: build("broadcast slices", size, root))
        group.table = CodeTable((by_slices,))
        group.forget_plans()
        for n, dtype, root in product((*counts, 300_000), (DType.U8, DType.F64), range(size)):
            given = draw(n + root, size, n, dtype)
            arrays = [given[rank].copy()]
            if n in counts:  # the group's own memory is small
                arrays.append(group.allocate(given[0].nbytes).view(given[0].dtype))
            for array in arrays:
                array[...] = given[rank]
                same(group.broadcast(array, root, dtype=dtype), given[root], (n, dtype, root, "by slices"))
    return True


def random_calls(
    rank: int,
    size: int,
    exchange: Exchange,
    seed: int,
    count: int,
    direct_from: int | None,
    ring_from: int | None,
    compiled: bool,
    threads: int = 1,
) -> int:
    """Any collective after any other, with any sizes, with pauses of some ranks between them: no call may see what
    another left.
    """
    choice, pause = np.random.default_rng(seed), np.random.default_rng([seed, rank])
    made = [ring_all_reduce(size), all_pairs_all_reduce(size), ring_all_reduce(size, channels=2)]
    codes = [encode(compile_one_sided(algorithm)) for algorithm in made]
    codes += [
        encode_pull(made[0]),
        encode_schedule(compile_algorithm(made[1])),
        encode_schedule(compile_algorithm(made[2])),
    ]
    with cut_up(rank, size, exchange, threads, compiled) as group:
        group.direct_from, group.ring_from = direct_from, ring_from
        for number in range(count):
            n, kind = int(choice.choice([1, 30, 700, 5000])), int(choice.integers(0, 4))
            if pause.random() < 0.1:
                time.sleep(pause.random() * 1e-3)
            match kind:
                case 0:
                    check_reductions(group, n, DType.F32, Reduction.SUM, seed=number)
                case 1:
                    check_moves(group, n, DType.I16, seed=number)
                case 2:
                    code = codes[int(choice.integers(0, len(codes)))]
                    inputs = draw(number, size, n, DType.I64)
                    arrays = [group.allocate(8 * n).view(np.int64), np.empty(n, np.int64)]
                    own, out = arrays if choice.random() < 0.5 else arrays[::-1]
                    own[...] = inputs[rank]
                    group.run(code, own.ctypes.data, out.ctypes.data, n, DType.I64, Reduction.SUM)
                    same(out, total(DType.I64, Reduction.SUM, inputs), (number, n))
                case _:
                    group.barrier()
    return count


def messages(rank: int, size: int, exchange: Exchange, compiled: bool) -> None:
    generator = np.random.default_rng(7)
    with ShmGroup.create(rank, size, exchange, timeout=60, capacity=SMALL, compiled=compiled) as group:
        after, before = (rank + 1) % size, (rank - 1) % size
        for n in (0, 1, 15, 16, 17, 4096, 50_001):
            data = generator.integers(0, 255, n).astype(np.uint8)
            sender = threading.Thread(target=group.send_array, args=(data + rank, after, 3))
            sender.start()
            same(group.receive_array(np.empty_like(data), before, 3), data + before, n)
            sender.join()
        # out of order: tag 2 is asked for first
        if rank == 0:
            for tag in (1, 2, 1):
                group.send_array(np.full(10, tag, dtype=np.int64), 1, tag)
        if rank == 1:
            for tag in (2, 1, 1):
                assert group.receive_array(np.empty(10, dtype=np.int64), 0, tag)[0] == tag
        counts = np.random.default_rng(size).integers(0, 9000, (size, size))
        parts = [np.full(counts[rank, peer], 10 * rank + peer, dtype=np.int16) for peer in range(size)]
        outs = [np.empty(counts[peer, rank], dtype=np.int16) for peer in range(size)]
        group.all_to_all_v(parts, outs)
        for peer, out in enumerate(outs):
            assert (out == 10 * peer + rank).all()
        outs = [np.empty(1000 * peer, dtype=np.float32) for peer in range(size)]
        group.all_gather_v(np.full(1000 * rank, rank, dtype=np.float32), outs)
        for peer, out in enumerate(outs):
            assert (out == peer).all()


def bits(rank: int, size: int, exchange: Exchange) -> tuple[bytes, ...]:
    """The first elements of sums of floats: by each algorithm, and as a part of larger arrays."""
    found: list[bytes] = []
    with ShmGroup.create(rank, size, exchange, timeout=60, capacity=SMALL) as group:
        codes = [encode_pull(build(name, size)) for name in ("all_reduce direct", "all_reduce slices")]
        for n, code in product((100, 3000, 40_000), codes):
            array = np.random.default_rng(rank).normal(size=40_000).astype(np.float32)[:n].copy()
            group.run(code, array.ctypes.data, array.ctypes.data, n, DType.F32, LayoutReduction.SUM)
            found.append(array[:100].tobytes())
    return tuple(found)


def overlaps(rank: int, size: int, exchange: Exchange, compiled: bool, threads: int = 1) -> None:
    """Output over input: at the same place, moved by one, and inside; of one tile and of many."""
    with cut_up(rank, size, exchange, threads, compiled) as group:
        for n in (50, 6000):
            inputs = draw(n, size, n, DType.I32)
            wanted = total(DType.I32, Reduction.SUM, inputs)
            for shift in (0, 1, -1):
                room = np.zeros(n + 2, dtype=np.int32)
                room[1 : n + 1] = inputs[rank]
                out = room[1 + shift : n + 1 + shift]
                group.all_reduce(room[1 : n + 1], out=out)
                same(out, wanted, (n, shift))
                room[1 : n + 1] = inputs[rank]
                reduced = group.reduce(room[1 : n + 1], 2, out=out if rank == 2 else None)
                if reduced is not None:
                    same(reduced, wanted, (n, shift))
            wide = draw(n, size, n * size, DType.I32)
            own = wide[rank].copy()
            group.reduce_scatter(own, own[:n])
            same(own[:n], total(DType.I32, Reduction.SUM, [array[rank * n : (rank + 1) * n] for array in wide]), n)


def tuned(rank: int, size: int, exchange: Exchange) -> list[str]:
    """Rows of a selection table serve in place of the default ones."""
    rows = (
        Row(CollectiveName.ALL_REDUCE, 0, "ring_all_reduce", 1e-6, "a test", 1024),
        Row(CollectiveName.ALL_REDUCE, 1024, "all_pairs_all_reduce", 1e-6, "a test"),
    )
    with ShmGroup.create(rank, size, exchange, timeout=60) as group:
        group.table = tuned_table(SelectionTable("here", 1, size, "made up", rows), default_table(size, 2))
        for n in (10, 1000):
            array = np.full(n, rank, dtype=np.int64)
            group.all_reduce(array)
            assert (array == size * (size - 1) // 2).all()
        group.broadcast(array, 1)
        return [group.code(CollectiveName.ALL_REDUCE, n).name for n in (10, 2000)] + [
            group.code(CollectiveName.BROADCAST, 10, 1).name
        ]


def threads_and_groups(rank: int, size: int, exchange: Exchange) -> None:
    """Two groups run from two threads at the same time; calls of one group from two threads take turns."""
    groups = [ShmGroup.create(rank, size, exchange, timeout=60) for _ in range(2)]
    faults: list[BaseException] = []

    def work(group: ShmGroup, value: int) -> None:
        try:
            for turn in range(30):
                array = np.full(1000, value + turn, dtype=np.int64)
                group.all_reduce(array)
                assert (array == size * (value + turn)).all()
        except BaseException as error:
            faults.append(error)

    workers = [threading.Thread(target=work, args=(group, 100 * i)) for i, group in enumerate(groups)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for group in groups:
        group.close()
    if faults:
        raise faults[0]


def takes_turns(rank: int, size: int, exchange: Exchange, places: list[int]) -> None:
    """Bound to one of two cores that all share; it is late now and then, and moves to the other core now and then."""
    allowed_before, late = os.sched_getaffinity(0), np.random.default_rng(rank)
    cores = sorted(allowed_before)[:2]
    os.sched_setaffinity(0, {cores[places[rank]]})
    try:
        with ShmGroup.create(rank, size, exchange, timeout=30, capacity=SMALL) as group:
            for seed, n in enumerate([1, 7, 64, 1003, 5000] * 4):
                check_moves(group, n, DType.F32, seed)
                if late.random() < 0.3:
                    time.sleep(late.choice([1e-5, 1e-4, 3e-3]))
                check_reductions(group, n, DType.I32, Reduction.SUM, seed)
                if late.random() < 0.2:
                    os.sched_setaffinity(0, {cores[late.integers(2)]})
    finally:
        os.sched_setaffinity(0, allowed_before)


def cycles(rank: int, size: int, exchange: Exchange, count: int) -> tuple[int, int, list[str]]:
    """Start and stop groups; the descriptors before and after, and names left."""

    def once() -> None:
        with ShmGroup.create(rank, size, exchange, timeout=30) as group:
            array = np.ones(100, dtype=np.float32)
            group.all_reduce(array)
            assert array[0] == size

    once()  # what Python opens for itself is open now
    gc.collect()  # groups that earlier jobs dropped
    before, mapped = descriptors(), maps()
    for _ in range(count):
        once()
    assert maps() <= mapped + 1, f"{mapped} mappings before, {maps()} after"
    return before, descriptors(), segments()


def maps() -> int:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("memfd:sennit" in line for line in file)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def killed(rank: int, size: int, exchange: Exchange, victim: int, elements: int, compiled: bool) -> None:
    """The victim ends in the middle of a collective, without a word."""
    group = ShmGroup.create(rank, size, exchange, timeout=30, compiled=compiled)
    group.all_reduce(np.ones(4, dtype=np.float32))
    if rank == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        group.all_reduce(np.ones(elements, dtype=np.float32))


def killed_while_read(rank: int, size: int, exchange: Exchange, victim: int) -> None:
    """The victim ends while others read its memory."""
    group = ShmGroup.create(rank, size, exchange, timeout=30)
    if rank == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        group.all_to_all(np.ones(size << 20, dtype=np.float32), np.ones(size << 20, dtype=np.float32))


def never_comes(rank: int, size: int, exchange: Exchange, absent: int) -> None:
    with ShmGroup.create(rank, size, exchange, timeout=1.0) as group:
        if rank == absent:
            time.sleep(3)
            return
        group.all_reduce(np.ones(1000, dtype=np.float32))


def leaves(rank: int, size: int, exchange: Exchange) -> None:
    group = ShmGroup.create(rank, size, exchange, timeout=20)
    if rank == 0:
        group.close()
        time.sleep(1)
        return
    group.barrier()


def interrupted(rank: int, size: int, exchange: Exchange) -> str:
    """A signal whose handler raises ends the call of its rank; the others do not wait for the timeout."""

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with ShmGroup.create(rank, size, exchange, timeout=30) as group:
        if rank == 0:
            previous = signal.signal(signal.SIGUSR1, handler)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            try:
                group.barrier()
            except KeyboardInterrupt:
                signal.signal(signal.SIGUSR1, previous)
                return "interrupted"
        if rank == 1:
            group.receive_array(np.empty(3), 0)
        time.sleep(1.5)
        group.barrier()
    return "nothing was said"


def other_size(rank: int, size: int, exchange: Exchange) -> None:
    with ShmGroup.create(rank, size, exchange, timeout=20) as group:
        group.barrier()
        group.all_reduce(np.ones(1000 + (rank == 1), dtype=np.float32))
        time.sleep(0.5)


def other_collective(rank: int, size: int, exchange: Exchange) -> None:
    with ShmGroup.create(rank, size, exchange, timeout=20) as group:
        group.barrier()
        if rank == 1:
            group.all_gather(np.ones(10, dtype=np.float32), np.ones(10 * size, dtype=np.float32))
        else:
            group.all_reduce(np.ones(10, dtype=np.float32))
        time.sleep(0.5)


def broken_for_all(rank: int, size: int, exchange: Exchange) -> str:
    """After a failure every call fails at once, and a new group works."""
    group = ShmGroup.create(rank, size, exchange, timeout=0.5)
    text = ""
    try:
        if rank != 0:
            group.broadcast(np.zeros(4), 0)  # waits for rank 0 alone, however late the others are
    except Exception as error:
        text = str(error)
    exchange(b"")  # rank 0 comes when the others have given up
    try:
        group.barrier()
    except Exception as error:
        text += str(error)
    group.close()
    with ShmGroup.create(rank, size, exchange, timeout=20) as fresh:
        fresh.barrier()
    return text


def forked(rank: int, size: int, exchange: Exchange) -> str:
    """A forked child may not use the group, and its end does not disturb it."""
    with ShmGroup.create(rank, size, exchange, timeout=20) as group:
        group.barrier()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                group.barrier()
            except Exception as error:
                os.write(writing, str(error).encode())
            finally:
                group.close()
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(child, 0)
        array = np.ones(3, dtype=np.int32)
        group.all_reduce(array)
        assert array[0] == size
    return said


def wrong_sizes(rank: int, size: int, exchange: Exchange) -> None:
    with ShmGroup.create(rank, size, exchange, timeout=20) as group:
        outs = [np.empty(10 + (rank == 1), dtype=np.uint8) for _ in range(size)]
        group.all_gather_v(np.empty(10 + (rank == 1), dtype=np.uint8), outs)
        time.sleep(0.5)


def limited(rank: int, size: int, exchange: Exchange, limited_rank: int, limit: str) -> str:
    """What is told where one rank may not have the memory of the segment."""
    kind = resource.RLIMIT_FSIZE if limit == "file" else resource.RLIMIT_AS
    addresses = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
    before = resource.getrlimit(kind)
    if rank == limited_rank:
        resource.setrlimit(kind, (4096 if limit == "file" else addresses + (100 << 20), before[1]))
    try:
        ShmGroup.create(rank, size, exchange, timeout=20)
    except RunError as error:
        return str(error)
    finally:
        resource.setrlimit(kind, before)
    return "it was made"


def small_shm(rank: int, size: int, exchange: Exchange, room: int) -> str:
    """What is told where /dev/shm has so much room and memory without a name cannot be shared. This process keeps it."""
    private, recursive, new_mounts = 1 << 18, 1 << 14, 0x20000  # MS_PRIVATE, MS_REC, CLONE_NEWNS
    libc = ctypes.CDLL(None)
    if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private | recursive, None):
        return "may not mount"
    if libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, f"size={room}".encode()):
        return "may not mount"
    shm_segment._WAYS = shm_segment._WAYS[1:]
    try:
        with ShmGroup.create(rank, size, exchange, timeout=20) as group:
            for elements in (10, 1 << 20, 1 << 23):
                array = np.ones(elements, dtype=np.float32)
                group.all_reduce(array)
            group.allocate(1 << 20)[...] = 1
            group.allocate(64 << 20)[...] = 1
    except RunError as error:
        return str(error)
    finally:
        assert os.listdir("/dev/shm") == []
    return "it was made"


def other_root(rank: int, size: int, exchange: Exchange, between: int, compiled: bool) -> list[float]:
    """Rank 0 names itself as the root, the others name rank 1: nobody waits for rank 0 there."""
    with ShmGroup.create(rank, size, exchange, timeout=20, compiled=compiled) as group:
        array = np.full(5, rank, dtype=np.float32)
        group.all_reduce(array)
        group.broadcast(array, min(rank, 1))
        for _ in range(between):
            group.broadcast(array, 0)
        group.all_reduce(array)
        return list(array)
