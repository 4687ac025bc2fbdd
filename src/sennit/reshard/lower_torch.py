"""A redistribution as one rank runs it: what it copies, sends and receives, in which order.

    operation := Move | Fill | Together
    Move      := input shape, output shape, copies, sends, receives, how

Every communicating step is a **Move**: parts of the input go to other ranks, parts of the output come from them, each
part being a region of the array that one rank holds and another needs.

| step | a device receives | how |
|---|---|---|
| all_gather, all_to_all | from each member of its group, what that member had and it now has | assigned |
| permute, exchange | what `transfers` says | assigned |
| slice | nothing: one local copy | assigned |
| reduce_scatter | from each member, its own new region | reduced |
| all_reduce | a reduce_scatter of the flat tensor, then an all_gather of it | reduced, assigned |

**Together** is the same step said to the backend as one collective over a process group (`groups_torch.py` decides
which).

**Order, and why nothing deadlocks.** A message has a key (part of the stream, chunk, distance, sender), which both its
ends compute; no two messages share one. Each rank posts its messages in the order of their keys and waits in that
order. Of all messages not yet done, the one with the least key is posted at both its ends, so it completes.

**Staging.** Parts that lie side by side in memory are sent and received in place. Other parts are packed, and cut into
chunks first, so that a bounded buffer is enough (`wire_torch.py`). Both ends must cut alike, so the cut depends on what
both know: the two layouts, with contiguous tensors.

**Adjoint.** A Move with `how` none or a sum is linear; its transpose sends where it received and adds into zeros
(`Move.transposed`). The transpose of a sequence is the transposes in reverse: gather becomes reduce_scatter, slice
becomes padding with zeros, exchange becomes the exchange back with sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import numpy as np

from sennit.errors import LayoutError
from sennit.ir.exchange import Transfer, transfers
from sennit.ir.layout import Layout, Reduction
from sennit.ir.region import Region
from sennit.reshard.redistribution import Redistribution, Step, StepKind
from sennit.reshard.selection_torch import Selection

__all__ = [
    "Cut",
    "Fill",
    "Message",
    "Move",
    "Operation",
    "Together",
    "lower",
    "lower_all_reduce",
    "lower_transfers",
    "region_of",
    "transposed",
]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A part that goes to `peer` or comes from it."""

    peer: int
    part: Selection
    key: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """`how` says what a received part does to the output:

    None assigns. With `zeros` the output starts as zeros and local copies are combined too; else they are assigned,
    before anything is received.
    """

    label: str
    given: Shape
    shape: Shape
    copies: tuple[tuple[Selection, Selection], ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    how: Reduction | None = None
    zeros: bool = False

    def transposed(self) -> Move:
        return Move(
            f"the adjoint of {self.label}",
            self.shape,
            self.given,
            tuple((put, take) for take, put in self.copies),
            self.receives,
            self.sends,
            Reduction.SUM,
            zeros=True,
        )


@dataclass(frozen=True, slots=True)
class Fill:
    """Replicated becomes pending: the values on coordinate 0, the identity of the reduction elsewhere."""

    label: str
    op: Reduction
    keeps: bool


@dataclass(frozen=True, slots=True)
class Together:
    """One collective over `members`: part i of the input is for member i, part i of the output is from it.

    An all_gather has one part for all, an all_reduce the whole tensor.
    """

    label: str
    kind: StepKind
    axes: tuple[str, ...]
    members: tuple[int, ...]
    given: Shape
    shape: Shape
    takes: tuple[Selection, ...]
    puts: tuple[Selection, ...]
    op: Reduction | None
    point_to_point: tuple[Move, ...]

    def transposed(self) -> Together:
        kinds = {StepKind.ALL_GATHER: StepKind.REDUCE_SCATTER, StepKind.REDUCE_SCATTER: StepKind.ALL_GATHER}
        return Together(
            f"the adjoint of {self.label}",
            kinds.get(self.kind, self.kind),
            self.axes,
            self.members,
            self.shape,
            self.given,
            self.puts,
            self.takes,
            None if self.kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_TO_ALL) else Reduction.SUM,
            tuple(move.transposed() for move in reversed(self.point_to_point)),
        )


