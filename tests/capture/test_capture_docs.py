"""The example of docs/capture.md, run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "capture.md"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert 'loss "loss" %' in out
    assert 'result "errors" %' in out
    assert "sennit.uniform(%seed, 0, [4, 16], f32)" in out
    assert out.endswith("dict_keys(['batch.x', 'batch.y'])\n")
