from __future__ import annotations

import random

import pytest
from engine_oracle import run as slow_run
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.sim.engine import Tasks, run
from sennit.sim.turns import Turn


def flow(tasks: Tasks, wires: dict[int, float], bandwidth: list[float], latency: float = 0.0) -> int:
    drain = max(size / bandwidth[wire] for wire, size in wires.items())
    return tasks.add(latency, drain, max(wires.values()), tuple(wires.items()))


def test_a_flow_alone_takes_its_closed_form() -> None:
    tasks = Tasks()
    flow(tasks, {0: 10.0, 1: 10.0}, [5.0, 2.0], latency=1.0)
    assert run(tasks, [5.0, 2.0]).stop == [6.0]


def test_two_flows_share_a_wire_and_the_second_speeds_up_when_the_first_ends() -> None:
    tasks = Tasks()
    flow(tasks, {0: 10.0}, [1.0])
    flow(tasks, {0: 20.0}, [1.0])
    # both at 1/2 until 20, then 10 bytes are left for the second alone
    assert run(tasks, [1.0]).stop == pytest.approx([20.0, 30.0])


def test_max_min_fairness_gives_the_rest_to_those_who_can_use_it() -> None:
    bandwidth = [1.0, 10.0]
    tasks = Tasks()
    # two flows are held to 1/2 by wire 0; the third gets the other 9.5 of wire 1
    flow(tasks, {0: 100.0}, bandwidth)
    flow(tasks, {0: 100.0, 1: 100.0}, bandwidth)
    flow(tasks, {1: 9.5}, bandwidth)
    assert run(tasks, bandwidth).stop[2] == pytest.approx(1.0)


def test_cores_are_shared_evenly() -> None:
    tasks = Tasks()
    for seconds in (1.0, 1.0, 1.0, 2.0):
        tasks.add(0.0, seconds, workers=((0, 1),))
    # four on two cores: half speed until 2; then one alone with 1 second left
    assert run(tasks, [], [2.0]).stop == pytest.approx([2.0, 2.0, 2.0, 3.0])


def test_a_transfer_that_keeps_a_part_of_a_core_busy_slows_compute_down_by_as_much() -> None:
    tasks = Tasks()
    tasks.add(0.0, 10.0, 10.0, ((0, 10.0),), ((0, 0.25),))
    tasks.add(0.0, 4.0, workers=((0, 1),))
    # at 1 / 1.25 of their speed until 5
    assert run(tasks, [1.0], [1.0]).stop == pytest.approx([11.0, 5.0])


def opposite(first_compute: float, receive_after: float) -> tuple[Tasks, int, int]:
    """A message one way after some compute, and one the other way that is ready from the beginning; its receiver, the
    sender of the first, posts the receive after its own compute."""
    tasks = Tasks()
    compute, other = tasks.add(0.0, first_compute), tasks.add(0.0, receive_after)
    there, back = flow(tasks, {0: 10.0}, [1.0, 1.0], latency=1.0), flow(tasks, {1: 5.0}, [1.0, 1.0], latency=1.0)
    tasks.order(compute, there)
    tasks.order(other, back)
    tasks.turns = {there: Turn(0, True, (), 0, 0), back: Turn(0, False, (other,), 1, 1)}
    return tasks, there, back


def test_a_message_under_way_holds_up_the_announcement_of_a_receive() -> None:
    tasks, there, back = opposite(first_compute=2.0, receive_after=4.0)
    result = run(tasks, [1.0, 1.0])
    # there goes from 2 to 13; the receive of back, posted at 4, is announced behind it
    assert (result.start[back], result.stop[back], result.cause[back]) == (13.0, 19.0, there)


def test_at_one_time_the_send_that_was_posted_first_goes_first() -> None:
    tasks, _, back = opposite(first_compute=4.0, receive_after=4.0)
    assert run(tasks, [1.0, 1.0]).stop[back] == 21.0


def test_a_receive_that_was_announced_in_time_goes_at_once() -> None:
    tasks, there, back = opposite(first_compute=4.0, receive_after=3.0)
    result = run(tasks, [1.0, 1.0])
    assert (result.stop[there], result.stop[back]) == (15.0, 9.0)


def test_a_bucket_lets_through_at_once_what_it_has_saved() -> None:
    tasks = Tasks()
    first, pause, second = flow(tasks, {0: 10.0}, [2.0]), tasks.add(0.0, 0.5), flow(tasks, {0: 10.0}, [2.0])
    tasks.order(first, pause)
    tasks.order(pause, second)
    # 4 bytes pass at once; half a second later the bucket has 1 again
    assert run(tasks, [2.0], (), {0: 4.0}).stop == pytest.approx([3.0, 3.5, 8.0])


def test_a_cause_is_the_last_dependency_to_end() -> None:
    tasks = Tasks()
    slow, fast, last = tasks.add(0.0, 5.0), tasks.add(0.0, 1.0), tasks.add(0.0, 1.0)
    tasks.order(slow, last)
    tasks.order(fast, last)
    result = run(tasks, [])
    assert (result.start[last], result.cause[last], result.cause[slow]) == (5.0, slow, -1)


def test_a_cycle_is_reported_as_stuck() -> None:
    tasks = Tasks()
    first, second = tasks.add(0.0, 1.0), tasks.add(0.0, 1.0)
    tasks.order(first, second)
    tasks.order(second, first)
    assert run(tasks, []).stuck == (first, second)


