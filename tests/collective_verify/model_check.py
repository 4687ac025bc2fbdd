"""Every interleaving of a small schedule, one by one: the oracle for what the verifier says about deadlock and races.

A state is how far each block is. A block is able to go on if its waits are done, a message is there and a slot is free.
No idea of happens-before enters: a deadlock is a state in which no block is able and one is not at its end; a race is a
state in which two blocks are able to run steps that touch the same memory, one of them to write.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.ir.cells import RankCells, lay_out_cells
from sennit.ir.schedule import Instruction, Opcode, Schedule

__all__ = ["Findings", "explore"]

Step = tuple[int, int, int]  # rank, block, step


@dataclass(frozen=True)
class Findings:
    states: int
    deadlock: bool
    races: frozenset[frozenset[Step]]


def explore(schedule: Schedule, slots: int | None) -> Findings:
    """All states that can be reached with so many slots; None: any number."""
    names = [(ranked.rank, index) for ranked in schedule.ranks for index in range(len(ranked.blocks))]
    scratch = [piece for ranked in schedule.ranks for piece in ranked.scratch]
    cells = lay_out_cells(schedule.collective, scratch, "model check")
    start = tuple(0 for _ in names)
    reached, todo = {start}, [start]
    deadlock, races = False, set[frozenset[Step]]()
    while todo:
        state = todo.pop()
        position = dict(zip(names, state, strict=True))
        able = [name for name in names if _able(schedule, position, name, slots)]
        ended = all(position[r, b] == len(schedule.ranks[r].blocks[b].instructions) for r, b in names)
        deadlock = deadlock or (not able and not ended)
        for i, left in enumerate(able):
            for right in able[i + 1 :]:
                steps = [(*name, position[name]) for name in (left, right)]
                if left[0] == right[0] and _conflict(cells[left[0]], *(_at(schedule, step) for step in steps)):
                    races.add(frozenset(steps))
        for name in able:
            following = tuple(position[other] + (other == name) for other in names)
            if following not in reached:
                reached.add(following)
                todo.append(following)
    return Findings(len(reached), deadlock, frozenset(races))


def _at(schedule: Schedule, step: Step) -> Instruction:
    rank, block, index = step
    return schedule.ranks[rank].blocks[block].instructions[index]


def _able(schedule: Schedule, position: dict[tuple[int, int], int], name: tuple[int, int], slots: int | None) -> bool:
    rank, index = name
    block = schedule.ranks[rank].blocks[index]
    if position[name] == len(block.instructions):
        return False
    instruction = block.instructions[position[name]]
    if any(position[rank, wait.block] <= wait.step for wait in instruction.after):
        return False
    if instruction.opcode.receives:
        assert block.receive is not None
        sent, taken = _traffic(schedule, position, block.receive, rank, block.channel)
        if sent == taken:
            return False
    if instruction.opcode.sends and slots is not None:
        assert block.send is not None
        sent, taken = _traffic(schedule, position, rank, block.send, block.channel)
        if sent - taken >= slots:
            return False
    return True


def _traffic(
    schedule: Schedule, position: dict[tuple[int, int], int], sender: int, receiver: int, channel: int
) -> tuple[int, int]:
    """Messages sent so far and taken so far."""
    sent = taken = 0
    for index, block in enumerate(schedule.ranks[sender].blocks):
        if (block.send, block.channel) == (receiver, channel):
            sent += sum(i.opcode.sends for i in block.instructions[: position[sender, index]])
    for index, block in enumerate(schedule.ranks[receiver].blocks):
        if (block.receive, block.channel) == (sender, channel):
            taken += sum(i.opcode.receives for i in block.instructions[: position[receiver, index]])
    return sent, taken


def _conflict(cells: RankCells, left: Instruction, right: Instruction) -> bool:
    touched, written = zip(*(_touches(cells, instruction) for instruction in (left, right)), strict=True)
    return bool(touched[0] & written[1] or written[0] & touched[1])


def _touches(cells: RankCells, instruction: Instruction) -> tuple[set[int], set[int]]:
    spans = [
        cells.find(p.buffer, p.start, p.count) for p in (*instruction.sources, instruction.target) if p is not None
    ]
    touched = {cell for span in spans if span is not None for cell in range(*span)}
    if instruction.target is None or instruction.opcode in (Opcode.SEND, Opcode.RECEIVE_REDUCE_SEND):
        return touched, set()
    target = cells.find(instruction.target.buffer, instruction.target.start, instruction.target.count)
    assert target is not None
    return touched, set(range(*target))
