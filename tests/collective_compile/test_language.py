"""The language: what it records, and that each fault is an error at the user's line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from collective_programs import all_reduce, ring, ring_reduce_scatter

from sennit.collective.interval_map import IntervalMap
from sennit.collective.language import Builder, trace
from sennit.errors import CollectiveError
from sennit.ir.collective import (
    Algorithm,
    Chunks,
    CollectiveName,
    CollectiveSpec,
    CustomCollective,
    MoveKind,
    single,
)


def test_a_ring_has_its_moves_and_their_lines() -> None:
    algorithm = trace(ring, all_reduce(4, 4), "ring")
    assert len(algorithm.moves) == 2 * 4 * 3
    first = algorithm.moves[0]
    assert (first.kind, first.source, first.target) == (
        MoveKind.REDUCE,
        Chunks(1, "output", 0, 1),
        Chunks(2, "output", 0, 1),
    )
    line = ring_reduce_scatter.__code__.co_firstlineno + 3
    assert first.line == f"collective_programs.py:{line}"


def test_instances_split_every_range_and_channels_are_kept() -> None:
    def program(b: Builder) -> None:
        with b.instances(2), b.channel(3):
            b.chunk(0, "output", 0, 4).reduce(into=b.chunk(1, "output", 0, 4))
        b.output(1).copy(to=0)

    moves = trace(program, all_reduce(2, 4), "halves").moves
    assert [(m.source.start, m.source.count, m.channel, m.instance) for m in moves] == [
        (0, 2, 3, 0),
        (2, 2, 3, 1),
        (0, 4, None, 0),
    ]


def test_in_place_aliases_and_moves_onto_itself() -> None:
    def program(b: Builder) -> None:
        for rank in range(b.ranks):
            own = b.input(rank).copy(to=rank, buffer="output", index=rank)  # it lies there already
            for other in range(b.ranks):
                if other != rank:
                    own.copy(to=other)

    spec = CollectiveSpec(CollectiveName.ALL_GATHER, 3, 1, in_place=True)
    assert len(trace(program, spec, "direct").moves) == 6
    assert len(trace(program, CollectiveSpec(CollectiveName.ALL_GATHER, 3, 1), "direct").moves) == 9


def reduce_then_copy(b: Builder) -> None:
    """A reduce-scatter in place: the result lies at its own part of the input."""
    ring_reduce_scatter(b.group(range(b.ranks)), b.input(0))


def test_reduce_scatter_in_place() -> None:
    spec = CollectiveSpec(CollectiveName.REDUCE_SCATTER, 4, 2, in_place=True)
    assert len(trace(reduce_then_copy, spec, "ring").moves) == 12


def test_a_custom_collective() -> None:
    wanted = ((None,), (single(0, 1), single(0, 0)))
    swap = CustomCollective("swap", (2, 1), (1, 2), wanted)

    def program(b: Builder) -> None:
        b.chunk(0, "input", 0).copy(to=1, buffer="output", index=1)
        b.chunk(0, "input", 1).copy(to=1, buffer="output", index=0)

    assert len(trace(program, swap, "swap").moves) == 2


def lost(b: Builder) -> None:
    b.chunk(0, "output", 0).reduce(into=b.chunk(1, "output", 0))


def twice(b: Builder) -> None:
    ring_reduce_scatter(b.group(range(b.ranks)), b.output(0))
    ring_reduce_scatter(b.group(range(b.ranks)), b.output(0))


def copied_then_added(b: Builder) -> None:
    copied = b.chunk(0, "output", 0).copy(to=1)
    copied.reduce(into=b.chunk(0, "output", 0))


def unwritten(b: Builder) -> None:
    b.scratch(0, "spare", 2)
    b.chunk(0, "spare", 1).copy(to=1, buffer="output", index=0)


def no_such_rank(b: Builder) -> None:
    b.chunk(0, "output", 0).copy(to=9)


def no_such_chunk(b: Builder) -> None:
    b.chunk(0, "output", 3, 2)


def no_such_buffer(b: Builder) -> None:
    b.chunk(0, "output", 0).copy(to=1, buffer="spare")


def overlap(b: Builder) -> None:
    b.chunk(0, "output", 0, 2).copy(to=0, index=1)


def too_many_instances(b: Builder) -> None:
    with b.instances(4):
        b.chunk(0, "output", 0, 2).copy(to=1)


def repeated_member(b: Builder) -> None:
    b.group([0, 1, 0])


def same_name(b: Builder) -> None:
    b.scratch(0, "output", 2)


FAULTS: list[tuple[Callable[[Builder], None], int, str]] = [  # program, line of the fault in it, words of the message
    (twice, 2, "twice"),
    (copied_then_added, 2, "adds chunk 0 of rank 0 twice"),
    (unwritten, 2, "nobody wrote it"),
    (no_such_rank, 1, "there is no rank 9"),
    (no_such_chunk, 1, "out of range: output of rank 0 has 4 chunks"),
    (no_such_buffer, 1, "no buffer 'spare'"),
    (overlap, 1, "overlap"),
    (too_many_instances, 2, "2 chunks for 4 instances"),
    (repeated_member, 1, "repeats a rank"),
    (same_name, 1, "already has a buffer"),
]


@pytest.mark.parametrize(("program", "line", "words"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_fault_is_an_error_at_the_line(program: Callable[[Builder], None], line: int, words: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        trace(program, all_reduce(2, 4), "faulty")
    assert words in caught.value.what
    assert caught.value.fix
    assert caught.value.where is not None
    assert f"test_language.py:{program.__code__.co_firstlineno + line}, in {program.__name__}" in caught.value.where


def test_a_lost_chunk_is_named() -> None:
    with pytest.raises(CollectiveError) as caught:
        trace(lost, all_reduce(3, 1), "lost")
    assert caught.value.what == (
        "the result is wrong in 3 chunks:\n"
        "  output chunk 0 of rank 0 lacks chunk 0 of ranks 1 to 2\n"
        "  output chunk 0 of rank 1 lacks chunk 0 of rank 2\n"
        "  output chunk 0 of rank 2 lacks chunk 0 of ranks 0 to 1"
    )


def test_an_output_never_written_and_a_wrong_one() -> None:
    def program(b: Builder) -> None:
        b.chunk(0, "input", 0).copy(to=1, buffer="output")

    with pytest.raises(CollectiveError, match="was never written; it should hold chunk 0 of rank 1"):
        trace(program, CollectiveSpec(CollectiveName.ALL_TO_ALL, 2, 1), "half")
    with pytest.raises(CollectiveError, match="lacks chunk 0 of rank 1, should not hold chunk 0 of rank 0"):
        trace(program, CollectiveSpec(CollectiveName.BROADCAST, 2, 1, root=1), "wrong")


def test_interval_map_against_a_list() -> None:
    import random

    draw = random.Random(7)
    plain: list[int] = [0] * 12
    mapped = IntervalMap(12, 0)
    for value in range(400):
        low, high = sorted(draw.sample(range(13), 2))
        mapped.write(low, high, value)
        plain[low:high] = [value] * (high - low)
        low, high = sorted(draw.sample(range(13), 2))
        assert [v for a, b, v in mapped.read(low, high) for _ in range(a, b)] == plain[low:high]
        assert [v for a, b, v in mapped for _ in range(a, b)] == plain


def test_an_algorithm_is_a_value() -> None:
    one, other = trace(ring, all_reduce(3, 3), "ring"), trace(ring, all_reduce(3, 3), "ring")
    assert isinstance(one, Algorithm)
    assert one == other
    assert hash(one) == hash(other)
