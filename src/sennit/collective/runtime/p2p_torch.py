"""Any schedule on any backend of torch.distributed, by its point-to-point calls alone.

    run_schedule_p2p(schedule, x, y)                  # plan and run, once
    plan = plan_p2p(schedule, rank)                   # or: plan once
    run_plan_p2p(plan, x, y)                          # and run often

`p2p_plan.py` cuts the schedule into rounds; a round is one `batch_isend_irecv` and some local copies and reductions.
Tensors may be on any device that the group's backend serves, of any type that torch can reduce. `start_rounds` is the
same for any other way to post messages: the backend's own sockets use it between hosts.

**Sizes.** The input and output of a collective are `parts` (one, or one for each rank) of n elements; a part is cut
into `chunks`. Where chunks divides n, messages leave from and land in the tensors themselves. Where it does not, or a
tensor is not contiguous, a copy is made in which every part is padded to a multiple of chunks, and the result is copied
back.

**In place** `input` and `output` are the same memory: the smaller is a view of the larger, at the part that
`alias_offset` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.collective.runtime.p2p_plan import Local, Location, P2PPlan, Round, Slot, plan_p2p
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveSpec, CustomCollective
from sennit.ir.layout import Reduction
from sennit.ir.schedule import Place, Schedule

__all__ = ["combinations", "run_plan_p2p", "run_schedule_p2p", "start_rounds"]

Messages = Sequence[tuple[int, Tensor]]  # peer, and what is sent or received; contiguous
Post = Callable[[Messages, Messages], Callable[[], None]]  # the sends and the receives of a batch, to what waits for it
Combine = Callable[[Tensor, Tensor], Tensor]


def run_schedule_p2p(
    schedule: Schedule,
    input: Tensor,
    output: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    reduction: Reduction = Reduction.SUM,
    tiles: int = 1,
) -> None:
    """Run a schedule on the ranks of a group.

    All of them must call this with the same schedule and tensors of the same sizes.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size != schedule.collective.ranks:
        raise CollectiveError(
            f"a schedule for {schedule.collective.ranks} ranks in a group of {size}",
            where=f"schedule {schedule.name!r}",
            fix=f"compile the algorithm for {size} ranks",
        )
    run_plan_p2p(plan_p2p(schedule, rank, tiles=tiles), input, output, group, reduction=reduction)


def run_plan_p2p(
    plan: P2PPlan,
    input: Tensor,
    output: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    reduction: Reduction = Reduction.SUM,
) -> None:
    """Run the rounds of this rank in a group."""

    def post(sends: Messages, receives: Messages) -> Callable[[], None]:
        calls = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
        calls += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
        works = dist.batch_isend_irecv(calls)

        def end() -> None:
            for work in works:
                work.wait()

        return end

    start_rounds(plan, input, output, post, reduction.value)()


def start_rounds(plan: P2PPlan, input: Tensor, output: Tensor, post: Post, reduction: str) -> Callable[[], None]:
    """Run the rounds of this rank with any way to post messages: those of the first round are under way when this
    returns, and calling what it returns does the rest. `reduction` is a key of `combinations`.
    """
    combine = combinations()[reduction]
    input, output = input.detach(), output.detach()
    elements = _part_elements(plan, input, output)
    if elements == 0 or not plan.rounds:
        return _nothing
    buffers = _lay_out(plan, input, output, elements)
    first = _post(buffers, plan.rounds[0], post)

    def finish() -> None:
        arrived = first
        for number, item in enumerate(plan.rounds):
            arrived()
            for work in item.work:
                _do(buffers, work, combine)
            if number + 1 < len(plan.rounds):
                arrived = _post(buffers, plan.rounds[number + 1], post)
        if buffers.output_copy is not None:
            output.copy_(buffers.output_copy[:, :elements].reshape(output.shape))

    return finish


def _nothing() -> None:
    """The end of an exchange of no messages."""


