from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sennit.cli import main
from sennit.reshard import Redistribution

ARGUMENTS = ["reshard", "f32[1024{x},4096{y}]", "f32[1024,4096{x,y}]", "--mesh", "x=4,y=2"]
PROBLEM = {"mesh": [2, 4], "axes": ["x", "y"], "shape": [8, 8], "src": [["x"], []], "dst": [[], ["y", "x"]]}
FIELDS = ["steps", "recv_elements", "min_recv_elements", "peak_elements", "bound_elements", "plan_ms", "kind"]


def test_the_table_has_the_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--explain"]) == 0
    text = capsys.readouterr().out
    for word in ("received", "largest piece", "1.75 MiB", "1.000", "constructive", "direct", "simulated"):
        assert word in text


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--json", "--cluster", "dgx-h100"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "sennit.reshard/1"
    assert document["steps"][-1]["result"] == "[1024,4096{x.0,x.1,y}]"
    assert document["chosen"]["received_elements"] == document["chosen"]["received_bound_elements"]
    assert document["chosen"]["seconds"] > 0
    assert document["lost"]


def test_text_parses_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--text"]) == 0
    assert str(Redistribution.parse(text := capsys.readouterr().out)) == text.strip()


def test_a_batch_prints_a_line_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "problems.jsonl"
    partial = {**PROBLEM, "src_partial": ["y"], "dtype": "bf16"}
    file.write_text(json.dumps(PROBLEM) + "\n\n" + json.dumps(partial) + "\n", encoding="utf-8")
    for mode in ("auto", "collective", "direct"):
        assert main(["reshard", "--batch", str(file), "--json", "--mode", mode]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [list(line) for line in lines] == [FIELDS, FIELDS]
        assert all(line["peak_elements"] <= line["bound_elements"] for line in lines)
        assert lines[0]["bound_elements"] == 32
    assert main(["reshard", "--batch", str(file)]) == 0
    assert "2 problems" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "no problem in JSON"),
        (json.dumps({**PROBLEM, "src": [["x"], ["x"]]}), "axis 'x' is used 2 times"),
        (json.dumps({**PROBLEM, "axes": ["x"]}), "1 axes for 2 mesh sizes"),
        (json.dumps({**PROBLEM, "dtype": "f33"}), "unknown element type 'f33'"),
    ],
)
def test_a_fault_in_a_batch_names_the_line(
    line: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps(PROBLEM) + "\n" + line + "\n", encoding="utf-8")
    assert main(["reshard", "--batch", str(file)]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert "problems.jsonl, line 2" in error


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["reshard"], "a source, a target and a mesh are needed"),
        (["reshard", "f32[8", "f32[8]", "--mesh", "x=2"], "'f32[8'"),
        (["reshard", "f32[8]", "bf16[8]", "--mesh", "x=2"], "elements of f32 and the target of bf16"),
        (["reshard", "f32[8]", "f32[9]", "--mesh", "x=2"], "shape [8] and the target [9]"),
        (["reshard", "f32[8{z}]", "f32[8]", "--mesh", "x=2"], "unknown axis 'z'"),
        (["reshard", "f32[8{x}]", "f32[8]", "--mesh", "x=2", "--budget", "3"], "the least possible"),
        (["reshard", "--batch", "absent.jsonl"], "cannot read absent.jsonl"),
    ],
)
def test_faults_are_messages(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert what in captured.err
    assert "fix:" in captured.err or "expected" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ARGUMENTS,
        ["reshard", "f32[12,8{x},6]", "f32[12{y},8,6]", "--mesh", "x=2", "--to-mesh", "x=2,y=2@2-5", "--budget", "100"],
        ["reshard", "f32[]{sum:x}", "f32[]", "--mesh", "x=32"],
        ["reshard", "f32[7{x},5]", "f32[7,5{x}]", "--mesh", "x=4"],
    ],
)
def test_the_picture(arguments: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    assert main([*arguments, "--svg", str(file)]) == 0
    root = ElementTree.parse(file).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    tiles = [shape for shape in root.iter(f"{space}rect") if shape.get("class") == "tile"]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert tiles
    for tile in tiles:
        assert 0 <= float(tile.attrib["x"]) <= float(tile.attrib["x"]) + float(tile.attrib["width"]) <= width
        assert 0 <= float(tile.attrib["y"]) <= float(tile.attrib["y"]) + float(tile.attrib["height"]) <= height
