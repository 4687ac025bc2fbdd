"""Ranks that fail: the error names the rank, nothing hangs, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest

from sennit.errors import RunError
from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.plan import data_parallel, lower, propagate
from sennit.run import LocalRanks, run_in_process


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
