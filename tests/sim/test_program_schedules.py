"""Compiled schedules as the collectives of a program, and times by size class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import Topology, load
from sennit.collective.baseline import nccl_ring
from sennit.collective.program_times import schedule_times
from sennit.collective.simulate import simulate_schedule
from sennit.cost import Transfer, by_size_class, collective
from sennit.ir.event import Category
from sennit.ir.program import CollectiveKind, Program
from sennit.sim import simulate_fully

Maker = Callable[[int, int], Program]
REDUCE = CollectiveKind.ALL_REDUCE


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 1 << 24))
def test_a_straight_line_is_found_exactly_and_asked_for_at_powers_of_two(size: int) -> None:
    topology = Topology.of(load("dgx-a100"))
    group = (0, 1, 2, 3)
    asked: list[int] = []

    def times(kind: CollectiveKind, members: tuple[int, ...], size: int) -> Transfer | None:
        asked.append(size)
        return Transfer(1e-5, ((0, 1.5 * size), (3, float(size))), "line", 0, floor=2e-9 * size)

    found = by_size_class(times)(REDUCE, group, size)
    assert found is not None
    assert found.seconds(topology) == pytest.approx(1e-5 + max(2e-9 * size, 1.5 * size / topology.wires[0].bandwidth))
    assert all(value & (value - 1) == 0 for value in asked)
    assert found.wire_bytes == collective(topology, REDUCE, group, size).wire_bytes


def test_nothing_known_stays_nothing() -> None:
    assert by_size_class(lambda *_: None)(REDUCE, (0, 1), 100) is None


def test_a_program_runs_its_collective_by_a_schedule(tensor_parallel: Maker) -> None:
    cluster = load("ndv4")
    schedule = nccl_ring(cluster)
    program = tensor_parallel(8, 1024)  # reduces 4 MiB: a power of two
    times = schedule_times({(REDUCE, 8): schedule}, cluster)
    timeline = simulate_fully(program, cluster, collectives=times).timeline
    (reduce,) = {(event.start, event.stop) for event in timeline.events if event.category is Category.COLLECTIVE}
    alone = simulate_schedule(schedule, cluster, 4 << 20).span
    assert reduce[1] - reduce[0] == pytest.approx(alone, rel=0.02)
    # a group that the schedule is not for keeps the closed form
    four = tensor_parallel(4, 1024)
    assert simulate_fully(four, cluster, collectives=times).timeline.span == pytest.approx(
        simulate_fully(four, cluster).timeline.span
    )
