"""Random schedules of a few steps, right or wrong: what the model check can look at in full.

Messages match in number and size; everything else is left to chance, so deadlocks and races are common.
"""

from __future__ import annotations

import random
from dataclasses import replace

from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule, Wait

__all__ = ["random_schedule"]

CHUNKS = 3


def random_schedule(seed: int) -> Schedule:
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 2, 3, 4])
    collective = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, CHUNKS, in_place=draw.random() < 0.5)
    blocks = [[_Draft(rank, ranks, draw) for _ in range(draw.randint(1, 2))] for rank in range(ranks)]
    drafts = [block for held in blocks for block in held]
    for index, block in enumerate(drafts):
        block.channel = index % 2  # blocks of one rank differ, so a connection has one block at each end
    lines = [
        (s, r) for s in drafts for r in drafts if s.send == r.rank and r.receive == s.rank and s.channel == r.channel
    ]
    for _ in range(draw.randint(3, 8)):
        if lines and draw.random() < 0.85:
            sender, receiver = draw.choice(lines)
            place, other = _place(draw), _place(draw, count=None)
            other = Place(other.buffer, min(other.start, CHUNKS - place.count), place.count)
            _put(sender, Instruction(Opcode.SEND, source=place), draw)
            _put(receiver, Instruction(draw.choice([Opcode.RECEIVE, Opcode.RECEIVE_REDUCE]), target=other), draw)
        else:
            start = draw.randrange(CHUNKS)
            places = Place("input", start, 1), Place("output", (start + 1) % CHUNKS, 1)
            instruction = Instruction(draw.choice([Opcode.COPY, Opcode.REDUCE]), *places)
            if instruction.opcode is Opcode.REDUCE and start % 2:
                instruction = replace(instruction, further=(Place("input", (start + 2) % CHUNKS, 1),))
            _put(draw.choice(drafts), instruction, draw)
    schedules = [RankSchedule(rank, tuple(b.finish(held, draw) for b in held)) for rank, held in enumerate(blocks)]
    return Schedule(f"tiny{seed}", collective, draw.randint(1, 2), tuple(schedules))


class _Draft:
    def __init__(self, rank: int, ranks: int, draw: random.Random) -> None:
        others = [other for other in range(ranks) if other != rank]
        self.rank = rank
        self.send, self.receive, self.channel = draw.choice(others), draw.choice(others), 0
        self.instructions: list[Instruction] = []

    def finish(self, rank: list[_Draft], draw: random.Random) -> Block:
        done: list[Instruction] = []
        for instruction in self.instructions:
            other = draw.randrange(len(rank))
            if draw.random() < 0.4 and rank[other] is not self and rank[other].instructions:
                wait = Wait(other, draw.randrange(len(rank[other].instructions)))
                instruction = replace(instruction, after=(wait,))
            done.append(instruction)
        return Block(self.send, self.receive, self.channel, tuple(_fuse(done)))


def _fuse(instructions: list[Instruction]) -> list[Instruction]:
    """A receive and a send of the same place right behind it become one."""
    fused: list[Instruction] = []
    for instruction in instructions:
        if (
            fused
            and fused[-1].opcode in (Opcode.RECEIVE, Opcode.RECEIVE_REDUCE)
            and instruction.opcode is Opcode.SEND
            and instruction.source == fused[-1].target
            and not instruction.after
        ):
            copies = fused[-1].opcode is Opcode.RECEIVE
            both = Opcode.RECEIVE_COPY_SEND if copies else Opcode.RECEIVE_REDUCE_COPY_SEND
            fused[-1] = replace(fused[-1], opcode=both)
        else:
            fused.append(instruction)
    return fused


def _put(block: _Draft, instruction: Instruction, draw: random.Random) -> None:
    """Mostly at the end: an order that one can run is then common."""
    at = len(block.instructions) if draw.random() < 0.6 else draw.randint(0, len(block.instructions))
    block.instructions.insert(at, instruction)


def _place(draw: random.Random, count: int | None = None) -> Place:
    count = count or draw.randint(1, 2)
    return Place(draw.choice(["input", "output"]), draw.randint(0, CHUNKS - count), count)
