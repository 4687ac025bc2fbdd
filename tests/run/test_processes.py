"""Ranks that fail: the error names the rank, nothing hangs, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from sennit.cluster.ranks_torch import GlooRanks
from sennit.errors import RunError
from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.plan import data_parallel, lower, propagate
from sennit.run import LocalRanks, run_in_process


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run at the same time have folders of ranks too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def left_behind() -> set[str]:
    """The folders and processes of ranks."""
    folders = {path.name for path in Path(tempfile.gettempdir()).glob("sennit-ranks-*")}
    return folders | {child.name for child in multiprocessing.active_children()}


def broken(program: Program) -> Program:
    """The same program with one operator that torch refuses at run time."""
    text = str(program)
    changed = text.replace("aten.gelu.default(%", "aten.gelu_that_is_not.default(%", 1)
    assert changed != text
    return Program.parse(changed)


def test_a_rank_that_raises(small_gpt) -> None:
    program = lower(propagate(data_parallel(small_gpt.graph, Mesh.parse("dp=2"))))
    before = left_behind()
    with pytest.raises(RunError, match=r"rank [01] failed:[\s\S]*gelu_that_is_not"), LocalRanks(2) as ranks:
        ranks.run(broken(program), small_gpt.state)
    assert left_behind() <= before
    with pytest.raises(RunError, match=r"device [01] failed: AttributeError"):
        run_in_process(broken(program), small_gpt.state)


def run_for_ever(ranks: LocalRanks, program: Program, state) -> None:
    while True:
        ranks.run(program, state, repeats=50)


def test_a_rank_that_is_killed(small_gpt) -> None:
    program = lower(propagate(data_parallel(small_gpt.graph, Mesh.parse("dp=2"))))
    before = left_behind()
    with LocalRanks(2) as ranks:
        ranks.run(program, small_gpt.state)  # both are up
        victim = ranks.ranks.processes[1].pid
        assert victim is not None
        threading.Timer(0.05, os.kill, (victim, signal.SIGKILL)).start()
        with pytest.raises(RunError, match=r"rank [01] (died with exit status -9|failed)"):
            run_for_ever(ranks, program, small_gpt.state)
    assert left_behind() <= before


def waits(rank: int, seconds: float) -> int:
    time.sleep(seconds)
    return rank


@pytest.mark.parametrize("asleep", [0.0, 30.0], ids=["with work unread", "at work"])
def test_a_rank_that_is_killed_with_its_pipe_full_or_empty(asleep: float) -> None:
    before = left_behind()
    with GlooRanks(2) as ranks:
        assert ranks.call(waits, 0.0) == [0, 1]
        victim = ranks.processes[1].pid
        assert victim is not None
        if asleep:
            threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
        else:
            os.kill(victim, signal.SIGSTOP)  # it reads nothing more: what is sent to it stays in its pipe
            threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
        with pytest.raises(RunError, match="rank 1 died with exit status -9"):
            ranks.call(waits, asleep)
        assert ranks.call(waits, 0.0) == [0, 1]  # new ones
    assert left_behind() <= before


def unpicklable(rank: int) -> object:
    return threading.Lock()


def test_an_answer_that_cannot_travel() -> None:
    with GlooRanks(1) as ranks, pytest.raises(RunError, match="cannot pickle"):
        ranks.call(unpicklable)