@dataclass(slots=True, eq=False)
class _Buffers:
    """All buffers as tensors of (chunks, elements of a chunk).

    `output_copy` is (parts, padded part) where the output could not be used as it is.
    """

    named: dict[str, Tensor]
    slots: dict[tuple[int, int, int], Tensor]
    tiles: int
    output_copy: Tensor | None

    def view(self, location: Location, tile: int) -> Tensor:
        match location:
            case Slot(peer, channel, index, count):
                rows = self.slots[peer, channel, index][:count]
            case Place(buffer, start, count):
                rows = self.named[buffer][start : start + count]
        width = rows.shape[1]
        return rows if self.tiles == 1 else rows[:, width * tile // self.tiles : width * (tile + 1) // self.tiles]


def _lay_out(plan: P2PPlan, input: Tensor, output: Tensor, elements: int) -> _Buffers:
    """`elements` is at least 1."""
    collective, rank, chunks = plan.schedule.collective, plan.rank, _chunks(plan)
    stride = -(-elements // chunks)
    width = stride * chunks
    inputs, outputs = collective.input_chunks(rank), collective.output_chunks(rank)
    usable = width == elements and input.is_contiguous() and output.is_contiguous()
    if collective.in_place:
        larger, smaller = (input, output) if inputs >= outputs else (output, input)
        _check_alias(plan, larger, smaller, elements)
        whole = (larger if usable else _padded(larger, max(inputs, outputs) // chunks, width)).view(-1, stride)
        offset = collective.alias_offset(rank)
        part = whole[offset : offset + min(inputs, outputs)]
        named = {"input": whole, "output": part} if inputs >= outputs else {"input": part, "output": whole}
    elif usable:
        kept = input.clone() if plan.writes_input else input
        named = {"input": kept.view(inputs, stride), "output": output.view(outputs, stride)}
    else:
        padded = _padded(input, inputs // chunks, width)
        named = {"input": padded.view(inputs, stride), "output": input.new_zeros((outputs, stride))}
    copy = None if usable else named["output"].view(outputs // chunks, width)
    for piece in plan.schedule.ranks[rank].scratch:
        named[piece.name] = input.new_empty((piece.chunks, stride))
    return _Buffers(named, _slots(plan, input, stride), plan.tiles, copy)


def _chunks(plan: P2PPlan) -> int:
    """Chunks of a part; in a custom collective each chunk is a part."""
    collective = plan.schedule.collective
    return collective.chunks if isinstance(collective, CollectiveSpec) else 1


def _part_elements(plan: P2PPlan, input: Tensor, output: Tensor) -> int:
    """n: the elements of a part, which input and output must agree on."""
    collective, rank, chunks = plan.schedule.collective, plan.rank, _chunks(plan)
    if input.dtype != output.dtype or input.device != output.device:
        raise _fault(
            plan, f"the input is {input.dtype} on {input.device}, the output {output.dtype} on {output.device}"
        )
    sizes: dict[str, tuple[int, int]] = {
        "input": (input.numel(), collective.input_chunks(rank) // chunks),
        "output": (output.numel(), collective.output_chunks(rank) // chunks),
    }
    found: set[int] = set()
    for name, (numel, parts) in sizes.items():
        if parts == 0:
            continue
        if numel % parts:
            raise _fault(plan, f"the {name} has {numel} elements for {parts} parts")
        found.add(numel // parts)
    if len(found) != 1:
        (a, p), (b, q) = sizes.values()
        raise _fault(plan, f"{a} elements of input in {p} parts and {b} of output in {q} parts")
    return found.pop()


def _check_alias(plan: P2PPlan, larger: Tensor, smaller: Tensor, elements: int) -> None:
    part = plan.schedule.collective.alias_offset(plan.rank) // _chunks(plan)
    wanted = larger.data_ptr() + part * elements * larger.element_size()
    if smaller.numel() and smaller.data_ptr() != wanted:
        raise _fault(plan, f"input and output of a collective in place are apart: they must meet at part {part}")


def _padded(tensor: Tensor, parts: int, width: int) -> Tensor:
    """A copy of (parts, width), zeros behind the elements of each part."""
    rows = tensor.reshape(parts, -1) if tensor.numel() else tensor.new_empty((parts, 0))
    padded = tensor.new_zeros((parts, width))
    padded[:, : rows.shape[1]] = rows
    return padded


def _slots(plan: P2PPlan, like: Tensor, stride: int) -> dict[tuple[int, int, int], Tensor]:
    counts: dict[tuple[int, int, int], int] = {}
    for item in plan.rounds:
        for transfer in item.receives:
            if isinstance(slot := transfer.location, Slot):
                key = (slot.peer, slot.channel, slot.index)
                counts[key] = max(counts.get(key, 0), slot.count)
    return {key: like.new_empty((count, stride)) for key, count in counts.items()}


def _post(buffers: _Buffers, item: Round, post: Post) -> Callable[[], None]:
    """Post a batch; what comes back waits for its end.

    A message of no elements is sent by nobody: both sides know its size.
    """
    arriving: list[tuple[int, Tensor]] = []
    landings: list[tuple[Tensor, Tensor]] = []
    for transfer in item.receives:
        view = buffers.view(transfer.location, transfer.tile)
        if view.numel():
            landing = view if view.is_contiguous() else torch.empty_like(view, memory_format=torch.contiguous_format)
            if landing is not view:
                landings.append((view, landing))
            arriving.append((transfer.peer, landing))
    leaving = [(transfer.peer, buffers.view(transfer.location, transfer.tile).contiguous()) for transfer in item.sends]
    leaving = [(peer, tensor) for peer, tensor in leaving if tensor.numel()]
    if not leaving and not arriving:
        return _nothing
    ended = post(leaving, arriving)

    def end() -> None:
        ended()
        for view, landing in landings:
            view.copy_(landing)

    return end


def _do(buffers: _Buffers, work: Local, combine: Combine) -> None:
    source, target = buffers.view(work.source, work.tile), buffers.view(work.target, work.tile)
    if work.reduce:
        combine(target, source)
    else:
        target.copy_(source)


def combinations() -> dict[str, Combine]:
    """How torch reduces one tensor into another, by the name of the reduction."""
    return {
        "sum": lambda target, source: target.add_(source),
        "prod": lambda target, source: target.mul_(source),
        "min": lambda target, source: torch.minimum(target, source, out=target),
        "max": lambda target, source: torch.maximum(target, source, out=target),
        "band": lambda target, source: target.bitwise_and_(source),
        "bor": lambda target, source: target.bitwise_or_(source),
        "bxor": lambda target, source: target.bitwise_xor_(source),
    }


def _fault(plan: P2PPlan, what: str) -> CollectiveError:
    collective = plan.schedule.collective
    shown = f"custom {collective.title!r}" if isinstance(collective, CustomCollective) else str(collective)
    return CollectiveError(
        what,
        where=f"schedule {plan.schedule.name!r} on rank {plan.rank}",
        fix=f"pass tensors of one type on one device, with the same number of elements a part, for {shown}",
    )
