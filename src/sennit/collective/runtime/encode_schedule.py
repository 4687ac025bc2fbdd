"""From a FIFO schedule to `Code`: FIFOs on the one-sided machine.

A connection is a ring of `slots` messages in scratch of the receiver.

    send               wait for the receiver's credit, from message `slots` on; put into the slot; signal
    receive            wait for the signal; copy out of the slot; signal the credit, if a later message needs it
    receive_reduce_send    reduce the source into the slot, put the slot into the next one

Nobody but the FIFO's two ends touches another's memory: input and output stay private. A sender waits for the
receiver's gate before its first message: so it does not write to a rank that is still in the call before.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sennit.collective.runtime.code import FIRST_SCRATCH, Code, Op, Operand
from sennit.collective.runtime.encode_writer import Home, Writer
from sennit.ir.collective import Scratch
from sennit.ir.schedule import Block, Opcode, Place, Schedule
from sennit.ir.schedule_check import check_schedule

__all__ = ["encode_schedule"]

_Connection = tuple[int, int, int]  # sender, receiver, channel
_Tag = tuple[str, Home, int]  # what a signal says: which end of which block, after its how-manieth message or step


@dataclass(frozen=True, slots=True)
class _Ends:
    sender: Home
    receiver: Home
    messages: int
    buffer: int  # of the receiver: the ring of slots


def encode_schedule(schedule: Schedule) -> Code:
    check_schedule(schedule)
    writer = Writer(schedule.collective)
    for ranked in schedule.ranks:
        writer.add_scratch(ranked.scratch)
    widest = max([1, *(_width(i.source, i.target) for r in schedule.ranks for b in r.blocks for i in b.instructions)])
    connections = _connections(schedule, writer, widest * schedule.slots)
    for ranked in schedule.ranks:
        for number in range(len(ranked.blocks) + 1):
            writer.blocks[ranked.rank, number] = []
    ordinals = _number_signals(schedule, connections)
    for ends in connections.values():  # the gates
        writer.signal((ends.receiver[0], 0), ends.sender)
    for ranked in schedule.ranks:
        for number, block in enumerate(ranked.blocks):
            _FifoBlock(writer, schedule, connections, ordinals, widest, (ranked.rank, number + 1)).write(block)
    return writer.code(schedule.name)


def _width(*places: Place | None) -> int:
    return max(place.count for place in places if place is not None)


def _connections(schedule: Schedule, writer: Writer, chunks: int) -> dict[_Connection, _Ends]:
    senders: dict[_Connection, tuple[Home, int]] = {}
    receivers: dict[_Connection, Home] = {}
    for ranked in schedule.ranks:
        for number, block in enumerate(ranked.blocks):
            home = ranked.rank, number + 1
            messages = sum(i.opcode.sends for i in block.instructions)
            if block.send is not None and messages:
                senders[ranked.rank, block.send, block.channel] = home, messages
            if block.receive is not None:
                receivers[block.receive, ranked.rank, block.channel] = home
    arriving: defaultdict[int, int] = defaultdict(int)
    found: dict[_Connection, _Ends] = {}
    for connection, (sender, messages) in senders.items():
        receiver = receivers[connection]
        name = f"fifo {arriving[receiver[0]]}"
        arriving[receiver[0]] += 1
        writer.add_scratch((Scratch(receiver[0], name, chunks),))
        found[connection] = _Ends(sender, receiver, messages, FIRST_SCRATCH + list(writer.scratch).index(name))
    return found


def _signals_of(
    schedule: Schedule, connections: dict[_Connection, _Ends], home: Home, block: Block
) -> list[list[tuple[_Tag, Home]]]:
    """By step of a block: what it signals to whom, in order: a credit, a message, a step that others wait for."""
    rank, number = home
    wanted: defaultdict[int, list[Home]] = defaultdict(list)
    for other, waiter in enumerate(schedule.ranks[rank].blocks):
        for instruction in waiter.instructions:
            for wait in instruction.after:
                if wait.block == number - 1 != other and (rank, other + 1) not in wanted[wait.step]:
                    wanted[wait.step].append((rank, other + 1))
    result: list[list[tuple[_Tag, Home]]] = []
    taken = put = 0
    for step, instruction in enumerate(block.instructions):
        signals: list[tuple[_Tag, Home]] = []
        if instruction.opcode.receives:
            assert block.receive is not None
            ends = connections[block.receive, rank, block.channel]
            if taken + schedule.slots < ends.messages:
                signals.append((("credit", home, taken), ends.sender))
            taken += 1
        if instruction.opcode.sends:
            assert block.send is not None
            signals.append((("message", home, put), connections[rank, block.send, block.channel].receiver))
            put += 1
        signals += [(("step", home, step), waiter) for waiter in wanted[step]]
        result.append(signals)
    return result


def _number_signals(schedule: Schedule, connections: dict[_Connection, _Ends]) -> dict[tuple[_Tag, Home], int]:
    """Which of its block's signals to the same waiter a signal is.

    A gate's comes from block 0, so it counts for itself.
    """
    ordinals: dict[tuple[_Tag, Home], int] = {}
    for ranked in schedule.ranks:
        for number, block in enumerate(ranked.blocks):
            counts: defaultdict[Home, int] = defaultdict(int)
            for signals in _signals_of(schedule, connections, (ranked.rank, number + 1), block):
                for tag, waiter in signals:
                    counts[waiter] += 1
                    ordinals[tag, waiter] = counts[waiter]
    return ordinals


@dataclass(slots=True)
class _FifoBlock:
    writer: Writer
    schedule: Schedule
    connections: dict[_Connection, _Ends]
    ordinals: dict[tuple[_Tag, Home], int]
    widest: int
    home: Home

    def write(self, block: Block) -> None:
        rank, writer, home = self.home[0], self.writer, self.home
        taken = put = 0
        signals = _signals_of(self.schedule, self.connections, home, block)
        for instruction, said in zip(block.instructions, signals, strict=True):
            for wait in instruction.after:
                if (rank, wait.block + 1) != home:
                    self.wait_for(("step", (rank, wait.block + 1), wait.step))
            source = None if instruction.source is None else writer.operand(rank, instruction.source)
            target = None if instruction.target is None else writer.operand(rank, instruction.target)
            count = _width(instruction.source, instruction.target)
            if instruction.opcode.receives:
                assert block.receive is not None
                ends = self.connections[block.receive, rank, block.channel]
                slot = Operand(rank, ends.buffer, taken % self.schedule.slots * self.widest)
                self.wait_for(("message", ends.sender, taken))
                self.take(instruction.opcode, slot, source, target, count)
                source = slot if target is None else target
                taken += 1
            elif target is not None:
                assert source is not None
                sources = [writer.operand(rank, place) for place in instruction.sources]
                if len(sources) > 1:
                    writer.reduce_many(home, sources, target, count, overwrite=False)
                else:
                    op = Op.COPY if instruction.opcode is Opcode.COPY else Op.REDUCE
                    writer.transfer(home, op, source, target, count)
            if instruction.opcode.sends:
                assert block.send is not None
                assert source is not None
                ends = self.connections[rank, block.send, block.channel]
                if put == 0:
                    writer.wait(home, (block.send, 0), 1)
                if put >= self.schedule.slots:
                    self.wait_for(("credit", ends.receiver, put - self.schedule.slots))
                slot = Operand(block.send, ends.buffer, put % self.schedule.slots * self.widest)
                writer.transfer(home, Op.PUT, source, slot, count)
                put += 1
            for _, waiter in said:
                writer.signal(home, waiter)

    def take(self, opcode: Opcode, slot: Operand, source: Operand | None, target: Operand | None, count: int) -> None:
        """What a receiving instruction does with the message in its slot, before it sends it on."""
        match opcode:
            case Opcode.RECEIVE | Opcode.RECEIVE_COPY_SEND:
                assert target is not None
                self.writer.transfer(self.home, Op.COPY, slot, target, count)
            case Opcode.RECEIVE_REDUCE | Opcode.RECEIVE_REDUCE_COPY_SEND:
                assert target is not None
                self.writer.transfer(self.home, Op.REDUCE, slot, target, count)
            case Opcode.RECEIVE_REDUCE_SEND:
                assert source is not None
                self.writer.transfer(self.home, Op.REDUCE, source, slot, count)
            case _:
                raise AssertionError(opcode)

    def wait_for(self, tag: _Tag) -> None:
        self.writer.wait(self.home, tag[1], self.ordinals[tag, self.home])
