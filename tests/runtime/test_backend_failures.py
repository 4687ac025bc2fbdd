"""Ranks that die, do not come, are late, or call something else: named by all others, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from backend_scenarios import play

VICTIM = 1
LIMIT = 20.0
TWO_HOSTS = ("a", "a", "b", "b")


def own_segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "sennit" in name}


def run(scenario: str, folder: Path, size: int, hosts: tuple[str, ...] = ()) -> list[dict[str, Any] | None]:
    """What each rank sent; None of one that died before."""
    before = own_segments()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["sennit.cluster.ranks_torch", "sennit.collective.runtime.group_torch"]
    )  # torch, once
    found: list[dict[str, Any] | None] = []
    pipes, ranks = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=play, args=(scenario, rank, size, str(folder), hosts, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        ranks.append(process)
    try:
        for pipe in pipes:
            try:
                found.append(pipe.recv() if pipe.poll(120) else None)
            except EOFError:
                found.append(None)
    finally:
        for process in ranks:
            process.join(5.0)
            process.kill()
            process.join()
    assert own_segments() <= before
    return found


@pytest.mark.parametrize("hosts", [(), TWO_HOSTS], ids=["one host", "two hosts"])
@pytest.mark.parametrize("scenario", ["killed_between", "killed_inside", "killed_while_awaited"])
def test_a_killed_rank_is_named_by_all_and_a_new_group_starts(
    tmp_path: Path, scenario: str, hosts: tuple[str, ...]
) -> None:
    size = 4 if hosts else 3
    for rank, found in enumerate(run(scenario, tmp_path, size, hosts)):
        if rank == VICTIM:
            assert found is None
            continue
        assert found is not None
        assert f"rank {VICTIM} " in found["error"]
        assert f"rank {VICTIM} " in found["again"]
        assert found["seconds"] < LIMIT / 2  # seen, not waited out
        assert found["sum"] == size - 1


def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    found = run("never_joins", tmp_path, 3)
    for rank in (0, 2):
        assert f"rank {VICTIM} of 3 did not join" in found[rank]["error"]  # type: ignore[index]


@pytest.mark.parametrize("hosts", [(), TWO_HOSTS], ids=["one host", "two hosts"])
def test_a_late_rank_is_named(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    size = 4 if hosts else 3
    errors = {rank: found["error"] for rank, found in enumerate(run("late", tmp_path, size, hosts)) if found}
    assert set(errors) == set(range(size)) - {VICTIM}
    for rank, error in errors.items():
        assert f"rank {VICTIM} " in error, rank
    if not hosts:  # whoever finds it says what else to change
        assert any("give a longer timeout to init_process_group" in error for error in errors.values())


@pytest.mark.parametrize("hosts", [(), ("a", "b")], ids=["one host", "two hosts"])
def test_ranks_that_call_different_things_are_told(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    for found in run("other_call", tmp_path, 2, hosts):
        assert found is not None
        assert "broadcast" in found["error"] or "all_reduce" in found["error"]
        assert found["seconds"] < LIMIT / 2


def test_a_forked_child_has_no_part_in_the_group(tmp_path: Path) -> None:
    for found in run("forks", tmp_path, 2):
        assert found is not None
        assert "forked" in found["error"]
        assert found["sum"] == 4.0
