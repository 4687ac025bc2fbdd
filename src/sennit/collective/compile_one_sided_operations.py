"""The operations of the one-sided lowering: each is one step of one rank.

A copy between ranks is a put by its source, a reduce a read_reduce by its target. Reduces that `compile_joins.py` joins
are one multi_reduce; the moves of a switch are one multicast by the source, or one switch_reduce by the target.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.collective.compile_chunks import ChunkDag
from sennit.collective.compile_joins import joined_moves, moves_before
from sennit.ir.collective import Chunks, Move, MoveKind
from sennit.ir.one_sided import (
    DataStep,
    LocalCopy,
    LocalReduce,
    Multicast,
    MultiReduce,
    Put,
    ReadReduce,
    SwitchReduce,
    accesses,
)
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
    groups = joined_moves(chunks, local_only=False)
    number = {move: place for place, group in enumerate(groups) for move in group}
    instances = 1 + max((move.instance for move in chunks.moves), default=0)
    operations: list[Operation] = []
    waits: list[tuple[int, ...]] = []
    for place, group in enumerate(groups):
        earlier = {number[other] for move in group for other in moves_before(chunks, move)} - {place}
        waits.append(tuple(sorted(earlier)))
        operations.append(_operation([chunks.moves[move] for move in group], instances))
    return OperationGraph(tuple(operations), tuple(waits))


def _operation(moves: list[Move], instances: int) -> Operation:
    first, last = moves[0], moves[-1]
    here = first.source.rank if last.kind is MoveKind.COPY else first.target.rank
    if last.switch is not None and (len(moves) > 1 or last.kind is MoveKind.REDUCE):
        step = _switch_step(moves)
    else:
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


def _switch_step(moves: list[Move]) -> DataStep:
    first, last = moves[0], moves[-1]
    source, target = _place(first.source), _place(first.target)
    if last.kind is MoveKind.COPY:
        return Multicast(source, tuple(sorted(move.target.rank for move in moves)), target)
    ranks = {move.source.rank for move in moves}
    if first.kind is MoveKind.REDUCE:  # onto the place that is summed: it is an operand itself
        ranks.add(first.target.rank)
    return SwitchReduce(tuple(sorted(ranks)), source, target)


def _place(chunks: Chunks) -> Place:
    return Place(chunks.buffer, chunks.start, chunks.count)
