"""Torch's own tests of c10d backends, on sennit; what gloo passes and sennit does not is listed, with the reason.

`benchmarks/collective/torch_suite.py` runs them on both backends and with other numbers of ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch_suite import DIFFERENCES, FOR_FOUR_RANKS

pytest.importorskip("expecttest", reason="torch's tests need it")

PROGRAM = Path(__file__).with_name("torch_suite.py")
JOBS = "4"  # of each, much is waiting


def outcomes(*arguments: str) -> tuple[Counter[str], dict[str, str]]:
    """How often each outcome, and why the tests that failed did."""
    command = [sys.executable, str(PROGRAM), "--jobs", JOBS, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        try:
            said, wrong = run.communicate()
        except BaseException:  # pytest's time limit
            os.killpg(run.pid, signal.SIGKILL)
            raise
    assert run.returncode == 0, wrong
    found = [json.loads(line) for line in said.splitlines()]
    failed = {each["test"]: each["why"] for each in found if each["outcome"] == "failed"}
    return Counter(each["outcome"] for each in found), failed


def check(failed: dict[str, str], *, expected: set[str]) -> None:
    new = {name: why for name, why in failed.items() if name not in DIFFERENCES}
    assert not new, "\n\n".join(f"{name}: {why}" for name, why in new.items())
    assert expected <= set(failed), "passed, and is said to differ"


def test_what_torch_tests_on_the_cpu() -> None:
    counts, failed = outcomes()
    check(failed, expected={name for name in DIFFERENCES if "monitored_barrier" in name})
    assert counts["passed"] > 100, counts


def test_what_torch_tests_on_gpus_moved_to_the_cpu() -> None:
    counts, failed = outcomes("--moved")
    check(failed, expected=set())
    assert counts["passed"] > 50, counts


def test_what_torch_tests_with_four_ranks() -> None:
    counts, failed = outcomes("--moved", "--ranks", "4", *FOR_FOUR_RANKS)
    assert counts == {"passed": len(FOR_FOUR_RANKS)}, failed or counts
