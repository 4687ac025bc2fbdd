"""Steps of a redistribution as JAX collectives on the piece of one device, for the inside of a `shard_map`.

A piece is an array of its local positions (`pieces_jax`), and a step only says which positions become local and which
cease to be:

| step | on the piece |
|---|---|
| slice | one `dynamic_slice` that takes this device's coordinate in every position that goes to an axis |
| all_to_all | cut into the parts at each coordinate of the positions that go; one `lax.all_to_all`; the parts that arrive are joined along the positions that come |
| permute | one `lax.ppermute`: the positions stay, other axes hold them |
| all_gather | one untiled `lax.all_gather` for all positions of all dims: they lead, and where they should not, one transpose |
| all_to_all or all_gather in parts | one `lax.ppermute` for each other member of the group; the own part is read where it lies, and all are joined |
| exchange | always alone, on CPU devices: each takes its piece out of the memory of the others (`exchange_jax`) |

Which steps are lowered together, and which in parts, is said by the phases (`phases_jax`).

Where the cuts of one dim do not divide one another (dim 6: 2 blocks here, 3 blocks there), a permute between pieces of
equal shape is the only step that crosses: the piece is closed before it and opened on other positions after it.

**Axes.** Steps lie on the prime-refined mesh; JAX has the axes of the user. Every collective here is over all axes of
the mesh with explicit groups of device positions, which says any part of an axis without a second mesh: nothing clashes
with the mesh in context, and arrays pass in and out as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from sennit.errors import LayoutError
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard.exchange_jax import exchange
from sennit.reshard.phases_jax import Phase, leads
from sennit.reshard.pieces_jax import Grid, Piece, Position, Table, cut, frame, held, local, of_device, positions
from sennit.reshard.pull import firsts
from sennit.reshard.redistribution import Step, StepKind

try:
    import jax.lax
except ImportError as missing:
    raise ImportError('sennit.reshard.lower_jax needs JAX: pip install "sennit[jax]"') from missing

lax: Any = jax.lax  # whose collectives have no types

__all__ = ["lower"]

MANY, SHORT = 8, 32  # pieces, and elements: measured on 16 x86_64 cores


def lower(phases: Sequence[Phase], names: tuple[str, ...], value: Any) -> Any:
    """The piece of the last phase's result from the piece of the first one's source.

    `names` are the mesh's axes in JAX.
    """
    if [phase.step.kind for phase in phases] == [StepKind.EXCHANGE]:
        step = phases[0].step
        return exchange(step, _all_groups(step.source.mesh, step.axes), names, value)
    for run in _runs(phases):
        every = positions(_layouts(run))
        if every is None:
            assert len(run) == 1  # `_runs` leaves a step with clashing cuts alone
            value = lax.ppermute(value, names, _pairs(run[0].step))
            continue
        piece = Piece(value, local(run[0].source, every))
        for phase in run:
            piece = _phase(piece, phase, every, names)
        result = run[-1].result
        value = lax.reshape(piece.arranged(local(result, every)).value, result.local_shape())
    return value


def _layouts(phases: Sequence[Phase]) -> list[Layout]:
    return [phases[0].source, *(step.result for phase in phases for step in phase.steps)]


def _runs(phases: Sequence[Phase]) -> list[list[Phase]]:
    """The phases in as few runs with common positions as there are."""
    runs: list[list[Phase]] = []
    for phase in phases:
        if runs and positions(_layouts([*runs[-1], phase])) is not None:
            runs[-1].append(phase)
            continue
        if positions(_layouts([phase])) is None and phase.step.kind is not StepKind.PERMUTE:
            raise LayoutError(
                f"a step of kind {phase.step.kind.value} between layouts whose digits clash",
                where=f"{phase.source} -> {phase.result} on mesh {phase.source.mesh}",
                fix="plan a permute between pieces of equal shape there",
            )
        runs.append([phase])
    return runs


def _phase(piece: Piece, phase: Phase, every: Sequence[Position], names: tuple[str, ...]) -> Piece:
    step = phase.step
    piece = piece.arranged(local(phase.source, every))
    match step.kind:
        case StepKind.SLICE:
            taken = _coordinates(step, every)
            (value,) = cut(piece, [taken], names, frame=frame(len(step.source.shape), [piece.order], [taken]))
            return Piece(value, local(step.result, every))
        case StepKind.ALL_TO_ALL if phase.in_parts:
            return _exchange_in_parts(piece, phase, every, names)
        case StepKind.ALL_TO_ALL:
            return _exchange(piece, phase, every, names)
        case StepKind.PERMUTE:
            return Piece(lax.ppermute(piece.value, names, _pairs(step)), piece.order)
        case StepKind.ALL_GATHER if phase.in_parts:
            return _gather_in_parts(piece, step, every, names)
        case StepKind.ALL_GATHER:
            return _gather(piece, step, every, names)
        case _:
            raise LayoutError(
                f"a step of kind {step.kind.value} has no lowering on JAX",
                where=f"{step.source} -> {step.result}",
                fix="plan in collective mode, between layouts without pending reductions",
            )


def _grid(piece: Piece, phase: Phase, every: Sequence[Position]) -> tuple[Grid, tuple[str, ...]]:
    """How the piece is cut and joined, and the group's axes in the order in which their positions lie in the result."""
    step, result = phase.step, local(phase.step.result, every)
    axes = tuple(sorted(step.axes, key=lambda axis: result.index(held(step.source, axis, every))))
    came = tuple(held(step.source, axis, every) for axis in axes)
    gone = tuple(held(step.result, axis, every) for axis in axes) if step.kind is StepKind.ALL_TO_ALL else ()
    cuts = _coordinates(phase.sliced, every) if phase.sliced is not None else {}
    found = frame(len(step.source.shape), [piece.order, result], [{*gone, *cuts}, came])
    return Grid(piece.order, gone, cuts, came, result, found), axes


