"""The examples of docs/layouts.md, run."""

from __future__ import annotations

import doctest
import re
from importlib.util import find_spec
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_examples_of_the_page_are_true() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    if find_spec("jax") is None:
        blocks = [block for block in blocks if "layout_jax" not in block]
    page = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    assert len(page.examples) > 30
    report: list[str] = []
    failed, _ = doctest.DocTestRunner().run(page, out=report.append)
    assert failed == 0, "".join(report)
