"""The comparison in a terminal: one table of all plans, one of predictions against measurements, one sentence.

`ComparisonView` is a rich renderable: `console.print(ComparisonView(comparison))`. It asks the console how wide it is
and which letters it can write, so it looks right from 80 columns on, in a pipe and in a file. Every column says whether
its numbers are simulated or measured. `comparison_text` renders the same without colour.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sennit.report import units
from sennit.report.comparison import Breakdown, Comparison, MeasuredRun, PlanResult, Verdict

__all__ = ["ComparisonView", "comparison_table", "comparison_text", "prediction_table"]

NONE = "-"
WIDE, ROOMY = 112, 92  # columns from which headings are spelled out, and from which columns stand two apart


@dataclass(frozen=True, slots=True)
class ComparisonView:
    """Everything that the terminal shows of a comparison."""

    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        mark = "★" if options.encoding.lower().startswith("utf") else "*"
        comparison = self.comparison
        yield Text(f"{comparison.model}: {comparison.model_summary}", style="bold")
        yield Text(f"simulated on {comparison.cluster}; {_measured_on(comparison)}")
        yield ""
        yield comparison_table(comparison, mark=mark, width=options.max_width)
        yield Padding(Text(f"{mark} {comparison.why()}", style="bold"), (1, 0))
        if any(len(result.simulated) > 1 or result.error is not None for result in comparison.results):
            yield Text("simulated against measured", style="bold")
            yield prediction_table(comparison, width=options.max_width)
            yield ""
        reference = units.seconds(comparison.reference_seconds)
        yield Text(f"The single-device step that every run is compared with took {reference}, measured.", style="dim")


def comparison_text(comparison: Comparison, *, width: int = 120) -> str:
    """What the terminal shows, as plain text."""
    file = io.StringIO()
    # the file is text, so every letter can be written to it
    console = Console(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(ComparisonView(comparison))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def comparison_table(comparison: Comparison, *, mark: str = "★", width: int = WIDE) -> Table:
    """One row a plan, in the order given; the best one bears the mark. Made for a terminal of `width` columns."""
    table = _table(width)
    longest = max(len(word) for result in comparison.results for word in result.name.split())
    table.add_column("plan", min_width=2 + min(longest, 14))
    # the lines of a heading are broken by hand: only the first and the last column may give way in a narrow terminal
    table.add_column("simulated\nstep", justify="right", no_wrap=True)
    exposed = "communication" if width >= WIDE else "comm."
    table.add_column(f"simulated\nexposed\n{exposed}", justify="right", no_wrap=True)
    table.add_column("simulated\npeak\nmemory", justify="right", no_wrap=True)
    table.add_column("simulated\nbytes on\nthe wire", justify="right", no_wrap=True)
    table.add_column("measured\nstep on\nCPU ranks", justify="right", no_wrap=True)
    difference = "max\ndifference" if width >= WIDE else "max diff."
    table.add_column(f"measured\n{difference}", justify="right", no_wrap=True)
    table.add_column("measured\nverdict", min_width=9, overflow="fold")
    winner = comparison.best
    for result in comparison.results:
        best = result is winner
        run = result.headline
        table.add_row(
            _name(result, mark if best else " "),
            units.seconds(run.step),
            units.seconds(Breakdown.of(run.timeline).exposed),
            units.size(run.peak_memory),
            units.size(run.wire_bytes),
            *_measured_cells(result.measured),
            style="bold" if best else "",
        )
    return table


def prediction_table(comparison: Comparison, *, width: int = WIDE) -> Table:
    """The later clusters, and where one of them is the machine that ran, the error of the simulation."""
    table = _table(width)
    table.add_column("plan", overflow="fold")
    table.add_column("on", overflow="fold")
    table.add_column("simulated\nstep", justify="right", no_wrap=True)
    table.add_column("measured\nstep (median)", justify="right", no_wrap=True)
    table.add_column("measured\nleast to greatest", justify="right", no_wrap=True)
    table.add_column("error of the\nsimulation", justify="right", no_wrap=True)
    for result in comparison.results:
        runs = list(result.simulated[1:])
        if result.predicted is not None and not any(run is result.predicted for run in runs):
            runs.append(result.predicted)
        for run in runs:
            measured = result.measured if run is result.predicted else None
            cells = [NONE, NONE, NONE]
            if measured is not None and result.error is not None:
                spread = f"{units.seconds(min(measured.seconds))} to {units.seconds(max(measured.seconds))}"
                cells = [units.seconds(measured.step), spread, units.signed_percent(result.error)]
            table.add_row(result.name, f"{run.cluster}, {run.mesh}", units.seconds(run.step), *cells)
    return table


def _table(width: int) -> Table:
    padding = (0, 1, 0, 0) if width >= ROOMY else (0, 0, 0, 0)
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, header_style="bold")


def _name(result: PlanResult, mark: str) -> Table:
    """The mark in a column of its own, so that a name of several lines stays clear of it."""
    grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    grid.add_row(mark, result.name)
    return grid


def _measured_cells(measured: MeasuredRun | None) -> tuple[str, str, Text]:
    if measured is None:
        return NONE, NONE, Text("not run", style="dim")
    match measured.verdict:
        case Verdict.BITWISE | Verdict.ROUNDING:
            verdict = Text(measured.verdict.value, style="green")
        case Verdict.DIFFERENT:
            verdict = Text(f"{measured.verdict.value} in {measured.worst}", style="bold red")
    return units.seconds(measured.step), units.difference(measured.max_difference), verdict


def _measured_on(comparison: Comparison) -> str:
    runs = [result.measured for result in comparison.results if result.measured is not None]
    if not runs:
        return "not measured"
    return "measured on " + ", ".join(dict.fromkeys(f"{run.ranks} CPU ranks ({run.backend})" for run in runs))
