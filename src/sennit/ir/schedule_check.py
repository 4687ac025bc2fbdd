"""The checker of a schedule's form: every rank, block, step, peer and place that it names exists and fits its opcode.

| rule | says |
|---|---|
| ranks | one entry for each rank of the collective, in order; one slot at least |
| scratch | a scratch buffer is its rank's, has a name of its own there and one chunk at least |
| blocks | a peer is another rank that exists; the channel is not negative |
| connections | (sender, receiver, channel) has one block at each end |
| operands | an instruction has the places that the table of `schedule.py` gives its opcode, and they exist |
| peers | an instruction that sends is in a block with a peer to send to; the same for receives |
| further | only a reduce has several sources |
| overlap | sources and target of one instruction are apart, or a copy onto itself |
| waits | a wait names a block of the rank and a step that it has; in its own block an earlier one |

What the schedule does (messages that match, deadlock, races, the result) is a matter of `collective/verify.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.errors import CollectiveError
from sennit.ir.cells import RankCells, lay_out_cells
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule

__all__ = ["check_schedule", "describe_step"]


def check_schedule(schedule: Schedule) -> tuple[RankCells, ...]:
    """Raise `CollectiveError` for the first rule that the schedule breaks; return where its buffers lie."""
    here = f"schedule {schedule.name!r}"
    listed = [ranked.rank for ranked in schedule.ranks]
    if listed != list(range(schedule.collective.ranks)):
        raise CollectiveError(
            f"the ranks listed are {listed[:8]}{'...' if len(listed) > 8 else ''}, {len(listed)} in all",
            where=here,
            fix=f"list ranks 0 to {schedule.collective.ranks - 1}, once each and in order",
        )
    if schedule.slots < 1:
        raise CollectiveError(f"{schedule.slots} slots", where=here, fix="a connection has one slot at least")
    for ranked in schedule.ranks:
        for piece in ranked.scratch:
            if piece.rank != ranked.rank:
                raise CollectiveError(
                    f"scratch {piece.name!r} of rank {piece.rank} stands under rank {ranked.rank}",
                    where=here,
                    fix=f"move it to rank {piece.rank}",
                )
    cells = lay_out_cells(schedule.collective, (piece for ranked in schedule.ranks for piece in ranked.scratch), here)
    _check_blocks(schedule)
    for ranked in schedule.ranks:
        for index, block in enumerate(ranked.blocks):
            for step in range(len(block.instructions)):
                _check_instruction(_Site(schedule, ranked, index, step), block, cells[ranked.rank])
    return cells


@dataclass(frozen=True, slots=True)
class _Site:
    schedule: Schedule
    ranked: RankSchedule
    block: int
    step: int

    @property
    def instruction(self) -> Instruction:
        return self.ranked.blocks[self.block].instructions[self.step]

    def error(self, what: str, *, fix: str) -> CollectiveError:
        return CollectiveError(what, where=str(self), fix=fix)

    def __str__(self) -> str:
        return f"schedule {self.schedule.name!r}, " + describe_step(
            self.schedule, self.ranked.rank, self.block, self.step
        )


def describe_step(schedule: Schedule, rank: int, block: int, step: int) -> str:
    """One line for messages."""
    return f"rank {rank}, block {block}, step {step}: {schedule.ranks[rank].blocks[block].instructions[step]}"


def _check_blocks(schedule: Schedule) -> None:
    ranks = schedule.collective.ranks
    ends: dict[tuple[str, int, int, int], int] = {}  # (end, rank, peer, channel) -> block
    for ranked in schedule.ranks:
        for index, block in enumerate(ranked.blocks):
            where = f"schedule {schedule.name!r}, rank {ranked.rank}, block {index}"
            for end, peer in (("sends to", block.send), ("receives from", block.receive)):
                if peer is None:
                    continue
                if peer == ranked.rank or not 0 <= peer < ranks:
                    raise CollectiveError(
                        f"the block {end} rank {peer}" + (", itself" if peer == ranked.rank else ""),
                        where=where,
                        fix=f"name another rank of 0 to {ranks - 1}",
                    )
                other = ends.setdefault((end, ranked.rank, peer, block.channel), index)
                if other != index:
                    raise CollectiveError(
                        f"blocks {other} and {index} of rank {ranked.rank} both {end.replace('s ', ' ')} rank {peer} on "
                        f"channel {block.channel}",
                        where=where,
                        fix="give one of them another channel: a connection has one block at each end",
                    )
            if block.channel < 0:
                raise CollectiveError(f"channel {block.channel}", where=where, fix="use 0 or more")


def _check_instruction(site: _Site, block: Block, cells: RankCells) -> None:
    instruction = site.instruction
    opcode, source, target = instruction.opcode, instruction.source, instruction.target
    local = opcode in (Opcode.COPY, Opcode.REDUCE)
    has_source = local or opcode in (Opcode.SEND, Opcode.RECEIVE_REDUCE_SEND)
    has_target = local or not has_source
    if (source is not None, target is not None) != (has_source, has_target):
        wanted = " and ".join(["a source"] * has_source + ["a target"] * has_target)
        raise site.error(
            f"{opcode.value} has source {source} and target {target}", fix=f"give it {wanted} and nothing else"
        )
    for does, peer, name in ((opcode.sends, block.send, "send"), (opcode.receives, block.receive, "receive")):
        if does and peer is None:
            raise site.error(f"{opcode.value} in a block with no {name} peer", fix=f"give the block {name}=RANK")
    if instruction.further and opcode is not Opcode.REDUCE:
        raise site.error(
            f"{opcode.value} from {len(instruction.sources)} sources", fix="give it one: a reduce adds several"
        )
    spans = [_locate(cells, place, site) for place in instruction.sources]
    if target is not None:
        c, d = _locate(cells, target, site)
        for place, (a, b) in zip(instruction.sources, spans, strict=True):
            if place.count != target.count:
                raise site.error(f"{place.count} chunks move to {target.count}", fix="name as many on both sides")
            if a < d and c < b and (opcode is Opcode.REDUCE or a != c):
                raise site.error(f"{place} and {target} overlap", fix="move through scratch, or chunk by chunk")
    for wait in instruction.after:
        if not 0 <= wait.block < len(site.ranked.blocks):
            raise site.error(f"the wait {wait} names block {wait.block}", fix=f"use 0 to {len(site.ranked.blocks) - 1}")
        steps = len(site.ranked.blocks[wait.block].instructions)
        if not 0 <= wait.step < steps:
            raise site.error(
                f"the wait {wait} names step {wait.step} of a block of {steps}", fix=f"use 0 to {steps - 1}"
            )
        if wait.block == site.block and wait.step >= site.step:
            raise site.error(f"the wait {wait} is for this step or a later one of its own block", fix="remove it")


def _locate(cells: RankCells, place: Place, site: _Site) -> tuple[int, int]:
    found = cells.find(place.buffer, place.start, place.count)
    if found is None:
        raise cells.missing(place.buffer, place.start, place.count, str(site))
    return found
