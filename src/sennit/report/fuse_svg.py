"""Fusions as a picture: for each variant two steps, the kernels above and the channel below, on one time axis.

Forward and backward have their tones; what the compute stream waits for is hatched out as a gap with a frame; a dashed
line stands at the bound that these kernels cannot beat.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.fuse.clock import Activity, Span
from sennit.fuse.compare import Variant
from sennit.report import units
from sennit.report.canvas import Axis, axis_for, document, line, plot, rectangle, text

__all__ = ["fusion_svg"]

MARGIN, LABELS, ROW, GAP, AXIS_ROW, LEGEND = 14, 196, 14, 12, 20, 26


def fusion_svg(variants: Sequence[Variant], bound: float, *, width: int = 1000, standalone: bool = True) -> str:
    """`bound` is the least time of one step, drawn as a line."""
    axis = axis_for(max([2 * item.seconds for item in variants], default=1e-6))
    inside = width - 2 * MARGIN - LABELS
    each = 2 * ROW + 2 + GAP
    height = MARGIN + each * len(variants) + AXIS_ROW + LEGEND + MARGIN
    best = min(variants, key=lambda item: item.seconds, default=None)
    elements: list[str] = []
    inner: list[str] = []
    for tick in axis.ticks:
        inner.append(line(axis.percent(tick), 0, each * len(variants), "grid"))
        inner.append(text(axis.percent(tick), each * len(variants) + 14, axis.label(tick), "tick"))
    for place, item in enumerate(variants):
        top = place * each
        star = " ★" if item is best else ""
        elements.append(text(f"{MARGIN}", MARGIN + top + 12, item.name + star, "name"))
        elements.append(text(f"{MARGIN}", MARGIN + top + 26, f"{units.seconds(item.seconds)} a step", "stream"))
        inner += _blocks(item, axis, top)
        for step in (1, 2):
            inner.append(line(axis.percent(step * item.seconds), top - 3, top + 2 * ROW + 5, "end"))
    inner.append(line(axis.percent(bound), 0, each * len(variants), "bound"))
    elements.append(plot(MARGIN + LABELS, MARGIN, inside, each * len(variants) + AXIS_ROW, inner))
    elements.append(_legend(MARGIN + LABELS, height - MARGIN))
    return document(width, height, [_STYLE, *elements], "simulated steps under several fusions", standalone=standalone)


def _blocks(item: Variant, axis: Axis, top: float) -> list[str]:
    found: list[str] = []
    for span in item.spans:
        if span.activity is Activity.WAIT:
            continue  # a gap says it
        below = span.activity is Activity.BUCKET
        y = top + (ROW + 2 if below else 0)
        found.append(
            rectangle(
                axis.percent(span.start),
                y,
                axis.percent(max(span.stop - span.start, 4e-4 * axis.span)),
                ROW - 3 if below else ROW,
                f"f-{_tone(item, span)}",
                _title(item, span),
            )
        )
    return found


def _tone(item: Variant, span: Span) -> str:
    if span.activity is Activity.KERNEL:
        return "forward" if span.number < item.forward else "backward"
    return "update" if span.activity is Activity.UPDATE else "bucket"


def _title(item: Variant, span: Span) -> str:
    length = units.seconds(span.stop - span.start)
    if span.activity is Activity.KERNEL:
        return f"{_tone(item, span)} kernels, {length}"
    bucket = item.strategy.buckets[span.number]
    more = f" and {len(bucket.parts) - 1} more" if len(bucket.parts) > 1 else ""
    what = "update of" if span.activity is Activity.UPDATE else f"{bucket.reduce.value} of"
    return f"{what} bucket {span.number + 1}: {bucket.parts[0].path}{more}, {length}"


def _legend(left: float, y: float) -> str:
    entries = (
        ("f-forward", "forward"),
        ("f-backward", "backward"),
        ("f-update", "update"),
        ("f-bucket", "bucket on the channel"),
    )
    parts: list[str] = []
    at = left
    for tone, name in entries:
        parts.append(rectangle(f"{at:g}", y - 9, "10", 10, tone))
        parts.append(text(f"{at + 14:g}", y, name, "stream"))
        at += 30 + 6.6 * len(name)
    parts.append(f'<line class="bound" x1="{at + 5:g}" x2="{at + 5:g}" y1="{y - 11:g}" y2="{y + 2:g}"/>')
    parts.append(text(f"{at + 14:g}", y, "least step of these kernels, any buckets", "stream"))
    return "".join(parts)


_STYLE = (
    "<style>.f-forward{fill:#4c78a8}.f-backward{fill:#7b9fc9}.f-update{fill:#8f7fc0}.f-bucket{fill:#e08b3c;stroke:#fff;stroke-width:.6}"
    ".bound{stroke:#c03d3d;stroke-width:1.2;stroke-dasharray:4 3}</style>"
)
