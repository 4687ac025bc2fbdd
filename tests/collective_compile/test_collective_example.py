"""The example runs, and its program is right for other sizes too."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from sennit.collective import compile_algorithm, trace
from sennit.collective.verify import verify_schedule
from sennit.ir.collective import CollectiveName, CollectiveSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "collective_hierarchical.py"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("all_reduce(ranks=32, chunks=32, in_place): 640 moves")
    assert "is right" in printed


@pytest.mark.parametrize(("ranks", "chunks"), [(8, 8), (16, 16), (24, 50)])
def test_other_sizes(ranks: int, chunks: int) -> None:
    program = runpy.run_path(str(EXAMPLE))["hierarchical"]
    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, chunks, in_place=True)
    verify_schedule(compile_algorithm(trace(program, spec, "hierarchical")))
