"""Steps of a redistribution as JAX collectives on the piece of one device, for the inside of a `shard_map`.

**Positions.** Cut every dim at each place where a layout of the plan has the end of a digit. Where the cuts of a dim divide
one another, the dim is a product of positions (dim, stride, size), and each layout of the plan says of a position that it
lies on one axis or is local. So a piece is an array with one array dim for each local position, in any order that suits
the next step, and a step only says which positions become local and which cease to be:

| step | on the piece |
|---|---|
| slice | one `dynamic_slice` that takes this device's coordinate in every position that goes to an axis |
| all_to_all | positions that go to axes lead, in the order of the group; one `lax.all_to_all` with split = concat = 0; now the positions that came from the axes lead |
| all_to_all between two devices | one `lax.ppermute` of the part that goes; the part that stays is read where it lies, and both are joined in the order that is wanted next (`Direct` says when) |
| permute | one `lax.ppermute`: the positions stay, other axes hold them |
| all_gather | one untiled `lax.all_gather` for all positions of all dims: they lead |

The order of the positions is put right once: where a copy is made anyway, because parts are joined; before a gather whose
positions lead in the result, because the pieces are smaller before it; else at the end (`_close`).

Where the cuts of one dim do not divide one another (dim 6: 2 blocks here, 3 blocks there), a permute between pieces of
equal shape is the only step that crosses: the piece is closed before it and opened on other positions after it.

**Axes.** Steps lie on the prime-refined mesh; JAX has the axes of the user. Every collective here is over all axes of the
mesh with explicit groups of device positions, which says any part of an axis without a second mesh: nothing clashes with
the mesh in context, and arrays pass in and out as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.errors import LayoutError
from sennit.ir.layout import Layout, Split
from sennit.ir.mesh import Mesh
from sennit.reshard.redistribution import Step, StepKind

try:
    import jax.lax
except ImportError as missing:
    raise ImportError('sennit.reshard.lower_jax needs JAX: pip install "sennit[jax]"') from missing

lax: Any = jax.lax  # whose collectives have no types

__all__ = ["DIRECT", "Direct", "Position", "held", "local", "lower", "positions", "wanted"]


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The digit of a dim from `stride` to `stride * size`."""

    dim: int
    stride: int
    size: int


@dataclass(frozen=True, slots=True)
class Direct:
    """Which all-to-alls become permutes of single parts: in groups of at most `members`, of pieces of at least `least`
    bytes. Below, the starts of the permutes cost more than the copies that they save. On 16 cores with 2 MiB of cache each,
    pieces of 1 MiB and less lost 6 to 27 %, larger ones won 15 % on average; four members won only before a permute."""

    members: int = 2
    least: int = 2**21

    def takes(self, step: Step, itemsize: int) -> bool:
        members = prod(step.source.mesh.size(axis) for axis in step.axes)
        size = step.source.local_elements() * itemsize
        return step.kind is StepKind.ALL_TO_ALL and members <= self.members and size >= self.least


