"""A picture of a redistribution: one row a step, one column a device, the tiles that each device holds after the step.

Every cell of the grid shows the whole array as an outline and what the device holds of it as tiles. A tile has the
colour of the device that it came from in this step, and the number of that device where it came from another; what a
device had already keeps the device's own colour and has no number. Partial sums are hatched.

The array is drawn in two dims, its last one across and all others, in row-major order, down. Each dim is drawn in the
units in which no layout of the redistribution changes hands, so a tile is as large as it has to be and not larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd, prod

from sennit.ir.layout import Layout
from sennit.ir.mesh import print_ranges
from sennit.ir.region import Interval, Region
from sennit.report.canvas import document, rectangle, text
from sennit.reshard import Redistribution, Step, StepKind, transfers
from sennit.reshard.step_cost import streams

__all__ = ["redistribution_svg"]

MOST_DEVICES = 16
MARGIN, LABELS, TOP, CELL, GAP, CAPTION = 20, 190, 74, 92, 14, 26
# distinct hues that differ in lightness too, so that they stay apart in grey
COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#e69f00",
    "#004488", "#ffaabb", "#44bb99", "#997700", "#99ddff", "#882255", "#777777", "#ddcc77",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tile:
    """A box in units of the drawing, and the device that it came from; None where it was there before."""

    across: Interval
    down: Interval
    sender: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """What stands in one row: a title, its details, and the tiles of each device."""

    title: str
    details: tuple[str, ...]
    tiles: dict[int, list[_Tile]]
    pending: bool


@dataclass(frozen=True, slots=True)
class _Grid:
    """The units of each dim and how many there are of them."""

    units: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, redistribution: Redistribution) -> _Grid:
        layouts = [redistribution.source, redistribution.target]
        layouts += [layout for step in redistribution.steps for layout in (step.source, step.result)]
        units = tuple(
            gcd(*(digit.stride for layout in layouts for digit in layout.digits(dim))) or max(size, 1)
            for dim, size in enumerate(redistribution.source.shape)
        )
        counts = tuple(-(-size // unit) for size, unit in zip(redistribution.source.shape, units, strict=True))
        return cls(units, counts)

    @property
    def across(self) -> int:
        return self.counts[-1] if self.counts else 1

    @property
    def down(self) -> int:
        return prod(self.counts[:-1])

    def boxes(self, region: Region) -> list[tuple[Interval, Interval]]:
        """The region in units: intervals across and down."""
        if not region.dims:
            return [((0, 1), (0, 1))]
        dims = [
            [(start // unit, -(-stop // unit)) for start, stop in intervals]
            for intervals, unit in zip(region.dims, self.units, strict=True)
        ]
        rows = [(0, 1)]
        for intervals, count in zip(dims[:-1], self.counts[:-1], strict=True):
            if intervals == [(0, count)]:
                rows = [(top * count, bottom * count) for top, bottom in rows]
                continue
            rows = [
                (row * count + start, row * count + stop)
                for top, bottom in rows
                for row in range(top, bottom)
                for start, stop in intervals
            ]
        return list(product(dims[-1], rows))


def redistribution_svg(redistribution: Redistribution) -> str:
    """The picture as an SVG file. Of more than 16 devices the first 16 are drawn."""
    grid = _Grid.of(redistribution)
    every = sorted({*redistribution.source.mesh.devices, *redistribution.target.mesh.devices})
    devices = every[:MOST_DEVICES]
    frames = _frames(redistribution, grid)
    shape = redistribution.source.shape
    # the proportions of the array, within reason
    tall = min(1.6, max(0.7, prod(shape[:-1]) / max(1, prod(shape[-1:])))) * CELL
    width = MARGIN * 2 + LABELS + len(devices) * (CELL + GAP)
    height = TOP + len(frames) * (tall + CAPTION) + MARGIN + 30
    shapes = [_style(), *_heading(redistribution, devices, every)]
    for row, frame in enumerate(frames):
        top = TOP + 12 + row * (tall + CAPTION)
        shapes.append(text(f"{MARGIN}", top + 14, frame.title, "step"))
        shapes += [text(f"{MARGIN}", top + 31 + 15 * i, line, "small faint") for i, line in enumerate(frame.details)]
        for column, device in enumerate(devices):
            left = MARGIN + LABELS + column * (CELL + GAP)
            if device in frame.tiles:
                shapes += _cell(frame, grid, device, left, top, tall)
    shapes.append(
        text(
            f"{MARGIN}",
            height - MARGIN,
            "A tile has the colour of the device it came from in this step; a number names that device. Hatched: partial sums.",
            "small faint",
        )
    )
    return document(width, height, shapes, f"from {redistribution.source} to {redistribution.target}", standalone=True)


def _style() -> str:
    hatch = (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="2" height="6" fill="#ffffff" fill-opacity="0.65"/></pattern></defs>'
    )
    rules = (
        ".whole{fill:none;stroke:#8a8a8a;stroke-dasharray:2 2}.tile{stroke:#ffffff;stroke-width:1}"
        "svg.sennit text.step{font-weight:600}svg.sennit text.from{fill:#ffffff;font-weight:600;"
        "paint-order:stroke;stroke:#000000aa;stroke-width:2.5px}"
    )
    return f"<style>{rules}</style>{hatch}"


def _heading(redistribution: Redistribution, devices: list[int], every: list[int]) -> list[str]:
    source, target = redistribution.source, redistribution.target
    mesh = f"on mesh {source.mesh}" if source.mesh == target.mesh else f"from mesh {source.mesh} to mesh {target.mesh}"
    shapes = [text(f"{MARGIN}", 30, f"{source} to {target}, {mesh}", "title")]
    if len(every) > len(devices):
        shapes.append(text(f"{MARGIN}", 48, f"devices {print_ranges(tuple(devices))} of {len(every)}", "small faint"))
    for column, device in enumerate(devices):
        left = MARGIN + LABELS + column * (CELL + GAP)
        shapes.append(f'<rect x="{left}" y="{TOP - 14}" width="10" height="10" rx="2" fill="{_colour(device)}"/>')
        shapes.append(text(f"{left + 15}", TOP - 5, f"device {device}", "small"))
    return shapes


def _frames(redistribution: Redistribution, grid: _Grid) -> list[_Frame]:
    source = redistribution.source
    frames = [_Frame("source", (str(source),), _held(source, grid), bool(source.pending))]
    for parts in streams(redistribution.steps):
        step = parts[0]
        title = step.kind.value if len(parts) == 1 else f"{step.kind.value} in {len(parts)} parts"
        over = (f"over {','.join(step.axes)}",) if step.axes else ()
        frames.append(_Frame(title, (*over, str(step.result)), _tiles(step, grid), bool(step.result.pending)))
    return frames


def _tiles(step: Step, grid: _Grid) -> dict[int, list[_Tile]]:
    if not step.kind.communicates or step.kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE):
        return _held(step.result, grid)  # a sum comes from all of its group
    tiles: dict[int, list[_Tile]] = {device: [] for device in step.result.mesh.devices}
    for transfer in transfers(step.source, step.result):
        boxes = grid.boxes(transfer.region)
        tiles[transfer.receiver] += [_Tile(across, down, transfer.sender) for across, down in boxes]
    return tiles


def _held(layout: Layout, grid: _Grid) -> dict[int, list[_Tile]]:
    return {
        (device := layout.mesh.device(point)): [
            _Tile(across, down, device) for across, down in grid.boxes(layout.region(point))
        ]
        for point in layout.mesh.points()
    }


def _cell(frame: _Frame, grid: _Grid, device: int, left: float, top: float, tall: float) -> list[str]:
    shapes = [rectangle(f"{left:g}", top, f"{CELL}", tall, "whole")]
    for tile in frame.tiles[device]:
        x = left + tile.across[0] * CELL / grid.across
        y = top + tile.down[0] * tall / grid.down
        wide = (tile.across[1] - tile.across[0]) * CELL / grid.across
        high = (tile.down[1] - tile.down[0]) * tall / grid.down
        place = f'x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{high:.2f}"'
        shapes.append(f'<rect class="tile" {place} fill="{_colour(tile.sender)}"/>')
        if frame.pending:
            shapes.append(f'<rect {place} fill="url(#hatch)"/>')
        digits = min(11.0, 0.9 * high, 1.4 * wide / len(str(tile.sender)))
        if tile.sender != device and digits >= 7:
            size = f' style="font-size:{digits:.3g}px"'
            shapes.append(
                text(f"{x + wide / 2:.2f}", y + high / 2 + 0.36 * digits, str(tile.sender), "from middle", size)
            )
    return shapes


def _colour(device: int) -> str:
    return COLOURS[device % len(COLOURS)]
