"""Collectives over sockets: schedules of the library, compiled for the ranks that take part and run round by round.

| | below `SMALL` bytes | above |
|---|---|---|
| all_reduce | all to all pairs, two rounds | a ring: least bytes |
| of two ranks | each sends the other all it has, one round | the same: as many bytes as any |
| all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter | straight between the ranks, one round | the same |

A group between hosts has few members, and a link is shared by the ranks of a host, not by the members of this group: so a straight algorithm, which
sends every byte over a link once, is as good as a ring there.

Messages of a call bear its number and a note of what it is, so a rank that calls something else is found at its first message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sennit.collective.compile import compile_algorithm
from sennit.collective.language import Builder, trace
from sennit.collective.library import all_pairs_all_reduce, ring_all_reduce
from sennit.collective.runtime.p2p_links import Label, Links
from sennit.collective.runtime.p2p_note import Note
from sennit.collective.runtime.p2p_plan import P2PPlan, plan_p2p
from sennit.collective.runtime.p2p_torch import Messages, run_rounds
from sennit.collective.runtime.shm_algorithms import build
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["Linked", "bytes_of"]

SMALL = 64 << 10


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class Linked:
    """The ranks `members` of the links, as a group of their own. `kind` keeps its messages apart from those of other groups on the same links."""

    def __init__(self, links: Links, members: Sequence[int], kind: int) -> None:
        self.links, self.members, self.kind = links, tuple(members), kind
        self.rank, self.size = self.members.index(links.rank), len(members)
        self.calls = 0
        self._plans: dict[tuple[str, int | None], P2PPlan] = {}

    # ---- collectives -----------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, reduction: str, timeout: float) -> None:
        self.all_reduce_as(self.next_call(), tensor, reduction, timeout)

    def all_reduce_as(self, call: int, tensor: Tensor, reduction: str, timeout: float) -> None:
        """With the number of a call that was taken before: so several may run at once, on threads of their own."""
        name = "exchange" if self.size == 2 else "pairs" if tensor.nbytes < SMALL else "ring"
        self._run(call, Note("all_reduce", reduction), self.plan(name), tensor, tensor, timeout)

    def all_gather(self, output: Tensor, input: Tensor, timeout: float) -> None:
        self._run(self.next_call(), Note("all_gather"), self.plan("all_gather"), input, output, timeout)

    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: str, timeout: float) -> None:
        plan = self.plan("reduce_scatter")
        self._run(self.next_call(), Note("reduce_scatter", reduction), plan, input, output, timeout)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        note = Note("broadcast", root=root)
        others = [peer for peer in range(self.size) if peer != root] if self.rank == root else []
        receives = [] if self.rank == root else [(root, tensor)]
        self._exchange(self.next_call(), note, [(peer, tensor) for peer in others], receives, timeout)

    def reduce(self, tensor: Tensor, root: int, reduction: str, timeout: float) -> None:
        result = torch.empty_like(tensor)
        plan = self.plan("reduce direct", root)
        self._run(self.next_call(), Note("reduce", reduction, root), plan, tensor, result, timeout)
        if self.rank == root:
            tensor.copy_(result)

    def gather(self, output: Tensor | None, input: Tensor, root: int, timeout: float) -> None:
        note = Note("gather", root=root)
        if output is None:
            self._exchange(self.next_call(), note, [(root, input)], [], timeout)
            return
        parts = output.view(self.size, -1)
        parts[root].copy_(input)
        receives = [(peer, parts[peer]) for peer in range(self.size) if peer != root]
        self._exchange(self.next_call(), note, [], receives, timeout)

    def scatter(self, output: Tensor, input: Tensor | None, root: int, timeout: float) -> None:
        note = Note("scatter", root=root)
        if input is None:
            self._exchange(self.next_call(), note, [], [(root, output)], timeout)
            return
        parts = input.view(self.size, -1)
        output.copy_(parts[root])
        sends = [(peer, parts[peer]) for peer in range(self.size) if peer != root]
        self._exchange(self.next_call(), note, sends, [], timeout)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], timeout: float
    ) -> None:
        pieces, places = cut(input, input_sizes), cut(output, output_sizes)
        places[self.rank].copy_(pieces[self.rank])
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends, receives = ([(peer, items[peer]) for peer in others] for items in (pieces, places))
        self._exchange(self.next_call(), Note("all_to_all"), sends, receives, timeout)

    def barrier(self, timeout: float) -> None:
        nothing = torch.empty(0)
        others = [(peer, nothing) for peer in range(self.size) if peer != self.rank]
        self._exchange(self.next_call(), Note("barrier"), others, others, timeout)

    def abort(self, why: str) -> None:
        self.links.close()

    def close(self) -> None:
        self.links.close()

    # ---- running ---------------------------------------------------------------------------------------------------------

    def next_call(self) -> int:
        self.calls += 1
        return self.calls

    def _run(self, call: int, note: Note, plan: P2PPlan, input: Tensor, output: Tensor, timeout: float) -> None:
        def exchange(sends: Messages, receives: Messages) -> None:
            self._exchange(call, note, sends, receives, timeout)

        run_rounds(plan, input, output, exchange, note.reduction or "sum")

    def plan(self, name: str, root: int | None = None) -> P2PPlan:
        """Compiled at its first use, kept with the group."""
        if (found := self._plans.get((name, root))) is None:
            schedule = compile_algorithm(_algorithm(name, self.size, root))
            found = self._plans[name, root] = plan_p2p(schedule, self.rank)
        return found

    def _exchange(self, call: int, note: Note, sends: Messages, receives: Messages, timeout: float) -> None:
        self.links.exchange(
            Label(self.kind, call),
            [(self.members[peer], bytes_of(tensor)) for peer, tensor in sends],
            [(self.members[peer], bytes_of(tensor)) for peer, tensor in receives],
            note=int(note),
            timeout=timeout,
        )


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
    """Of two ranks: each sends all it has, and adds what it gets. A sum of two is the same in either order, so both get the same bits."""
    for rank in (0, 1):
        b.scratch(rank, "other", 1)
        b.input(1 - rank).copy(to=rank, buffer="other", index=0)
    for rank in (0, 1):
        b.chunk(rank, "other", 0).reduce(into=b.input(rank))
