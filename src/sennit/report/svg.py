"""Timelines as pictures: time to the right, a row per stream, devices that do the same folded into one group of rows.

`timeline_svg` draws one timeline. `comparison_svg` draws the headline run of every plan, one under another on a common
time axis, so that the eye compares lengths; the best plan bears a star. Both return SVG text that stands alone as a
file (with its own ground, readable on a light and on a dark page) or, with `standalone=False`, to be set into an HTML
page.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.ir.program import Program
from sennit.ir.timeline import Timeline
from sennit.report import units
from sennit.report.activity import Block, Group, Tone, groups
from sennit.report.canvas import Axis, axis_for, document, end_of_step, line, plot, rectangle, text
from sennit.report.comparison import Comparison

__all__ = ["comparison_svg", "timeline_svg"]

MARGIN = 14
LABELS = 196  # width of the column of device and stream names
COMPUTE_ROW, TALK_ROW, ROW_GAP, GROUP_GAP = 20, 10, 2, 8
AXIS_ROW = 20
LETTER = 6.4  # width of a letter of a caption, on average
DIGIT = 6.4  # width of a digit in the letters of micro-batch numbers, with a hair of space
MOST_ZOOM = 32


def timeline_svg(
    timeline: Timeline,
    program: Program | None = None,
    *,
    width: int = 1000,
    span: float | None = None,
    standalone: bool = True,
) -> str:
    """One timeline. `program` tells forward from backward and numbers the micro-batches; `span` sets the length of the
    time axis where several pictures share it."""
    axis = axis_for(max(span or 0.0, timeline.span))
    inside = width - 2 * MARGIN - LABELS
    # a page can zoom in: it gets what cannot be seen at first, up to a number of blocks that keeps it small
    seen = 0.4 if standalone else 0.4 / 8
    found = groups(timeline, program, resolution=seen * axis.span / inside, most_blocks=1200)
    rows = _height(found)
    top = MARGIN if standalone else 2
    height = top + rows + AXIS_ROW + (26 + MARGIN if standalone else 0)
    elements = _panel(found, axis, timeline.span, top, inside, ruler=True, most_zoom=1 if standalone else MOST_ZOOM)
    if standalone:
        elements.append(_legend(_tones(found), MARGIN + LABELS, top + rows + AXIS_ROW + 18, numbered=_numbered(found)))
    label = f"{timeline.origin.value} timeline of {timeline.name}: {units.seconds(timeline.span)}"
    return document(width, height, elements, label, standalone=standalone)


def comparison_svg(comparison: Comparison, *, width: int = 1000, standalone: bool = True) -> str:
    """The headline run of every plan on one time axis, the best one marked."""
    runs = [(result, result.headline) for result in comparison.results]
    winner = comparison.best
    axis = axis_for(max(run.step for _, run in runs))
    inside = width - 2 * MARGIN - LABELS
    right = f"{width - MARGIN}"
    top = MARGIN + 16
    title = f"{comparison.model} on {comparison.cluster}: one training step of each plan, simulated"
    elements = [text(f"{MARGIN}", top, title, "title")]
    top += 14
    tones: list[Tone] = []
    numbered = False
    for position, (result, run) in enumerate(runs):
        best = result is winner
        top += 18
        name = f"★ {result.name} (best)" if best else result.name
        elements.append(text(f"{MARGIN}", top, name, "plan best" if best else "plan"))
        step = f"{units.seconds(run.step)} simulated"
        left = max(MARGIN + LABELS, MARGIN + LETTER * 1.25 * len(name) + 10)
        room = width - MARGIN - left - LETTER * 1.25 * len(step)
        elements.append(text(f"{left:g}", top, _shorten(result.summary, int(room / LETTER)), "faint"))
        elements.append(text(right, top, step, "plan end-anchor best" if best else "plan end-anchor"))
        top += 7
        found = groups(run.timeline, run.program, resolution=0.4 * axis.span / inside)
        tones += _tones(found)
        numbered = numbered or _numbered(found)
        last = position == len(runs) - 1
        elements += _panel(found, axis, run.step, top, inside, ruler=last)
        top += _height(found) + (AXIS_ROW if last else 6)
    legend = [tone for tone in Tone if tone in tones]
    elements.append(_legend(legend, MARGIN + LABELS, top + 18, numbered=numbered))
    return document(width, top + 26 + MARGIN, elements, title, standalone=standalone)


def _shorten(content: str, letters: int) -> str:
    return content if len(content) <= letters else content[: max(letters - 1, 0)].rstrip() + "…"


def _tones(found: Sequence[Group]) -> list[Tone]:
    seen = {block.tone for group in found for row in group.rows for block in row.blocks}
    return [tone for tone in Tone if tone in seen]


def _numbered(found: Sequence[Group]) -> bool:
    return any(block.microbatch is not None for group in found for row in group.rows for block in row.blocks)


def _row_height(stream: str) -> int:
    return COMPUTE_ROW if stream == "compute" else TALK_ROW


def _height(found: Sequence[Group]) -> int:
    rows = sum(_row_height(row.stream) + ROW_GAP for group in found for row in group.rows)
    return rows + GROUP_GAP * max(0, len(found) - 1)


def _panel(
    found: Sequence[Group], axis: Axis, end: float, top: float, inside: float, *, ruler: bool, most_zoom: float = 1
) -> list[str]:
    """The rows of all groups: the plot first, then the names, so that names stay above a plot scrolled under them."""
    height = _height(found)
    tracks: list[str] = []
    drawn = [line(axis.percent(tick), 0, height, "grid") for tick in axis.ticks]
    names: list[str] = []
    y = 0.0
    for group in found:
        names.append(_group_name(group, top + y))
        for row in group.rows:
            tall = _row_height(row.stream)
            tracks.append(rectangle("0", y, "100%", tall, "track"))
            for block in row.blocks:
                drawn += _block(block, axis, y, tall, inside, most_zoom)
            baseline = top + y + tall / 2 + 3.5
            names.append(text(f"{MARGIN + LABELS - 8}", baseline, row.stream, "small faint end-anchor"))
            y += tall + ROW_GAP
        y += GROUP_GAP
    drawn.append(end_of_step(axis, end, 0, height))
    if ruler:
        drawn += [
            text(axis.percent(tick), height + 14, axis.label(tick), "small faint" + (" middle" if tick else ""))
            for tick in axis.ticks
        ]
    mask = rectangle("2", top, f"{MARGIN + LABELS - 2}", height + (AXIS_ROW if ruler else 0), "mask")
    return [
        plot(MARGIN + LABELS, top, inside, height + (AXIS_ROW if ruler else 0), [*tracks, *drawn]),
        f'<g class="names">{mask}{"".join(names)}</g>',
    ]


def _group_name(group: Group, top: float) -> str:
    title = group.label
    if group.spread > 0:
        title += (
            f": device {group.devices[0]} is drawn, the others are at most {units.seconds(group.spread)} apart from it"
        )
    label = text(f"{MARGIN}", top + 14, group.label)
    lane = text(f"{MARGIN}", top + 27, group.lane, "small faint") if len(group.rows) > 1 else ""
    return f"<g><title>{title}</title>{label}{lane}</g>"


def _block(block: Block, axis: Axis, y: float, tall: int, inside: float, most_zoom: float) -> list[str]:
    share = (block.stop - block.start) / axis.span
    odd = " odd" if block.microbatch is not None and block.microbatch % 2 else ""
    shape = rectangle(
        axis.percent(block.start),
        y,
        # a transfer too short to be seen is still there
        f"{max(share * 100, 0.12):.4g}%",
        tall,
        # an outline in the colour of the ground parts neighbours, and would wash out what is only a line itself
        f"block {block.tone.value}{odd}{'' if share * inside > 3 else ' thin'}",
        block.describe(),
        # gaps that are too short to be drawn make the block as pale as they would make it from afar
        opacity=max(0.2, block.density) if block.density < 0.95 else None,
    )
    if block.microbatch is None or tall < COMPUTE_ROW:
        return [shape]
    number = str(block.microbatch)
    needed = (DIGIT * len(number) + 3) / max(share * inside, 1e-9)
    if needed > most_zoom:
        return [shape]
    # a number that does not fit yet is shown by the page once the reader has zoomed in that far
    hidden = "" if needed <= 1 else f' data-fits="{needed:.2g}" style="display:none"'
    middle = axis.percent((block.start + block.stop) / 2)
    return [shape, text(middle, y + tall / 2 + 3.6, number, f"number {block.tone.value}", hidden)]


def _legend(tones: Sequence[Tone], left: float, y: float, *, numbered: bool) -> str:
    shapes: list[str] = []
    for tone in tones:
        shapes.append(rectangle(f"{left:g}", y - 9, "11", 11, tone.value, rounded=2))
        shapes.append(text(f"{left + 16:g}", y, tone.value, "faint"))
        left += 16 + 6.4 * len(tone.value) + 20
    if numbered:
        shapes.append(text(f"{left:g}", y, "the number is the micro-batch", "faint"))
    return "".join(shapes)