Operation = Move | Fill | Together


def lower(redistribution: Redistribution, device: int, cut: Cut) -> tuple[Operation, ...]:
    """What `device` does."""
    operations: list[Operation] = []
    # consecutive exchanges of parts of one array fill one output
    for (in_parts, *_), steps in groupby(redistribution.steps, lambda s: (s.region is not None, s.source, s.result)):
        if in_parts:
            operations.append(_lower_stream(list(steps), device, cut))
        else:
            for step in steps:
                operations += _lower_step(step, device, cut)
    return tuple(operations)


def transposed(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """The adjoint. Refuses a reduction that is not a sum, which has none."""
    result: list[Operation] = []
    for operation in reversed(tuple(operations)):
        op = operation.how if isinstance(operation, Move) else operation.op
        if op not in (None, Reduction.SUM):
            raise LayoutError(
                f"a pending {op.value} has no adjoint" if op else "no adjoint",
                where=operation.label,
                fix="resolve it on a tensor that needs no gradient, or use sums",
            )
        result.append(operation if isinstance(operation, Fill) else operation.transposed())
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Cut:
    """How messages are cut: packed ones have `chunk` elements at most; without `in_place` all have, as an adjoint
    needs, where every received part is added from a buffer.
    """

    chunk: int | None
    in_place: bool = True

    def parts(self, region: Region, sender: Region, receiver: Region, how: Reduction | None) -> list[Region]:
        if self.chunk is None or region.size <= self.chunk:
            return [region]
        if self.in_place and how is None:
            both_dense = Selection.of(region, sender).is_dense and Selection.of(region, receiver).is_dense
            if both_dense:
                return [region]
        return _pieces(region, self.chunk)


def _pieces(region: Region, most: int) -> list[Region]:
    """A region in pieces of at most `most` elements, cut along the first dims, in row-major order."""
    if region.size <= most:
        return [region]
    indices = list(region.indices())
    dim = next(dim for dim, size in enumerate(region.shape) if size > 1)
    row = region.size // region.shape[dim]
    count = max(1, most // row)
    cuts = range(0, region.shape[dim], count)
    parts = [
        Region.of_indices([*indices[:dim], indices[dim][start : start + count], *indices[dim + 1 :]]) for start in cuts
    ]
    return [piece for part in parts for piece in _pieces(part, most)]


# ---- one step --------------------------------------------------------------------------------------------------------


def region_of(layout: Layout, device: int) -> Region | None:
    """What a device holds; None where it is not in the mesh."""
    if device not in layout.mesh.devices:
        return None
    return layout.region(layout.mesh.coordinate(device))


def _lower_step(step: Step, device: int, cut: Cut) -> list[Operation]:
    label = f"{step.kind.value} over {','.join(step.axes) or 'all ranks'}: {step.source} -> {step.result}"
    match step.kind:
        case StepKind.EXCHANGE | StepKind.PERMUTE:
            return [_lower_stream([step], device, cut)]
        case _ if device not in step.source.mesh.devices:
            return []
        case StepKind.PARTIAL:
            (op,) = {op for axis, op in step.result.pending if axis in step.axes}
            point = dict(zip(step.source.mesh.names, step.source.mesh.coordinate(device), strict=True))
            return [Fill(label, op, keeps=all(point[axis] == 0 for axis in step.axes))]
        case StepKind.SLICE:
            have, need = _regions(step, device)
            whole = Selection.of(need, need)
            return [Move(label, have.shape, need.shape, ((Selection.of(need, have), whole),), (), ())]
        case StepKind.ALL_REDUCE:
            return [_lower_all_reduce(step, device, cut, label)]
        case StepKind.ALL_GATHER | StepKind.ALL_TO_ALL | StepKind.REDUCE_SCATTER:
            return [_lower_group(step, device, cut, label)]


def _regions(step: Step, device: int) -> tuple[Region, Region]:
    point = step.source.mesh.coordinate(device)
    return step.source.region(point), step.result.region(point)


def _lower_group(step: Step, device: int, cut: Cut, label: str) -> Operation:
    members = step.source.mesh.group(device, step.axes)
    have, need = _regions(step, device)
    others = {member: _regions(step, member) for member in members}
    op = _single_op(step)
    sent = [have.intersect(others[member][1]) for member in members]
    received = [need if op else need.intersect(others[member][0]) for member in members]
    place = members.index(device)
    sends: list[Message] = []
    receives: list[Message] = []
    for other, member in enumerate(members):
        if member == device:
            continue
        for order, part in enumerate(cut.parts(sent[other], have, others[member][1], op)):
            key = (0, order, (other - place) % len(members), place)
            sends.append(Message(member, Selection.of(part, have), key))
        for order, part in enumerate(cut.parts(received[other], others[member][0], need, op)):
            key = (0, order, (place - other) % len(members), other)
            receives.append(Message(member, Selection.of(part, need), key))
    takes = tuple(Selection.of(part, have) for part in sent)
    puts = tuple(Selection.of(part, need) for part in received)
    move = Move(
        label,
        have.shape,
        need.shape,
        ((takes[place], puts[place]),) if takes[place].elements else (),
        _sorted(sends),
        _sorted(receives),
        op,
    )
    if not (step.source.is_even and step.result.is_even):
        return move  # a collective of the backend wants parts of one size
    return Together(label, step.kind, step.axes, members, have.shape, need.shape, takes, puts, op, (move,))


def _lower_all_reduce(step: Step, device: int, cut: Cut, label: str) -> Operation:
    members = step.source.mesh.group(device, step.axes)
    shape = step.source.region(step.source.mesh.coordinate(device)).shape
    op = _single_op(step)
    assert op is not None
    return lower_all_reduce(label, members, device, shape, op, cut, step.axes)


def lower_all_reduce(
    label: str, members: Sequence[int], device: int, shape: Shape, op: Reduction, cut: Cut, axes: tuple[str, ...] = ()
) -> Together:
    """An all_reduce of tensors of one shape, whatever layout they have."""
    moves = _all_reduce_moves(label, members, device, prod(shape), op, cut)
    whole = (Selection.at(shape, [np.arange(size) for size in shape]),)
    return Together(label, StepKind.ALL_REDUCE, axes, tuple(members), shape, shape, whole, whole, op, moves)


def _all_reduce_moves(
    label: str, members: Sequence[int], device: int, size: int, op: Reduction, cut: Cut
) -> tuple[Move, Move]:
    place = members.index(device)
    edges = [size * member // len(members) for member in range(len(members) + 1)]
    return (
        _flat_move(f"{label} (reduce)", members, place, edges, cut, op),
        _flat_move(f"{label} (gather)", members, place, edges, cut, None),
    )


def _flat_move(
    label: str, members: Sequence[int], place: int, edges: Sequence[int], cut: Cut, op: Reduction | None
) -> Move:
    """Between a flat tensor and chunk `place` of it: with an op the members' chunks are reduced, without they are
    gathered.
    """
    size, count = edges[-1], len(members)
    start, stop = edges[place], edges[place + 1]
    sends: list[Message] = []
    receives: list[Message] = []
    for other, member in enumerate(members):
        if other == place:
            continue
        theirs = _flat_chunks(edges[other], edges[other + 1], cut, op)
        ours = _flat_chunks(start, stop, cut, op)
        away, back = (other - place) % count, (place - other) % count
        if op is not None:  # their chunk of ours goes to them, our chunk of theirs comes to us
            sends += [
                Message(member, Selection.flat(size, a, b), (0, i, away, place)) for i, (a, b) in enumerate(theirs)
            ]
            receives += [
                Message(member, Selection.flat(stop - start, a - start, b - start), (0, i, back, other))
                for i, (a, b) in enumerate(ours)
            ]
        else:
            sends += [
                Message(member, Selection.flat(stop - start, a - start, b - start), (0, i, away, place))
                for i, (a, b) in enumerate(ours)
            ]
            receives += [
                Message(member, Selection.flat(size, a, b), (0, i, back, other)) for i, (a, b) in enumerate(theirs)
            ]
    inner, outer = Selection.flat(stop - start, 0, stop - start), Selection.flat(size, start, stop)
    if op is not None:
        return Move(label, (size,), (stop - start,), ((outer, inner),), _sorted(sends), _sorted(receives), op)
    return Move(label, (stop - start,), (size,), ((inner, outer),), _sorted(sends), _sorted(receives))


def _flat_chunks(start: int, stop: int, cut: Cut, op: Reduction | None) -> list[tuple[int, int]]:
    if start == stop:
        return []
    if cut.chunk is None or (cut.in_place and op is None):
        return [(start, stop)]
    return [(a, min(a + cut.chunk, stop)) for a in range(start, stop, cut.chunk)]


def _single_op(step: Step) -> Reduction | None:
    ops = {op for axis, op in step.source.pending if axis in step.axes}
    if len(ops) > 1:
        raise LayoutError(
            f"axes {list(step.axes)} of {step.source} mix the reductions {sorted(op.value for op in ops)}",
            fix="resolve one of them first: they do not commute",
        )
    return ops.pop() if ops else None


# ---- regions from any holder -----------------------------------------------------------------------------------------


def _lower_stream(steps: Sequence[Step], device: int, cut: Cut) -> Move:
    """Exchanges of parts of one array from one layout to another, one after the other into one output."""
    first = steps[0]
    participants = sorted({*first.source.mesh.devices, *first.result.mesh.devices})
    held = {d: region for d in participants if (region := region_of(first.source, d)) is not None}
    needed = {d: region for d in participants if (region := region_of(first.result, d)) is not None}
    streams = [transfers(step.source, step.result, step.region) for step in steps]
    label = f"{first.kind.value} over {','.join(first.axes) or 'all ranks'}: {first.source} -> {first.result}"
    return lower_transfers(label, streams, held, needed, device, cut)


def lower_transfers(
    label: str,
    streams: Sequence[Sequence[Transfer]],
    held: Mapping[int, Region],
    needed: Mapping[int, Region],
    device: int,
    cut: Cut,
) -> Move:
    """What `device` does of the given transfers between devices that hold and need the given regions."""
    nothing = Region(((),) * len(next(iter((*held.values(), *needed.values()))).dims))
    position = {d: place for place, d in enumerate(sorted({*held, *needed}))}
    have, need = held.get(device, nothing), needed.get(device, nothing)
    copies: list[tuple[Selection, Selection]] = []
    sends: list[Message] = []
    receives: list[Message] = []
    for stream, moved in enumerate(streams):
        counts: dict[tuple[int, int], int] = {}
        for transfer in moved:
            sender, receiver = transfer.sender, transfer.receiver
            if device not in (sender, receiver) or transfer.region.size == 0:
                continue
            if sender == receiver:
                copies.append((Selection.of(transfer.region, have), Selection.of(transfer.region, need)))
                continue
            distance = (position[receiver] - position[sender]) % len(position)
            for part in cut.parts(transfer.region, held[sender], needed[receiver], None):
                order = counts[sender, receiver] = counts.get((sender, receiver), -1) + 1
                key = (stream, order, distance, position[sender])
                if device == sender:
                    sends.append(Message(receiver, Selection.of(part, have), key))
                else:
                    receives.append(Message(sender, Selection.of(part, need), key))
    return Move(label, have.shape, need.shape, tuple(copies), _sorted(sends), _sorted(receives))


def _sorted(messages: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(sorted((message for message in messages if message.part.elements), key=lambda message: message.key))
