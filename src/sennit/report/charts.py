"""The two charts beside the timelines: where the step goes, and what memory is live when.

`breakdown_svg` draws, per plan, the mean device's step as compute, exposed communication and idle (they sum to the
step). `memory_svg` draws the device that comes closest to running out: live bytes by kind, stacked, the peak marked. A
timeline has a sample per change; the chart keeps, of the samples that fall into one pixel, the greatest, so the peak is
never lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.ir.timeline import Memory, MemoryKind, Timeline
from sennit.report import units
from sennit.report.canvas import axis_for, document, line, plot, rectangle, text
from sennit.report.comparison import Breakdown, SimulatedRun

__all__ = ["breakdown_svg", "memory_svg", "worst_device"]

LEFT, RIGHT = 210, 14  # as in the timelines, so that a page shows time above the same time


def breakdown_svg(runs: Sequence[tuple[str, SimulatedRun]], best: str, *, width: int = 1000) -> str:
    """A bar per plan: the name, then its run."""
    left, right, bar, gap = LEFT, 90, 22, 10
    axis = axis_for(max(run.step for _, run in runs))
    height = len(runs) * (bar + gap) + 48
    drawn = [line(axis.percent(tick), 0, height - 48, "grid") for tick in axis.ticks]
    outside: list[str] = []
    for position, (name, run) in enumerate(runs):
        y = position * (bar + gap)
        parts = Breakdown.of(run.timeline)
        start = 0.0
        for part, label, value in (
            ("compute", "compute", parts.compute),
            ("exposed", "exposed communication", parts.exposed),
            ("idle", "idle", parts.idle),
        ):
            share = value / axis.span
            title = f"{name}, simulated: {label} {units.seconds(value)}, {units.percent(value / max(run.step, 1e-30))}"
            drawn.append(rectangle(axis.percent(start), y, f"{share * 100:.4g}%", bar, f"block {part}", title))
            caption = units.seconds(value)
            if share * (width - left - right) > 7 * len(caption) + 8:
                letters = "small middle" if part == "idle" else "number"
                drawn.append(text(axis.percent(start + value / 2), y + bar / 2 + 3.6, caption, letters))
            start += value
        marked = "end-anchor best plan" if name == best else "end-anchor plan"
        outside.append(text(f"{left - 10}", y + 15, f"★ {name}" if name == best else name, marked))
        outside.append(
            text(f"{width - right + 8}", y + 15, units.seconds(run.step), "best plan" if name == best else "plan")
        )
    base = height - 48
    drawn += [
        text(axis.percent(tick), base + 12, axis.label(tick), "small faint" + (" middle" if tick else ""))
        for tick in axis.ticks
    ]
    legend = _legend([("compute", "compute"), ("exposed", "exposed communication"), ("idle", "idle")], left, height - 8)
    elements = [plot(left, 0, width - left - right, base + 20, drawn), *outside, legend]
    return document(width, height, elements, "simulated step by what the mean device does", standalone=False)


def worst_device(timeline: Timeline) -> int | None:
    """The device with the greatest peak, the first of them; none where no memory was recorded."""
    return max(timeline.memory, key=lambda sample: sample.total).device if timeline.memory else None


def memory_svg(timeline: Timeline, *, width: int = 1000) -> str:
    """Live bytes over time on the worst device, stacked by kind."""
    device = worst_device(timeline)
    if device is None:
        return ""
    left, right, tall = LEFT, RIGHT, 150
    axis = axis_for(timeline.span)
    samples = sorted((s for s in timeline.memory if s.device == device), key=lambda sample: sample.time)
    peak = max(samples, key=lambda sample: sample.total)
    kept = _thin(samples, timeline.span, width - left - right)
    present = [kind for kind in MemoryKind if any(dict(sample.live).get(kind) for sample in kept)]
    ceiling = max(peak.total, 1) * 1.12
    drawn = [line(axis.percent(tick), 0, tall, "grid") for tick in axis.ticks]
    # percentages have no meaning in a path: the areas lie in a plot of their own, stretched to the same width
    areas = "".join(
        _area(kept, present[: position + 1], axis.span, ceiling) for position in reversed(range(len(present)))
    )
    drawn.append(
        f'<svg x="0" y="0" width="100%" height="{tall}" viewBox="0 0 1000 100" preserveAspectRatio="none">{areas}</svg>'
    )
    y = tall * (1 - peak.total / ceiling)
    x = axis.percent(min(peak.time, axis.span))
    late = peak.time > axis.span / 2
    drawn.append(f'<circle class="peak" cx="{x}" cy="{y:.1f}" r="3.5"/>')
    caption = f"peak {units.size(peak.total)} at {units.seconds(peak.time)}"
    drawn.append(text(x, y - 8, caption, "small end-anchor" if late else "small"))
    drawn += [
        text(axis.percent(tick), tall + 13, axis.label(tick), "small faint" + (" middle" if tick else ""))
        for tick in axis.ticks
    ]
    outside = [text(f"{left - 8}", 12, units.size(ceiling), "small faint end-anchor")]
    outside += [text(f"{left - 8}", tall, "0", "small faint end-anchor")]
    outside.append(_legend([(kind.value, kind.value) for kind in present], left, tall + 36))
    label = f"live memory of device {device}, {timeline.origin.value}: {caption}"
    return document(
        width,
        tall + 44,
        [plot(left, 0, width - left - right, tall + 20, drawn), *outside],
        label,
        standalone=False,
    )


def _thin(samples: Sequence[Memory], span: float, pixels: int) -> list[Memory]:
    """Of the samples in one pixel the greatest and the last: the peak is kept, and so is the level that holds after."""
    kept: list[Memory] = []
    column: list[Memory] = []

    def close() -> None:
        highest = max(column, key=lambda sample: sample.total)
        kept.append(highest)
        if column[-1] is not highest:
            kept.append(column[-1])

    for sample in samples:
        if column and int(sample.time / max(span, 1e-30) * pixels) != int(column[0].time / max(span, 1e-30) * pixels):
            close()
            column = []
        column.append(sample)
    if column:
        close()
    return kept


def _area(samples: Sequence[Memory], kinds: Sequence[MemoryKind], span: float, ceiling: float) -> str:
    """The sum of `kinds` as steps; drawn from the highest sum to the lowest, each covers the one before."""
    path = "M0,100"
    for sample in samples:
        live = dict(sample.live)
        height = 100 * (1 - sum(live.get(kind, 0) for kind in kinds) / ceiling)
        path += f"H{sample.time / span * 1000 if span else 0:.5g}V{height:.4g}"
    return f'<path class="{kinds[-1].value}" d="{path}H1000V100Z"><title>{kinds[-1].value}</title></path>'


def _legend(entries: Sequence[tuple[str, str]], left: float, y: float) -> str:
    shapes: list[str] = []
    for tone, name in entries:
        shapes.append(rectangle(f"{left:g}", y - 9, "11", 11, tone, rounded=2))
        shapes.append(text(f"{left + 16:g}", y, name, "faint"))
        left += 16 + 6.6 * len(name) + 20
    return "".join(shapes)
