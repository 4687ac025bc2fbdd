"""Passes 5 and 6: channels, and thread blocks with their instructions and waits.

**Channels** (`assign_channels`). The moves that fused operations join form a *chain*: a send, operations that receive
and send on, a receive. A chain lies on one channel from end to end, so that the two ends of every connection agree. The
channel is that of its lane, unless it would meet messages there that it overtakes, or that overtake it: a connection
takes a message if as many of its sends stand before the new send as of its receives before the new receive. Then the
chain goes to a further channel of its lane.

**Blocks** (`assign_blocks`). The end of a connection belongs to one block of its rank. A block is the two ends that
fused operations join, or one end alone; moves within a rank have a block for each channel. Each block runs its
operations in the global order. So every wait, message and step of a block points backwards in that order: with
connections that hold any number of messages nothing can deadlock. With `share` a block that would only receive and one
that would only send become one: half the blocks, where executors limit them, but a send may have to wait for a receive
that it does not need, and more slots may be needed.

**Waits.** A block *knows* how far the other blocks of its rank are: by its own waits, and by those that the operations
that it waited for had behind them. A wait for what the block knows already is left out. Of several, the one for the
latest operation comes first, since it may imply the others. (Knowledge is not handed on further: that would cost as
much as there are blocks for every wait.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from sennit.collective.compile_operations import OperationDag
from sennit.collective.compile_order import GlobalOrder
from sennit.ir.collective import Chunks, Scratch
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Wait

__all__ = ["Channels", "assign_blocks", "assign_channels"]


@dataclass(frozen=True, slots=True)
class Channels:
    """By move. A connection has a number for its sender, receiver and channel."""

    channel: tuple[int, ...]
    connection: tuple[int, ...]


def assign_channels(dag: OperationDag, order: GlobalOrder) -> Channels:
    if not order.overtaking:
        return Channels(dag.lane, dag.connection)
    position = {op: place for place, op in enumerate(order.operations)}
    channel, connection = list(dag.lane), list(dag.connection)
    further = dag.chunks.algorithm.collective.ranks**2 * dag.lanes  # no connection of a lane has this number or more
    numbers: dict[tuple[int, int], int] = {}  # further channels: (lane, which) -> channel
    taken: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for chain in _chains(dag, order):
        ends = [(position[dag.owner[2 * move]], position[dag.owner[2 * move + 1]]) for move in chain]
        for which in count():
            lists = [taken[dag.connection[move] + which * further] for move in chain]
            if all(
                bisect_left(sends, send) == bisect_left(receives, receive)
                for (sends, receives), (send, receive) in zip(lists, ends, strict=True)
            ):
                break
        for (sends, receives), (send, receive) in zip(lists, ends, strict=True):
            insort(sends, send)
            insort(receives, receive)
        if which:
            lane = dag.lane[chain[0]]
            number = numbers.setdefault((lane, which), dag.lanes + len(numbers))
            for move in chain:
                channel[move] = number
                connection[move] += which * further
    return Channels(tuple(channel), tuple(connection))


def _chains(dag: OperationDag, order: GlobalOrder) -> list[list[int]]:
    """The moves of each chain, in the order of their first sends."""
    chains: list[list[int]] = []
    for op in order.operations:
        if dag.received[op] is not None or dag.sent[op] is None:
            continue
        chain: list[int] = []
        move = dag.sent[op]
        while move is not None:
            chain.append(move)
            move = dag.sent[dag.owner[2 * move + 1]]
        chains.append(chain)
    return chains


@dataclass(slots=True)
class _Block:
    """A block that is being filled.

    `waited` is the last step of each other block that it waited for; it is replaced, not changed, since operations keep
    it. `known` has besides what the operations waited for had waited for.
    """

    number: int  # among those of its rank
    send: int | None
    receive: int | None
    channel: int
    instructions: list[Instruction] = field(default_factory=list)
    waited: dict[int, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)


def assign_blocks(
    dag: OperationDag, order: GlobalOrder, channels: Channels, *, share: bool = False
) -> tuple[RankSchedule, ...]:
    algorithm, moves = dag.chunks.algorithm, dag.chunks.moves
    blocks, homes = _homes(dag, order, channels, share)
    progress = _Progress(homes, [0] * len(homes), [0] * len(homes), [{}] * len(homes))
    places: dict[tuple[str, int, int], Place] = {}

    def place(chunks: Chunks) -> Place:
        key = chunks.buffer, chunks.start, chunks.count
        found = places.get(key)
        if found is None:
            found = places[key] = Place(*key)
        return found

    opcodes, owner, before = dag.opcode, dag.owner, dag.before
    send, receive_reduce_send, copy, reduce = Opcode.SEND, Opcode.RECEIVE_REDUCE_SEND, Opcode.COPY, Opcode.REDUCE
    for position, op in enumerate(order.operations):
        opcode, block, move = opcodes[op], homes[op], moves[op // 2]
        assert opcode is not None  # only operations are in the order
        assert block is not None
        instructions = block.instructions
        after = progress.waits(block, [owner[access] for access in before[op]]) if before[op] else ()
        progress.steps[op], progress.positions[op], progress.waited[op] = len(instructions), position, block.waited
        if opcode is send:
            instruction = Instruction(opcode, place(move.source), None, after)
        elif opcode is receive_reduce_send:
            instruction = Instruction(opcode, place(move.target), None, after)
        elif opcode is reduce and op in dag.joined:
            first, *further = [place(moves[number].source) for number in dag.joined[op]]
            instruction = Instruction(opcode, first, place(move.target), after, tuple(further))
        elif opcode is copy or opcode is reduce:
            instruction = Instruction(opcode, place(move.source), place(move.target), after)
        else:
            instruction = Instruction(opcode, None, place(move.target), after)
        instructions.append(instruction)
    scratch: list[list[Scratch]] = [[] for _ in blocks]
    for piece in algorithm.scratch:
        scratch[piece.rank].append(piece)
    return tuple(
        RankSchedule(
            rank,
            tuple(Block(b.send, b.receive, b.channel, tuple(b.instructions)) for b in blocks[rank]),
            tuple(scratch[rank]),
        )
        for rank in range(len(blocks))
    )


@dataclass(frozen=True, slots=True)
class _Progress:
    """By operation: its block, its step there, its place in the global order, and what its block had waited for."""

    homes: list[_Block | None]
    steps: list[int]
    positions: list[int]
    waited: list[dict[int, int]]

    def waits(self, block: _Block, operations: list[int]) -> tuple[Wait, ...]:
        """What the next instruction of `block` still has to wait for, so that these operations are done."""
        if len(operations) > 1:
            operations.sort(key=self.positions.__getitem__, reverse=True)
        needed: list[Wait] = []
        known = block.known
        for op in operations:
            other, step = self.homes[op], self.steps[op]
            if other is block:
                continue
            assert other is not None
            if step <= known.get(other.number, -1):
                continue
            known[other.number] = step
            for number, last in self.waited[op].items():
                if last > known.get(number, -1):
                    known[number] = last
            needed.append(Wait(other.number, step))
        if not needed:
            return ()
        block.waited = block.waited | {wait.block: wait.step for wait in needed}
        return tuple(sorted(needed, key=attrgetter("block")))


def _homes(
    dag: OperationDag, order: GlobalOrder, channels: Channels, share: bool
) -> tuple[list[list[_Block]], list[_Block | None]]:
    """The empty blocks of each rank, and by operation the block that it belongs to."""
    channel, connection = channels.channel, channels.connection
    rank, received, sent = dag.rank, dag.received, dag.sent
    blocks: list[list[_Block]] = [[] for _ in range(dag.chunks.algorithm.collective.ranks)]
    receiving: dict[int, _Block] = {}  # by connection
    sending: dict[int, _Block] = {}
    local: dict[tuple[int, int], _Block] = {}  # by rank and channel
    joined = [(m, n) for m, n in zip(received, sent, strict=True) if m is not None and n is not None]
    if share:
        joined += _lonely_ends(dag, channels, joined)
    onward = {connection[m]: n for m, n in joined}  # where the block of a receiving end sends to
    inward = {connection[n]: m for m, n in joined}

    def new(here: int, received: int | None, sent: int | None, number: int) -> _Block:
        source = None if received is None else rank[2 * received]
        goal = None if sent is None else rank[2 * sent + 1]
        block = _Block(len(blocks[here]), goal, source, number)
        blocks[here].append(block)
        if received is not None:
            receiving[connection[received]] = block
        if sent is not None:
            sending[connection[sent]] = block
        return block

    homes: list[_Block | None] = [None] * len(dag.opcode)
    for op in order.operations:
        if (move := received[op]) is not None:
            end = connection[move]
            homes[op] = receiving.get(end) or new(rank[op], move, onward.get(end), channel[move])
        elif (move := sent[op]) is not None:
            end = connection[move]
            homes[op] = sending.get(end) or new(rank[op], inward.get(end), move, channel[move])
        else:
            key = rank[op], channel[op // 2]
            if key not in local:
                local[key] = new(key[0], None, None, key[1])
            homes[op] = local[key]
    return blocks, homes


def _lonely_ends(dag: OperationDag, channels: Channels, joined: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of a received and a sent move whose ends no fused operation joins: of the same peer first, then as they
    come.
    """
    channel, connection = channels.channel, channels.connection
    inward, outward = {connection[m] for m, _ in joined}, {connection[n] for _, n in joined}
    receives: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # rank, channel: peer -> a move
    sends: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for move, number in enumerate(channel):
        source, goal = dag.rank[2 * move], dag.rank[2 * move + 1]
        if source == goal:
            continue
        if connection[move] not in inward:
            receives[goal, number].setdefault(source, move)
        if connection[move] not in outward:
            sends[source, number].setdefault(goal, move)
    pairs: list[tuple[int, int]] = []
    for key, incoming in receives.items():
        outgoing = sends[key]
        pairs += [(incoming[peer], outgoing[peer]) for peer in incoming if peer in outgoing]
        pairs += zip(
            [move for peer, move in incoming.items() if peer not in outgoing],
            [move for peer, move in outgoing.items() if peer not in incoming],
            strict=False,
        )
    return pairs
