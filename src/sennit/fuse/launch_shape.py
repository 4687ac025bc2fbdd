"""How the programs of a part lie on the device: what a compiler chooses from sizes alone, and what the estimator learns
from.

Inductor's heuristics, for a GPU of 132 multiprocessors:

    kept rows     of 256 to 1024 elements, 1024 rows or more: a warp keeps 1024 elements' worth of rows, 32 of each value in every thread. Fewer rows: a row a program
    loops         a row a program, two up to 2048 elements
    columns       a block of 2 to 64 columns a program, by how many there are
    pointwise     1024 elements a program; a value that lies across is read by tiles of 32 x 32, of which sides that are no multiple waste a part

A multiprocessor holds 32 programs of a warp with up to 64 registers, and fewer with more: what a thread holds of values
of whole rows is most of its registers. `shape_features` gives of a part the logarithms of its programs for each
multiprocessor, of what the last round of programs wastes, of what powers of two and tiles waste, and counts of what is
loaded, stored and reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sennit.fuse.compiled_parts import Part

__all__ = ["SHAPE_WIDTH", "LaunchShape", "is_uneven", "shape_features", "tile_waste"]

SHAPE_WIDTH = 14
_PROCESSORS = 132
_TILE = 32
_ROWS = 1024
_REGISTERS = 65536


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Of a part: the values that it `loads`, those of them that are as `wide` as it and their `bytes` an element,
    `stores`, `reductions`, what tiles waste of it (`tiled`, 1 for nothing) and how many values lie `across`; `uneven`
    says that something is broadcast over a dim that is no power of two.
    """

    loads: int = 1
    wide: int = 1
    bytes: int = 4
    stores: int = 1
    reductions: int = 0
    tiled: float = 1.0
    across: int = 0
    uneven: bool = False


def tile_waste(*sides: int) -> float:
    """Elements of tiles over elements of a plane with these sides."""
    waste = 1.0
    for side in sides:
        waste *= ceil(side / _TILE) * _TILE / max(1, side)
    return waste


def is_uneven(shape: tuple[int, ...]) -> bool:
    """Whether an inner dim is no power of two."""
    return any(size & (size - 1) for size in shape[1:])


def shape_features(part: Part | None) -> list[float]:
    """`SHAPE_WIDTH` numbers; zeros for no part."""
    if part is None:
        return [0.0] * SHAPE_WIDTH
    shape, inner = part.shape, max(1, part.size // max(1, part.outer))
    whole = 1 << (inner - 1).bit_length()
    programs, resident = _programs(part, inner, whole)
    rounds = programs / (_PROCESSORS * resident)
    return [
        log2(1 + programs / _PROCESSORS),
        log2(1 + rounds),
        log2(max(1.0, ceil(rounds) / rounds)) if rounds > 1 else 0.0,
        log2(whole / inner),
        log2(shape.tiled),
        float(resident),
        float(shape.loads),
        float(shape.wide),
        float(shape.bytes),
        float(shape.stores),
        float(shape.reductions),
        float(shape.across),
        float(shape.uneven),
        log2(inner & -inner),
    ]


def _programs(part: Part, inner: int, whole: int) -> tuple[float, int]:
    """Programs, and how many of them a multiprocessor holds."""
    if part.sort.name == "ROW" and part.kept:
        if whole >= 256 and part.outer >= _ROWS:
            held = max(1, 32 * (part.shape.wide + part.shape.reductions // 2))
            return part.outer / max(1, 1024 // whole), max(4, min(32, _REGISTERS // (32 * (held + 16))))
        return float(part.outer), 16
    if part.sort.name == "ROW":
        return part.outer / (2 if inner <= 2048 else 1), 4
    if part.sort.name == "COLUMN":
        columns = part.outer
        block = max(min(columns // 128, 8), 2) if columns <= 1024 else 16 if columns // 4096 <= 8 else 64
        return max(1.0, columns / block), 8
    return max(1.0, part.size / 1024), 16
