"""Rounds of messages: they are matched, keep to the slots, and do what the schedule does; on one process first, then on
gloo ranks.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from p2p_cases import algorithms, views_and_types, wrong_schedules

from sennit.cluster.ranks_torch import GlooRanks
from sennit.collective.compile import CompileOptions, compile_algorithm
from sennit.collective.library import ring_all_reduce
from sennit.collective.runtime.p2p_plan import Local, Location, P2PPlan, Slot, plan_p2p
from sennit.errors import CollectiveError
from sennit.ir.algorithm_numpy import allocate_buffers
from sennit.ir.collective import Algorithm
from sennit.ir.layout_numpy import Array
from sennit.ir.schedule import Schedule
from sennit.ir.schedule_numpy import run_schedule

SHAPES = ((1, 2), (1, 3), (1, 4), (2, 2), (1, 5), (2, 3), (3, 2))


class Machine:
    """All ranks' rounds in lockstep, on numpy arrays of (chunks, elements)."""

    def __init__(self, plans: list[P2PPlan], inputs: list[Array]) -> None:
        schedule = plans[0].schedule
        scratch = [piece for ranked in schedule.ranks for piece in ranked.scratch]
        self.plans = plans
        self.buffers = allocate_buffers(schedule.collective, scratch, inputs)
        self.slots: list[dict[tuple[int, int, int], Array]] = [{} for _ in plans]

    def view(self, rank: int, location: Location, tile: int) -> Array:
        if isinstance(location, Slot):
            rows = self.slots[rank][location.peer, location.channel, location.index]
            assert len(rows) == location.count
            return rows
        rows = self.buffers[rank][location.buffer][location.start : location.start + location.count]
        width, tiles = rows.shape[1], self.plans[rank].tiles
        return rows[:, width * tile // tiles : width * (tile + 1) // tiles]

    def run(self) -> list[Array]:
        for number in range(max(len(plan.rounds) for plan in self.plans)):
            self.exchange(number)
            for rank, plan in enumerate(self.plans):
                for work in plan.rounds[number].work if number < len(plan.rounds) else ():
                    self.do(rank, work)
        return [held["output"] for held in self.buffers]

    def exchange(self, number: int) -> None:
        flying: dict[tuple[int, int], list[Array]] = defaultdict(list)
        for rank, plan in enumerate(self.plans):
            for transfer in plan.rounds[number].sends if number < len(plan.rounds) else ():
                flying[rank, transfer.peer].append(self.view(rank, transfer.location, transfer.tile).copy())
        for rank, plan in enumerate(self.plans):
            for transfer in plan.rounds[number].receives if number < len(plan.rounds) else ():
                message = flying[transfer.peer, rank].pop(0)
                if isinstance(slot := transfer.location, Slot):
                    self.slots[rank][slot.peer, slot.channel, slot.index] = message
                else:
                    self.view(rank, slot, transfer.tile)[...] = message
        assert not any(flying.values()), "a message that nobody receives in its round"

    def do(self, rank: int, work: Local) -> None:
        source, target = self.view(rank, work.source, work.tile), self.view(rank, work.target, work.tile)
        if work.reduce:
            target += source
        else:
            target[...] = source


@lru_cache
def shaped(shape: tuple[int, int]) -> tuple[Algorithm, ...]:
    return tuple(algorithms(*shape))


def most_kept(plan: P2PPlan) -> int:
    """The most messages of one connection that wait in slots at a time."""
    return 1 + max(
        (t.location.index for item in plan.rounds for t in item.receives if isinstance(t.location, Slot)), default=-1
    )


def check(schedule: Schedule, elements: int, tiles: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    spec = schedule.collective
    inputs = [draw.integers(-99, 99, (spec.input_chunks(r), elements)) for r in range(spec.ranks)]
    plans = [plan_p2p(schedule, rank, tiles=tiles) for rank in range(spec.ranks)]
    assert all(most_kept(plan) <= schedule.slots for plan in plans)
    outputs = Machine(plans, inputs).run()
    for rank, (got, wanted) in enumerate(zip(outputs, run_schedule(schedule, inputs, tiles=tiles), strict=True)):
        for index in range(spec.output_chunks(rank)):
            if spec.after(rank, index) is not None:
                np.testing.assert_array_equal(got[index], wanted[index])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rounds_do_what_the_schedule_does(shape: tuple[int, int]) -> None:
    for number, algorithm in enumerate(shaped(shape)):
        check(compile_algorithm(algorithm), elements=3, tiles=1, seed=number)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.sampled_from(SHAPES),
    st.integers(0, 100),
    st.integers(1, 4),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_tiles_options_and_more_slots(
    shape: tuple[int, int], pick: int, tiles: int, elements: int, fuse: bool, share: bool, spare: int
) -> None:
    found = shaped(shape)
    compiled = compile_algorithm(found[pick % len(found)], CompileOptions(fuse=fuse, share_blocks=share))
    schedule = Schedule(compiled.name, compiled.collective, compiled.slots + spare, compiled.ranks)
    check(schedule, elements, tiles, seed=pick)


def test_a_ring_takes_one_round_a_step_and_no_local_copy() -> None:
    plan = plan_p2p(compile_algorithm(ring_all_reduce(4, in_place=True)), 1)
    assert len(plan.rounds) == 2 * 3
    assert plan.messages == 2 * 3
    assert all(work.reduce for item in plan.rounds for work in item.work)


def test_a_schedule_without_enough_slots_is_refused() -> None:
    text = """
    schedule "knot" all_to_all(ranks=2, chunks=1) slots=1 {
      rank 0 { block 0 send=1 receive=1 channel=0 {
        send from input[1:2]
        send from input[0:1]
        receive to output[1:2]
        receive to output[0:1] } }
      rank 1 { block 0 send=0 receive=0 channel=0 {
        send from input[0:1]
        send from input[1:2]
        receive to output[0:1]
        receive to output[1:2] } }
    }
    """
    from sennit.ir.text import Scanner

    schedule = Scanner.whole(text, Schedule.read)
    with pytest.raises(CollectiveError, match="deadlocks with 1 slots"):
        plan_p2p(schedule, 0)
    assert len(plan_p2p(Schedule("knot", schedule.collective, 2, schedule.ranks), 0).rounds) == 2


def test_wrong_numbers_are_named() -> None:
    schedule = compile_algorithm(ring_all_reduce(3))
    with pytest.raises(CollectiveError, match="rank 3 of a schedule for 3"):
        plan_p2p(schedule, 3)
    with pytest.raises(CollectiveError, match="0 tiles"):
        plan_p2p(schedule, 0, tiles=0)


@pytest.mark.parametrize(("shape", "tiles", "sizes"), [((1, 3), 2, (48,)), ((2, 2), 1, (0, 7))], ids=str)
def test_every_collective_on_gloo_ranks(shape: tuple[int, int], tiles: int, sizes: tuple[int, ...]) -> None:
    with GlooRanks(
        shape[0] * shape[1], preload=("sennit.collective.runtime.p2p_torch", "sennit.collective.library")
    ) as ranks:
        for rank, wrong in enumerate(ranks.call(wrong_schedules, *shape, sizes, tiles)):
            assert not wrong, f"rank {rank}: {wrong}"


def test_views_types_and_groups_on_gloo_ranks() -> None:
    with GlooRanks(3, preload=("sennit.collective.runtime.p2p_torch", "sennit.collective.library")) as ranks:
        assert ranks.call(views_and_types) == [[], [], []]
