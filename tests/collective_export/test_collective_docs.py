"""The examples of docs/collective.md, run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from sennit.collective.library import recipes

PAGE = Path(__file__).parents[2] / "docs" / "collective.md"


def test_examples_of_the_page_are_true() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    page = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    assert len(page.examples) > 8
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(page, out=report.append)
    assert failed == 0, "".join(report)


def test_the_page_names_every_algorithm_of_the_library() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for recipe in recipes():
        assert f"`{recipe.name}`" in text
