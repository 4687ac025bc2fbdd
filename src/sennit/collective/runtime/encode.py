"""From a one-sided program, or from a FIFO schedule, to `Code`.

`encode` keeps the steps of a `OneSided` program one for one, with two exceptions:

- a transfer that crosses the edge of a part is cut there (see `code.py`);
- a run of reductions into one target becomes one MULTI_REDUCE, one pass over memory instead of one for each operand. The waits between them
  come first then. That delays no signal, since there is none between them, so what the waits wait for cannot depend on it. A copy into
  the target just before becomes the first operand.

`encode_schedule` runs FIFOs on the same machine: a connection is a ring of `slots` messages in scratch of the receiver.

    send               wait for the receiver's credit, from message `slots` on; put into the slot; signal
    receive            wait for the signal; copy out of the slot; signal the credit, if a later message needs it
    receive_reduce_send    reduce the source into the slot, put the slot into the next one

Nobody but the FIFO's two ends touches another's memory: input and output stay private. A sender waits for the receiver's gate before its
first message: so it does not write to a rank that is still in the call before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sennit.collective.runtime.code import FIRST_SCRATCH, INPUT, OUTPUT, Code, Instruction, Op, Operand
from sennit.ir.collective import CollectiveSpec, CustomCollective, Scratch
from sennit.ir.one_sided import Await, LocalCopy, LocalReduce, OneSided, Put, ReadReduce, Signal, Step
from sennit.ir.schedule import Block, Opcode, Place, Schedule
from sennit.ir.schedule_check import check_schedule

__all__ = ["encode", "encode_schedule"]

Home = tuple[int, int]  # rank, block


@dataclass(slots=True)
class _Writer:
    """Collects the tables of a code."""

    collective: CollectiveSpec | CustomCollective
    scratch: dict[str, int] = field(default_factory=dict)  # chunks by name, in the order of their numbers
    blocks: dict[Home, list[Instruction]] = field(default_factory=dict)
    operands: list[Operand] = field(default_factory=list)
    flags: dict[tuple[Home, Home], int] = field(
        default_factory=dict
    )  # (signalling, waiting): number at the waiting rank
    flag_count: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    sent: defaultdict[tuple[Home, Home], int] = field(default_factory=lambda: defaultdict(int))

    def add_scratch(self, pieces: Iterable[Scratch]) -> None:
        for piece in pieces:
            self.scratch[piece.name] = max(self.scratch.get(piece.name, 0), piece.chunks)

    def operand(self, rank: int, place: Place) -> Operand:
        match place.buffer:
            case "input":
                return Operand(rank, INPUT, place.start)
            case "output":
                return Operand(rank, OUTPUT, place.start)
            case name:
                return Operand(rank, FIRST_SCRATCH + list(self.scratch).index(name), place.start)

    def transfer(self, home: Home, op: Op, source: Operand, target: Operand, count: int) -> None:
        """One COPY, REDUCE, PUT, GET or READ_REDUCE, cut at the edges of parts."""
        peer = target.rank if op is Op.PUT else source.rank
        for skip, chunks in self._cut((source, target), count):
            (_, buffer, chunk), (_, goal, place) = source, target
            self.blocks[home].append(Instruction(op, peer, buffer, chunk + skip, goal, place + skip, chunks))

    def reduce_many(self, home: Home, sources: Sequence[Operand], target: Operand, count: int, overwrite: bool) -> None:
        for skip, chunks in self._cut((*sources, target), count):
            first = len(self.operands)
            self.operands += [Operand(rank, buffer, chunk + skip) for rank, buffer, chunk in sources]
            self.blocks[home].append(
                Instruction(
                    Op.MULTI_REDUCE,
                    len(sources),
                    int(overwrite),
                    0,
                    target.buffer,
                    target.chunk + skip,
                    chunks,
                    first,
                )
            )

    def _cut(self, places: Sequence[Operand], count: int) -> Iterable[tuple[int, int]]:
        """The pieces of a transfer, each within one part at every end: how many chunks to skip, and how many it has."""
        width = self.collective.chunks if isinstance(self.collective, CollectiveSpec) else 1
        done = 0
        while done < count:
            rooms = [width - (place.chunk + done) % width for place in places if place.buffer < FIRST_SCRATCH]
            piece = min([count - done, *rooms])
            yield done, piece
            done += piece

    def signal(self, home: Home, waiting: Home) -> None:
        self.sent[home, waiting] += 1
        count = self.sent[home, waiting]
        self.blocks[home].append(
            Instruction(Op.SIGNAL, waiting[0], count=count, argument=self._flag(home, waiting)),
        )

    def wait(self, home: Home, signalling: Home, count: int) -> None:
        self.blocks[home].append(
            Instruction(Op.WAIT, signalling[0], count=count, argument=self._flag(signalling, home)),
        )

    def _flag(self, signalling: Home, waiting: Home) -> int:
        if (signalling, waiting) not in self.flags:
            self.flags[signalling, waiting] = self.flag_count[waiting[0]]
            self.flag_count[waiting[0]] += 1
        return self.flags[signalling, waiting]

    def code(self, name: str) -> Code:
        ranks = range(self.collective.ranks)
        by_rank: list[list[list[Instruction]]] = [[] for _ in ranks]
        for home in sorted(self.blocks):
            by_rank[home[0]].append(self.blocks[home])
        flags = [self.flag_count[rank] for rank in ranks]
        return Code.of(name, self.collective, by_rank, self.operands, flags, tuple(self.scratch.values()))


# ---- one-sided programs ----------------------------------------------------------------------------------------------


def encode(program: OneSided, *, join: bool = True) -> Code:
    """`join=False` keeps every reduction an instruction of its own."""
    writer = _Writer(program.collective)
    for ranked in program.ranks:
        writer.add_scratch(ranked.scratch)
    for ranked in program.ranks:
        for number, steps in enumerate(ranked.blocks):
            home = ranked.rank, number
            writer.blocks[home] = []
            at = 0
            while at < len(steps):
                run = _run_of_reductions(ranked.rank, steps[at:]) if join else None
                if run is None:
                    _write_step(writer, home, steps[at])
                    at += 1
                else:
                    _write_run(writer, home, run)
                    at += run.steps
    return writer.code(program.name)


@dataclass(frozen=True, slots=True)
class _Run:
    """Reductions into one target, and a copy into it before them."""

    steps: int
    awaits: tuple[Await, ...]
    sources: tuple[tuple[int, Place], ...]
    target: Place
    overwrites: bool


def _run_of_reductions(rank: int, steps: Sequence[Step]) -> _Run | None:
    """The run that begins here, where it has two operands at least."""
    awaits: list[Await] = []
    between: list[Await] = []  # since the last operand: not of the run unless another operand follows
    sources: list[tuple[int, Place]] = []
    target: Place | None = None
    overwrites, length = False, 0
    for position, step in enumerate(steps):
        match step:
            case Await() if sources:
                between.append(step)
                continue
            case LocalCopy() if not sources:
                overwrites, target = True, step.target
                sources.append((rank, step.source))
            case LocalReduce() if target in (None, step.target):
                target = step.target
                sources.append((rank, step.source))
            case ReadReduce() if target in (None, step.target):
                target = step.target
                sources.append((step.rank, step.source))
            case _:
                break
        awaits += between
        between = []
        length = position + 1
    if target is None or len(sources) < 2:
        return None
    return _Run(length, tuple(awaits), tuple(sources), target, overwrites)


def _write_run(writer: _Writer, home: Home, run: _Run) -> None:
    for step in run.awaits:
        writer.wait(home, (step.rank, step.block), step.count)
    sources = [writer.operand(rank, place) for rank, place in run.sources]
    writer.reduce_many(home, sources, writer.operand(home[0], run.target), run.target.count, run.overwrites)


def _write_step(writer: _Writer, home: Home, step: Step) -> None:
    rank = home[0]
    match step:
        case LocalCopy(source, target):
            writer.transfer(home, Op.COPY, writer.operand(rank, source), writer.operand(rank, target), source.count)
        case LocalReduce(source, target):
            writer.transfer(home, Op.REDUCE, writer.operand(rank, source), writer.operand(rank, target), source.count)
        case Put(source, peer, target):
            writer.transfer(home, Op.PUT, writer.operand(rank, source), writer.operand(peer, target), source.count)
        case ReadReduce(peer, source, target):
            writer.transfer(
                home, Op.READ_REDUCE, writer.operand(peer, source), writer.operand(rank, target), source.count
            )
        case Signal(peer, block):
            writer.signal(home, (peer, block))
        case Await(peer, block, count):
            writer.wait(home, (peer, block), count)


# ---- FIFO schedules --------------------------------------------------------------------------------------------------

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
    writer = _Writer(schedule.collective)
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


def _connections(schedule: Schedule, writer: _Writer, chunks: int) -> dict[_Connection, _Ends]:
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
    """Which of its block's signals to the same waiter a signal is. A gate's comes from block 0, so it counts for itself."""
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
    writer: _Writer
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
