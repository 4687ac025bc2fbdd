"""Collectives over sockets: schedules of the library, compiled for the ranks that take part and run round by round.

| | below `SMALL` bytes | above |
|---|---|---|
| all_reduce | all to all pairs, two rounds | a ring: least bytes |
| of two ranks | each sends the other all it has, one round | the same: as many bytes as any |
| all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter | straight between the ranks, one round | the same |

A group between hosts has few members, and a link is shared by the ranks of a host, not by the members of this group: so
a straight algorithm, which sends every byte over a link once, is as good as a ring there.

Messages of a call bear its number and a note of what it is, so a rank that calls something else is found at its first
message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sennit.collective.compile import compile_algorithm
from sennit.collective.language import Builder, trace
from sennit.collective.library import all_pairs_all_reduce, ring_all_reduce
from sennit.collective.runtime.p2p_links import Label, Links
from sennit.collective.runtime.p2p_note import Note
from sennit.collective.runtime.p2p_plan import P2PPlan, plan_p2p
from sennit.collective.runtime.p2p_ticket import wait_for
from sennit.collective.runtime.p2p_torch import Messages, start_rounds
from sennit.collective.runtime.shm_algorithms import build
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["Finish", "Linked", "apart", "bytes_of", "cut", "equal"]

SMALL = 64 << 10

Finish = Callable[[], None]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class Linked:
    """The ranks `members` of the links, as a group of their own.

    `kind` keeps its messages apart from those of other groups on the same links.
    """

    def __init__(self, links: Links, members: Sequence[int], kind: int) -> None:
        self.links, self.members, self.kind = links, tuple(members), kind
        self.rank, self.size = self.members.index(links.rank), len(members)
        self.calls = 0
        self._plans: dict[tuple[str, int | None], P2PPlan] = {}

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, reduction: str, timeout: float) -> None:
        self.start_all_reduce(tensor, reduction, timeout)()

    def start_all_reduce(self, tensor: Tensor, reduction: str, timeout: float) -> Finish:
        """Its first messages are under way when this returns; what comes back does the rest.

        Several may be under way at once.
        """
        name = "exchange" if self.size == 2 else "pairs" if tensor.nbytes < SMALL else "ring"
        return self._start(Note("all_reduce", reduction), self.plan(name), tensor, tensor, timeout)

    def all_gather(self, output: Tensor, input: Tensor, timeout: float) -> None:
        self._start(Note("all_gather"), self.plan("all_gather"), apart(input, output), output, timeout)()

    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: str, timeout: float) -> None:
        plan = self.plan("reduce_scatter")
        self._start(Note("reduce_scatter", reduction), plan, apart(input, output), output, timeout)()

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        note = Note("broadcast", root=root)
        others = [peer for peer in range(self.size) if peer != root] if self.rank == root else []
        receives = [] if self.rank == root else [(root, tensor)]
        self._post(note, self._next_label(), [(peer, tensor) for peer in others], receives, timeout)()

    def reduce(self, tensor: Tensor, root: int, reduction: str, timeout: float) -> None:
        result = torch.empty_like(tensor)
        plan = self.plan("reduce direct", root)
        self._start(Note("reduce", reduction, root), plan, tensor, result, timeout)()
        if self.rank == root:
            tensor.copy_(result)

    def gather(self, output: Tensor | None, input: Tensor, root: int, timeout: float) -> None:
        note = Note("gather", root=root)
        if output is None:
            self._post(note, self._next_label(), [(root, input)], [], timeout)()
            return
        parts = output.view(self.size, -1)
        parts[root].copy_(input)
        receives = [(peer, parts[peer]) for peer in range(self.size) if peer != root]
        self._post(note, self._next_label(), [], receives, timeout)()

    def scatter(self, output: Tensor, input: Tensor | None, root: int, timeout: float) -> None:
        note = Note("scatter", root=root)
        if input is None:
            self._post(note, self._next_label(), [], [(root, output)], timeout)()
            return
        parts = apart(input, output).view(self.size, -1)
        output.copy_(parts[root])
        sends = [(peer, parts[peer]) for peer in range(self.size) if peer != root]
        self._post(note, self._next_label(), sends, [], timeout)()

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        timeout: float,
    ) -> None:
        input_sizes = input_sizes or equal(input, self.size)
        output_sizes = output_sizes or equal(output, self.size)
        pieces, places = cut(apart(input, output), input_sizes), cut(output, output_sizes)
        places[self.rank].copy_(pieces[self.rank])
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends, receives = ([(peer, items[peer]) for peer in others] for items in (pieces, places))
        self._post(Note("all_to_all"), self._next_label(), sends, receives, timeout)()

    def start_exchange(self, sends: Messages, receives: Messages, timeout: float) -> Finish:
        """A part of an all-to-all, under way when this returns; what comes back waits for its end."""
        return self._post(Note("all_to_all"), self._next_label(), sends, receives, timeout)

    def barrier(self, timeout: float) -> None:
        nothing = torch.empty(0)
        others = [(peer, nothing) for peer in range(self.size) if peer != self.rank]
        self._post(Note("barrier"), self._next_label(), others, others, timeout)()

    def abort(self, why: str) -> None:
        self.links.close(why)

    def allocate(self, nbytes: int) -> Tensor | None:
        return None

    def close(self) -> None:
        self.links.close()

    # ---- running -----------------------------------------------------------------------------------------------------

    def _next_label(self) -> Label:
        self.calls += 1
        return Label(self.kind, self.calls)

    def _start(self, note: Note, plan: P2PPlan, input: Tensor, output: Tensor, timeout: float) -> Finish:
        label = self._next_label()

        def post(sends: Messages, receives: Messages) -> Finish:
            return self._post(note, label, sends, receives, timeout)

        return start_rounds(plan, input, output, post, note.reduction or "sum")

    def _post(self, note: Note, label: Label, sends: Messages, receives: Messages, timeout: float) -> Finish:
        number, members, links = int(note), self.members, self.links
        tickets = [links.receive(members[peer], label, bytes_of(tensor), note=number) for peer, tensor in receives]
        tickets += [links.send(members[peer], label, bytes_of(tensor), note=number) for peer, tensor in sends]
        return lambda: wait_for(tickets, timeout)

    def plan(self, name: str, root: int | None = None) -> P2PPlan:
        """Compiled at its first use, kept with the group."""
        if (found := self._plans.get((name, root))) is None:
            schedule = compile_algorithm(_algorithm(name, self.size, root))
            found = self._plans[name, root] = plan_p2p(schedule, self.rank)
        return found


def apart(input: Tensor, output: Tensor) -> Tensor:
    """The input, or a copy where it overlaps the output: what arrives early would be sent."""
    here, there = input.data_ptr(), output.data_ptr()
    overlaps = here < there + output.nbytes and there < here + input.nbytes
    return input.clone() if overlaps else input


def equal(tensor: Tensor, count: int) -> list[int]:
    """The sizes of so many equal pieces."""
    return [tensor.numel() // count] * count


def cut(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The pieces of a flat tensor, of the given sizes."""
    ends = list(accumulate(sizes))
    return [tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _algorithm(name: str, ranks: int, root: int | None) -> Algorithm:
    match name:
        case "exchange":
            spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, 1, in_place=True)
            return trace(_exchange_all_reduce, spec, name)
        case "pairs":
            return all_pairs_all_reduce(ranks, in_place=True)
        case "ring":
            return ring_all_reduce(ranks, in_place=True)
        case other:
            return build(other, ranks, root)


def _exchange_all_reduce(b: Builder) -> None:
    """Of two ranks: each sends all it has, and adds what it gets.

    A sum of two is the same in either order, so both get the same bits.
    """
    for rank in (0, 1):
        b.scratch(rank, "other", 1)
        b.input(1 - rank).copy(to=rank, buffer="other", index=0)
    for rank in (0, 1):
        b.chunk(rank, "other", 0).reduce(into=b.input(rank))
