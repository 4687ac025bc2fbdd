"""Pass 7, slots: the least number of messages that every connection must hold so that the schedule cannot deadlock.

With s slots, the k-th receive of a connection must come before its (k + s)-th send. Together with steps of blocks,
waits and messages this is a graph of what comes before what; the schedule runs to its end if and only if the graph has
no cycle.

**One run decides.** An instruction that may run stays so until it has run: nothing that others do takes a message, a
slot or a finished step away from it. So all orders of execution end in the same state, and one run tells whether the
graph has a cycle. Where a run is stuck with s slots it goes on from there with s + 1: that state can be reached with s
+ 1 slots too. The first s with which the run reaches the end is the least, after one pass over the instructions.

**Tiles.** A schedule for large data repeats all instructions for each tile, blocks going on to the next tile by
themselves. No edge leads to an earlier tile: waits and messages stay in a tile, steps of a block and slots lead to the
same tile or a later one. So a cycle would lie within one tile, where the edges are those of a run with one tile, slots
included: what is free of deadlock for one tile is so for any number of tiles, with the same slots.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sennit.errors import CollectiveError
from sennit.ir.schedule import Instruction, Opcode, RankSchedule

__all__ = ["least_slots"]


def least_slots(ranks: tuple[RankSchedule, ...], name: str) -> int:
    """The least number of slots without deadlock, at least 1. Raises where no number is enough."""
    machine = _machine(ranks)
    slots = 1
    while not _run(machine, slots):
        if not any(machine.wants_slot(block, slots) for block in range(len(machine.steps))):
            raise CollectiveError(
                f"schedule {name!r} deadlocks with any number of slots",
                where=_first_stuck(machine, ranks),
                fix="the waits or the order of messages form a cycle",
            )
        slots += 1
    return slots


@dataclass(frozen=True, slots=True)
class _Machine:
    """All blocks of all ranks by one number, and how far they are. A connection that is absent has number 0."""

    steps: list[tuple[Instruction, ...]]
    inward: list[int]
    outward: list[int]
    first: list[int]  # the number of block 0 of the block's rank
    sender: list[int]  # by connection: a block
    receiver: list[int]
    sent: list[int]
    received: list[int]
    done: list[int]  # by block

    def wants_slot(self, block: int, slots: int) -> bool:
        outward = self.outward[block]
        return self.done[block] < len(self.steps[block]) and self.sent[outward] - self.received[outward] >= slots


def _machine(ranks: tuple[RankSchedule, ...]) -> _Machine:
    machine = _Machine([], [], [], [], [0], [0], [0], [0], [])
    numbers: dict[tuple[int, int, int], int] = {}

    def connection(sender: int | None, receiver: int | None, channel: int) -> int:
        if sender is None or receiver is None:
            return 0
        key = sender, receiver, channel
        if key not in numbers:
            numbers[key] = len(machine.sent)
            for column in (machine.sender, machine.receiver, machine.sent, machine.received):
                column.append(0)
        return numbers[key]

    for ranked in ranks:
        first = len(machine.steps)
        for block in ranked.blocks:
            number = len(machine.steps)
            inward = connection(block.receive, ranked.rank, block.channel)
            outward = connection(ranked.rank, block.send, block.channel)
            machine.receiver[inward], machine.sender[outward] = number, number
            machine.steps.append(block.instructions)
            machine.inward.append(inward)
            machine.outward.append(outward)
            machine.first.append(first)
            machine.done.append(0)
    return machine


def _run(machine: _Machine, slots: int) -> bool:
    """Go on until every block is at its end (True) or lacks something (False)."""
    sent, received, done = machine.sent, machine.received, machine.done
    sending = tuple(code for code in Opcode if code.sends)  # asked for by identity: a property would take half the time
    receiving = tuple(code for code in Opcode if code.receives)
    waiting: defaultdict[int, list[tuple[int, int]]] = defaultdict(
        list
    )  # by block: a step of it, and who waits for that
    todo = list(range(len(machine.steps)))
    idle = [False] * len(todo)  # lacks a message or a slot; neither in `todo` nor in `waiting`
    while todo:
        block = todo.pop()
        steps, inward, outward = machine.steps[block], machine.inward[block], machine.outward[block]
        first, start = machine.first[block], done[block]
        for at in range(start, len(steps)):
            instruction = steps[at]
            opcode = instruction.opcode
            if instruction.after:
                lacking = [wait for wait in instruction.after if done[wait.block + first] <= wait.step]
                if lacking:
                    waiting[lacking[0].block + first].append((lacking[0].step, block))
                    break
            if opcode in receiving:
                if sent[inward] == received[inward]:
                    idle[block] = True
                    break
                if opcode in sending:
                    if sent[outward] - received[outward] >= slots:
                        idle[block] = True
                        break
                    sent[outward] += 1
                received[inward] += 1
            elif opcode in sending:
                if sent[outward] - received[outward] >= slots:
                    idle[block] = True
                    break
                sent[outward] += 1
            done[block] = at + 1
        if done[block] == start:
            continue
        for other in (machine.sender[inward], machine.receiver[outward]):
            if idle[other]:
                idle[other] = False
                todo.append(other)
        if block in waiting:
            waiters = waiting.pop(block)
            todo += [other for step, other in waiters if step < done[block]]
            if late := [(step, other) for step, other in waiters if step >= done[block]]:
                waiting[block] = late
    return all(count == len(steps) for count, steps in zip(done, machine.steps, strict=True))


def _first_stuck(machine: _Machine, ranks: tuple[RankSchedule, ...]) -> str:
    done = iter(machine.done)
    for ranked in ranks:
        for index, block in enumerate(ranked.blocks):
            count = next(done)
            if count < len(block.instructions):
                return f"rank {ranked.rank}, block {index}, step {count} ({block.instructions[count].opcode.value})"
    raise AssertionError("no block is stuck")