def _exchange(piece: Piece, phase: Phase, every: Sequence[Position], names: tuple[str, ...]) -> Piece:
    """XLA cuts what it is given along the dim that is split and joins what arrives along the same: here exactly our
    parts.
    """
    grid, axes = _grid(piece, phase, every)
    parts = grid.parts(piece.value, [np.array(number) for number in range(grid.count)], names)
    dim = grid.runs()[0][0]
    value = lax.all_to_all(
        lax.concatenate(parts, dim),
        names,
        split_axis=dim,
        concat_axis=dim,
        axis_index_groups=_groups(phase.step.source.mesh, axes),
        tiled=True,
    )
    if len(grid.runs()) == 1:
        return Piece(value, grid.result)
    size = parts[0].shape[dim]
    return grid.join([lax.slice_in_dim(value, i * size, (i + 1) * size, axis=dim) for i in range(grid.count)])


def _exchange_in_parts(piece: Piece, phase: Phase, every: Sequence[Position], names: tuple[str, ...]) -> Piece:
    """In round r the member i of a group sends part i + r (modulo the group). Without a permute its part i stays: it is
    neither packed nor sent. Where a part comes to lie depends on the device, so each member has a branch that joins."""
    grid, axes = _grid(piece, phase, every)
    groups = _all_groups(phase.step.source.mesh, axes)
    count, devices = grid.count, range(sum(map(len, groups)))
    goes = dict(_pairs(phase.moved)) if phase.moved is not None else {device: device for device in devices}
    sends, joins = np.zeros(len(devices), dtype=np.int32), np.zeros(len(devices), dtype=np.int32)
    for group in groups:
        for index, device in enumerate(group):
            sends[device], joins[goes[device]] = index, index
    rounds = range(0 if phase.moved is not None else 1, count)
    parts = grid.parts(piece.value, [(sends + shift) % count for shift in rounds], names)
    got: list[Any] = []
    for shift, part in zip(rounds, parts, strict=True):
        pairs = [(a, goes[group[(i + shift) % count]]) for group in groups for i, a in enumerate(group)]
        got.append(lax.ppermute(part, names, sorted(pairs)))

    def own(whole: Any, index: int) -> list[Any]:
        return [] if phase.moved is not None else grid.parts(whole, [np.array(index)], names)

    return Piece(_join_by_member(grid, joins, own, piece.value, got, names), grid.result)


