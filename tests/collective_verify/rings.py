"""A ring AllReduce written out by hand, as an algorithm and as the schedule of one block a rank."""

from __future__ import annotations

from sennit.ir.collective import Algorithm, Chunks, CollectiveName, CollectiveSpec, Move, MoveKind
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule

__all__ = ["ring_algorithm", "ring_schedule"]


def ring_collective(ranks: int) -> CollectiveSpec:
    return CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks, in_place=True)


def ring_algorithm(ranks: int) -> Algorithm:
    moves: list[Move] = []
    for kind in (MoveKind.REDUCE, MoveKind.COPY):
        for chunk in range(ranks):
            first = chunk + 1 if kind is MoveKind.REDUCE else chunk
            for step in range(ranks - 1):
                here, there = (first + step) % ranks, (first + step + 1) % ranks
                moves.append(Move(kind, Chunks(here, "output", chunk, 1), Chunks(there, "output", chunk, 1)))
    return Algorithm(f"ring{ranks}", ring_collective(ranks), tuple(moves))


def ring_schedule(ranks: int, slots: int = 2) -> Schedule:
    """Chunk c starts at rank c + 1, is complete at rank c, and goes round once more. With one slot, blocks that all
    send before they receive wait for each other."""
    lists: list[RankSchedule] = []
    for rank in range(ranks):
        mine: list[Instruction] = []
        for step in range(2 * ranks - 1):
            place = Place("output", (rank - 1 - step) % ranks, 1)
            if step == 0:
                mine.append(Instruction(Opcode.SEND, source=place))
            elif step < ranks:  # the last of these completes the chunk
                mine.append(Instruction(Opcode.RECEIVE_REDUCE_COPY_SEND, target=place))
            elif step < 2 * ranks - 2:
                mine.append(Instruction(Opcode.RECEIVE_COPY_SEND, target=place))
            else:
                mine.append(Instruction(Opcode.RECEIVE, target=place))
        block = Block((rank + 1) % ranks, (rank - 1) % ranks, 0, tuple(mine))
        lists.append(RankSchedule(rank, (block,)))
    return Schedule(f"ring{ranks}", ring_collective(ranks), slots, tuple(lists))
