"""Passes 5 and 6: channels, and thread blocks with their instructions and waits.

**Channels** (`assign_channels`). The moves that fused operations join form a *chain*: a send, operations that receive and send on, a receive. A
chain lies on one channel from end to end, so that the two ends of every connection agree. The channel is that of its lane, unless it
would meet messages there that it overtakes, or that overtake it: a connection takes a message if as many of its sends stand before
the new send as of its receives before the new receive. Then the chain goes to a further channel of its lane.

**Blocks** (`assign_blocks`). The end of a connection belongs to one block of its rank. A block is the two ends that fused operations join, or one
end alone; moves within a rank have a block for each lane. Each block runs its operations in the global order. So every wait, message
and step of a block points backwards in that order: with connections that hold any number of messages nothing can deadlock.

A wait is kept only for the last step needed of each other block, and only if no earlier instruction of this block waited for that
step or a later one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count

from sennit.collective.compile_operations import OperationDag
from sennit.collective.compile_order import GlobalOrder
from sennit.ir.collective import Chunks, Scratch
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Wait

__all__ = ["assign_blocks", "assign_channels"]


def assign_channels(dag: OperationDag, order: GlobalOrder) -> tuple[int, ...]:
    """The channel of each move."""
    if not order.overtaking:
        return dag.lane
    position = {op: place for place, op in enumerate(order.operations)}
    channel = list(dag.lane)
    numbers: dict[tuple[int, int], int] = {}  # further channels: (lane, which) -> channel
    taken: defaultdict[tuple[int, int, int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for chain in _chains(dag, order):
        lane = dag.lane[chain[0]]
        hops = [
            (dag.rank[2 * m], dag.rank[2 * m + 1], position[dag.owner[2 * m]], position[dag.owner[2 * m + 1]])
            for m in chain
        ]
        for which in count():
            lists = [taken[source, goal, lane, which] for source, goal, _, _ in hops]
            if all(
                bisect_left(sends, send) == bisect_left(receives, receive)
                for (sends, receives), (_, _, send, receive) in zip(lists, hops, strict=True)
            ):
                break
        for (sends, receives), (_, _, send, receive) in zip(lists, hops, strict=True):
            insort(sends, send)
            insort(receives, receive)
        if which:
            number = numbers.setdefault((lane, which), dag.lanes + len(numbers))
            for move in chain:
                channel[move] = number
    return tuple(channel)


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
    """A block that is being filled. `waited` is the last step of each other block that it has waited for."""

    number: int  # among those of its rank
    send: int | None
    receive: int | None
    channel: int
    instructions: list[Instruction] = field(default_factory=list)
    waited: dict[int, int] = field(default_factory=dict)


def assign_blocks(dag: OperationDag, order: GlobalOrder, channel: tuple[int, ...]) -> tuple[RankSchedule, ...]:
    algorithm, moves = dag.chunks.algorithm, dag.chunks.moves
    blocks: list[list[_Block]] = [[] for _ in range(algorithm.collective.ranks)]
    homes = _Homes(dag, order, channel, blocks)
    home: list[_Block | None] = [None] * len(dag.opcode)
    step = [0] * len(dag.opcode)
    places: dict[tuple[str, int, int], Place] = {}
    opcodes, owner, before, received, sent = dag.opcode, dag.owner, dag.before, dag.received, dag.sent

    def place(chunks: Chunks) -> Place:
        key = chunks.buffer, chunks.start, chunks.count
        found = places.get(key)
        if found is None:
            found = places[key] = Place(*key)
        return found

    for op in order.operations:
        opcode = opcodes[op]
        assert opcode is not None
        block = homes.find(op, received[op], sent[op])
        home[op], step[op] = block, len(block.instructions)
        after = _waits(block, [owner[access] for access in before[op]], home, step) if before[op] else ()
        move = moves[op // 2]
        match opcode:
            case Opcode.SEND:
                source, target = place(move.source), None
            case Opcode.RECEIVE_REDUCE_SEND:
                source, target = place(move.target), None
            case Opcode.COPY | Opcode.REDUCE:
                source, target = place(move.source), place(move.target)
            case _:
                source, target = None, place(move.target)
        block.instructions.append(Instruction(opcode, source, target, after))
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


def _waits(block: _Block, operations: list[int], home: list[_Block | None], step: list[int]) -> tuple[Wait, ...]:
    """What an instruction of `block` still has to wait for."""
    waited, own = block.waited, block.number
    needed: dict[int, int] = {}
    for op in operations:
        other = home[op]
        assert other is not None  # it stands earlier in the order
        number = other.number
        if number != own and step[op] > waited.get(number, -1):
            waited[number] = needed[number] = step[op]
    return tuple([Wait(number, needed[number]) for number in sorted(needed)]) if needed else ()


class _Homes:
    """Which block an operation belongs to. Connections are numbered by sender, receiver and channel."""

    def __init__(
        self, dag: OperationDag, order: GlobalOrder, channel: tuple[int, ...], blocks: list[list[_Block]]
    ) -> None:
        rank, ranks, channels = dag.rank, len(blocks), 1 + max(channel, default=0)
        self.dag, self.channel, self.blocks = dag, channel, blocks
        self.connection = [
            (rank[2 * move] * ranks + rank[2 * move + 1]) * channels + number for move, number in enumerate(channel)
        ]
        self.onward: dict[int, int] = {}  # the connection that a receiving end's block sends to, as moves
        self.inward: dict[int, int] = {}
        for op in order.operations:
            received, sent = dag.received[op], dag.sent[op]
            if received is not None and sent is not None:
                self.onward[self.connection[received]] = sent
                self.inward[self.connection[sent]] = received
        self.receiving: dict[int, _Block] = {}
        self.sending: dict[int, _Block] = {}
        self.local: dict[tuple[int, int], _Block] = {}

    def find(self, op: int, received: int | None, sent: int | None) -> _Block:
        if received is not None:
            found = self.receiving.get(self.connection[received])
            return found or self._new(received, self.onward.get(self.connection[received]))
        if sent is not None:
            found = self.sending.get(self.connection[sent])
            return found or self._new(self.inward.get(self.connection[sent]), sent)
        key = self.dag.rank[op], self.channel[op // 2]
        if key not in self.local:
            block = _Block(len(self.blocks[key[0]]), None, None, key[1])
            self.blocks[key[0]].append(block)
            self.local[key] = block
        return self.local[key]

    def _new(self, received: int | None, sent: int | None) -> _Block:
        rank = self.dag.rank
        if received is not None:
            here, channel = rank[2 * received + 1], self.channel[received]
        else:
            assert sent is not None
            here, channel = rank[2 * sent], self.channel[sent]
        block = _Block(
            len(self.blocks[here]),
            None if sent is None else rank[2 * sent + 1],
            None if received is None else rank[2 * received],
            channel,
        )
        self.blocks[here].append(block)
        if received is not None:
            self.receiving[self.connection[received]] = block
        if sent is not None:
            self.sending[self.connection[sent]] = block
        return block
