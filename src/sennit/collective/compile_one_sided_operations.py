"""The operations of the one-sided lowering: moves, and moves that are done together.

**Joined reduces.** Reduces one after another into the same chunks must keep their order anyway, and each would read and write the target.
Joined to one operation they read every source and the target once and write once. A reduce joins the one before it if

1. both write exactly the same chunks of the same rank, on the same lane;
2. nothing has touched these chunks in between: its write waits for the write of the other and for nothing else;
3. no move that is not in the joint operation waits for a part of it.

By 3 an operation can stand where its last move stands: nothing in between needed the earlier ones. So if operations are numbered by their last
moves, every operation waits for smaller numbers only, and joining never makes a cycle. One pass over the moves decides it: an operation is
closed as soon as a move that does not join it waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.collective.compile_chunks import ChunkDag
from sennit.ir.collective import Chunks, Move, MoveKind
from sennit.ir.one_sided import DataStep, LocalCopy, LocalReduce, MultiReduce, Put, ReadReduce, accesses
from sennit.ir.schedule import Place

__all__ = ["Operation", "OperationGraph", "operation_graph"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One step, the rank that does it, its lane, and the other ranks whose memory it touches."""

    step: DataStep
    rank: int
    lane: int
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperationGraph:
    """`waits` is by operation: those it waits for, all of smaller numbers."""

    operations: tuple[Operation, ...]
    waits: tuple[tuple[int, ...], ...]


def operation_graph(chunks: ChunkDag) -> OperationGraph:
    groups = _groups(chunks)
    number = {move: place for place, group in enumerate(groups) for move in group}
    instances = 1 + max((move.instance for move in chunks.moves), default=0)
    operations: list[Operation] = []
    waits: list[tuple[int, ...]] = []
    for place, group in enumerate(groups):
        earlier = {number[other] for move in group for other in _earlier(chunks, move)} - {place}
        waits.append(tuple(sorted(earlier)))
        operations.append(_operation([chunks.moves[move] for move in group], instances))
    return OperationGraph(tuple(operations), tuple(waits))


def _earlier(chunks: ChunkDag, move: int) -> set[int]:
    """The moves that a move waits for."""
    return {access // 2 for access in (*chunks.before[2 * move], *chunks.before[2 * move + 1])}


def _groups(chunks: ChunkDag) -> list[list[int]]:
    """The moves of each operation, in the order of their last moves."""
    groups: list[list[int]] = []
    of: list[list[int]] = []  # by move
    closed: set[int] = set()  # operations, by their first move
    for number, move in enumerate(chunks.moves):
        joined = _joins(chunks, number, of, closed)
        for other in _earlier(chunks, number) - {number}:
            if of[other] is not joined:
                closed.add(of[other][0])
        if joined is None:
            joined = []
            groups.append(joined)
        joined.append(number)
        of.append(joined)
        if move.kind is not MoveKind.REDUCE:
            closed.add(number)
    return sorted(groups, key=lambda group: group[-1])


def _joins(chunks: ChunkDag, number: int, of: list[list[int]], closed: set[int]) -> list[int] | None:
    """The operation that a move becomes a part of, or None where it is one of its own."""
    move, before = chunks.moves[number], chunks.before[2 * number + 1]
    if move.kind is not MoveKind.REDUCE or len(before) != 1 or not before[0] % 2:
        return None
    last = before[0] // 2
    other, group = chunks.moves[last], of[last]
    if group[0] in closed or chunks.cells[before[0]] != chunks.cells[2 * number + 1]:
        return None
    if (other.channel, other.instance) != (move.channel, move.instance):
        return None
    # a source that was made from a part of the operation cannot be read together with it
    return None if any(of[access // 2] is group for access in chunks.before[2 * number]) else group


def _operation(moves: list[Move], instances: int) -> Operation:
    first = moves[0]
    here = first.source.rank if first.kind is MoveKind.COPY else first.target.rank
    step = _step(first) if len(moves) == 1 else _joint_step(moves)
    touched = accesses(step, here)
    peers = {rank for rank, _ in (*touched.reads, *touched.writes)} - {here}
    return Operation(step, here, (first.channel or 0) * instances + first.instance, tuple(sorted(peers)))


def _step(move: Move) -> DataStep:
    source, target = _place(move.source), _place(move.target)
    here, there = move.source.rank, move.target.rank
    match move.kind:
        case MoveKind.COPY:
            return LocalCopy(source, target) if here == there else Put(source, there, target)
        case MoveKind.REDUCE:
            return LocalReduce(source, target) if here == there else ReadReduce(here, source, target)


def _joint_step(moves: list[Move]) -> DataStep:
    sources = tuple((move.source.rank, _place(move.source)) for move in moves)
    return MultiReduce(sources, _place(moves[0].target))


def _place(chunks: Chunks) -> Place:
    return Place(chunks.buffer, chunks.start, chunks.count)
