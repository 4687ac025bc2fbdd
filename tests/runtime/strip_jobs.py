"""What the ranks of test_shm_strips.py do: calls that are cut into strips."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
from shm_jobs import check_moves, check_reductions, cut_up
from shm_ranks import Exchange, descriptors

from sennit.collective.runtime.shm_abi import Reduction
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.ir.dtype import DType


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def helpers_come_and_go(rank: int, size: int, exchange: Exchange, cycles: int) -> int:
    """Threads, while a group lives whose calls were cut, more than before it; and none is left after many groups, closed
    or dropped.
    """
    gc.collect()
    before, files, more = threads_of_this_process(), descriptors(), 0
    for cycle in range(cycles):
        group = cut_up(rank, size, exchange, 3)
        assert threads_of_this_process() == before, "no call was cut yet"
        assert group.all_reduce(np.ones(1000))[999] == size
        more = threads_of_this_process() - before
        exchange(b"")  # nobody leaves while others are in the call
        if cycle % 2:
            group.close()
        del group
        gc.collect()
        assert soon(lambda: threads_of_this_process() == before)
    assert descriptors() == files
    return more


def without_helpers(rank: int, size: int, exchange: Exchange, absent: list[int]) -> None:
    """Helpers of some ranks have ended, as if they could not be started: the caller runs their strips."""
    with cut_up(rank, size, exchange, 3) as group:
        group.barrier()
        group.all_reduce(np.ones(1000))
        if rank in absent:
            group._records.dismiss_helpers()
        for seed, n in enumerate([1, 40, 5003, 60_000]):
            check_reductions(group, n, DType.F32, Reduction.SUM, seed)
            check_moves(group, n, DType.I16, seed)


def with_pauses(rank: int, size: int, exchange: Exchange, turns: int) -> None:
    """Helpers sleep before some calls and are awake before others; the ranks come late in turns."""
    with cut_up(rank, size, exchange, 2) as group:
        for turn in range(turns):
            choice = np.random.default_rng(turn)
            pause = choice.choice([0.0, 1e-5, 1e-4, 2e-3])
            if turn % size == rank:
                time.sleep(pause)
            n = int(choice.choice([100, 30_000, 600_000]))
            array = np.full(n, turn + rank, np.int64)
            group.all_reduce(array)
            assert (array == size * turn + size * (size - 1) // 2).all()


def learns(rank: int, size: int, exchange: Exchange) -> list[int]:
    """By call: the way that it was made, when helpers seem slow from the ninth on, and then fast again."""
    ways: list[int] = []
    with cut_up(rank, size, exchange, 2) as group:
        for turn in range(24):
            array = np.full(1000, turn + rank, np.int64)
            group.all_reduce(array)
            assert (array == size * turn + size * (size - 1) // 2).all()
            (plan,) = group._plans.values()
            trials = plan.record.trials
            ways.append(int(trials.way))
            assert trials.made == turn + 1
            if turn >= 4:
                assert min(trials.took) > 0
                trials.took[0], trials.took[1] = (1, 1 << 40) if turn >= 8 else (1 << 40, 1)
    return ways


def busy(rank: int, size: int, exchange: Exchange, turns: int) -> None:
    """Other threads of the process compute meanwhile."""
    stop = threading.Event()

    def compute() -> None:
        a = np.ones((200, 200))
        while not stop.is_set():
            a @ a

    others = [threading.Thread(target=compute) for _ in range(2)]
    for other in others:
        other.start()
    try:
        with cut_up(rank, size, exchange, 3) as group:
            for turn in range(turns):
                array = np.full(100_000, turn + rank, np.int32)
                group.all_reduce(array)
                assert (array == size * turn + size * (size - 1) // 2).all()
    finally:
        stop.set()
        for other in others:
            other.join()


def killed(rank: int, size: int, exchange: Exchange, victim: int, elements: int) -> None:
    group = cut_up(rank, size, exchange, 2)
    group.all_reduce(np.ones(1000))
    if rank == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        group.all_reduce(np.ones(elements, dtype=np.float32))


def absent(rank: int, size: int, exchange: Exchange, absent_rank: int) -> None:
    with ShmGroup.create(rank, size, exchange, timeout=1.0, threads=2) as group:
        group.strip_bytes = 1
        group.all_reduce(np.ones(1000))
        if rank == absent_rank:
            time.sleep(3)
            return
        group.all_reduce(np.ones(1000, dtype=np.float32))


def other_size(rank: int, size: int, exchange: Exchange) -> None:
    with cut_up(rank, size, exchange, 3) as group:
        group.all_reduce(np.ones(5000, dtype=np.float32))
        group.all_reduce(np.ones(5000 + (rank == 1), dtype=np.float32))
        time.sleep(0.5)


def interrupted(rank: int, size: int, exchange: Exchange) -> str:
    """A signal whose handler raises ends the call of its rank, with all its strips."""

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with cut_up(rank, size, exchange, 3) as group:
        group.all_reduce(np.ones(5000))
        if rank == 0:
            previous = signal.signal(signal.SIGUSR1, handler)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            try:
                group.all_reduce(np.ones(5000))
            except KeyboardInterrupt:
                signal.signal(signal.SIGUSR1, previous)
                return "interrupted"
        time.sleep(1.5)
        group.all_reduce(np.ones(5000))
    return "nothing was said"


def forked(rank: int, size: int, exchange: Exchange) -> tuple[str, int]:
    """What a child is told that was forked while there are helpers, and how it ended: it has none, and may close and
    drop the group.
    """
    with cut_up(rank, size, exchange, 3) as group:
        group.all_reduce(np.ones(5000))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                group.all_reduce(np.ones(5000))
            except Exception as error:
                os.write(writing, str(error).encode())
                group.close()
                del group
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        assert group.all_reduce(np.ones(5000))[0] == size
    return said, status


def ends_without_closing(rank: int, size: int, exchange: Exchange) -> int:
    """The exit status of a process that ends while its group of one rank has helpers."""
    child = os.fork()
    if child == 0:
        group = ShmGroup.create(0, 1, lambda said: [said], timeout=10, threads=3)
        group.strip_bytes = 1
        group.all_gather(np.ones(5000), np.ones(5000))
        os.kill(os.getpid(), signal.SIGTERM)
    return os.waitpid(child, 0)[1]
