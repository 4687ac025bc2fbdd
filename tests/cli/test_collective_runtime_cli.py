"""`sennit collective run` and `tune` from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sennit.cli import main
from sennit.collective.compile import compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import Options, recipe
from sennit.collective.runtime.measure import (
    Runtime,
    code_for,
    elements_of,
    expected_outputs,
    random_inputs,
    wrong_ranks,
)
from sennit.collective.selection import SelectionTable
from sennit.ir.collective import Algorithm, CollectiveName


def run(*arguments: str) -> int:
    return main(["collective", *arguments])


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    captured = capsys.readouterr()
    found: dict[str, Any] = json.loads(captured.out)
    assert found["schema"] == f"sennit.collective.{arguments[0]}/1"
    return found


def ring() -> Algorithm:
    return recipe("ring_all_reduce").build(1, 3, Options())


def test_a_name_of_the_library(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "run.svg"
    shape = ("--ranks", "3", "--runtime", "numpy", "--bytes", "40", "1K", "--repeat", "2", "--check")
    found = result(capsys, "run", "ring_all_reduce", *shape, "--svg", str(picture))
    assert (found["ranks"], found["runtime"], found["origin"], found["checked"]) == (3, "numpy", "measured", True)
    assert [size["bytes"] for size in found["sizes"]] == [40, 1024]
    for size in found["sizes"]:
        assert size["wrong"] == []
        assert 0 < size["least_seconds"] <= size["seconds"]
        assert size["bus_bandwidth"] == pytest.approx(size["algorithm_bandwidth"] * 4 / 3)
    assert ElementTree.fromstring(picture.read_text(encoding="utf-8")).tag.endswith("svg")


@pytest.mark.parametrize("form", ["algorithm", "schedule", "one_sided"])
def test_a_file_of_any_form(form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = {
        "algorithm": str(ring()),
        "schedule": str(compile_algorithm(ring())),
        "one_sided": str(compile_one_sided(ring())),
    }
    file = tmp_path / "ring.txt"
    file.write_text(texts[form], encoding="utf-8")
    assert run("run", str(file), "--runtime", "numpy", "--bytes", "100", "--repeat", "1", "--check") == 0
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize("runtime", ["shm", "p2p"])
def test_processes(runtime: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--ranks", "2", "--runtime", runtime, "--bytes", "1000", "--repeat", "1", "--check")
    found = result(capsys, "run", "direct_reduce_scatter", *shape)
    assert found["sizes"][0]["wrong"] == []


def test_tune_writes_a_table_that_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, picture = tmp_path / "table.toml", tmp_path / "tune.svg"
    shape = ("--ranks", "2", "--runtime", "numpy", "--collectives", "all_to_all", "broadcast")
    found = result(
        capsys, "tune", *shape, "--sizes", "64", "1K", "--repeat", "1", "--out", str(out), "--svg", str(picture)
    )
    table = SelectionTable.parse(out.read_text(encoding="utf-8"))
    assert "measured on the numpy runtime" in table.basis
    for name in (CollectiveName.ALL_TO_ALL, CollectiveName.BROADCAST):
        for size in (64, 1024):
            rows = [t for t in found["trials"] if (t["collective"], t["bytes"]) == (name.value, size)]
            best = [t for t in rows if t["best"]]
            assert min(t["seconds"] for t in rows) == best[0]["seconds"]
            assert table.choose(name, size).algorithm == best[0]["algorithm"].partition("(")[0]
    assert picture.exists()


def test_tune_prints_the_table_and_marks_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--ranks", "2", "--runtime", "numpy", "--collectives", "all_to_all", "--sizes", "64", "--repeat", "1")
    assert run("tune", *shape) == 0
    text = capsys.readouterr().out
    assert "us *" in text or "ms *" in text
    assert "* the fastest; measured on the numpy runtime" in text
    assert "[[row]]" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "ring_all_reduce"), "say --ranks N"),
        (("run", "ring_all_reduse", "--ranks", "4"), "did you mean 'ring_all_reduce'?"),
        (("run", "hierarchical_all_reduce", "--ranks", "4"), "is for more than one node"),
        (("run", "ring_all_reduce", "--ranks", "4", "--bytes", "1T"), "'1T' is no size"),
        (("run", "ring_all_reduce", "--ranks", "4", "--bytes", "2"), "4 bytes or more"),
        (("run", "ring_all_reduce", "--ranks", "1"), "use 2 or more"),
        (("tune", "--ranks", "2", "--repeat", "0"), "1 repetition or more"),
    ],
)
def test_errors_end_with_status_2(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_runtime_that_is_not_here_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run("run", "ring_all_reduce", "--ranks", "2", "--runtime", "gpu") == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_file_for_other_ranks_and_a_form_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "ring.txt"
    file.write_text(str(compile_one_sided(ring())), encoding="utf-8")
    assert run("run", str(file), "--ranks", "4") == 2
    assert "is for 3 ranks, and --ranks says 4" in capsys.readouterr().err
    file.write_text("nonsense", encoding="utf-8")
    assert run("run", str(file)) == 2
    assert "begins with 'nonsense'" in capsys.readouterr().err


def test_a_wrong_result_is_seen() -> None:
    code = code_for(ring(), Runtime.NUMPY)
    inputs = random_inputs(code, elements_of(code, 400), 1)
    goal = expected_outputs(code, inputs, 100)
    found = [array.copy() for array in goal]
    assert wrong_ranks(found, goal) == ()
    found[1][7] += 1
    assert wrong_ranks(found, goal) == (1,)


@pytest.mark.parametrize("command", ["run", "tune"])
def test_help_has_an_example_and_the_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command, "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"Example: sennit collective {command}" in text
    assert "--json" in text
