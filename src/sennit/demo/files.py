"""What the demo leaves behind: the report, the trace, the picture, and each plan's program and source."""

from __future__ import annotations

from pathlib import Path

from sennit.errors import RunError
from sennit.report import Comparison, SimulatedRun, comparison_svg, write_html, write_text, write_trace
from sennit.run import emit_lane

__all__ = ["write_files"]


def write_files(folder: Path, comparison: Comparison) -> None:
    """Each file is written whole or not at all."""
    try:
        write_html(folder / "report.html", comparison)
        runs = [run for result in comparison.results for run in result.simulated]
        write_trace(folder / "trace.json.gz", [run.timeline for run in runs])
        write_text(folder / "timelines.svg", comparison_svg(comparison))
        for run in runs:
            _write_program(folder / "programs", run)
    except OSError as error:
        raise RunError(
            f"cannot write to {folder}: {error.strerror}", fix="name a folder that you may write to"
        ) from error


def _write_program(folder: Path, run: SimulatedRun) -> None:
    name = "-".join(f"{run.program.name} {run.cluster}".replace(":", " x").split())
    write_text(folder / f"{name}.txt", str(run.program))
    for lane in run.program.lanes:
        write_text(folder / f"{name}.{lane.name}.py", emit_lane(run.program, lane))
