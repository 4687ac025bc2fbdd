"""The README's code runs, top to bottom, as one script; the demo's output in it is a demo's output."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_code_runs(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    exec(compile("\n".join(blocks), str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed.startswith('program "feed-forward" {')
    assert re.search(r"\d+ us simulated", printed)
    assert "slots" in printed  # of the collective's proof


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


def test_it_shows_what_the_demo_prints() -> None:
    shown = README.read_text()
    for words in ("simulated", "measured", "★ data", "pipeline", "equal"):
        assert words in shown
