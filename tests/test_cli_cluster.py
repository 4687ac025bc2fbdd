from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sennit.cli import main
from sennit.cli_cluster import ClusterResult, ProbeResult
from sennit.cli_simulate import SimulateResult
from sennit.cluster import load, presets

TRAINING = """
program "training" {
  mesh m0 = dp=16
  lane all on 0-15 {
    param %w : bf16[1024,1024] of %w on m0 "w"
    input %x : bf16[4096{dp},1024] of %x on m0 "x"
    forward %y : bf16[4096{dp},1024] of %y on m0 = aten.mm.default(%x, %w) for %y "up"
    backward %g : bf16[1024,1024]{sum:dp} of %g on m0 = aten.mm.default(%w, %w) for %g "up"
    all_reduce %r : bf16[1024,1024] of %g on m0 = %g over dp
    free %g
    gradient "w" %r
  }
}
"""
MATRIX = """
      GPU0  GPU1  CPU Affinity
GPU0   X    NV4   0-15
GPU1  NV4    X    0-15
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.txt"
    path.write_text(TRAINING, encoding="utf-8")
    return str(path)


def test_what_ifs_stand_beside_the_unchanged_step(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", program, "--cluster", "h200x8:2", "--optimizer", "adamw", "--iterations", "3", "--json"]
    arguments += ["--what-if", "node 1 compute x2", "--what-if", "bandwidth fabric x0.5"]
    assert main(arguments) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=SimulateResult)
    assert result.what_if == ("node 1 compute x2", "bandwidth fabric x0.5")
    assert result.unchanged_step_seconds is not None
    assert result.step_seconds > 1.2 * result.unchanged_step_seconds
    assert result.steady_step_seconds == pytest.approx(result.step_seconds)
    assert sum(share.seconds for share in result.critical_path) == pytest.approx(result.step_seconds)
    assert sum(share.seconds for share in result.exposed_by) == pytest.approx(result.exposed_seconds)
    assert {cost.basis for cost in result.costs} >= {"measured"}
    (lane,) = result.lanes
    assert lane.memory_bytes["optimizer"] == 8 * 1024**2
    assert sum(lane.memory_bytes.values()) == lane.peak_memory_bytes


def test_operators_timed_here_are_for_cpu_ranks(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", program, "--cluster", "laptop:16", "--profile-here", "--json"]) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=SimulateResult)
    assert "operators timed on this machine" in {cost.source for cost in result.costs}
    assert main(["simulate", program, "--cluster", "h200x8:2", "--profile-here"]) == 2
    assert "are no CPU ranks" in capsys.readouterr().err


def test_reserved_memory_is_no_less_than_what_is_live(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", program, "--cluster", "h200x8:2", "--reserved", "--fused-attention", "--json"]
    assert main(arguments) == 0
    (lane,) = msgspec.json.decode(capsys.readouterr().out, type=SimulateResult).lanes
    assert lane.reserved_memory_bytes is not None
    assert lane.reserved_memory_bytes >= lane.peak_memory_bytes


def test_the_table_says_where_times_come_from(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", program, "--cluster", "dgx-h100:2", "--what-if", "link nic:3 down"]) == 0
    out = capsys.readouterr().out
    assert "without the what-ifs" in out
    assert "where the compute times come from" in out
    assert "carried over" in out


@pytest.mark.parametrize(
    ("change", "fault"),
    [("node 7 compute x2", "there is no such place"), ("make it fast", "is no what-if")],
)
def test_a_what_if_that_cannot_be(program: str, change: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", program, "--cluster", "dgx-h100:2", "--what-if", change]) == 2
    assert fault in capsys.readouterr().err


def test_clusters_are_listed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in presets())
    picture = tmp_path / "c.svg"
    assert main(["cluster", "dgx-h100:4", "--svg", str(picture), "--json"]) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=ClusterResult)
    assert (result.devices, result.nodes) == (32, 4)
    assert all(figure.source for figure in result.figures)
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert main(["cluster", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=ClusterResult).presets == presets()
    assert main(["cluster", "laptop", "--toml"]) == 0
    assert 'name = "laptop"' in capsys.readouterr().out


def test_a_matrix_of_nvidia_smi_becomes_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix, out = tmp_path / "topo.txt", tmp_path / "mine.toml"
    matrix.write_text(MATRIX, encoding="utf-8")
    assert main(["probe", "--topology", str(matrix), "--like", "dgx-a100", "--out", str(out), "--json"]) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=ProbeResult)
    assert (result.per_node, result.backend) == (2, None)
    assert load(str(out)).devices == 2
    assert main(["probe", "--topology", str(matrix), "--out", str(out)]) == 2
    assert "--like" in capsys.readouterr().err


def test_a_probe_without_ranks_says_how_to_start_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe"]) == 2
    assert "torchrun" in capsys.readouterr().err
