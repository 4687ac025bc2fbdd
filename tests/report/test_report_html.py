from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_samples import sample_comparison

from sennit.report import Comparison, html_page, write_html

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Keeps the tags that load something, the letters, and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "action", "xlink:href") and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_holds_everything_and_loads_nothing(comparison: Comparison, tmp_path: Path) -> None:
    write_html(tmp_path / "report.html", comparison)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    reader = read(page)
    words = " ".join(reader.words)
    assert reader.loads == ["data:,"]
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert page.count('<tr class="best"') == 1
    assert page.count('<span class="badge">best</span>') == 1
    assert comparison.why() in words
    for result in comparison.results:
        assert result.summary in words
        for run in result.simulated:
            assert f"mesh {run.mesh}" in words
            assert str(run.program).splitlines()[1] in words
    for number in ("2.24 ms", "-9.7%", "-58%", "-25%", "2.4e-07", "equal, bitwise", "equal within rounding"):
        assert number in words
    assert page.count('class="sennit"') == 2 + 3 * 2 * 2  # overview, bars; a timeline and a memory chart for each run
    assert len(page) < 400_000


def test_what_the_page_shows_is_escaped(comparison: Comparison) -> None:
    evil = "<script>alert(1)</script>"
    first = comparison.results[0]
    assert first.measured is not None
    result = replace(first, name=evil, summary=evil, measured=replace(first.measured, worst=evil))
    page = html_page(replace(comparison, model=evil, model_summary=evil, results=(result,)))
    assert page.count("<script") == 1
    assert evil not in page
    read(page)


def test_a_plan_that_was_not_run_and_one_that_is_wrong(comparison: Comparison) -> None:
    first, second, _ = comparison.results
    assert first.measured is not None
    wrong = replace(first, measured=replace(first.measured, max_difference=float("nan")))
    page = html_page(replace(comparison, results=(wrong, replace(second, measured=None, predicted=None))))
    read(page)
    assert '<span class="verdict different">DIFFERENT</span>' in page
    assert "not run" in page
    assert "does not equal the single-device run" in page


def test_a_large_model_keeps_the_page_small() -> None:
    page = html_page(sample_comparison(depth=96))
    assert len(page.encode()) < 3_000_000
    assert "more lines are in the program" in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on PATH to open the page in")
def test_a_browser_opens_it_without_a_complaint(comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html(path, comparison)
    # the page is opened as a reader would, and every zoom button pressed
    press = "<script>for (const b of document.querySelectorAll('[data-zoom=\"2\"]')) { b.click(); b.click(); }</script></body>"
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", press), encoding="utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr --dump-dom"
    )
    done = subprocess.run(
        ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    assert 'data-ready="yes"' in done.stdout
    assert done.stdout.count("<output>4×</output>") == 6
    shown = re.findall(r'<svg class="plot" x="210" y="2" width="([0-9.]+)"', done.stdout)
    assert {float(width) for width in shown} == {4 * (1160 - 28 - 196)}
