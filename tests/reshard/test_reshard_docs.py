"""The examples of docs/reshard.md, run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reshard.md"


def test_examples_of_the_page_are_true() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    page = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    assert len(page.examples) > 20
    report: list[str] = []
    failed, _ = doctest.DocTestRunner().run(page, out=report.append)
    assert failed == 0, "".join(report)
