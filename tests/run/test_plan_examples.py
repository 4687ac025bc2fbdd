"""The examples of parallelize are run: inside ranks that are there, and one as its docstring says, by torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import example_work as work
import pytest

from sennit.cluster.ranks_torch import GlooRanks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("plan", ["tensor", "pipeline"])
def test_train_gpt(plan: str, four: GlooRanks) -> None:
    said = four.call(work.run_example, "plan_train_gpt", plan, 3)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", said[0])]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert "parameters" in said[0]
    assert said[1:] == ["", "", ""]


def test_own_plan(four: GlooRanks) -> None:
    said = four.call(work.run_example, "plan_own")[0]
    assert "blocks.0.up.weight lies as [256,64]" in said
    assert "blocks.1.up.weight lies as [256{tp},64]" in said
    assert "blocks.0.attention.qkv.weight lies as [192{tp:32},64]" in said


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install sennit[hf]"
)
def test_finetune_hf(four: GlooRanks, tmp_path: Path) -> None:
    said = four.call(work.run_hf_example, str(tmp_path))[0]
    evaluated, saved = re.search(r"evaluated: ([\d.]+), from the saved model: ([\d.]+)", said).groups()
    assert abs(float(evaluated) - float(saved)) < 2e-5


def test_own_operator_by_torchrun() -> None:
    """As its docstring says: plain torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(EXAMPLES / "plan_own_op.py")], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found, expected = re.search(r"loss ([\d.]+), on one device ([\d.]+)", done.stdout).groups()
    assert abs(float(found) - float(expected)) < 1e-5
    assert "the gate lies as [64{tp}]" in done.stdout
    assert "example.gated.default(" in done.stdout
