"""One HTML file that holds the whole comparison and loads nothing: it can be mailed, archived and opened offline.

    the sentence, the table of plans, the picture of all plans on one time axis
    where the step goes: compute, exposed communication, idle
    predicted against measured
    per plan and cluster: timeline (zooms), memory over time, critical path, program text
    how the numbers were made

Numbers are simulated or measured, and each says which. Pictures fold what cannot be seen (`activity.groups`) and long
program texts are cut with a note, which keeps the file small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sennit.ir.timeline import Category, Event, Timeline
from sennit.report import units
from sennit.report.canvas import picture_style
from sennit.report.charts import breakdown_svg, memory_svg, worst_device
from sennit.report.comparison import Breakdown, Comparison, PlanResult, SimulatedRun
from sennit.report.file import write_whole
from sennit.report.svg import comparison_svg, timeline_svg

__all__ = ["html_page", "write_html"]

PICTURE = 1160  # pixels: the width of the page's column
PROGRAM_LETTERS = 100_000
PATH_ROWS = 10


@dataclass(frozen=True, slots=True)
class _Link:
    """One of the longest events of a critical path."""

    name: str
    place: str
    start: str
    length: str
    share: str


@dataclass(frozen=True, slots=True)
class _Path:
    """A critical path in numbers: its events by category, the wait between them, and the longest of them."""

    events: int
    shares: tuple[tuple[str, str, str], ...]
    longest: tuple[_Link, ...]


@dataclass(frozen=True, slots=True)
class _Section:
    """One plan on one cluster, with its pictures made."""

    cluster: str
    mesh: str
    step: str
    parts: Breakdown
    memory_device: int | None
    timeline: Markup
    memory: Markup
    path: _Path | None
    program: str
    program_note: str


def write_html(path: Path | str, comparison: Comparison) -> None:
    write_whole(Path(path), html_page(comparison).encode())


def html_page(comparison: Comparison) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("sennit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["seconds"] = units.seconds
    environment.filters["size"] = units.size
    environment.filters["difference"] = units.difference
    environment.filters["signed_percent"] = units.signed_percent
    headlines = [(result.name, result.headline) for result in comparison.results]
    return environment.get_template("report.html.j2").render(
        comparison=comparison,
        best=comparison.best,
        why=comparison.why(),
        rows=[(result, Breakdown.of(result.headline.timeline)) for result in comparison.results],
        overview=Markup(comparison_svg(comparison, width=PICTURE, standalone=False)),
        breakdown=Markup(breakdown_svg(headlines, comparison.best.name, width=PICTURE)),
        plans=[(result, _sections(result)) for result in comparison.results],
        picture_style=Markup(picture_style()),
    )


def _sections(result: PlanResult) -> list[_Section]:
    runs: list[SimulatedRun] = list(result.simulated)
    if result.predicted is not None and not any(run is result.predicted for run in runs):
        runs.append(result.predicted)
    return [_section(run) for run in runs]


def _section(run: SimulatedRun) -> _Section:
    program, note = _cut(str(run.program), PROGRAM_LETTERS)
    return _Section(
        run.cluster,
        run.mesh,
        units.seconds(run.step),
        Breakdown.of(run.timeline),
        worst_device(run.timeline),
        Markup(timeline_svg(run.timeline, run.program, width=PICTURE, standalone=False)),
        Markup(memory_svg(run.timeline, width=PICTURE)),
        _critical(run.timeline),
        program,
        note,
    )


def _critical(timeline: Timeline) -> _Path | None:
    path, span = timeline.critical_path(), timeline.span
    if not path or span <= 0:
        return None

    def row(name: str, value: float) -> tuple[str, str, str]:
        return name, units.seconds(value), units.percent(value / span)

    sums = [(category.value, _sum([e for e in path if e.category is category])) for category in Category]
    wait = span - _sum(path)
    shares = [row(name, value) for name, value in sums if value > 0]
    if wait > 1e-6 * span:
        shares.append(row("waiting", wait))
    longest = sorted(path, key=lambda e: e.start - e.stop)[:PATH_ROWS]
    links = [
        _Link(
            event.name,
            f"device {event.device}, {event.stream}",
            units.seconds(event.start),
            units.seconds(event.stop - event.start),
            units.percent((event.stop - event.start) / span),
        )
        for event in longest
    ]
    return _Path(len(path), tuple(shares), tuple(links))


def _sum(events: Sequence[Event]) -> float:
    return sum(event.stop - event.start for event in events)


def _cut(text: str, letters: int) -> tuple[str, str]:
    """The text, or its first whole lines with a note of how many follow."""
    if len(text) <= letters:
        return text, ""
    end = text.rfind("\n", 0, letters) + 1 or letters
    return text[:end], f"{text.count(chr(10), end)} more lines are in the program's own text file."
