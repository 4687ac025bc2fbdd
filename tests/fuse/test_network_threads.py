"""Threads of the network that run first: what is asked of the kernel, and that a process without gloo is left alone."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from sennit.fuse.network_threads import Preference, gloo_threads, is_granted, network_first, ordinary

T = TypeVar("T")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduling classes are Linux's")


def on_a_thread(work: Callable[[int], T]) -> T:
    """What a thread of its own gives, for its number."""
    told: list[T] = []
    thread = threading.Thread(target=lambda: told.append(work(threading.get_native_id())))
    thread.start()
    thread.join()
    return told[0]


def test_without_gloo_nothing_is_asked() -> None:
    assert network_first(()) is Preference.NONE


def test_threads_of_python_are_not_gloos() -> None:
    assert on_a_thread(lambda me: me not in gloo_threads())
    assert os.getpid() not in gloo_threads()


def test_a_thread_gets_what_is_told_and_gives_it_back() -> None:
    def work(me: int) -> tuple[Preference, int, int, int, int]:
        granted = network_first([me])
        got = os.sched_getscheduler(me), os.getpriority(os.PRIO_PROCESS, me)
        ordinary([me])
        return granted, *got, os.sched_getscheduler(me), os.getpriority(os.PRIO_PROCESS, me)

    granted, policy, nice, policy_after, nice_after = on_a_thread(work)
    assert policy == (os.SCHED_FIFO if granted is Preference.REAL_TIME else os.SCHED_OTHER)
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert (nice < own) == (granted is Preference.NICE_AND_SHORT)
    assert (policy_after, nice_after) == (os.SCHED_OTHER, own)


def test_a_slice_is_read_back() -> None:
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    given = on_a_thread(lambda me: is_granted(me, Preference.SHORT_SLICE))
    assert given in ([True, False] if release >= (6, 12) else [False])


def test_a_thread_that_is_gone_is_no_error() -> None:
    assert network_first([2**22 - 1]) is Preference.NONE
