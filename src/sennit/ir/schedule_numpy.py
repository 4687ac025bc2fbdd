"""The reference interpreter of a schedule: all thread blocks of all ranks as coroutines in one process, on numpy
arrays.

A block gives way before every instruction, and again between reading its operands and writing its results; which block
goes on is drawn from a seeded generator. So a schedule with a race gives another result under some seed, and one that
is right gives the same under all. A block that cannot go on parks on what it lacks:

- `Done`: a step of another block of its rank;
- `Message`: a message in the connection that it receives from;
- `Slot`: a free slot in the connection that it sends to.

An instruction takes its message out of the connection, and puts its own in, when it is done. If every block that is not
at its end is parked, the schedule deadlocks. Tile t of T is the t-th of T near-equal parts of the elements of every
chunk; a block runs all its instructions for one tile, then for the next, without waiting for the other blocks.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from sennit.errors import CollectiveError
from sennit.ir.algorithm_numpy import allocate_buffers
from sennit.ir.layout_numpy import Array
from sennit.ir.schedule import Block, Instruction, Opcode, Place, Schedule
from sennit.ir.schedule_check import check_schedule

__all__ = ["run_schedule"]

Connection = tuple[int, int, int]  # sender, receiver, channel


@dataclass(frozen=True, slots=True)
class Done:
    rank: int
    block: int

    def __str__(self) -> str:
        return f"a step of block {self.block}"


@dataclass(frozen=True, slots=True)
class Message:
    connection: Connection

    def __str__(self) -> str:
        sender, _, channel = self.connection
        return f"a message from rank {sender} on channel {channel}"


@dataclass(frozen=True, slots=True)
class Slot:
    connection: Connection

    def __str__(self) -> str:
        _, receiver, channel = self.connection
        return f"a free slot to rank {receiver} on channel {channel}"


Lack = Done | Message | Slot
Thread = Generator[Lack | None, None, None]  # yields what it lacks, or None where it only gives way


@dataclass(slots=True, eq=False)
class _Machine:
    schedule: Schedule
    buffers: list[dict[str, Array]]
    tiles: int
    queues: dict[Connection, deque[Array]] = field(default_factory=lambda: defaultdict(deque))
    done: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))  # steps, over all tiles
    parked: dict[Lack, list[tuple[tuple[int, int], Thread]]] = field(default_factory=lambda: defaultdict(list))
    ready: list[tuple[tuple[int, int], Thread]] = field(default_factory=list)

    def wake(self, lack: Lack) -> None:
        self.ready += self.parked.pop(lack, [])

    def view(self, rank: int, place: Place | None, tile: int) -> Array:
        assert place is not None
        array = self.buffers[rank][place.buffer]
        start, stop = (array.shape[1] * edge // self.tiles for edge in (tile, tile + 1))
        return array[place.start : place.start + place.count, start:stop]


def run_schedule(schedule: Schedule, inputs: Sequence[Array], *, seed: int = 0, tiles: int = 1) -> list[Array]:
    """The output of every rank, of shape (chunks, elements).

    Raises `CollectiveError` on a deadlock, a message of the wrong size, or one that nobody receives.
    """
    check_schedule(schedule)
    scratch = [piece for rank in schedule.ranks for piece in rank.scratch]
    machine = _Machine(schedule, allocate_buffers(schedule.collective, scratch, inputs), tiles)
    for ranked in schedule.ranks:
        for index, block in enumerate(ranked.blocks):
            machine.ready.append(((ranked.rank, index), _run_block(machine, ranked.rank, index, block)))
    draw = random.Random(seed)
    while machine.ready:
        position = int(draw.random() * len(machine.ready))
        machine.ready[position], machine.ready[-1] = machine.ready[-1], machine.ready[position]
        name, thread = machine.ready.pop()
        try:
            lack = next(thread)
        except StopIteration:
            continue
        if lack is None:
            machine.ready.append((name, thread))
        else:
            machine.parked[lack].append((name, thread))
    if any(machine.parked.values()):
        raise _deadlock(machine)
    for (sender, receiver, channel), queue in machine.queues.items():
        if queue:
            raise CollectiveError(
                f"rank {receiver} leaves {len(queue)} messages from rank {sender} on channel {channel} unread",
                where=f"schedule {schedule.name!r}",
            )
    return [held["output"].copy() for held in machine.buffers]


def _run_block(machine: _Machine, rank: int, index: int, block: Block) -> Thread:
    lengths = [len(other.instructions) for other in machine.schedule.ranks[rank].blocks]
    inward = None if block.receive is None else (block.receive, rank, block.channel)
    outward = None if block.send is None else (rank, block.send, block.channel)
    for tile in range(machine.tiles):
        for step, instruction in enumerate(block.instructions):
            yield None
            for wait in instruction.after:
                while machine.done[rank, wait.block] <= tile * lengths[wait.block] + wait.step:
                    yield Done(rank, wait.block)
            message: Array | None = None
            if instruction.opcode.receives:
                assert inward is not None  # the checker has seen it
                while not machine.queues[inward]:
                    yield Message(inward)
                message = machine.queues[inward][0]
                _check_size(instruction, message, f"rank {rank}, block {index}, step {step}")
            if instruction.opcode.sends:
                assert outward is not None
                while len(machine.queues[outward]) >= machine.schedule.slots:
                    yield Slot(outward)
            result = _result(machine, rank, instruction, message, tile)
            yield None
            if instruction.target is not None:
                machine.view(rank, instruction.target, tile)[...] = result
            if inward is not None and instruction.opcode.receives:
                machine.queues[inward].popleft()
                machine.wake(Slot(inward))
            if outward is not None and instruction.opcode.sends:
                machine.queues[outward].append(result)
                machine.wake(Message(outward))
            machine.done[rank, index] += 1
            machine.wake(Done(rank, index))


def _result(machine: _Machine, rank: int, instruction: Instruction, message: Array | None, tile: int) -> Array:
    """What the instruction writes or sends."""
    match instruction.opcode:
        case Opcode.COPY | Opcode.SEND:
            return machine.view(rank, instruction.source, tile).copy()
        case Opcode.REDUCE:
            total = machine.view(rank, instruction.target, tile).copy()
            for source in instruction.sources:
                total += machine.view(rank, source, tile)
            return total
        case Opcode.RECEIVE | Opcode.RECEIVE_COPY_SEND:
            assert message is not None
            return message
        case Opcode.RECEIVE_REDUCE | Opcode.RECEIVE_REDUCE_COPY_SEND:
            return machine.view(rank, instruction.target, tile) + message
        case Opcode.RECEIVE_REDUCE_SEND:
            return machine.view(rank, instruction.source, tile) + message


def _check_size(instruction: Instruction, message: Array, where: str) -> None:
    place = instruction.target or instruction.source
    if place is not None and len(message) != place.count:
        raise CollectiveError(f"a message of {len(message)} chunks arrives for {place}", where=where)


def _deadlock(machine: _Machine) -> CollectiveError:
    lacks = {name: lack for lack, threads in machine.parked.items() for name, _ in threads}
    stands: list[str] = []
    for ranked in machine.schedule.ranks:
        for index, block in enumerate(ranked.blocks):
            here = f"rank {ranked.rank}, block {index}"
            if (lack := lacks.get((ranked.rank, index))) is None:
                stands.append(f"{here}: at its end")
            else:
                tile, step = divmod(machine.done[ranked.rank, index], len(block.instructions))
                opcode = block.instructions[step].opcode.value
                stands.append(f"{here}: at step {step} ({opcode}) of tile {tile}, waits for {lack}")
    return CollectiveError(
        f"schedule {machine.schedule.name!r} deadlocks with {machine.schedule.slots} slots",
        where="\n         ".join(stands),
    )
