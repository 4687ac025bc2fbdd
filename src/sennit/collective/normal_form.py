"""One form for schedules that do the same in the same way: what an export and an import must agree on.

    named scratch buffers      one buffer, "scratch", in the order in which the rank declares them
    waits of an instruction    one a block, the latest step; none on its own block; none that an earlier instruction of the block
                               has waited for already; by block

    a reduce of several        one reduce a source, in their order, unless `single_reduces` is off; a wait for it is for the last

Other instructions, blocks and channels stay as they are: their order is the meaning.
"""

from __future__ import annotations

from dataclasses import replace

from sennit.ir.collective import Scratch
from sennit.ir.schedule import Block, Instruction, Place, RankSchedule, Schedule, Wait

__all__ = ["SCRATCH", "normal_form", "scratch_places"]

SCRATCH = "scratch"


def normal_form(schedule: Schedule, *, single_reduces: bool = True) -> Schedule:
    ranks = (_rank(rank) for rank in schedule.ranks)
    return replace(schedule, ranks=tuple(_with_single_reduces(rank) if single_reduces else rank for rank in ranks))


def scratch_places(rank: RankSchedule) -> dict[str, int]:
    """Where each named scratch buffer begins in the joint one."""
    starts: dict[str, int] = {}
    total = 0
    for scratch in rank.scratch:
        starts[scratch.name] = total
        total += scratch.chunks
    return starts


def _rank(rank: RankSchedule) -> RankSchedule:
    starts = scratch_places(rank)
    total = sum(scratch.chunks for scratch in rank.scratch)
    blocks = tuple(_block(number, block, starts) for number, block in enumerate(rank.blocks))
    return RankSchedule(rank.rank, blocks, (Scratch(rank.rank, SCRATCH, total),) if total else ())


def _block(number: int, block: Block, starts: dict[str, int]) -> Block:
    done: dict[int, int] = {}  # by block of the rank, the latest step that was waited for
    instructions: list[Instruction] = []
    for instruction in block.instructions:
        wanted: dict[int, int] = {}
        for wait in instruction.after:
            if wait.block != number and wait.step > done.get(wait.block, -1):
                wanted[wait.block] = max(wanted.get(wait.block, -1), wait.step)
        done.update(wanted)
        instructions.append(
            replace(
                instruction,
                source=_place(instruction.source, starts),
                target=_place(instruction.target, starts),
                further=tuple(_moved(place, starts) for place in instruction.further),
                after=tuple(Wait(other, step) for other, step in sorted(wanted.items())),
            )
        )
    return replace(block, instructions=tuple(instructions))


def _place(place: Place | None, starts: dict[str, int]) -> Place | None:
    return None if place is None else _moved(place, starts)


def _moved(place: Place, starts: dict[str, int]) -> Place:
    if place.buffer not in starts:
        return place
    return Place(SCRATCH, starts[place.buffer] + place.start, place.count)


def _with_single_reduces(rank: RankSchedule) -> RankSchedule:
    if not any(instruction.further for block in rank.blocks for instruction in block.instructions):
        return rank
    last: list[list[int]] = []  # by block and step, the number of its last part
    for block in rank.blocks:
        ends: list[int] = []
        for instruction in block.instructions:
            ends.append((ends[-1] + 1 if ends else 0) + len(instruction.further))
        last.append(ends)
    blocks: list[Block] = []
    for block in rank.blocks:
        parts: list[Instruction] = []
        for instruction in block.instructions:
            after = tuple(Wait(wait.block, last[wait.block][wait.step]) for wait in instruction.after)
            parts.append(replace(instruction, after=after, further=()))
            parts += [Instruction(instruction.opcode, place, instruction.target) for place in instruction.further]
        blocks.append(replace(block, instructions=tuple(parts)))
    return replace(rank, blocks=tuple(blocks))
