"""From one layout to another on one mesh: a sequence of moves, each over one axis.

With strided splits, every axis takes its own digit, so axes move one at a time and in any order, as long as no two hold
the same digit at once. What each axis must do follows from its two entries:

| from \\ to   | nothing    | split              | pending |
|-------------|------------|--------------------|---------|
| nothing     | -          | slice              | partial |
| split       | all_gather | all_to_all         | (gather, then partial) |
| pending     | all_reduce | reduce_scatter     | -       |

Order: what shrinks the array first (reduce_scatter, slice), then what keeps its size (all_to_all), then all_reduce on
the small array, then what grows it (all_gather), partial last. So no array is larger than the larger of source and
target, unless an axis takes a digit that another one holds: then the holder is gathered first. The order is a pure
function of the two layouts, so every rank makes the same moves.

Section 3 of Rink et al., arXiv 2112.01075, has the mathematics for block layouts; this is its first, greedy part.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sennit.errors import LayoutError
from sennit.ir.layout import Entry, Layout, Pending, Split

__all__ = ["Move", "MoveKind", "moves"]


class MoveKind(Enum):
    """In the order in which they are tried."""

    REDUCE_SCATTER = "reduce_scatter"
    SLICE = "slice"
    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    PARTIAL = "partial"

    @property
    def communicates(self) -> bool:
        return self not in (MoveKind.SLICE, MoveKind.PARTIAL)


@dataclass(frozen=True, slots=True)
class Move:
    kind: MoveKind
    axis: str
    result: Layout


def moves(source: Layout, target: Layout) -> tuple[Move, ...]:
    """The moves that take `source` to `target`. Both are even, of one shape, on one mesh."""
    if source.mesh != target.mesh or source.shape != target.shape:
        raise LayoutError(
            f"cannot move from {source} on {source.mesh} to {target} on {target.mesh}", fix="use one mesh and one shape"
        )
    for layout in (source, target):
        if not layout.is_even:
            raise LayoutError(
                f"layout {layout} is uneven on mesh {layout.mesh}", fix="choose axes that divide the dims"
            )
    done: list[Move] = []
    current = source
    while current != target:
        move = _next_move(current, target)
        done.append(move)
        current = move.result
    return tuple(done)


def _next_move(current: Layout, target: Layout) -> Move:
    wanted = [
        (kind, axis.name)
        for axis in current.mesh.axes
        if (kind := _kind(current.entry(axis.name), target.entry(axis.name))) is not None
    ]
    for kind in MoveKind:
        for candidate, axis in wanted:
            if candidate is kind:
                entry = None if kind is MoveKind.ALL_GATHER else target.entry(axis)
                result = _legal(current, axis, entry)
                if result is not None:
                    return Move(kind, axis, result)
    # every move waits for a digit that another axis holds: gather one of the holders
    for kind, axis in wanted:
        if kind is MoveKind.ALL_TO_ALL:
            return Move(MoveKind.ALL_GATHER, axis, current.with_entry(axis, None))
    raise AssertionError(f"no move from {current} to {target}")


def _kind(have: Entry | None, need: Entry | None) -> MoveKind | None:
    match have, need:
        case (a, b) if a == b:
            return None
        case (None, Split()):
            return MoveKind.SLICE
        case (None, Pending()):
            return MoveKind.PARTIAL
        case (Split(), Split()):
            return MoveKind.ALL_TO_ALL
        case (Split(), _):
            return MoveKind.ALL_GATHER
        case (Pending(), None):
            return MoveKind.ALL_REDUCE
        case (Pending(), Split()):
            return MoveKind.REDUCE_SCATTER
        case _:
            raise LayoutError(f"a value pending {have} cannot become pending {need}", fix="resolve it first")


def _legal(current: Layout, axis: str, entry: Entry | None) -> Layout | None:
    """The layout after the move, or None where another axis still holds the digit."""
    try:
        result = current.with_entry(axis, entry)
    except LayoutError:
        return None
    return result if result.is_even else None
