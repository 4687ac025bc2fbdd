"""Plans for JAX: slices, one fused all-to-all, at most one permute, gathers; chosen by the bytes that they touch.

Over common positions (`pieces_jax.positions`) a layout is a map from axes to positions. Let S be the positions that the
source holds, T those of the target.

- A position of T \\ S is local and must go to an axis: an axis that holds nothing *slices* it, or an axis that holds a
  position of S \\ T *exchanges* the two (all-to-all).
- A position of S \\ T that was not exchanged stays where it is and is *gathered* last, when all else is in place.
- After slices and exchanges the right positions are held, perhaps by other axes than the target says: one *permute*
  gives
  each device the piece that it should have. Axes that the target leaves free hold the positions to be gathered.

`sequences` enumerates who slices and who exchanges what. All sequences keep the memory bound: slices shrink, exchanges
and the permute keep, gathers grow to the target (the normal form of arXiv 2112.01075). They differ in time, and so do
the ways to lower each of them: `choose` takes the way that costs least (`phases_jax`).

The planner of `planner.py` minimises time on a cluster's links and has more kinds of steps (reductions, exchanges
between meshes, uneven pieces), none of which JAX can place. Steps are of its type, so that its plans lower here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from sennit.ir.layout import Layout, Split
from sennit.reshard.ends import changed_axes
from sennit.reshard.phases_jax import DEFAULT_COST, Phase, TouchCost, touched, ways
from sennit.reshard.pieces_jax import Position, positions
from sennit.reshard.redistribution import Step, StepKind

__all__ = ["choose", "sequences"]

# Sequences looked at. Up to 16 devices there are fewer; beyond, those that keep the target's names come first.
LIMIT = 128

Held = dict[str, Position]


def choose(
    source: Layout, target: Layout, itemsize: int, cost: TouchCost = DEFAULT_COST, *, exchanges: bool = False
) -> tuple[Phase, ...] | None:
    """The way from one even layout to another on the same refined mesh that costs least; the first among equals.

    With `exchanges`, devices can read each other's memory.

    None where there is nothing to do: the layouts are the same, or there are no elements.
    """
    if 0 in source.shape or source == target:
        return None
    exchange = Phase(Step(StepKind.EXCHANGE, changed_axes(source, target), source, target))
    if positions([source, target]) is None:
        return (exchange,) if exchanges else _through_blocks(source, target)
    best: tuple[float, tuple[Phase, ...]] | None = None
    if exchanges:
        best = touched([exchange], itemsize, (), cost), (exchange,)
    for steps in islice(sequences(source, target), LIMIT):
        every = positions([source, *(step.result for step in steps)])
        assert every is not None  # `sequences` gives none else
        for way in ways(steps, every):
            value = touched(way, itemsize, every, cost)
            if best is None or value < best[0]:
                best = value, way
    return best[1] if best is not None else None


def sequences(source: Layout, target: Layout) -> Iterator[tuple[Step, ...]]:
    """Sequences of steps between layouts with common positions. Those that keep the target's names come early."""
    every = positions([source, target])
    assert every is not None
    have, want = _held(source), _held(target)
    missing = [position for position in every if position in want.values() and position not in have.values()]
    owner = {position: axis for axis, position in want.items()}
    free = [axis for axis in source.mesh.names if axis not in have and source.mesh.size(axis) > 1]
    surplus = [axis for axis, position in have.items() if position not in want.values()]

    def assignments(waiting: list[Position], takers: list[str]) -> Iterator[Held]:
        if not waiting:
            yield {}
            return
        able = [axis for axis in takers if source.mesh.size(axis) == waiting[0].size]
        for axis in sorted(able, key=lambda axis: axis != owner[waiting[0]]):
            for others in assignments(waiting[1:], [other for other in takers if other != axis]):
                yield {axis: waiting[0], **others}

    for takes in assignments(missing, free + surplus):
        sliced = {axis: position for axis, position in takes.items() if axis in free}
        exchanged = {axis: position for axis, position in takes.items() if axis not in free}
        gathered = {axis: have[axis] for axis in surplus if axis not in takes}
        for fronted in _fronts(gathered, target, [have[axis] for axis in surplus]):
            for apart in (False, True):
                steps = _sequence(source, target, sliced, {**exchanged, **fronted}, apart)
                if steps is not None:
                    yield steps


