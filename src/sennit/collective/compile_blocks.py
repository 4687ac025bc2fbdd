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
    blocks, homes = _homes(dag, order, channel)
    steps = [0] * len(homes)
    places: dict[tuple[str, int, int], Place] = {}

    def place(chunks: Chunks) -> Place:
        key = chunks.buffer, chunks.start, chunks.count
        found = places.get(key)
        if found is None:
            found = places[key] = Place(*key)
        return found

    opcodes, owner, before = dag.opcode, dag.owner, dag.before
    send, receive_reduce_send, copy, reduce = Opcode.SEND, Opcode.RECEIVE_REDUCE_SEND, Opcode.COPY, Opcode.REDUCE
    for op in order.operations:
        opcode, block, move = opcodes[op], homes[op], moves[op // 2]
        assert opcode is not None  # only operations are in the order
        assert block is not None
        instructions = block.instructions
        steps[op] = len(instructions)
        after = _waits(block, [owner[access] for access in before[op]], homes, steps) if before[op] else ()
        if opcode is send:
            instruction = Instruction(opcode, place(move.source), None, after)
        elif opcode is receive_reduce_send:
            instruction = Instruction(opcode, place(move.target), None, after)
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


def _waits(block: _Block, operations: list[int], homes: list[_Block | None], steps: list[int]) -> tuple[Wait, ...]:
    """What an instruction of `block` still has to wait for."""
    needed: dict[int, int] | None = None
    waited = block.waited
    for op in operations:
        other = homes[op]
        if other is block:
            continue
        assert other is not None
        number, step = other.number, steps[op]
        if step > waited.get(number, -1):
            needed = needed or {}
            waited[number] = needed[number] = step
    return tuple([Wait(number, needed[number]) for number in sorted(needed)]) if needed else ()


def _homes(
    dag: OperationDag, order: GlobalOrder, channel: tuple[int, ...]
) -> tuple[list[list[_Block]], list[_Block | None]]:
    """The empty blocks of each rank, and by operation the block that it belongs to."""
    ranks, channels = dag.chunks.algorithm.collective.ranks, 1 + max(channel, default=0)
    rank, received, sent = dag.rank, dag.received, dag.sent
    connection = [(rank[2 * m] * ranks + rank[2 * m + 1]) * channels + number for m, number in enumerate(channel)]
    blocks: list[list[_Block]] = [[] for _ in range(ranks)]
    receiving: dict[int, _Block] = {}
    sending: dict[int, _Block] = {}
    local: dict[tuple[int, int], _Block] = {}

    def new(here: int, inward: int | None, outward: int | None, number: int) -> _Block:
        source = None if inward is None else inward // channels // ranks
        goal = None if outward is None else outward // channels % ranks
        block = _Block(len(blocks[here]), goal, source, number)
        blocks[here].append(block)
        if inward is not None:
            receiving[inward] = block
        if outward is not None:
            sending[outward] = block
        return block

    joined = [(m, n) for m, n in zip(received, sent, strict=True) if m is not None and n is not None]
    onward = {connection[m]: connection[n] for m, n in joined}
    inward = {goal: source for source, goal in onward.items()}
    homes: list[_Block | None] = [None] * len(dag.opcode)
    for op in order.operations:
        if (move := received[op]) is not None:
            end = connection[move]
            homes[op] = receiving.get(end) or new(rank[op], end, onward.get(end), channel[move])
        elif (move := sent[op]) is not None:
            end = connection[move]
            homes[op] = sending.get(end) or new(rank[op], inward.get(end), end, channel[move])
        else:
            key = rank[op], channel[op // 2]
            if key not in local:
                local[key] = new(key[0], None, None, key[1])
            homes[op] = local[key]
    return blocks, homes
