"""The communicator on torch.distributed: any backend that has the collectives, gloo and NCCL among them.

Process groups are made once per set of ranks, before the first step, by all ranks in the same order (`run/groups.py`).
Transfers between two ranks are numbered, and the number is the tag: a receive takes the message that the program
matched it with. Device d of the program is rank d. The messages of an exchange start together. Their tag is the
exchange's number, among the odd ones, so that exchanges may overtake each other; on NCCL they have a communicator of
their own (`run/groups.py`).

Gloo's reduce-scatter adds in an order that depends on where in the message an element lies, and takes two to ten times
as long as its all-to-all (`benchmarks/plan/zero.py --calls`). So on gloo a reduce-scatter is an all-to-all of as many
bytes, and each member adds what it got, in the order of the group: an element has the same bits in whatever bucket it
travels, and those of ranks in one process (`run/threads.py`).

A program's group is ordered by coordinates, a group of torch by ranks. Where the two differ (a mesh with its devices in
another order), pieces are put in the order of torch on the way in, and in that of the program on the way out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.ir.layout import Reduction
from sennit.ir.program_exchange import Channel
from sennit.run.groups import ProcessGroups
from sennit.run.rank import Group

__all__ = ["SCATTERING", "ProcessCommunicator"]

SCATTERING = 2  # reduce-scatters under way at once: one while the next source is made


@dataclass(slots=True)
class _Work:
    """A torch work handle and how to get the result once it is done. It keeps its source alive until then."""

    work: dist.Work | None
    source: Tensor | None
    result: Callable[[], Tensor]

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = self.source = None  # the handle holds the source too
        return self.result()


@dataclass(slots=True)
class _Adding:
    """An all-to-all under way whose pieces are added up when they are in, in the order of the group."""

    pieces: _Work | None
    op: Reduction
    total: Tensor | None = None

    def wait(self) -> Tensor:
        if self.total is None:
            assert self.pieces is not None
            received = self.pieces.wait()
            total = _combine(received[0], received[1], self.op)  # in memory of its own
            for piece in received[2:]:
                total = _combine(total, piece, self.op, out=total)
            self.total, self.pieces = total, None  # what was received may go
        return self.total


class ProcessCommunicator:
    """This process's end. `groups` has what the program needs (`ProcessGroups.make_for`)."""

    def __init__(self, groups: ProcessGroups, device: torch.device | None = None) -> None:
        self.groups = groups
        self._device = device or torch.device("cpu")
        self.counts: dict[tuple[int, int], int] = defaultdict(int)
        self.sending: list[tuple[dist.Work, tuple[Tensor, ...]]] = []  # with what must live until it has left
        self.scattering: deque[_Work | _Adding] = deque()  # the latest, of which there are at most SCATTERING

    @property
    def device(self) -> torch.device:
        return self._device

    def all_reduce(self, group: Group, tensor: Tensor, op: Reduction, *, in_place: bool = False) -> _Work:
        # the source may still be read, or share memory with what is
        result = tensor if in_place else tensor.clone()
        work = dist.all_reduce(result, _op(op), group=self.groups.of(group), async_op=True)
        assert work is not None
        return _Work(work, result, lambda: result)  # the source itself may go

    def all_gather(self, group: Group, tensor: Tensor) -> _Work:
        stacked = tensor.new_empty((len(group), *tensor.shape))
        # members write straight to their places in the program's order
        parts = [stacked[place] for place in _places(group)]
        work = dist.all_gather(parts, tensor, group=self.groups.of(group), async_op=True)
        assert work is not None
        return _Work(work, tensor, lambda: stacked)

    def reduce_scatter(self, group: Group, tensor: Tensor, op: Reduction) -> _Work | _Adding:
        if len(self.scattering) == SCATTERING:
            # a piece of a gradient may be read much later, at the next micro-batch: the whole must not live as long
            self.scattering.popleft().wait()
        under_way: _Work | _Adding
        if len(group) > 1 and dist.get_backend(self.groups.of(group)) == "gloo":
            under_way = _Adding(self.all_to_all(group, tensor), op)
        else:
            under_way = self._reduce_scatter(group, tensor, op)
        self.scattering.append(under_way)
        return under_way

    def _reduce_scatter(self, group: Group, tensor: Tensor, op: Reduction) -> _Work:
        result = torch.empty_like(tensor[0])
        parts = [tensor[place] for place in _places(group)]
        work = dist.reduce_scatter(result, parts, _op(op), group=self.groups.of(group), async_op=True)
        assert work is not None
        return _Work(work, tensor, lambda: result)

    def all_to_all(self, group: Group, tensor: Tensor) -> _Work:
        places = _places(group)
        in_order = places == sorted(places)
        source = tensor if in_order else tensor[places]
        result = torch.empty_like(source)
        work = dist.all_to_all_single(result, source, group=self.groups.of(group), async_op=True)
        assert work is not None
        return _Work(work, source, lambda: result if in_order else result[_inverse(places)])

    def _tag(self, source: int, target: int) -> int:
        self.counts[source, target] += 1
        return 2 * self.counts[source, target]

    def send(self, tensor: Tensor, to: int) -> None:
        rank = dist.get_rank()
        work = dist.isend(tensor, to, group=self.groups.between(rank, to), tag=self._tag(rank, to))
        assert work is not None
        self.sending.append((work, (tensor,)))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, origin: int) -> _Work:
        rank = dist.get_rank()
        result = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(result, origin, group=self.groups.between(origin, rank), tag=self._tag(origin, rank))
        assert work is not None
        return _Work(work, result, lambda: result)

    def exchange(
        self,
        channel: Channel,
        number: int,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> Callable[[], None]:
        group, tag = self.groups.channel(channel), 2 * number + 1
        calls = [dist.P2POp(dist.isend, tensor, to, group, tag) for tensor, to in sends]
        calls += [dist.P2POp(dist.irecv, place, origin, group, tag) for place, origin in receives]
        works = dist.batch_isend_irecv(calls) if calls else []
        apart = len(works) == len(calls)  # a backend that joins the messages of a batch has one handle for all of them
        coming = works[len(sends) :] if apart else works
        if sends:
            leaving = works[: len(sends)] if apart else works
            self.sending += [(work, tuple(tensor for tensor, _ in sends)) for work in leaving]

        def arrive() -> None:
            for work in coming:
                work.wait()

        return arrive

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()
        while self.scattering:
            self.scattering.popleft().wait()


def _places(group: Group) -> list[int]:
    """For each member in the order of ranks, its place in the program's group."""
    return [group.index(rank) for rank in sorted(group)]


def _inverse(places: list[int]) -> list[int]:
    return [places.index(place) for place in range(len(places))]


def _op(op: Reduction) -> dist.ReduceOp.RedOpType:
    match op:
        case Reduction.SUM:
            return dist.ReduceOp.SUM
        case Reduction.PROD:
            return dist.ReduceOp.PRODUCT
        case Reduction.MAX:
            return dist.ReduceOp.MAX
        case Reduction.MIN:
            return dist.ReduceOp.MIN


def _combine(left: Tensor, right: Tensor, op: Reduction, out: Tensor | None = None) -> Tensor:
    match op:
        case Reduction.SUM:
            return torch.add(left, right, out=out)
        case Reduction.PROD:
            return torch.mul(left, right, out=out)
        case Reduction.MAX:
            return torch.maximum(left, right, out=out)
        case Reduction.MIN:
            return torch.minimum(left, right, out=out)
