"""Threads of the network that run first: what is asked of the kernel, and that a process without gloo is left alone."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from sennit.fuse.network_threads import Preference, _short_slice, gloo_threads, network_first


def test_without_gloo_nothing_is_asked() -> None:
    assert network_first(()) is Preference.NONE


def test_threads_go_by_the_names_that_gloo_gives_them() -> None:
    assert os.getpid() not in gloo_threads()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduling classes are Linux's")
def test_a_thread_gets_what_is_told() -> None:
    told: list[tuple[Preference, int]] = []

    def sleeper() -> None:
        me = threading.get_native_id()
        told.append((network_first([me]), os.sched_getscheduler(me)))

    thread = threading.Thread(target=sleeper)
    thread.start()
    thread.join()
    ((preference, policy),) = told
    assert policy == (os.SCHED_FIFO if preference is Preference.REAL_TIME else os.SCHED_OTHER)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="slices are Linux's")
def test_a_slice_is_given_or_refused() -> None:
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(_short_slice(threading.get_native_id())))
    thread.start()
    thread.join()
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert told == [release >= (6, 12)] or told == [False]


def test_a_thread_that_is_gone_is_no_error() -> None:
    assert network_first([2**22 - 1]) is Preference.NONE
