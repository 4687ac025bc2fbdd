"""A schedule as rounds of messages between pairs of ranks, so that any two-sided library runs it: gloo, NCCL, sockets.

A schedule (`ir/schedule.py`) has blocks that run at the same time and wait for messages in FIFOs. A library of
point-to-point calls has neither: a call may block until the other side calls too, and NCCL runs the calls of a pair one
after another. What both can do is a *batch*: several sends and receives that make progress together. So the whole
schedule is cut, ahead of time and on every rank alike, into rounds. In round r a rank

1. sends and receives its messages of the round, as one batch, and waits for it;
2. does its local work of the round: copies and reductions.

**Levels.** Each instruction I gets a level, and each message m a round, the least that satisfy

    done(D)  = round of the message that D sends, or level(D) if it sends nothing
    ready(I) = max over what I waits for (the step before it in its block, its `after`) of done, or -1
    level(I) >= ready(I), 0, and round(m) if I receives m
    round(m) >= ready(I) + 1 if I only sends m;  level(I) + 1 if it also receives
    round(m) >= done(C) + 1, where C receives the message `slots` before m on the same connection

The last line is the FIFO's bound: no more than `slots` messages of a connection are kept. These are longest paths in
the graph of which the compiler proves that it has no cycle, also with tiles: the same instructions once for each tile,
a block taking its tiles in order.

**No deadlock.** A message is in the batch of the same round on both sides. The earliest batch that is not done can
always go on: by induction all earlier batches of all ranks are done. This needs no buffering by the library at all.

**No copy without need.** A message lands in a slot, of which a connection has `slots`, until its instruction uses it. A
plain receive lands in its target at once where all that it waits for is done a round earlier, or is a send of other
memory in the same batch. Sends leave from where the data lies: an instruction that waits for a send waits for the end
of its batch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sennit.errors import CollectiveError
from sennit.ir.cells import RankCells
from sennit.ir.schedule import Instruction, Opcode, Place, Schedule
from sennit.ir.schedule_check import check_schedule

__all__ = ["Local", "Location", "P2PPlan", "Round", "Slot", "Transfer", "plan_p2p"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a message of a connection from `peer` on `channel` lies until it is used; it has `count` chunks."""

    peer: int
    channel: int
    index: int
    count: int


