"""The compiler: what it makes of known programs, and that it keeps the meaning of random ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from collective_programs import (
    all_pairs,
    all_reduce,
    random_inputs,
    random_moves,
    ring,
    ring_by_step,
    same_where_asked,
    tree,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.compile import CompileOptions, compile_algorithm
from sennit.collective.compile_slots import least_slots
from sennit.collective.language import Builder, trace
from sennit.collective.verify import verify_schedule
from sennit.errors import CollectiveError
from sennit.ir.algorithm_numpy import run_algorithm
from sennit.ir.collective import Algorithm, Chunks, CollectiveName, CollectiveSpec, Move, MoveKind
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule, Wait
from sennit.ir.schedule_numpy import run_schedule


def opcodes(schedule: Schedule) -> Counter[Opcode]:
    return Counter(i.opcode for ranked in schedule.ranks for block in ranked.blocks for i in block.instructions)


def channels(schedule: Schedule) -> set[int]:
    return {block.channel for ranked in schedule.ranks for block in ranked.blocks}


@pytest.mark.parametrize("program", [ring, ring_by_step])
def test_a_ring_is_one_block_a_rank(program: Callable[[Builder], None]) -> None:
    schedule = compile_algorithm(trace(program, all_reduce(4, 4), "ring"))
    assert schedule.slots == 2  # with 1, every rank would hold a full slot and wait for the next
    for ranked in schedule.ranks:
        (block,) = ranked.blocks
        assert (block.send, block.receive, block.channel) == ((ranked.rank + 1) % 4, (ranked.rank - 1) % 4, 0)
        assert [i.opcode.value for i in block.instructions] == [
            "send",
            "receive_reduce_send",
            "receive_reduce_send",
            "receive_reduce_copy_send",
            "receive_copy_send",
            "receive_copy_send",
            "receive",
        ]
        assert not any(i.after for i in block.instructions)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("program", [ring, ring_by_step, all_pairs, tree])
@pytest.mark.parametrize("in_place", [True, False])
def test_known_programs_are_proved_right(program: Callable[[Builder], None], fuse: bool, in_place: bool) -> None:
    def from_input(b: Builder) -> None:
        for rank in range(b.ranks):
            b.input(rank).copy(to=rank, buffer="output")
        program(b)

    algorithm = trace(from_input, all_reduce(5, 10, in_place=in_place), program.__name__)
    schedule = compile_algorithm(algorithm, CompileOptions(fuse=fuse))
    verify_schedule(schedule)
    assert channels(schedule) == {0}
    assert fuse or all(not (code.sends and code.receives) for code in opcodes(schedule))


def test_instances_and_hints_have_channels_of_their_own() -> None:
    def program(b: Builder) -> None:
        with b.instances(2):
            ring(b)

    schedule = compile_algorithm(trace(program, all_reduce(4, 8), "ring"))
    verify_schedule(schedule)
    assert channels(schedule) == {0, 1}
    assert all(len(ranked.blocks) == 2 for ranked in schedule.ranks)

    def hinted(b: Builder) -> None:
        with b.channel(5):
            ring(b)

    assert channels(compile_algorithm(trace(hinted, all_reduce(4, 4), "ring"))) == {5}


def forward(kinds: str, wanted: tuple[Move, ...] = ()) -> Algorithm:
    """Rank 0 to 1 to 2 by way of two chunks of the input of rank 1; then the moves `wanted`."""
    first, second = (MoveKind.COPY if kind == "c" else MoveKind.REDUCE for kind in kinds)
    spec = CollectiveSpec(CollectiveName.ALL_TO_NEXT, 3, 2)
    middle = Chunks(1, "input", 0, 2)
    moves = (
        Move(first, Chunks(0, "input", 0, 2), middle),
        Move(second, middle, Chunks(2, "input", 0, 2)),
        *wanted,
    )
    return Algorithm("forward", spec, moves)


def test_reduce_and_send_leaves_the_chunk_alone_only_if_all_of_it_is_dead() -> None:
    dead = compile_algorithm(forward("rr"))
    assert opcodes(dead)[Opcode.RECEIVE_REDUCE_SEND] == 1
    half = Move(MoveKind.COPY, Chunks(2, "input", 0, 1), Chunks(1, "input", 0, 1))
    other = Move(MoveKind.COPY, Chunks(1, "input", 1, 1), Chunks(1, "output", 0, 1))
    partly = compile_algorithm(forward("rr", (half, other)))  # the second chunk is read again
    assert opcodes(partly)[Opcode.RECEIVE_REDUCE_COPY_SEND] == 1
    both = Move(MoveKind.COPY, Chunks(0, "input", 0, 2), Chunks(1, "input", 0, 2))
    over = compile_algorithm(forward("rr", (both, other)))  # overwritten whole before it is read
    assert opcodes(over)[Opcode.RECEIVE_REDUCE_SEND] == 1


def test_what_the_collective_asks_for_is_not_dead() -> None:
    spec = CollectiveSpec(CollectiveName.ALL_TO_NEXT, 3, 1)
    copy, reduce = MoveKind.COPY, MoveKind.REDUCE
    for buffer, opcode in (("input", Opcode.RECEIVE_REDUCE_SEND), ("output", Opcode.RECEIVE_REDUCE_COPY_SEND)):
        moves = (
            Move(copy, Chunks(1, "input", 0, 1), Chunks(1, buffer, 0, 1)),
            Move(reduce, Chunks(0, "input", 0, 1), Chunks(1, buffer, 0, 1)),
            Move(copy, Chunks(1, buffer, 0, 1), Chunks(2, "output", 0, 1)),
        )
        assert opcodes(compile_algorithm(Algorithm("kept", spec, moves)))[opcode] == 1


def test_sends_of_part_of_what_was_received_are_not_fused() -> None:
    spec = CollectiveSpec(CollectiveName.ALL_TO_NEXT, 3, 2)
    moves = (
        Move(MoveKind.COPY, Chunks(0, "input", 0, 2), Chunks(1, "output", 0, 2)),
        Move(MoveKind.COPY, Chunks(1, "output", 0, 1), Chunks(2, "output", 0, 1)),
    )
    assert opcodes(compile_algorithm(Algorithm("part", spec, moves))) == {Opcode.SEND: 2, Opcode.RECEIVE: 2}


def test_waits_are_for_the_last_step_needed_and_not_repeated() -> None:
    def program(b: Builder) -> None:
        spare = b.scratch(1, "spare", 2)
        for index in range(2):
            b.chunk(0, "input", index).copy(to=1, buffer="spare", index=index)
        spare.copy(to=1, buffer="output", index=0)  # needs both
        b.chunk(1, "spare", 0).copy(to=2, buffer="output", index=0)  # needs the first
        b.chunk(1, "spare", 1).copy(to=2, buffer="output", index=1)

    schedule = compile_algorithm(
        trace(program, CollectiveSpec(CollectiveName.ALL_TO_NEXT, 3, 2), "waits", check=False),
        CompileOptions(fuse=False),
    )
    receive, local, send = sorted(schedule.ranks[1].blocks, key=lambda b: (b.receive is None, b.send is not None))
    assert [i.after for i in receive.instructions] == [(), ()]
    number = schedule.ranks[1].blocks.index(receive)
    assert [i.after for i in local.instructions] == [(Wait(number, 1),)]
    assert [i.after for i in send.instructions] == [(Wait(number, 0),), (Wait(number, 1),)]


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (Move(MoveKind.COPY, Chunks(0, "input", 0, 1), Chunks(7, "input", 0, 1), line="x.py:3"), "no rank 7"),
        (Move(MoveKind.COPY, Chunks(0, "input", 1, 2), Chunks(1, "input", 0, 2), line="x.py:3"), "out of range"),
        (Move(MoveKind.COPY, Chunks(0, "input", 0, 2), Chunks(1, "input", 0, 1), line="x.py:3"), "counts differ"),
        (Move(MoveKind.REDUCE, Chunks(0, "input", 0, 1), Chunks(0, "input", 0, 1), line="x.py:3"), "overlap"),
        (Move(MoveKind.COPY, Chunks(0, "spare", 0, 1), Chunks(0, "input", 0, 1), line="x.py:3"), "no buffer 'spare'"),
    ],
)
def test_moves_that_cannot_be_compiled(move: Move, words: str) -> None:
    with pytest.raises(CollectiveError, match=words) as caught:
        compile_algorithm(Algorithm("bad", all_reduce(2, 2), (move,)))
    assert caught.value.where == "x.py:3"


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(0, 10**9), st.booleans(), st.sampled_from([1, 2, 3]))
def test_random_programs_keep_their_meaning_with_the_least_slots(seed: int, fuse: bool, tiles: int) -> None:
    algorithm = random_moves(seed)
    schedule = compile_algorithm(algorithm, CompileOptions(fuse=fuse))
    inputs = random_inputs(algorithm, seed, elements=3)
    wanted = run_algorithm(algorithm, inputs)
    assert same_where_asked(algorithm, run_schedule(schedule, inputs, seed=seed, tiles=tiles), wanted)
    if schedule.slots > 1:
        with pytest.raises(CollectiveError, match="deadlock"):
            run_schedule(replace(schedule, slots=schedule.slots - 1), inputs, seed=seed)


def exchange(sends: int) -> tuple[RankSchedule, ...]:
    """Two ranks that each send `sends` messages before they receive any."""
    place = Place("input", 0, 1)
    steps = (Instruction(Opcode.SEND, place),) * sends + (Instruction(Opcode.RECEIVE, None, place),) * sends
    return tuple(RankSchedule(rank, (Block(1 - rank, 1 - rank, 0, steps),)) for rank in (0, 1))


@pytest.mark.parametrize("sends", [1, 2, 5])
def test_slots_of_an_exchange(sends: int) -> None:
    assert least_slots(exchange(sends), "exchange") == sends
    schedule = Schedule("exchange", all_reduce(2, 1), sends, exchange(sends))
    algorithm = Algorithm("nothing", schedule.collective, ())
    for tiles in (1, 2, 4):  # tiles need no more slots
        run_schedule(schedule, random_inputs(algorithm, elements=4), tiles=tiles)


def test_a_cycle_that_no_slots_help() -> None:
    place = Place("input", 0, 1)
    blocks = (
        Block(None, None, 0, (Instruction(Opcode.COPY, place, Place("output", 0, 1), (Wait(1, 0),)),)),
        Block(None, None, 1, (Instruction(Opcode.COPY, place, Place("output", 0, 1), (Wait(0, 0),)),)),
    )
    with pytest.raises(CollectiveError, match="any number of slots") as caught:
        least_slots((RankSchedule(0, blocks),), "stuck")
    assert caught.value.where == "rank 0, block 0, step 0 (copy)"
