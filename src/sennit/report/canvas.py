"""Drawing in SVG text: the few shapes that the pictures share, and the time axis.

Everything that has a place in time lies in a nested `<svg class="plot">` and is placed in percent of its width. To zoom
in time a page makes the plot wider; letters and heights stay as they are. Coordinates outside the plot are in pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import ceil, floor, log10

__all__ = ["Axis", "axis_for", "document", "end_of_step", "line", "picture_style", "plot", "rectangle", "text"]


@dataclass(frozen=True, slots=True)
class Axis:
    """Time from 0 to `span` seconds, with a tick every `tick` seconds, in a unit that suits the span."""

    span: float
    tick: float
    unit: str
    scale: float

    @property
    def ticks(self) -> tuple[float, ...]:
        # a tick in the last twentieth would run its label over the edge
        last = floor(self.span * 0.955 / self.tick + 1e-9)
        return tuple(position * self.tick for position in range(last + 1))

    def label(self, time: float) -> str:
        decimals = max(0, ceil(-log10(self.tick * self.scale) - 1e-9))
        return f"{time * self.scale:.{decimals}f} {self.unit}"

    def percent(self, time: float) -> str:
        return f"{time / self.span * 100:.4g}%"


def axis_for(span: float, most_ticks: int = 8) -> Axis:
    """An axis with ticks at 1, 2 or 5 times a power of ten."""
    span = span if span > 0 else 1e-6
    unit, scale = ("us", 1e6) if span < 1e-3 else ("ms", 1e3) if span < 1 else ("s", 1.0)
    power = 10.0 ** floor(log10(span / most_ticks))
    tick = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most_ticks)
    return Axis(span, tick, unit, scale)


def rectangle(
    x: str,
    y: float,
    width: str,
    height: float,
    classes: str,
    title: str = "",
    *,
    rounded: float = 0,
    opacity: float | None = None,
) -> str:
    extra = f' rx="{rounded:g}"' if rounded else ""
    extra += "" if opacity is None else f' style="fill-opacity:{opacity:.2g}"'
    shape = f'<rect class="{classes}" x="{x}" y="{y:g}" width="{width}" height="{height:g}"{extra}'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def text(x: str, y: float, content: str, classes: str = "", data: str = "") -> str:
    return f'<text class="{classes}" x="{x}" y="{y:g}"{data}>{escape(content)}</text>'


def line(x: str, top: float, bottom: float, classes: str) -> str:
    return f'<line class="{classes}" x1="{x}" x2="{x}" y1="{top:g}" y2="{bottom:g}"/>'


def end_of_step(axis: Axis, time: float, top: float, bottom: float) -> str:
    """A line where a step ends, kept inside the plot where it ends with the axis."""
    return line(f"{min(time / axis.span * 100, 99.9):.4g}%", top, bottom, "end")


def plot(left: float, top: float, width: float, height: float, elements: Iterable[str]) -> str:
    box = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    return f'<svg class="plot" {box}>{"".join(elements)}</svg>'


def document(width: float, height: float, elements: Iterable[str], label: str, *, standalone: bool) -> str:
    """The outer `<svg>`. A standalone one is a file of its own: it names its namespace and brings its style."""
    head = f'<svg class="sennit" width="{width:g}" height="{height:g}" role="img" aria-label="{escape(label)}"'
    if standalone:
        head += f' viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg"'
        ground = rectangle("0.5", 0.5, f"{width - 1:g}", height - 1, "ground", rounded=8)
        return f"{head}><style>{picture_style()}</style>{ground}{''.join(elements)}</svg>\n"
    return f"{head}>{''.join(elements)}</svg>"


def picture_style() -> str:
    return (files("sennit.report") / "templates" / "picture.css").read_text(encoding="utf-8")
