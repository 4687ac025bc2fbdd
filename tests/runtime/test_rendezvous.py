"""Ranks that meet through a store: a rank that cannot go on is named at once by all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from sennit.collective.runtime import group_torch, rendezvous_torch
from sennit.collective.runtime.rendezvous_torch import Rendezvous
from sennit.errors import PeerError, RunError, SennitError


def in_threads(size: int, job: Callable[[int], object]) -> list[object]:
    """What the ranks return or raise."""
    found: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = job(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    return found


def test_a_rank_that_gives_up_is_named_and_no_key_is_left() -> None:
    store = dist.HashStore()
    keys = store.num_keys()

    def job(rank: int) -> object:
        meet = Rendezvous(store, rank, 3, 15.0)
        meet(b"here")
        if rank == 1:
            meet.give_up(RunError("it has no memory", fix="buy some"))
            return "gave up"
        return meet(b"and here")

    began = time.monotonic()
    zero, one, two = in_threads(3, job)
    assert time.monotonic() - began < 10.0
    assert one == "gave up"
    for error in (zero, two):
        assert isinstance(error, PeerError)
        assert "rank 1 of 3 could not set up the group: it has no memory" in str(error)
        assert error.fix == "buy some"
    assert store.num_keys() == keys


def test_a_group_that_one_rank_cannot_make_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = dist.HashStore(), rendezvous_torch.own_address

    def own_address(store: Any, interface: str | None) -> str:
        if threading.current_thread().name == "rank 1":
            raise OSError(24, "Too many open files")
        return told(store, interface)

    def job(rank: int) -> object:
        threading.current_thread().name = f"rank {rank}"
        options = SimpleNamespace(store=store, group_rank=rank, group_size=2, group_id="g", global_ranks_in_group=[])
        options.timeout = timedelta(seconds=15)
        return group_torch.create_group(options)

    monkeypatch.setattr(group_torch, "own_address", own_address)
    for error in in_threads(2, job):
        assert isinstance(error, SennitError)
        assert "rank 1 cannot set up the group: Too many open files (a process may have " in str(error)
        assert "ulimit -n" in str(error)


def test_processes_that_share_the_cores_of_a_host() -> None:
    assert group_torch.HostSettings(local_ranks=8).sharers == 8
    assert group_torch.HostSettings().sharers == 1  # there is no default group, of which this one would be a part