WIRES = st.dictionaries(st.integers(0, 3), st.sampled_from([1.0, 3.0, 10.0]), min_size=1, max_size=3)


@st.composite
def task_lists(draw: st.DrawFn) -> list[Row]:
    """Latency, bytes by wire (none: a compute task), workers, dependencies on earlier tasks, and for some flows
    the connection and the direction; their receivers wait for the first dependency, if there is one."""
    rows = []
    for number in range(draw(st.integers(1, 12))):
        wires = draw(st.one_of(st.just({}), WIRES))
        workers = draw(st.integers(0, 2)) if not wires else 0
        before = draw(st.lists(st.integers(0, number - 1), max_size=2, unique=True)) if number else []
        turn = draw(st.sampled_from([None, (0, True), (0, False), (1, True), (1, False)])) if wires else None
        rows.append((draw(st.sampled_from([0.0, 0.5, 1.0])), wires, workers, before, turn))
    return rows


BANDWIDTH = [1.0, 2.0, 5.0, 5.0]


Row = tuple[float, dict[int, float], int, list[int], tuple[int, bool] | None]


def tasks_of(rows: list[Row], order: list[int]) -> tuple[Tasks, dict[int, int]]:
    """The tasks, put in by `order`, and the task of each row."""
    tasks = Tasks()
    task_of = {}
    for row in order:
        latency, wires, workers, _, turn = rows[row]
        if wires:
            task_of[row] = flow(tasks, wires, BANDWIDTH, latency)
        else:
            task_of[row] = tasks.add(latency, 1.5, workers=((0, workers),) if workers else ())
    for row in order:
        for before in rows[row][3]:
            tasks.order(task_of[before], task_of[row])
    for row in order:
        *_, before, turn = rows[row]
        if turn is not None:
            waits = tuple(task_of[other] for other in before[:1])
            tasks.turns[task_of[row]] = Turn(*turn, waits, sent=row % 3, received=row % 2)
    return tasks, task_of


BURSTS = st.dictionaries(st.integers(0, 3), st.sampled_from([0.5, 2.0, 20.0]), max_size=3)


def play(rows: list[Row], order: list[int], burst: dict[int, float] | None = None) -> list[float]:
    """The end of each row's task."""
    tasks, task_of = tasks_of(rows, order)
    result = run(tasks, BANDWIDTH, [2.0], burst)
    assert not result.stuck
    return [result.stop[task_of[row]] for row in range(len(rows))]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(task_lists(), BURSTS, st.integers(0, 1000))
def test_the_order_of_insertion_means_nothing(rows: list[Row], burst: dict[int, float], seed: int) -> None:
    order = list(range(len(rows)))
    plain = play(rows, order, burst)
    random.Random(seed).shuffle(order)
    assert play(rows, order, burst) == pytest.approx(plain, rel=1e-9)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(task_lists())
def test_never_below_the_cut_nor_the_longest_chain(rows: list[Row]) -> None:
    stop = play(rows, list(range(len(rows))))
    span = max(stop) * (1 + 1e-9)
    for wire, rate in enumerate(BANDWIDTH):
        assert sum(row[1].get(wire, 0.0) for row in rows) / rate <= span
    chain: list[float] = []
    for latency, wires, _, before, _ in rows:
        alone = latency + (max(size / BANDWIDTH[wire] for wire, size in wires.items()) if wires else 1.5)
        chain.append(alone + max((chain[other] for other in before), default=0.0))
    assert all(mine <= end * (1 + 1e-9) for mine, end in zip(chain, stop, strict=True))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(task_lists(), st.sampled_from([(), (2.0,)]), BURSTS)
def test_it_equals_the_oracle_that_puts_every_task_through_the_heap(
    rows: list[Row], cores: tuple[float, ...], burst: dict[int, float]
) -> None:
    if not cores:
        rows = [(latency, wires, 0, before, turn) for latency, wires, _, before, turn in rows]
    tasks, _ = tasks_of(rows, list(range(len(rows))))
    fast, slow = run(tasks, BANDWIDTH, cores, burst), slow_run(tasks, BANDWIDTH, cores, burst)
    assert (fast.start, fast.stop) == (slow.start, slow.stop)
    for task, cause in enumerate(fast.cause):
        assert (cause < 0) == (slow.cause[task] < 0)
        assert cause < 0 or fast.stop[cause] == fast.start[task]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(task_lists(), st.sampled_from([1.0, 1.5, 4.0]))
def test_without_contention_more_bandwidth_is_never_slower(rows: list[Row], factor: float) -> None:
    """Each flow has wires of its own: the schedule is fixed, and only the flows get faster."""
    rates = [rate for _ in rows for rate in BANDWIDTH]
    apart = [
        (latency, {4 * number + wire: size for wire, size in wires.items()}, 0, before)
        for number, (latency, wires, _, before, _) in enumerate(rows)
    ]

    def stops(bandwidth: list[float]) -> list[float]:
        tasks = Tasks()
        for latency, wires, _, _ in apart:
            if wires:
                flow(tasks, wires, bandwidth, latency)
            else:
                tasks.add(latency, 1.5)
        for number, (*_, before) in enumerate(apart):
            for other in before:
                tasks.order(other, number)
        return run(tasks, bandwidth).stop

    slow, fast = stops(rates), stops([rate * factor for rate in rates])
    assert all(after <= before * (1 + 1e-12) for before, after in zip(slow, fast, strict=True))
