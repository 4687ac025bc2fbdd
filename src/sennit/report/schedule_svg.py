"""Schedules as pictures: a row per lane, a block per task, time to the right on one axis for all schedules.

Blue is forward, green backward, yellow weight gradients; the number is the micro-batch. Where a lane has several
stages, later ones are paler, so that the way of a micro-batch can be followed through them.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.plan.grid import Grid
from sennit.plan.pattern import Work
from sennit.report.canvas import Axis, axis_for, document, line, plot, rectangle, text

__all__ = ["schedules_svg"]

MARGIN, LABELS, ROW, GAP = 14, 64, 18, 2
DIGIT = 6.4
_TONES = {Work.FORWARD: "forward", Work.BACKWARD: "backward", Work.WEIGHTS: "receive"}


def schedules_svg(grids: Sequence[tuple[str, Grid]], *, width: int = 1000, standalone: bool = True) -> str:
    """Schedules one under another, each with its caption, its span and its bubble.

    Times are those of the recurrence.
    """
    axis = axis_for(max(grid.span for _, grid in grids))
    inside = width - 2 * MARGIN - LABELS
    elements: list[str] = []
    top = float(MARGIN)
    for position, (caption, grid) in enumerate(grids):
        top += 14
        elements.append(text(f"{MARGIN}", top, caption, "plan"))
        figures = f"{grid.span * axis.scale:.4g} {axis.unit}, {100 * grid.bubble:.1f} % bubble"
        elements.append(text(f"{width - MARGIN}", top, figures, "plan end-anchor"))
        top += 6
        last = position == len(grids) - 1
        elements += _rows(grid, axis, top, inside, ruler=last)
        top += len(grid.start) * (ROW + GAP) + (20 if last else 8)
    elements.append(_legend(MARGIN + LABELS, top + 12))
    return document(width, top + 18 + MARGIN, elements, "schedules of pipeline stages", standalone=standalone)


def _rows(grid: Grid, axis: Axis, top: float, inside: float, *, ruler: bool) -> list[str]:
    height = len(grid.start) * (ROW + GAP)
    begin = min(row[0] for row in grid.start)
    drawn = [line(axis.percent(tick), 0, height, "grid") for tick in axis.ticks]
    names: list[str] = []
    for lane, row in enumerate(grid.pattern.rows):
        y = lane * (ROW + GAP)
        drawn.append(rectangle("0", y, "100%", ROW, "track"))
        stages = grid.pattern.stages[lane]
        for task, start, stop in zip(row, grid.start[lane], grid.stop[lane], strict=True):
            share = (stop - start) / axis.span
            if share <= 0:
                continue
            pale = 1.0 - 0.55 * stages.index(task.stage) / max(1, len(stages) - 1) if len(stages) > 1 else None
            title = f"{task}: {axis.label(start - begin)} to {axis.label(stop - begin)}"
            left = axis.percent(start - begin)
            drawn.append(
                rectangle(left, y, f"{share * 100:.4g}%", ROW, f"block {_TONES[task.work]}", title, opacity=pale)
            )
            if share * inside > DIGIT * len(str(task.microbatch)) + 3:
                middle = axis.percent((start + stop) / 2 - begin)
                drawn.append(text(middle, y + ROW / 2 + 3.6, str(task.microbatch), f"number {_TONES[task.work]}"))
        names.append(text(f"{MARGIN + LABELS - 8}", top + y + 13, f"lane {lane}", "small faint end-anchor"))
    if ruler:
        drawn += [
            text(axis.percent(tick), height + 14, axis.label(tick), "small faint" + (" middle" if tick else ""))
            for tick in axis.ticks
        ]
    return [plot(MARGIN + LABELS, top, inside, height + (20 if ruler else 0), drawn), *names]


def _legend(left: float, y: float) -> str:
    shapes: list[str] = []
    for name, tone in (("forward", "forward"), ("backward", "backward"), ("weight gradients", "receive")):
        shapes.append(rectangle(f"{left:g}", y - 9, "11", 11, tone, rounded=2))
        shapes.append(text(f"{left + 16:g}", y, name, "faint"))
        left += 16 + 6.4 * len(name) + 20
    shapes.append(text(f"{left:g}", y, "the number is the micro-batch; later stages of a lane are paler", "faint"))
    return "".join(shapes)