def _held(layout: Layout) -> Held:
    """Which position each axis holds. An axis of size 1 holds nothing."""
    return {
        name: Position(entry.dim, entry.stride, layout.mesh.size(name))
        for name, entry in layout.entries
        if isinstance(entry, Split) and layout.mesh.size(name) > 1
    }


def _sequence(source: Layout, target: Layout, sliced: Held, exchanged: Held, apart: bool) -> tuple[Step, ...] | None:
    """With `apart`, positions that do not lead in the result are gathered before those that do: what is put in place
    then is smaller. None where that is the same as one gather.
    """
    steps: list[Step] = []
    layout, held, want = source, _held(source), _held(target)

    def add(kind: StepKind, axes: Sequence[str], becomes: Held) -> None:
        nonlocal layout, held
        if axes:
            result = _layout(source, becomes)
            steps.append(Step(kind, tuple(axes), layout, result))
            layout, held = result, becomes

    add(StepKind.SLICE, list(sliced), {**held, **sliced})
    add(StepKind.ALL_TO_ALL, list(exchanged), {**held, **exchanged})
    named = _named(held, want)
    add(StepKind.PERMUTE, [axis for axis in source.mesh.names if held.get(axis) != named.get(axis)], named)
    # in the order in which the result has them, so that a gather of leading positions needs no transpose
    gathered = sorted((axis for axis in held if axis not in want), key=lambda axis: _rank(held[axis]))
    leading = _leading([held[axis] for axis in gathered], target)
    if not apart:
        leading = 0
    elif leading in (0, len(gathered)):
        return None
    for group in (gathered[leading:], gathered[:leading]):
        add(StepKind.ALL_GATHER, group, {axis: position for axis, position in held.items() if axis not in group})
    return tuple(steps)


def _leading(gathered: Sequence[Position], target: Layout) -> int:
    """How many of the positions, in order, lead the target's pieces."""
    chunks = _chunks(target, gathered)
    count = 0
    while count < len(gathered) and chunks[count] == gathered[count]:
        count += 1
    return count


def _fronts(gathered: Held, target: Layout, occupied: Sequence[Position]) -> Iterator[Held]:
    """What to bring to the front of the target's pieces before gathering it there: nothing, or all that is elsewhere.

    The front must be local before the exchange: what is `occupied` then cannot be taken.
    """
    yield {}
    found: Held = {}
    waiting = sorted(gathered, key=lambda axis: _rank(gathered[axis]))
    for chunk in _chunks(target, occupied):
        if not waiting:
            break
        holder = next((axis for axis in waiting if gathered[axis] == chunk), None)
        if holder is not None:
            waiting.remove(holder)
            continue
        if chunk in occupied:
            break
        size = chunk.size
        # from the back: what is near the front may lead where it is
        for axis in reversed(waiting.copy()):
            prime = gathered[axis].size
            if size % prime == 0:
                size //= prime
                found[axis] = Position(chunk.dim, chunk.stride * size, prime)
                waiting.remove(axis)
        if size > 1:
            break
    if found and not waiting:
        yield found