DIRECT = Direct()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one device holds: `value` has one array dim for each position of `order`."""

    value: Any
    order: tuple[Position, ...]

    def arranged(self, order: Sequence[Position]) -> Piece:
        """The same piece in another order. Neighbours that stay neighbours move as one: few long loops."""
        if tuple(order) == self.order:
            return self
        runs: list[list[int]] = []
        for position in order:
            index = self.order.index(position)
            if runs and runs[-1][-1] + 1 == index:
                runs[-1].append(index)
            else:
                runs.append([index])
        merged = sorted(runs)
        value = lax.reshape(self.value, [prod(self.value.shape[index] for index in run) for run in merged])
        value = lax.transpose(value, [merged.index(run) for run in runs])
        return Piece(lax.reshape(value, [self.value.shape[self.order.index(p)] for p in order]), tuple(order))


def positions(layouts: Sequence[Layout]) -> tuple[Position, ...] | None:
    """The common positions of even layouts of one shape, dims first to last, major to minor; None where cuts clash."""
    found: list[Position] = []
    for dim, size in enumerate(layouts[0].shape):
        digits = {(digit.stride, digit.size) for layout in layouts for digit in layout.digits(dim)}
        cuts = sorted({1, size, *(s for s, _ in digits), *(s * n for s, n in digits)}, reverse=True)
        if any(major % minor for major, minor in pairwise(cuts)):
            return None
        found += [Position(dim, minor, major // minor) for major, minor in pairwise(cuts)]
    return tuple(found)


def local(layout: Layout, every: Sequence[Position]) -> tuple[Position, ...]:
    """The positions that no axis holds, in the order in which a plain piece has them."""
    taken = {(entry.dim, entry.stride) for _, entry in layout.entries if isinstance(entry, Split)}
    return tuple(position for position in every if (position.dim, position.stride) not in taken)


def lower(steps: Sequence[Step], names: tuple[str, ...], value: Any, direct: Direct = DIRECT) -> Any:
    """The piece of the last step's result from the piece of the first step's source. `names` are the mesh's axes in JAX."""
    for run in _runs(steps):
        layouts = [run[0].source, *(step.result for step in run)]
        every = positions(layouts)
        if every is None:
            assert len(run) == 1  # `_runs` leaves a step with clashing cuts alone
            value = lax.ppermute(value, names, _pairs(run[0]))
            continue
        piece = _open(value, layouts[0], every)
        last = local(layouts[-1], every)
        waiting = list(run)
        while waiting:
            step = waiting.pop(0)
            # a slice before parts are sent is made with them: alone it would be one more copy
            sliced = step if waiting and step.kind is StepKind.SLICE else None
            if direct.takes(waiting[0] if sliced else step, value.dtype.itemsize):
                step = waiting.pop(0) if sliced else step
                moved = waiting.pop(0) if waiting and waiting[0].kind is StepKind.PERMUTE else None
                order = wanted(local(step.result, every), waiting[0] if waiting else None, every, last)
                piece = _send_parts(piece, sliced, step, moved, order, every, names)
            else:
                piece = _step(piece, step, every, names, last)
        value = _close(piece, layouts[-1], every)
    return value