Location = Place | Slot


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message: to `peer` from `location`, or from `peer` into it."""

    peer: int
    location: Location
    tile: int


@dataclass(frozen=True, slots=True)
class Local:
    """`reduce`: target += source; otherwise target = source."""

    reduce: bool
    source: Location
    target: Location
    tile: int


@dataclass(frozen=True, slots=True)
class Round:
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    work: tuple[Local, ...]


@dataclass(frozen=True, slots=True)
class P2PPlan:
    """What one rank does.

    `writes_input`: of a collective that is not in place, so that the input must be copied to be kept.
    """

    schedule: Schedule
    rank: int
    tiles: int
    rounds: tuple[Round, ...]
    writes_input: bool

    @property
    def messages(self) -> int:
        """How many messages the rank sends."""
        return sum(len(item.sends) for item in self.rounds)


def plan_p2p(schedule: Schedule, rank: int, *, tiles: int = 1) -> P2PPlan:
    """The rounds of one rank. All ranks must plan the same schedule with as many tiles."""
    cells = check_schedule(schedule)
    if not 0 <= rank < schedule.collective.ranks:
        raise CollectiveError(
            f"rank {rank} of a schedule for {schedule.collective.ranks}",
            where=f"schedule {schedule.name!r}",
            fix="run it in a group of as many ranks",
        )
    if tiles < 1:
        raise CollectiveError(f"{tiles} tiles", where=f"schedule {schedule.name!r}", fix="use 1 or more")
    levels = _Levels(schedule, tiles, cells)
    levels.fill()
    writes = any(
        instruction.target is not None and instruction.target.buffer == "input"
        for block in schedule.ranks[rank].blocks
        for instruction in block.instructions
    )
    return P2PPlan(schedule, rank, tiles, _rounds(levels, rank), writes and not schedule.collective.in_place)


Node = tuple[int, int, int]  # rank, block, step over all tiles
Connection = tuple[int, int, int]  # sender, receiver, channel


@dataclass(slots=True, eq=False)
class _Levels:
    """The graph of a schedule unrolled over its tiles, and the levels of its nodes."""

    schedule: Schedule
    tiles: int
    cells: tuple[RankCells, ...]
    waits: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    level: dict[Node, int] = field(default_factory=dict)
    round: dict[Node, int] = field(default_factory=dict)  # of the message that the node sends
    arrival: dict[Node, int] = field(default_factory=dict)  # of the message that it receives
    number: dict[Node, int] = field(default_factory=dict)  # of that message in its connection
    order: list[Node] = field(default_factory=list)

    def instruction(self, node: Node) -> Instruction:
        rank, block, step = node
        instructions = self.schedule.ranks[rank].blocks[block].instructions
        return instructions[step % len(instructions)]

    def tile(self, node: Node) -> int:
        rank, block, step = node
        return step // len(self.schedule.ranks[rank].blocks[block].instructions)

    def done(self, node: Node) -> int:
        return self.round.get(node, self.level[node])

    def fill(self) -> None:
        """Visit every node after what it needs (Kahn's order), so that each level is found once."""
        before, messages = self._edges()
        after: dict[Node, list[Node]] = defaultdict(list)
        missing: dict[Node, int] = {}
        for node, needs in before.items():
            needed = [*needs.waits, *needs.messages]
            missing[node] = len(needed)
            for item in needed:
                after[item].append(node)
        self.number = messages
        stack = [node for node, count in missing.items() if count == 0]
        while stack:
            node = stack.pop()
            self._place(node, before[node])
            self.order.append(node)
            for following in after[node]:
                missing[following] -= 1
                if missing[following] == 0:
                    stack.append(following)
        if len(self.order) < len(before):
            raise CollectiveError(
                f"schedule {self.schedule.name!r} deadlocks with {self.schedule.slots} slots and {self.tiles} tiles",
                fix="verify it with `sennit collective verify`, and compile it again",
            )

    def _place(self, node: Node, needs: _Needs) -> None:
        opcode = self.instruction(node).opcode
        self.waits[node] = needs.waits
        ready = max((self.done(item) for item in needs.waits), default=-1)
        level = max(ready, 0)
        if needs.sender is not None:
            self.arrival[node] = self.round[needs.sender]
            level = max(level, self.arrival[node])
        self.level[node] = level
        if opcode.sends:
            freed = 0 if needs.freed is None else self.done(needs.freed) + 1
            self.round[node] = max(freed, level + 1 if opcode.receives else ready + 1)

    def _edges(self) -> tuple[dict[Node, _Needs], dict[Node, int]]:
        needs: dict[Node, _Needs] = {}
        sent: dict[Connection, list[Node]] = defaultdict(list)
        received: dict[Connection, list[Node]] = defaultdict(list)
        for ranked in self.schedule.ranks:
            lengths = [len(block.instructions) for block in ranked.blocks]
            for index, block in enumerate(ranked.blocks):
                for step in range(self.tiles * lengths[index]):
                    node = (ranked.rank, index, step)
                    tile, within = divmod(step, lengths[index])
                    instruction = block.instructions[within]
                    waits = [(ranked.rank, index, step - 1)] if step else []
                    waits += [(ranked.rank, w.block, tile * lengths[w.block] + w.step) for w in instruction.after]
                    needs[node] = _Needs(tuple(waits))
                    if instruction.opcode.sends:
                        assert block.send is not None  # the checker has seen it
                        sent[ranked.rank, block.send, block.channel].append(node)
                    if instruction.opcode.receives:
                        assert block.receive is not None
                        received[block.receive, ranked.rank, block.channel].append(node)
        numbers: dict[Node, int] = {}
        for connection in sent.keys() | received.keys():
            sends, receives = sent[connection], received[connection]
            if len(sends) != len(receives):
                sender, receiver, channel = connection
                raise CollectiveError(
                    f"rank {sender} sends {len(sends)} messages to rank {receiver}, which receives {len(receives)}",
                    where=f"schedule {self.schedule.name!r}, channel {channel}",
                )
            for k, (send, receive) in enumerate(zip(sends, receives, strict=True)):
                needs[receive].sender = send
                numbers[receive] = k
                if k >= self.schedule.slots:
                    needs[send].freed = receives[k - self.schedule.slots]
        return needs, numbers


@dataclass(slots=True, eq=False)
class _Needs:
    """What must come before a node: local waits, who sends it its message, who frees the slot for its own."""

    waits: tuple[Node, ...]
    sender: Node | None = None
    freed: Node | None = None

    @property
    def messages(self) -> tuple[Node, ...]:
        return tuple(item for item in (self.sender, self.freed) if item is not None)


def _rounds(levels: _Levels, rank: int) -> tuple[Round, ...]:
    """The rounds of one rank.

    Messages of a pair of ranks are in the order of (channel, number) on both sides: a library without tags matches them
    by order.
    """
    schedule = levels.schedule
    sends: dict[int, list[tuple[tuple[int, int, int], Transfer]]] = defaultdict(list)
    receives: dict[int, list[tuple[tuple[int, int, int], Transfer]]] = defaultdict(list)
    work: dict[int, list[Local]] = defaultdict(list)
    counts: dict[tuple[int, int], int] = defaultdict(int)  # messages sent, by peer and channel
    mine = [node for node in levels.order if node[0] == rank]
    for node in mine:
        instruction, tile = levels.instruction(node), levels.tile(node)
        block = schedule.ranks[rank].blocks[node[1]]
        slot: Slot | None = None
        if instruction.opcode.receives:
            assert block.receive is not None
            number, place = levels.number[node], instruction.target or instruction.source
            assert place is not None
            slot = Slot(block.receive, block.channel, number % schedule.slots, place.count)
            direct = _may_land(levels, node)
            key = (block.receive, block.channel, number)
            landing: Location = place if direct else slot
            receives[levels.arrival[node]].append((key, Transfer(block.receive, landing, tile)))
            slot = None if direct else slot
        work[levels.level[node]] += _local(instruction, slot, tile)
        if instruction.opcode.sends:
            assert block.send is not None
            leaving: Location | None = instruction.target or instruction.source
            if instruction.opcode is Opcode.RECEIVE_REDUCE_SEND:
                leaving = slot
            assert leaving is not None
            key = (block.send, block.channel, counts[block.send, block.channel])
            counts[block.send, block.channel] += 1
            sends[levels.round[node]].append((key, Transfer(block.send, leaving, tile)))
    last = max([*sends, *receives, *work], default=-1)
    return tuple(
        Round(
            tuple(transfer for _, transfer in sorted(sends[r], key=lambda item: item[0])),
            tuple(transfer for _, transfer in sorted(receives[r], key=lambda item: item[0])),
            tuple(work[r]),
        )
        for r in range(last + 1)
    )


def _may_land(levels: _Levels, node: Node) -> bool:
    """Whether the message may be received into the target itself: it is overwritten, and nothing that must come before
    touches it then.
    """
    instruction, arrival = levels.instruction(node), levels.arrival[node]
    if instruction.opcode not in (Opcode.RECEIVE, Opcode.RECEIVE_COPY_SEND):
        return False
    for earlier in levels.waits[node]:
        if levels.done(earlier) < arrival:
            continue
        before = levels.instruction(earlier)
        if levels.round.get(earlier) != arrival or _overlap(levels.cells[node[0]], instruction.target, before):
            return False
    return True


def _overlap(cells: RankCells, target: Place | None, sending: Instruction) -> bool:
    """Whether a message leaves from memory that another one is to land in."""
    if sending.opcode is Opcode.RECEIVE_REDUCE_SEND:
        return False  # it leaves from a slot
    places = (target, sending.target or sending.source)
    (a, b), (c, d) = (
        found for place in places if place and (found := cells.find(place.buffer, place.start, place.count))
    )
    return a < d and c < b


def _local(instruction: Instruction, slot: Slot | None, tile: int) -> list[Local]:
    """What an instruction does besides its messages. `slot` is None where its message is in its target already."""
    source, target = instruction.source, instruction.target
    match instruction.opcode:
        case Opcode.SEND:
            return []
        case Opcode.COPY | Opcode.REDUCE:
            assert target is not None
            return [Local(instruction.opcode is Opcode.REDUCE, place, target, tile) for place in instruction.sources]
        case Opcode.RECEIVE | Opcode.RECEIVE_COPY_SEND:
            assert target is not None
            return [] if slot is None else [Local(False, slot, target, tile)]
        case Opcode.RECEIVE_REDUCE | Opcode.RECEIVE_REDUCE_COPY_SEND:
            assert slot is not None
            assert target is not None
            return [Local(True, slot, target, tile)]
        case Opcode.RECEIVE_REDUCE_SEND:
            assert slot is not None
            assert source is not None
            return [Local(True, source, slot, tile)]
