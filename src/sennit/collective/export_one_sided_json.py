"""A one-sided program as an mscclpp execution plan (JSON): nearly step by step, since mscclpp is one-sided too.

| step | becomes |
|---|---|
| put, copy, reduce | put, copy, re |
| read_reduce, multi_reduce | rre for operands of other ranks, re for those of this one, in their order |
| multicast | gstore on a switch channel |
| switch_reduce, then multicast of the same place to the same ranks | glres: loaded, added and stored through the switch, at once |
| signal, wait between ranks | signal, wait on a memory channel, one for each pair of blocks that signal each other |
| signal, wait within a rank | sem_release, sem_acquire on a semaphore for each pair of blocks |

The executor's wait takes one signal and knows no number, so the k-th wait of a block for another must be for k; the
compiler's are. Every signal is waited for once, so that channels start the next run balanced; the gates keep two runs
apart. A data operation names a channel to its peer too: one that the block has, or else one to the peer's gate.

**Switch channels.** A multicast object covers one buffer of some ranks, and a rank uses those that it belongs to: a
multicast or reduction must name the rank that does it. The plan format has no reduction in the switch whose result
stays with one rank: a lone switch_reduce is refused, and so `nvls_reduce_scatter` is. `nvls_all_reduce` with one piece
becomes glres.

Field names are those of mscclpp's parser (src/core/executor/execution_plan.cc). All ranks are within reach of each
other's loads and stores (one node). Not run on the executor by us; the tests interpret its operations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from sennit.collective.export_json import PlanOptions, plan_header
from sennit.collective.normal_form import SCRATCH
from sennit.errors import CollectiveError
from sennit.ir.one_sided import (
    Await,
    LocalCopy,
    LocalReduce,
    Multicast,
    MultiReduce,
    OneSided,
    OneSidedRank,
    Put,
    ReadReduce,
    Signal,
    Step,
    SwitchReduce,
    accesses,
)
from sennit.ir.one_sided_check import check_one_sided
from sennit.ir.schedule import Place

__all__ = ["one_sided_mscclpp_json"]

End = tuple[int, int]  # rank, block
Operation = dict[str, Any]
MEMORY, SWITCH = "memory", "switch"


def one_sided_mscclpp_json(program: OneSided, options: PlanOptions | None = None) -> str:
    """The plan as JSON text.

    Raises CollectiveError where the executor has no operation for a step, or cannot hold it.
    """
    options = options or PlanOptions()
    check_one_sided(program)
    channels = _channels(program)
    gpus = [_Rank(program, ranked, channels, options).run() for ranked in program.ranks]
    return json.dumps(plan_header(program.name, program.collective, gpus, options), indent=2) + "\n"


def _channels(program: OneSided) -> dict[int, list[tuple[End, End]]]:
    """By rank: its channels in the order of their numbers, each a pair of blocks, the lower one first.

    Both ends count alike.
    """
    pairs: set[tuple[End, End]] = set()
    for ranked in program.ranks:
        for block, steps in enumerate(ranked.blocks):
            here = (ranked.rank, block)
            partners = {(step.rank, step.block) for step in steps if isinstance(step, Signal | Await)}
            for peer in _peers(steps, ranked.rank) - {rank for rank, _ in partners}:
                partners.add((peer, 0))
            pairs |= {(min(here, other), max(here, other)) for other in partners if other[0] != ranked.rank}
    found: dict[int, list[tuple[End, End]]] = {ranked.rank: [] for ranked in program.ranks}
    for one, other in sorted(pairs, key=lambda pair: (pair[0][0], pair[1][0], pair)):
        found[one[0]].append((one, other))
        found[other[0]].append((one, other))
    return found


def _peers(steps: tuple[Step, ...], rank: int) -> set[int]:
    """The ranks whose memory puts and reads of a block touch."""
    return {
        there
        for step in steps
        if isinstance(step, Put | ReadReduce | MultiReduce)
        for there, _ in (*accesses(step, rank).reads, *accesses(step, rank).writes)
    } - {rank}


class _Rank:
    def __init__(
        self,
        program: OneSided,
        ranked: OneSidedRank,
        channels: dict[int, list[tuple[End, End]]],
        options: PlanOptions,
    ) -> None:
        self.program, self.ranked, self.options = program, ranked, options
        self.rank = ranked.rank
        self.channels = channels[ranked.rank]
        self.scratch: list[dict[str, int]] = []  # by rank: where a named scratch buffer begins in the joint one
        self.scratch_chunks: list[int] = []
        for other in program.ranks:
            starts, total = {}, 0
            for piece in other.scratch:
                starts[piece.name] = total
                total += piece.chunks
            self.scratch.append(starts)
            self.scratch_chunks.append(total)
        self.remote: dict[tuple[int, str], int] = {}  # rank and type of buffer -> number
        self.switches: dict[tuple[str, tuple[int, ...]], int] = {}  # type of buffer and ranks -> number
        self.semaphores: dict[tuple[int, int], int] = {}  # from block, to block

    def run(self) -> dict[str, Any]:
        spec = self.program.collective
        where = f"one-sided program {self.program.name!r}, rank {self.rank}"
        blocks = [
            _Block(self, number, f"{where}, block {number}").run(steps)
            for number, steps in enumerate(self.ranked.blocks)
        ]
        if len(self.semaphores) > self.options.limits.semaphores:
            raise CollectiveError(
                f"{len(self.semaphores)} pairs of blocks signal each other, the executor has "
                f"{self.options.limits.semaphores} semaphores",
                where=where,
                fix="use fewer channels or instances",
            )
        channels: list[dict[str, Any]] = []
        if self.channels:
            channels.append({"channel_type": MEMORY, "connected_to": [self.far(pair) for pair in self.channels]})
        for (kind, ranks), _ in sorted(self.switches.items(), key=lambda item: item[1]):
            group = {"size": self._size(kind), "ranks": list(ranks)}
            channels.append({"channel_type": SWITCH, "buffer_type": kind, "rank_groups": [group]})
        return {
            "id": self.rank,
            "input_chunks": spec.input_chunks(self.rank),
            "output_chunks": spec.output_chunks(self.rank),
            "scratch_chunks": self.scratch_chunks[self.rank],
            "threadblocks": blocks,
            "channels": channels,
            "remote_buffers": [
                {"rank": peer, "type": kind, "access_channel_types": [MEMORY]} for peer, kind in self.remote
            ],
            "semaphores": [{"init_value": 0} for _ in self.semaphores],
        }

    def _size(self, kind: str) -> int:
        """Chunks of a buffer, as a multicast object binds it."""
        spec = self.program.collective
        if kind == "s":
            return self.scratch_chunks[self.rank]
        return spec.input_chunks(self.rank) if kind == "i" else spec.output_chunks(self.rank)

    def far(self, pair: tuple[End, End]) -> int:
        return pair[1][0] if pair[0][0] == self.rank else pair[0][0]

    def locate(self, rank: int, place: Place) -> tuple[str, int]:
        """The type of a buffer and the chunk in it."""
        if place.buffer in self.scratch[rank]:
            return "s", self.scratch[rank][place.buffer] + place.start
        return {"input": "i", "output": "o", SCRATCH: "s"}[place.buffer], place.start


@dataclass(slots=True)
class _Block:
    whole: _Rank
    number: int
    where: str
    operations: list[Operation] = field(default_factory=list)
    channels: list[int] = field(default_factory=list)  # numbers of the rank's memory channels
    buffers: list[int] = field(default_factory=list)  # of its remote buffers
    switches: list[int] = field(default_factory=list)
    waited: dict[End, int] = field(default_factory=dict)

    def run(self, steps: tuple[Step, ...]) -> dict[str, Any]:
        position = 0
        while position < len(steps):
            following = steps[position + 1] if position + 1 < len(steps) else None
            position += self._step(steps[position], following)
        limits = self.whole.options.limits
        for count, most, what in (
            (len(self.operations), limits.operations, "operations"),
            (len(self.channels), limits.channels, "channels"),
        ):
            if count > most:
                raise CollectiveError(
                    f"{len(steps)} steps need {count} {what}, the executor holds {most}",
                    where=self.where,
                    fix="use fewer ranks or chunks a block",
                )
        listed = [(MEMORY, self.channels), (SWITCH, self.switches)]
        refs = [{"access_channel_type": MEMORY, "remote_buffer_ids": self.buffers}] if self.buffers else []
        return {
            "id": self.number,
            "ops": self.operations,
            "channels": [{"channel_type": kind, "channel_ids": numbers} for kind, numbers in listed if numbers],
            "remote_buffer_refs": refs,
        }

    def _step(self, step: Step, following: Step | None) -> int:
        """Append a step; how many steps that was."""
        rank = self.whole.rank
        match step:
            case Signal() | Await():
                self._synchronise(step)
            case LocalCopy():
                self._append(
                    {"name": "copy", "src_buff": [self._own(step.source)], "dst_buff": [self._own(step.target)]}
                )
            case Put():
                target = self._remote(step.rank, step.target)
                self._append(
                    {"name": "put", "src_buff": [self._own(step.source)], "dst_buff": [target], **self._to(step.rank)}
                )
            case LocalReduce() | ReadReduce() | MultiReduce():
                for near, run in groupby(accesses(step, rank).reads, key=lambda operand: operand[0] == rank):
                    self._reduce(list(run), step.target, near=near)
            case Multicast():
                self._append(
                    {
                        "name": "gstore",
                        "src_buff": [self._own(step.source)],
                        "dst_buff": [self._switch(step, step.ranks, step.target)],
                    }
                )
            case SwitchReduce():
                stored = isinstance(following, Multicast) and (following.source, following.target, following.ranks) == (
                    step.target,
                    step.target,
                    step.ranks,
                )
                if not stored:
                    raise CollectiveError(
                        f"{step}: the plan format adds up in the switch only to store the sum on the same ranks at once",
                        where=self.where,
                        fix="multicast the sum to the same ranks right behind it, in the same block, or compile with switch=False",
                    )
                source = self._switch(step, step.ranks, step.source)
                target = self._switch(step, step.ranks, step.target)
                self._append({"name": "glres", "src_buff": [source], "dst_buff": [target], "reduce_op": "sum"})
                return 2
        return 1

    def _reduce(self, operands: list[tuple[int, Place]], target: Place, *, near: bool) -> None:
        own = self._own(target)
        if near:
            sources = [self._own(place) for _, place in operands]
            self._append({"name": "re", "src_buff": [own, *sources], "dst_buff": [own], "reduce_op": "sum"})
            return
        sources = [self._remote(rank, place) for rank, place in operands]
        channels = [self._channel_to(rank) for rank, _ in operands]
        self._append(
            {
                "name": "rre",
                "src_buff": [own, *sources],
                "dst_buff": [own],
                "channel_ids": list(dict.fromkeys(channels)),
                "channel_type": MEMORY,
                "reduce_op": "sum",
            }
        )

    def _synchronise(self, step: Signal | Await) -> None:
        here, other = (self.whole.rank, self.number), (step.rank, step.block)
        if isinstance(step, Await):
            self.waited[other] = self.waited.get(other, 0) + 1
            if step.count != self.waited[other]:
                raise CollectiveError(
                    f"{step} is the {self.waited[other]}. wait for that block; the executor's waits take one signal each",
                    where=self.where,
                    fix=f"wait for {self.waited[other]}",
                )
        if step.rank != self.whole.rank:
            number = self._channel((min(here, other), max(here, other)))
            name = "signal" if isinstance(step, Signal) else "wait"
            self._append({"name": name, "channel_ids": [number], "channel_type": MEMORY})
            return
        pair = (self.number, step.block) if isinstance(step, Signal) else (step.block, self.number)
        semaphore = self.whole.semaphores.setdefault(pair, len(self.whole.semaphores))
        name = "sem_release" if isinstance(step, Signal) else "sem_acquire"
        self._append({"name": name, "semaphore_ids": [semaphore]})

    def _own(self, place: Place) -> Operation:
        kind, index = self.whole.locate(self.whole.rank, place)
        return {"type": kind, "index": index, "size": place.count}

    def _remote(self, rank: int, place: Place) -> Operation:
        kind, index = self.whole.locate(rank, place)
        buffer = self.whole.remote.setdefault((rank, kind), len(self.whole.remote))
        return {"buffer_id": _numbered(self.buffers, buffer), "index": index, "size": place.count}

    def _switch(self, step: Step, ranks: tuple[int, ...], place: Place) -> Operation:
        if self.whole.rank not in ranks:
            raise CollectiveError(
                f"{step}: rank {self.whole.rank} is not in the group, and the executor's switch channels are of their members",
                where=self.where,
                fix=f"add rank {self.whole.rank} to the group",
            )
        places = {self.whole.locate(rank, place) for rank in ranks}
        if len(places) > 1:
            raise CollectiveError(
                f"{step}: {place} lies at different places of the scratch of its ranks",
                where=self.where,
                fix="declare the scratch buffers of all ranks alike",
            )
        ((kind, index),) = places
        number = self.whole.switches.setdefault((kind, ranks), len(self.whole.switches))
        return {"switch_channel_id": _numbered(self.switches, number), "index": index, "size": place.count}

    def _to(self, rank: int) -> Operation:
        return {"channel_ids": [self._channel_to(rank)], "channel_type": MEMORY}

    def _channel_to(self, rank: int) -> int:
        here = (self.whole.rank, self.number)
        return self._channel(
            next(pair for pair in self.whole.channels if here in pair and self.whole.far(pair) == rank)
        )

    def _channel(self, pair: tuple[End, End]) -> int:
        return _numbered(self.channels, self.whole.channels.index(pair))

    def _append(self, operation: Operation) -> None:
        """With a barrier of the block's threads before it, except between two operations that one thread does."""
        if self.operations and ("src_buff" in self.operations[-1] or "src_buff" in operation):
            self.operations.append({"name": "nop"})
        self.operations.append(operation)


def _numbered(numbers: list[int], number: int) -> int:
    """The place of a number in a block's list, where it is put if it is new."""
    if number not in numbers:
        numbers.append(number)
    return numbers.index(number)