def _chunks(target: Layout, others: Sequence[Position]) -> tuple[Position, ...]:
    """The local positions of the target in order, cut where one of `others` ends."""
    chunks: list[Position] = []
    for dim, size in enumerate(target.shape):
        digits = {(digit.stride, digit.size): True for digit in target.digits(dim)}
        digits |= {(position.stride, position.size): False for position in others if position.dim == dim}
        cuts = sorted({1, size, *(s for s, _ in digits), *(s * n for s, n in digits)}, reverse=True)
        chunks += [
            Position(dim, minor, major // minor)
            for major, minor in pairwise(cuts)
            if not digits.get((minor, major // minor), False)
        ]
    return tuple(chunks)


def _named(held: Held, want: Held) -> Held:
    """The same positions under the target's names. What will be gathered stays, or goes to an axis that was left."""
    if all(held.get(axis) == position for axis, position in want.items()):
        return held
    named = dict(want)
    extra = {axis: position for axis, position in held.items() if position not in want.values()}
    named.update({axis: position for axis, position in extra.items() if axis not in want})
    left = [axis for axis in held if axis not in named]
    for axis, position in extra.items():
        if axis in want:
            other = next(name for name in left if held[name].size == position.size)
            left.remove(other)
            named[other] = position
    return named


def _rank(position: Position) -> tuple[int, int]:
    return position.dim, -position.stride


def _layout(like: Layout, held: Held) -> Layout:
    return Layout.make(
        like.mesh, like.shape, {axis: Split(position.dim, position.stride) for axis, position in held.items()}
    )


def _through_blocks(source: Layout, target: Layout) -> tuple[Phase, ...]:
    """Where digits clash (dim 6: 2 blocks here, 3 blocks there).

    Axes are primes. A dim that lacks an axis of some size gets one that is free (slice) or one of another dim that has
    too many (all-to-all, from the minor end to the minor end; where it does not lie there, whole blocks are permuted
    first). Then each dim is cut into the blocks of the target, or smaller: permute whole blocks, gather. This always
    leads to the target: with no dim that has too many axes of a size, the source splits fewer of them than the target,
    so one is free.
    """
    mesh, dims = source.mesh, range(len(source.shape))
    want = [[digit.axis for digit in target.digits(dim)] for dim in dims]
    path = _Path(source, [[digit.axis for digit in source.digits(dim)] for dim in dims])

    def count(axes: Sequence[str]) -> Counter[int]:
        return Counter(mesh.size(axis) for axis in axes)

    gives: list[tuple[int, int, int]] = []  # a size, from a dim, to a dim
    surplus = [count(path.axes[dim]) - count(want[dim]) for dim in dims]
    free = [axis for axis in mesh.names if source.entry(axis) is None]
    sliced = [list(axes) for axes in path.axes]
    for dim in dims:
        for size in (count(want[dim]) - count(path.axes[dim])).elements():
            giver = next((other for other in dims if surplus[other][size]), None)
            if giver is not None:
                surplus[giver][size] -= 1
                gives.append((size, giver, dim))
                continue
            able = [axis for axis in free if mesh.size(axis) == size]
            axis = min(able, key=lambda axis: axis not in want[dim])
            free.remove(axis)
            sliced[dim].append(axis)
    path.go(StepKind.SLICE, sliced)
    for size, giver, dim in gives:
        *_, axis = (axis for axis in path.axes[giver] if mesh.size(axis) == size)
        path.go(
            StepKind.PERMUTE, [[*(a for a in axes if a != axis), *(a for a in axes if a == axis)] for axes in path.axes]
        )
        path.go(
            StepKind.ALL_TO_ALL,
            [[*(a for a in axes if a != axis), *([axis] if at == dim else [])] for at, axes in enumerate(path.axes)],
        )
    rest = [axis for axis in mesh.names if target.entry(axis) is None]
    cut = [list(axes) for axes in want]
    for dim in dims:
        for size in (count(path.axes[dim]) - count(want[dim])).elements():
            axis = min((a for a in rest if mesh.size(a) == size), key=lambda a: a not in path.axes[dim])
            rest.remove(axis)
            cut[dim].append(axis)
    path.go(StepKind.PERMUTE, cut)
    path.go(StepKind.ALL_GATHER, want)
    return tuple(Phase(step) for step in path.steps)


class _Path:
    """Steps between block layouts, from the axes of each dim to others."""

    def __init__(self, source: Layout, axes: list[list[str]]) -> None:
        self.layout, self.axes = source, axes
        self.steps: list[Step] = []

    def go(self, kind: StepKind, axes: list[list[str]]) -> None:
        result = Layout.block(self.layout.mesh, self.layout.shape, dict(enumerate(axes)))
        if result != self.layout:
            self.steps.append(Step(kind, _changed(self.layout, result), self.layout, result))
        self.layout, self.axes = result, axes


def _changed(before: Layout, after: Layout) -> tuple[str, ...]:
    """The axes that differ; those that are gathered in the order in which the result has them."""
    names = [axis for axis in before.mesh.names if before.entry(axis) != after.entry(axis)]
    held = _held(before)
    return tuple(sorted(names, key=lambda axis: _rank(held[axis]) if axis in held else (0, 0)))
