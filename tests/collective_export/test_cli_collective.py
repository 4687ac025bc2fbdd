"""`sennit collective ...` from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sennit.cli import main


def run(*arguments: str) -> int:
    return main(["collective", *arguments])


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    assert found["schema"] == f"sennit.collective.{arguments[0]}/1"
    return found


@pytest.fixture
def ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    file = tmp_path / "ring.txt"
    assert run("compile", "ring_all_reduce", "--ranks", "4", "--out", str(file)) == 0
    assert "is right" in capsys.readouterr().out
    return file


def test_compile_prints_a_schedule_that_verify_accepts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("compile", "all_pairs_all_gather", "--ranks", "3") == 0
    text = capsys.readouterr().out
    assert text.startswith('schedule "all_pairs_all_gather" all_gather(ranks=3')
    file = tmp_path / "pairs.txt"
    file.write_text(text, encoding="utf-8")
    assert run("verify", str(file)) == 0
    assert "is right" in capsys.readouterr().out


def test_compile_with_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, out = tmp_path / "flow.svg", tmp_path / "h.txt"
    shape = ("--ranks", "8", "--per-node", "4", "--svg", str(svg), "--out", str(out))
    found = result(capsys, "compile", "hierarchical_all_reduce", *shape)
    assert (found["ranks"], found["text"]) == (8, None)
    assert ElementTree.fromstring(svg.read_text(encoding="utf-8")).tag.endswith("svg")
    assert result(capsys, "verify", str(out))["messages"] == found["messages"]


def test_export_and_read_back(capsys: pytest.CaptureFixture[str], ring: Path, tmp_path: Path) -> None:
    xml = tmp_path / "ring.xml"
    assert run("export", str(ring), "--to", "msccl-xml", "--out", str(xml), "--max-bytes", "64K") == 0
    assert ElementTree.fromstring(xml.read_text(encoding="utf-8")).get("maxBytes") == "65536"
    assert run("verify", str(xml)) == 0
    capsys.readouterr()
    plan = result(capsys, "export", str(xml), "--to", "mscclpp-json")
    assert json.loads(plan["text"])["collective"] == "allreduce"


def test_simulate_names_and_files(capsys: pytest.CaptureFixture[str], ring: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    found = result(capsys, "simulate", "ring_all_reduce", "--cluster", "ndv4", "--bytes", "64K", "--trace", str(trace))
    assert (found["origin"], found["bytes"]) == ("simulated", 65536)
    assert found["nccl"]["algorithm"] == "ring"
    assert trace.exists()
    found = result(capsys, "simulate", str(ring), "--cluster", "ndv4", "--bytes", "1024", "--protocol", "LL128")
    assert (found["protocol"], found["nccl"]) == ("LL128", None)  # 4 of 8 devices
    assert run("simulate", str(ring), "--cluster", "ndv4", "--bytes", "1K") == 0
    assert capsys.readouterr().out.startswith("simulated: 'ring_all_reduce' on ndv4, 1.00 KiB, LL\n")


def test_synthesize_certifies(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "synthesize", "--cluster", "dgx-a100", "--collective", "all_gather")
    assert found["optimal"]
    assert found["algbw"] == pytest.approx(225e9 * 8 / 7, rel=1e-3)


def test_list_describes_each_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "list")
    names = [entry["name"] for entry in found["algorithms"]]
    assert {"ring_all_reduce", "two_step_all_to_all", "spread_all_to_next"} <= set(names)
    assert all(entry["summary"] for entry in found["algorithms"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compile", "ring_all_reduse", "--ranks", "4"), "did you mean 'ring_all_reduce'?"),
        (("compile", "two_step_all_to_all", "--ranks", "8"), "is for more than one node"),
        (("compile", "ring_all_reduce", "--ranks", "8", "--per-node", "3"), "no whole number of nodes of 3"),
        (("verify", "nowhere.txt"), "cannot read nowhere.txt"),
        (("simulate", "ring_all_reduce", "--cluster", "ndv4", "--bytes", "1T"), "'1T' is no size"),
        (("simulate", "ring_all_reduce", "--cluster", "ndv5", "--bytes", "1M"), "unknown cluster 'ndv5'"),
    ],
)
def test_errors_end_with_status_2(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_wrong_file_is_refused_with_its_place(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ring.read_text(encoding="utf-8")
    assert "receive_reduce_send from output[2:3]" in text
    ring.write_text(
        text.replace("receive_reduce_send from output[2:3]", "receive_reduce_send from output[1:2]", 1),
        encoding="utf-8",
    )
    assert run("verify", str(ring)) == 2
    assert "output[2] of rank 0 holds chunk 1 of rank 0" in capsys.readouterr().err


def test_a_one_sided_program_is_compiled_verified_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nvls.txt"
    assert run("compile", "nvls_all_reduce", "--ranks", "4", "--one-sided", "--out", str(file)) == 0
    assert "switch_reduce ranks {0-3} input[0:1] into output[0:1]" in file.read_text(encoding="utf-8")
    capsys.readouterr()
    assert run("verify", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "sennit.collective.verify_one_sided/1"
    assert run("export", str(file), "--to", "mscclpp-json") == 0
    assert '"glres"' in capsys.readouterr().out
    assert run("export", str(file), "--to", "msccl-xml") == 2
    assert "has no one-sided operations" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compile", "verify", "synthesize", "simulate", "export", "list"])
def test_help_has_an_example_and_the_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command, "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"Example: sennit collective {command}" in text
    assert "--json" in text