def _runs(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps in as few runs with common positions as there are."""
    runs: list[list[Step]] = []
    for step in steps:
        if runs and positions([runs[-1][0].source, *(s.result for s in runs[-1]), step.result]) is not None:
            runs[-1].append(step)
            continue
        if positions([step.source, step.result]) is None and step.kind is not StepKind.PERMUTE:
            raise LayoutError(
                f"a step of kind {step.kind.value} between layouts whose digits clash",
                where=f"{step.source} -> {step.result} on mesh {step.source.mesh}",
                fix="plan a permute between pieces of equal shape there",
            )
        runs.append([step])
    return runs


def _open(value: Any, layout: Layout, every: Sequence[Position]) -> Piece:
    order = local(layout, every)
    return Piece(lax.reshape(value, [position.size for position in order]), order)


def _close(piece: Piece, layout: Layout, every: Sequence[Position]) -> Any:
    return lax.reshape(piece.arranged(local(layout, every)).value, layout.local_shape())


def _step(
    piece: Piece, step: Step, every: Sequence[Position], names: tuple[str, ...], last: tuple[Position, ...]
) -> Piece:
    match step.kind:
        case StepKind.SLICE:
            return _slice(piece, step, every, names)
        case StepKind.ALL_TO_ALL:
            return _all_to_all(piece, step, every, names)
        case StepKind.ALL_GATHER:
            return _all_gather(piece, step, every, names, last)
        case StepKind.PERMUTE:
            # in plain order: after an all-to-all XLA puts in order in the same copy that joins the parts, after this not
            piece = piece.arranged(local(step.source, every))
            return Piece(lax.ppermute(piece.value, names, _pairs(step)), piece.order)
        case _:
            raise LayoutError(
                f"a step of kind {step.kind.value} has no lowering on JAX",
                where=f"{step.source} -> {step.result}",
                fix="plan in collective mode, between layouts without pending reductions",
            )


def _slice(piece: Piece, step: Step, every: Sequence[Position], names: tuple[str, ...]) -> Piece:
    mesh = step.source.mesh
    return _cut(piece, {held(step.result, axis, every): _coordinates(mesh, axis) for axis in step.axes}, names)


def _cut(piece: Piece, taken: Mapping[Position, NDArray[np.int32]], names: tuple[str, ...]) -> Piece:
    """The part at the given coordinates of positions: one coordinate of each for each device, or one for all."""
    # neighbours that are kept are one array dim, and so is a kept one with those above it that are taken: few long loops
    zero = np.zeros((), dtype=np.int32)
    shape, starts, sizes = [1], [zero], [1]
    was_taken = False
    for position in piece.order:
        if position in taken and not was_taken:
            shape, starts, sizes = [*shape, 1], [*starts, zero], [*sizes, 1]
        shape[-1] *= position.size
        starts[-1] = starts[-1] * position.size
        if position in taken:
            starts[-1] = starts[-1] + taken[position]
        else:
            sizes[-1] *= position.size
        was_taken = position in taken
    whole = lax.reshape(piece.value, shape)
    if all(table.ndim == 0 for table in starts):
        ends = [int(start) + size for start, size in zip(starts, sizes, strict=True)]
        value = lax.slice(whole, [int(start) for start in starts], ends)
    else:
        first = [_of_device(table, names) if table.ndim and table.any() else np.int32(table.max()) for table in starts]
        value = lax.dynamic_slice(whole, first, sizes)
    order = tuple(position for position in piece.order if position not in taken)
    return Piece(lax.reshape(value, [position.size for position in order]), order)


def _all_to_all(piece: Piece, step: Step, every: Sequence[Position], names: tuple[str, ...]) -> Piece:
    gone = tuple(held(step.result, axis, every) for axis in step.axes)
    came = tuple(held(step.source, axis, every) for axis in step.axes)
    rest = tuple(position for position in piece.order if position not in gone)
    ready = piece.arranged(gone + rest)
    shape = [position.size for position in rest]
    count = prod(position.size for position in gone)
    value = lax.all_to_all(
        lax.reshape(ready.value, [count, *shape]),
        names,
        split_axis=0,
        concat_axis=0,
        axis_index_groups=_groups(step.source.mesh, step.axes),
    )
    return Piece(lax.reshape(value, [*(position.size for position in came), *shape]), came + rest)


def _send_parts(
    piece: Piece,
    sliced: Step | None,
    step: Step,
    moved: Step | None,
    order: tuple[Position, ...],
    every: Sequence[Position],
    names: tuple[str, ...],
) -> Piece:
    """An all-to-all, with the slice before and the permute after it, as permutes of single parts. In round r the member i of
    a group sends part i + r (modulo the group). Without a permute its part i stays: it is neither packed nor sent. Where a
    part comes to lie depends on the device, so each member has a branch that joins in a static order, with the positions
    in the `order` that is wanted next: the parts are copied into place once."""
    gone = tuple(held(step.result, axis, every) for axis in step.axes)
    came = tuple(held(step.source, axis, every) for axis in step.axes)
    mesh = step.source.mesh
    cut = {held(sliced.result, axis, every): _coordinates(mesh, axis) for axis in sliced.axes} if sliced else {}
    rest = tuple(position for position in piece.order if position not in gone and position not in cut)
    groups = _groups(mesh, step.axes) or [list(range(len(mesh.devices)))]
    count = len(groups[0])
    goes = dict(_pairs(moved)) if moved is not None else {device: device for group in groups for device in group}
    sends, joins = np.zeros(len(goes), dtype=np.int32), np.zeros(len(goes), dtype=np.int32)
    for group in groups:
        for index, device in enumerate(group):
            sends[device], joins[goes[device]] = index, index

    def part(whole: Any, index: NDArray[np.int32]) -> Any:
        digits = np.unravel_index(index, [position.size for position in gone])
        tables = {position: np.asarray(digit, dtype=np.int32) for position, digit in zip(gone, digits, strict=True)}
        return _cut(Piece(whole, piece.order), {**cut, **tables}, names).value

    got: list[Any] = []
    for shift in range(0 if moved is not None else 1, count):
        pairs = [
            (device, goes[group[(index + shift) % count]]) for group in groups for index, device in enumerate(group)
        ]
        got.append(lax.ppermute(part(piece.value, (sends + shift) % count), names, sorted(pairs)))

    def join(index: int) -> Callable[..., Any]:
        def joined(whole: Any, *got: Any) -> Any:
            rounds = got if moved is not None else (part(whole, np.array(index)), *got)
            # the part of member j came in the round in which j reached this one
            values = [lax.expand_dims(rounds[(index - member) % count], [0]) for member in range(count)]
            value = lax.concatenate(values, 0)
            shape = [position.size for position in came + rest]
            return Piece(lax.reshape(value, shape), came + rest).arranged(order).value

        return joined

    branches = [join(index) for index in range(count)]
    return Piece(lax.switch(_of_device(joins, names), branches, piece.value, *got), order)


def wanted(
    plain: tuple[Position, ...],
    following: Step | None,
    every: Sequence[Position],
    last: tuple[Position, ...],
) -> tuple[Position, ...]:
    """The order in which what follows an all-to-all wants the piece. It joins in any order at the same cost."""
    if following is None:
        return last
    if following.kind is StepKind.ALL_GATHER:
        came = tuple(held(following.source, axis, every) for axis in following.axes)
        if last[: len(came)] == came and set(last) == {*came, *plain}:
            return last[len(came) :]
    return plain


def _all_gather(
    piece: Piece, step: Step, every: Sequence[Position], names: tuple[str, ...], last: tuple[Position, ...]
) -> Piece:
    came = tuple(held(step.source, axis, every) for axis in step.axes)
    if last[: len(came)] == came and set(last) == {*came, *piece.order}:
        piece = piece.arranged(last[len(came) :])
    value = lax.all_gather(piece.value, names, axis_index_groups=_groups(step.source.mesh, step.axes))
    shape = [*(position.size for position in came), *(position.size for position in piece.order)]
    return Piece(lax.reshape(value, shape), came + piece.order)


def held(layout: Layout, axis: str, every: Sequence[Position]) -> Position:
    """The position that an axis holds."""
    split = layout.split(axis)
    assert split is not None  # a step names only the axes that it moves
    return next(position for position in every if (position.dim, position.stride) == (split.dim, split.stride))


# ---- devices, by their position in the flattened mesh ----------------------------------------------------------------


def _coordinates(mesh: Mesh, axis: str) -> NDArray[np.int32]:
    """The coordinate on the axis of each device."""
    return np.array([point[mesh.index(axis)] for point in mesh.points()], dtype=np.int32)


def _of_device(table: NDArray[np.int32], names: tuple[str, ...]) -> Any:
    """This device's entry. Looked up, because arithmetic on the device's number would be fused into the copies that use it
    and be done for each element."""
    return lax.dynamic_index_in_dim(table, lax.axis_index(names), keepdims=False)


def _groups(mesh: Mesh, axes: Sequence[str]) -> list[list[int]] | None:
    """The groups over `axes`, the first of them major. JAX wants None for the one group of all in order."""
    grid = np.arange(len(mesh.devices)).reshape([axis.size for axis in mesh.axes])
    moved = np.moveaxis(grid, [mesh.index(axis) for axis in axes], range(-len(axes), 0))
    groups: list[list[int]] = moved.reshape(-1, prod(mesh.size(axis) for axis in axes)).tolist()
    return None if groups == [list(range(len(mesh.devices)))] else groups


def _pairs(step: Step) -> list[tuple[int, int]]:
    """Sender and receiver of each piece. Self pairs are among them: a device that receives nothing would hold zeros."""
    have, want = _firsts(step.source), _firsts(step.result)
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, first in enumerate(have):
        holders.setdefault(first, []).append(device)
    kept = [device for device in range(len(want)) if have[device] == want[device]]
    for device in kept:
        holders[want[device]].remove(device)
    moved = [(holders[want[device]].pop(0), device) for device in range(len(want)) if have[device] != want[device]]
    return sorted([(device, device) for device in kept] + moved)


def _firsts(layout: Layout) -> list[tuple[int, ...]]:
    """The first index of each device's piece, per dim: among pieces of one form it names the piece."""
    found = []
    for point in layout.mesh.points():
        first = [0] * len(layout.shape)
        for name, entry in layout.entries:
            if isinstance(entry, Split):
                first[entry.dim] += point[layout.mesh.index(name)] * entry.stride
        found.append(tuple(first))
    return found
