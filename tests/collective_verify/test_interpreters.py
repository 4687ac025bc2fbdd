"""Both reference interpreters against what the collectives say, and the deadlock report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rings import ring_algorithm, ring_schedule

from sennit.errors import CollectiveError
from sennit.ir.algorithm_numpy import run_algorithm
from sennit.ir.collective import Algorithm, Chunks, CollectiveName, CollectiveSpec, CustomCollective, Move, MoveKind
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule
from sennit.ir.schedule_numpy import run_schedule


def random_inputs(ranks: int, chunks: int, elements: int = 5) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(-1000, 1000, (chunks, elements)) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_ring_sums(ranks: int) -> None:
    inputs = random_inputs(ranks, ranks)
    for output in run_algorithm(ring_algorithm(ranks), inputs):
        np.testing.assert_array_equal(output, sum(inputs))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("tiles", [1, 2, 7])
def test_a_compiled_ring_sums_under_every_seed(ranks: int, tiles: int) -> None:
    inputs = random_inputs(ranks, ranks)
    for seed in range(5):
        for output in run_schedule(ring_schedule(ranks), inputs, seed=seed, tiles=tiles):
            np.testing.assert_array_equal(output, sum(inputs))


def test_in_place_the_smaller_buffer_is_a_part_of_the_larger() -> None:
    gather = CollectiveSpec(CollectiveName.ALL_GATHER, 2, 1, in_place=True)
    moves = (
        Move(MoveKind.COPY, Chunks(0, "output", 0, 1), Chunks(1, "output", 0, 1)),
        Move(MoveKind.COPY, Chunks(1, "input", 0, 1), Chunks(0, "output", 1, 1)),
    )
    inputs = random_inputs(2, 1)
    for output in run_algorithm(Algorithm("gather", gather, moves), inputs):
        np.testing.assert_array_equal(output, np.concatenate(inputs))


def test_what_nobody_wrote_is_not_a_number() -> None:
    custom = CustomCollective("nothing", (1,), (2,), ((None, None),))
    (output,) = run_algorithm(Algorithm("nothing", custom, ()), [np.ones((1, 3))])
    assert np.isnan(output).all()


def test_a_deadlock_says_where_every_block_stands() -> None:
    place = Place("output", 0, 1)
    receive, send = Instruction(Opcode.RECEIVE, target=place), Instruction(Opcode.SEND, source=place)
    ranks = tuple(RankSchedule(r, (Block(1 - r, 1 - r, 0, (receive, send)),)) for r in range(2))
    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, 2, 1, in_place=True)
    with pytest.raises(CollectiveError, match=r"rank 1, block 0: at step 0 \(receive\).*message from rank 0") as caught:
        run_schedule(Schedule("stuck", spec, 1, ranks), random_inputs(2, 1))
    assert "rank 0, block 0" in str(caught.value)


def test_sends_wait_for_a_slot() -> None:
    def exchange(slots: int) -> Schedule:
        sends = tuple(Instruction(Opcode.SEND, source=Place("input", i, 1)) for i in range(2))
        receives = tuple(Instruction(Opcode.RECEIVE, target=Place("output", i, 1)) for i in range(2))
        ranks = tuple(RankSchedule(r, (Block(1 - r, 1 - r, 0, sends + receives),)) for r in range(2))
        wanted = tuple(tuple(((i, 1 << (1 - r)),) for i in range(2)) for r in range(2))
        return Schedule("exchange", CustomCollective("exchange", (2, 2), (2, 2), wanted), slots, ranks)

    inputs = random_inputs(2, 2)
    left, right = run_schedule(exchange(2), inputs)
    np.testing.assert_array_equal(left, inputs[1])
    np.testing.assert_array_equal(right, inputs[0])
    with pytest.raises(CollectiveError, match="free slot to rank 1"):
        run_schedule(exchange(1), inputs)


def test_messages_of_the_wrong_size_and_unread_ones_are_errors() -> None:
    schedule = ring_schedule(2)
    ranked = schedule.ranks[1]
    block = ranked.blocks[0]
    wide = replace(block.instructions[0], source=Place("output", 0, 2))
    wrong = replace(ranked, blocks=(replace(block, instructions=(wide, *block.instructions[1:])),))
    with pytest.raises(CollectiveError, match="a message of 2 chunks arrives"):
        run_schedule(replace(schedule, ranks=(schedule.ranks[0], wrong)), random_inputs(2, 2))
    short = replace(ranked, blocks=(replace(block, instructions=block.instructions[:-1]),))
    with pytest.raises(CollectiveError, match="unread"):
        run_schedule(replace(schedule, ranks=(schedule.ranks[0], short)), random_inputs(2, 2))
