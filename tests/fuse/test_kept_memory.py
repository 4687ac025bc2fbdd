"""Memory that a step frees and takes again costs no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

_STEPS = """
import resource
import torch
from sennit.fuse.kept_memory import keep_memory

if not keep_memory():
    print("no glibc")
    raise SystemExit

def step():
    held = [torch.empty(size << 18).fill_(1.0) for size in (3, 9, 24, 6)]
    return sum(float(one[0]) for one in held)

for _ in range(5):  # the heap takes some to settle
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_steps_after_the_first_fault_no_pages() -> None:
    # a process of its own: the setting is of the whole process
    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, timeout=120, check=True)
    if done.stdout.strip() == "no glibc":
        pytest.skip("memory is kept by a setting of glibc")
    pages = 42 * 256  # of one step
    assert int(done.stdout) < pages / 10
