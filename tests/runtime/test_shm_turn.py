"""`Turn` of the short way: a lock like that of `threading`, which is the oracle here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_shm_call = pytest.importorskip("sennit.collective.runtime._shm_call", reason="the short way was not built")

both = pytest.mark.parametrize("make", [_shm_call.Turn, threading.Lock], ids=["Turn", "Lock"])


@settings(derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(["try", "release", "ask", "with"]), max_size=30))
def test_one_thread_sees_what_it_sees_of_a_lock(steps: list[str]) -> None:
    def told(lock: Any) -> list[object]:
        found: list[object] = []
        for step in steps:
            try:
                if step == "with":
                    if not lock.locked():
                        with lock:
                            found.append(lock.locked())
                else:
                    found.append(
                        {"try": lambda: lock.acquire(False), "release": lock.release, "ask": lock.locked}[step]()
                    )
            except RuntimeError as error:
                found.append(str(error))
        return found

    assert told(_shm_call.Turn()) == told(threading.Lock())


@both
def test_nobody_has_it_while_another_has(make: Callable[[], Any]) -> None:
    lock, inside, most = make(), 0, 0

    def work(often: int) -> None:
        nonlocal inside, most
        for turn in range(often):
            if turn % 3 == 0:
                while not lock.acquire(blocking=False):
                    time.sleep(0)
            else:
                lock.acquire()
            inside += 1
            most = max(most, inside)
            time.sleep(0)
            inside -= 1
            lock.release()

    threads = [threading.Thread(target=work, args=(60,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert most == 1
    assert not lock.locked()


@both
def test_who_is_interrupted_while_it_waits_leaves_it_to_others(make: Callable[[], Any]) -> None:
    lock, had = make(), threading.Event()
    lock.acquire()

    def wait_too() -> None:
        with lock:
            had.set()

    other = threading.Thread(target=wait_too)
    other.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    finally:
        signal.signal(signal.SIGINT, before)
    assert lock.locked()
    lock.release()
    assert had.wait(20)
    other.join()
    assert not lock.locked()
    assert lock.acquire(False)


def test_what_a_turn_refuses() -> None:
    with pytest.raises(TypeError):
        _shm_call.Turn(1)
    with pytest.raises(TypeError):
        _shm_call.Turn().acquire(True, 1.0)
    with pytest.raises(RuntimeError, match="unlocked"):
        _shm_call.Turn().release()