def _gather(piece: Piece, step: Step, every: Sequence[Position], names: tuple[str, ...]) -> Piece:
    """Along the first dim, whatever it is: in memory one piece comes after the other.

    Where they should not, they are put in order: by one transpose, or by a copy for each if its loop would divide by
    what is no power of two. Not for many pieces of short runs: each copy would touch all lines of the result.
    """
    grid, axes = _grid(piece, Phase(step), every)
    in_place = leads(step, every)
    # flat where nothing is to be put in order: with dims of size 1 XLA may choose another layout for what is gathered,
    # and copies
    value = lax.reshape(piece.value, [piece.value.size] if in_place else grid.shape())
    groups = _groups(step.source.mesh, axes)
    gathered = lax.all_gather(value, names, axis_index_groups=groups, tiled=True)
    scattered = grid.count >= MANY and grid.run() < SHORT
    if in_place or scattered or all(position.size.bit_count() == 1 for position in grid.result):
        return Piece(gathered, grid.came + piece.order)
    return grid.place(gathered)


def _gather_in_parts(piece: Piece, step: Step, every: Sequence[Position], names: tuple[str, ...]) -> Piece:
    """In round r the member i of a group sends its piece to member i + r (modulo the group)."""
    grid, axes = _grid(piece, Phase(step), every)
    groups = _all_groups(step.source.mesh, axes)
    joins = np.zeros(sum(map(len, groups)), dtype=np.int32)
    for group in groups:
        joins[group] = range(grid.count)
    own = lax.reshape(piece.value, grid.shape())  # outside the branches: inside, XLA fuses it with what joins
    got = [
        lax.ppermute(
            own,
            names,
            sorted((a, group[(i + shift) % grid.count]) for group in groups for i, a in enumerate(group)),
        )
        for shift in range(1, grid.count)
    ]
    return Piece(_join_by_member(grid, joins, lambda whole, _: [whole], own, got, names), grid.result)


def _join_by_member(
    grid: Grid,
    members: Table,
    own: Callable[[Any, int], list[Any]],
    whole: Any,
    got: Sequence[Any],
    names: tuple[str, ...],
) -> Any:
    """The parts joined, on each device as its number in the group says: what came from member j came in the round in
    which j reached it. The own part, if it was not sent, is that of round 0.
    """

    def branch(index: int) -> Callable[..., Any]:
        def joined(whole: Any, *got: Any) -> Any:
            rounds = [*own(whole, index), *got]
            return grid.join([rounds[(index - member) % grid.count] for member in range(grid.count)]).value

        return joined

    return lax.switch(of_device(members, names), [branch(index) for index in range(grid.count)], whole, *got)


# ---- devices, by their position in the flattened mesh ----------------------------------------------------------------


def _coordinates(step: Step, every: Sequence[Position]) -> dict[Position, Table]:
    """The coordinate of each device in the positions that a slice takes."""
    mesh = step.source.mesh
    return {
        held(step.result, axis, every): np.array([point[mesh.index(axis)] for point in mesh.points()], dtype=np.int32)
        for axis in step.axes
    }


def _all_groups(mesh: Mesh, axes: Sequence[str]) -> list[list[int]]:
    """The groups over `axes`, the first of them major."""
    grid = np.arange(len(mesh.devices)).reshape([axis.size for axis in mesh.axes])
    moved = np.moveaxis(grid, [mesh.index(axis) for axis in axes], range(-len(axes), 0))
    groups: list[list[int]] = moved.reshape(-1, prod(mesh.size(axis) for axis in axes)).tolist()
    return groups


def _groups(mesh: Mesh, axes: Sequence[str]) -> list[list[int]] | None:
    """JAX wants None for the one group of all in order."""
    groups = _all_groups(mesh, axes)
    return None if groups == [list(range(len(mesh.devices)))] else groups


def _pairs(step: Step) -> list[tuple[int, int]]:
    """Sender and receiver of each piece. Self pairs are among them: a device that receives nothing would hold zeros."""
    have, want = firsts(step.source), firsts(step.result)
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, first in enumerate(have):
        holders.setdefault(first, []).append(device)
    kept = [device for device in range(len(want)) if have[device] == want[device]]
    for device in kept:
        holders[want[device]].remove(device)
    moved = [(holders[want[device]].pop(0), device) for device in range(len(want)) if have[device] != want[device]]
    return sorted([(device, device) for device in kept] + moved)
