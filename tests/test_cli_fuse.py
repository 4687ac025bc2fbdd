"""`sennit fuse` and `sennit profile`: results, files, and faults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sennit import cli_fuse, cli_profile
from sennit.cli import main
from sennit.ir.strategy import Strategy

MODEL = "gpt:layers=1,batch=2,tokens=8"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine would count as work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_fuse_compares_saves_and_reloads(capsys, tmp_path: Path) -> None:
    out = tmp_path / "fused"
    status, text, _ = run(capsys, "fuse", MODEL, "--cluster", "h200x8", "--seconds", "2", "--out", str(out), "--json")
    assert status == 0
    result = json.loads(text)
    assert result["schema"] == "sennit.fuse/1"
    assert result["origin"] == "simulated"
    steps = {item["name"]: item["step_seconds"] for item in result["variants"]}
    assert {"no overlap", "no fusion", "full fusion", "DDP, 25 MB", "compiled DDP, 25 MB", "operators only"} < set(
        steps
    )
    assert steps[result["best"]] == min(steps.values())
    assert result["bounds"]["full_overlap_seconds"] <= result["bounds"]["structural_seconds"] <= min(steps.values())
    saved = Strategy.parse((out / "strategy.txt").read_text())
    assert str(saved) == result["strategy"]
    for name in ("steps.svg", "report.html"):
        assert "least step of these kernels" in (out / name).read_text()
    again = ["fuse", MODEL, "--cluster", "h200x8", "--seconds", "1", "--no-ablation", "--json"]
    status, text, _ = run(capsys, *again, "--strategy", str(out / "strategy.txt"))
    assert status == 0
    times = {item["name"]: item["step_seconds"] for item in json.loads(text)["variants"]}
    assert times[f"saved: {saved.name}"] == pytest.approx(steps[result["best"]])


def test_profile_fills_a_database_that_fuse_reads(capsys, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    first = ("profile", MODEL, "--out", str(path), "--device", "cpu", "--rounds", "2")
    status, text, _ = run(capsys, *first, "--json")
    assert status == 0
    result = json.loads(text)
    assert result["schema"] == "sennit.profiled/1"
    assert 0 < result["new_structures"] == result["structures"] < result["operators"]
    assert result["channel"] is None
    assert result["slowest"][0]["operators"][0].startswith("aten.")
    status, text, _ = run(capsys, *first)
    assert status == 0
    assert "0 of them new" in text
    fuse = ("fuse", MODEL, "--cluster", "laptop", "--seconds", "1", "--no-ablation", "--profile", str(path))
    status, text, _ = run(capsys, *fuse)
    assert status == 0
    assert "measured kernels" in text
    status, _, error = run(capsys, *fuse, "--measured-channel")
    assert status == 2
    assert "no all-reduce of 2 ranks" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fuse", "nobody", "--cluster", "laptop"), "there is no model 'nobody'"),
        (("fuse", MODEL, "--cluster", "laptop", "--devices", "9"), "9 devices of laptop"),
        (("fuse", MODEL, "--cluster", "laptop", "--seconds", "0"), "0.0 seconds of search"),
        (("fuse", MODEL, "--cluster", "laptop", "--strategy", "/nowhere"), "cannot read the strategy"),
        (("fuse", MODEL, "--cluster", "laptop", "--profile", "/nowhere"), "cannot read /nowhere"),
        (("fuse", MODEL, "--cluster", "laptop", "--measured-channel"), "without --profile"),
        (("profile", MODEL, "--device", "tpu"), "is no device"),
        (("profile", MODEL, "--rounds", "1"), "1 rounds"),
    ],
)
def test_faults_are_named(capsys, arguments: tuple[str, ...], message: str) -> None:
    status, text, error = run(capsys, *arguments)
    assert (status, text) == (2, "")
    assert message in error


def test_every_field_of_both_documents_is_described() -> None:
    text = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
    for document in (
        cli_fuse.FuseResult,
        cli_fuse.VariantSummary,
        cli_fuse.Bounds,
        cli_profile.ProfileResult,
        cli_profile.KernelTime,
    ):
        for field in dataclasses.fields(document):
            assert f"`{field.name}`" in text, f"docs/commands.md does not describe {document.__name__}.{field.name}"


def test_on_a_cpu_operators_run_one_by_one_so_only_buckets_are_chosen(capsys) -> None:
    command = ["fuse", MODEL, "--cluster", "laptop", "--seconds", "1", "--json"]
    status, text, _ = run(capsys, *command)
    assert status == 0
    result = json.loads(text)
    assert not Strategy.parse(result["strategy"]).groups
    steps = {item["name"]: item["step_seconds"] for item in result["variants"]}
    assert steps["operators only"] == pytest.approx(steps["no fusion"])
    assert "one by one" in result["costs"]


def test_operators_that_are_unsure_are_measured_on_the_machine_at_hand(capsys) -> None:
    command = ["fuse", MODEL, "--cluster", "laptop", "--seconds", "1", "--no-ablation", "--measure", "--json"]
    status, text, _ = run(capsys, *command)
    assert status == 0
    costs = json.loads(text)["costs"]
    assert int(costs.split()[0]) > 10
    assert "measured here" in costs


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is meant")
def test_a_machine_that_is_not_the_clusters_measures_nothing(capsys) -> None:
    status, _, error = run(capsys, "fuse", MODEL, "--cluster", "dgx-a100", "--seconds", "1", "--measure")
    assert status != 0
    assert "this machine has no GPU" in error
