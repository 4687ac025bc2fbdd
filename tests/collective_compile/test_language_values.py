"""The values that the language follows, in segments, against a plain table with one value for each chunk."""

from __future__ import annotations

import pytest
from collective_programs import random_moves
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.buffers import Memories
from sennit.collective.language import Builder, Chunk
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, Chunks, Move, MoveKind, Value, add_values

Table = dict[tuple[int, int], Value]  # by memory and place


def plain_move(memories: Memories, table: Table, move: Move) -> Table | None:
    """The table after a move; None if it reads what nobody wrote, or adds a contribution twice."""
    after = dict(table)
    (memory, start), (other, goal) = memories.locate(move.source), memories.locate(move.target)
    for i in range(move.source.count):
        value, present = table.get((memory, start + i)), table.get((other, goal + i))
        if value is None or (move.kind is MoveKind.REDUCE and present is None):
            return None
        total = value if move.kind is MoveKind.COPY or present is None else add_values(present, value)
        if total is None:
            return None
        after[other, goal + i] = total
    return after


def replay(algorithm: Algorithm, moves: list[Move]) -> Builder:
    builder = Builder(algorithm.collective)
    for piece in algorithm.scratch:
        builder.scratch(piece.rank, piece.name, piece.chunks)

    def named(place: Chunks) -> Chunk:
        return builder.chunk(place.rank, place.buffer, place.start, place.count)

    for move in moves:
        builder.move(move.kind, named(move.source), named(move.target))
    return builder


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**9))
def test_values_and_faults_are_those_of_a_plain_table(seed: int) -> None:
    algorithm = random_moves(seed, most=120)
    spec, memories = algorithm.collective, Memories(algorithm.collective, algorithm.scratch)
    table: Table = {}
    for rank in range(spec.ranks):
        memory, offset, chunks = memories.find(rank, "input")
        table |= {(memory, offset + i): spec.before(rank, i) for i in range(chunks)}
    legal: list[Move] = []
    for move in algorithm.moves:
        after = plain_move(memories, table, move)
        if after is not None:
            legal.append(move)
            table = after
        elif len(legal) % 4 == 0:  # some of them: each replays the program
            with pytest.raises(CollectiveError, match=r"nobody wrote it|twice"):
                replay(algorithm, [*legal, move])
    builder = replay(algorithm, legal)
    for rank in range(spec.ranks):
        memory, offset, chunks = memories.find(rank, "output")
        held: dict[int, Value] = {}
        for first, last, value in builder.held(rank):
            for index in range(first, last):
                if value is not None:
                    held[index] = tuple((delta + index, ranks) for delta, ranks in value)
        assert held == {i: table[memory, offset + i] for i in range(chunks) if (memory, offset + i) in table}
