"""Time and bandwidth over size: one line for each way to do a collective, both axes logarithmic.

To the right: bytes of the array, in powers of two. Up: bytes a second, in powers of ten. A line bears its name at its
right end; names that would lie on one another are moved apart. What a line was measured on, and how, belongs into the
caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10

from sennit.errors import SennitError
from sennit.report import units
from sennit.report.canvas import document, text

__all__ = ["Series", "bandwidth_svg"]

MARGIN, LEFT, TOP, BOTTOM = 14, 64, 78, 44
LETTER = 6.7  # width of a letter of a name, on average
LINE = 15  # room for a name
TONES = ("best", "forward", "backward", "collective", "send", "compute", "optimizer", "receive")


@dataclass(frozen=True, slots=True)
class Series:
    """`points` are bytes of the array, and bytes a second. `main` draws it thicker."""

    name: str
    points: tuple[tuple[int, float], ...]
    main: bool = False


@dataclass(frozen=True, slots=True)
class _Scale:
    """From bytes and bytes a second to pixels."""

    left: float
    width: float
    top: float
    height: float
    first: int  # powers of two
    last: int
    low: int  # powers of ten
    high: int

    @classmethod
    def of(cls, series: Sequence[Series], width: float, height: float) -> _Scale:
        points = [point for item in series for point in item.points]
        if not points:
            raise SennitError("a picture of no measurements", fix="measure one size at least")
        sizes, rates = [log2(size) for size, _ in points], [log10(rate) for _, rate in points]
        return cls(
            LEFT + MARGIN,
            width,
            TOP,
            height,
            floor(min(sizes)),
            max(ceil(max(sizes)), floor(min(sizes)) + 1),
            floor(min(rates)),
            max(ceil(max(rates)), floor(min(rates)) + 1),
        )

    def x(self, size: float) -> float:
        return self.left + (log2(size) - self.first) / (self.last - self.first) * self.width

    def y(self, rate: float) -> float:
        return self.top + (self.high - log10(rate)) / (self.high - self.low) * self.height


def bandwidth_svg(
    title: str,
    caption: str,
    series: Sequence[Series],
    *,
    quantity: str = "bus bandwidth",
    width: float = 560,
    height: float = 310,
    standalone: bool = True,
) -> str:
    """The picture. `quantity` names the upward axis; `width` and `height` are those of the plot alone."""
    scale = _Scale.of(series, width, height)
    names = max(len(item.name) * (1.2 if item.main else 1.0) for item in series) * LETTER + 26
    whole = max(LEFT + 2 * MARGIN + width + names, len(caption) * 6 + 2 * MARGIN)
    elements = [
        text(f"{MARGIN}", MARGIN + 12, title, "title"),
        text(f"{MARGIN}", MARGIN + 28, caption, "faint"),
        *_grid(scale, quantity),
        *(_line(item, number, scale) for number, item in enumerate(series)),
        *_names(series, scale),
    ]
    label = f"{quantity} over size: {title}"
    return document(whole, TOP + height + BOTTOM, elements, label, standalone=standalone)


def _grid(scale: _Scale, quantity: str) -> list[str]:
    right, bottom = scale.left + scale.width, scale.top + scale.height
    found = [text(f"{MARGIN}", scale.top - 8, f"{quantity}, bytes/s", "faint small")]
    step = max(1, ceil((scale.last - scale.first) / 9))
    for power in range(scale.first, scale.last + 1, step):
        x = scale.x(2.0**power)
        found.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{scale.top:g}" y2="{bottom:g}"/>')
        found.append(text(f"{x:.1f}", bottom + 16, _short_size(power), "faint small middle"))
    for power in range(scale.low, scale.high + 1):
        y = scale.y(10.0**power)
        found.append(f'<line class="grid" x1="{scale.left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        found.append(text(f"{scale.left - 8:g}", y + 4, _short_rate(power), "faint small end-anchor"))
    found.append(
        text(f"{scale.left + scale.width / 2:g}", bottom + 34, "bytes of a rank's array", "faint small middle")
    )
    return found


def _short_size(power: int) -> str:
    whole, unit = 2 ** (power % 10), ("B", "KiB", "MiB", "GiB", "TiB")[max(0, power) // 10]
    return f"{whole} {unit}"


def _short_rate(power: int) -> str:
    unit = ("", "K", "M", "G", "T")[max(0, power) // 3]
    return f"{10 ** (power % 3)} {unit}B"


def _tone(number: int) -> str:
    return TONES[number % len(TONES)]


def _line(series: Series, number: int, scale: _Scale) -> str:
    places = [(scale.x(size), scale.y(rate)) for size, rate in sorted(series.points)]
    path = " ".join(f"{'M' if not i else 'L'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(places))
    dash = "" if number < len(TONES) else ";stroke-dasharray:5 3"
    stroke = f"fill:none;stroke:var(--{_tone(number)});stroke-width:{2.6 if series.main else 1.5}{dash}"
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" style="fill:var(--{_tone(number)})">'
        f"<title>{_label(series, size, rate)}</title></circle>"
        for (x, y), (size, rate) in zip(places, sorted(series.points), strict=True)
    )
    return f'<path d="{path}" style="{stroke}"/>{dots}'


def _label(series: Series, size: int, rate: float) -> str:
    return escape(f"{series.name}: {rate / 1e9:.3g} GB/s at {units.size(size)}")


def _names(series: Sequence[Series], scale: _Scale) -> list[str]:
    """At the right ends of the lines, from the top down, each at least a line below the one before."""
    ends = sorted(
        (scale.y(max(item.points)[1]), scale.x(max(item.points)[0]), number, item) for number, item in enumerate(series)
    )
    lowest = scale.top + scale.height
    spots: list[float] = []
    for y, *_ in ends:
        spots.append(max(y, spots[-1] + LINE) if spots else y)
    pushed = (spots[-1] - ends[-1][0]) / 2  # half of the push goes upwards
    highest = min(max(spots[0] - pushed, scale.top - LINE), max(scale.top, lowest - LINE * len(spots)))
    for position, (y, *_) in enumerate(ends):
        spots[position] = max(y - pushed, highest if not position else spots[position - 1] + LINE)
    found = []
    right = scale.left + scale.width
    for spot, (y, x, number, item) in zip(spots, ends, strict=True):
        colour = f"var(--{_tone(number)})"
        found.append(
            f'<path d="M{x + 4:.1f} {y:.1f} L{right + 14:.1f} {spot:.1f}" '
            f'style="fill:none;stroke:{colour};stroke-opacity:.5;stroke-width:1"/>'
        )
        weight = "plan" if item.main else ""
        found.append(text(f"{right + 18:g}", spot + 4, item.name, weight))
    return found
