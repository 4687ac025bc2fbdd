"""The main job, from the command line: every plan is right, every file is there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sennit.cli import main
from sennit.ir.program import Program
from sennit.ir.program_check import check_program


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


def test_the_demo(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == "sennit.demo/1"
    plans = {plan["name"]: plan for plan in result["plans"]}
    assert set(plans) == {"data parallel", "tensor parallel", "pipeline 1F1B"}
    for plan in plans.values():
        assert plan["measured"]["verdict"] in ("equal, bitwise", "equal within rounding")
        assert [run["cluster"] for run in plan["simulated"]] == ["dgx-h100:2", "laptop"]
    fastest = min(plans.values(), key=lambda plan: plan["simulated"][0]["step_seconds"])
    assert result["best"] == fastest["name"]
    assert "simulated" in result["why"]


def test_its_files(out: Path) -> None:
    """Runs after the demo, on what it left."""
    if not (out / "report.html").exists():
        pytest.skip("the demo did not run")
    page = (out / "report.html").read_text()
    assert page.count("pipeline 1F1B") > 3
    events = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))
    assert len(events["traceEvents"]) > 1000
    texts = sorted((out / "programs").glob("*.txt"))
    assert len(texts) == 6
    for path in texts:
        check_program(Program.parse(path.read_text()))
    sources = sorted((out / "programs").glob("*.py"))
    assert len(sources) == 8  # two lanes for the pipeline
    compile(sources[0].read_text(), str(sources[0]), "exec")


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--layers", "1", "--out", str(tmp_path)]) == 2
    assert "1 layers for a pipeline of 2 stages" in capsys.readouterr().err
