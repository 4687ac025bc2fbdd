"""The clock of a training step against its bounds and a slow, tick-by-tick model; the buckets against all bucketings."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.fuse.buckets import Gradient, by_size, earliest_end
from sennit.fuse.clock import BucketTime, Sharing, Timing, full_overlap, steady_state, tight


@st.composite
def timings(draw: st.DrawFn, next_step: bool = True) -> Timing:
    kernels = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    buckets = []
    made = draw(st.lists(st.integers(0, len(kernels) - 1), max_size=5))
    for ready in made:  # forward kernels need parameters, and all gradients come after them
        needed = draw(st.none() | st.integers(0, min(made))) if next_step else None
        buckets.append(
            BucketTime(
                ready, float(draw(st.integers(1, 12))), float(draw(st.integers(0, 2))), draw(st.integers(0, 2)), needed
            )
        )
    return Timing(tuple(map(float, kernels)), tuple(buckets), draw(st.booleans()))


def ticks(timing: Timing, steps: int, issued: int = 0) -> list[int]:
    """The same model in ticks of one second, written as directly as possible; the end of each step."""
    now, waiting, carrying, left, owing = 0, [], None, 0, 0
    done: set[int] = set()
    taken: list[int] = []
    ends: list[int] = []

    def take() -> None:
        nonlocal carrying, left, owing
        waiting.sort()
        if carrying is None and waiting and (timing.by_priority or waiting[0][2] == len(taken) % len(timing.buckets)):
            _, _, carrying = waiting.pop(0)
            left = int(timing.buckets[carrying].seconds)
            owing += issued
            taken.append(carrying)

    def tick() -> None:
        nonlocal now, carrying, left
        now += 1
        if carrying is not None:
            left -= 1
            if left == 0:
                done.add(carrying)
                carrying = None
                take()

    def compute(seconds: int) -> None:
        nonlocal owing
        while seconds:
            if carrying is not None:
                seconds, owing = seconds + owing, 0
            tick()
            seconds -= 1

    def settle(number: int) -> None:
        nonlocal owing
        while number not in done:
            owing = 0
            tick()
        done.discard(number)
        compute(int(timing.buckets[number].update))

    owed: set[int] = set()
    for _ in range(steps):
        for kernel, seconds in enumerate(timing.kernels):
            for number, bucket in enumerate(timing.buckets):
                if bucket.needed == kernel and number in owed:
                    owed.discard(number)
                    settle(number)
            compute(int(seconds))
            for number, bucket in enumerate(timing.buckets):
                if bucket.ready == kernel:
                    if number in owed:
                        owed.discard(number)
                        settle(number)
                    waiting.append((bucket.priority if timing.by_priority else number, now, number))
                    take()
        for number, bucket in enumerate(timing.buckets):
            if bucket.needed is None:
                settle(number)
        owed = {number for number, bucket in enumerate(timing.buckets) if bucket.needed is not None}
        ends.append(now)
    return ends


@settings(derandomize=True, deadline=None, max_examples=300)
@given(timing=timings(), issued=st.integers(0, 2))
def test_the_clock_is_the_model(timing: Timing, issued: int) -> None:
    found = steady_state(timing, Sharing(issued=float(issued)))
    ends = ticks(timing, 30, issued)
    if found.settled:
        assert found.seconds == pytest.approx(ends[-1] - ends[-2])
    assert found.seconds >= full_overlap(timing) - 1e-9 or not found.settled


@settings(derandomize=True, deadline=None, max_examples=200)
@given(timing=timings(next_step=False))
def test_in_one_step_the_tight_bound_holds(timing: Timing) -> None:
    found = steady_state(timing)
    assert found.settled
    assert found.seconds >= tight(timing) - 1e-9 >= full_overlap(timing) - 2e-9


def test_waiting_in_the_next_step_hides_what_one_step_cannot() -> None:
    kernels = (10.0, 10.0)  # forward, backward; the gradient comes at the end
    same = Timing(kernels, (BucketTime(1, 8.0),))
    later = Timing(kernels, (BucketTime(1, 8.0, needed=1),))
    assert steady_state(same).seconds == 28.0
    assert steady_state(later).seconds == 20.0


def test_sharing_slows_both() -> None:
    timing = Timing((10.0, 10.0), (BucketTime(0, 5.0),))
    assert steady_state(timing, Sharing(compute_rate=0.5)).seconds == 22.5  # 5 s at half rate
    assert steady_state(timing, Sharing(channel_rate=0.25)).seconds == 22.5  # 2.5 s are left when the kernels end


def test_a_bucket_costs_computing_when_it_is_taken() -> None:
    sharing = Sharing(issued=1.0)
    assert steady_state(Timing((10.0, 10.0), (BucketTime(0, 5.0),)), sharing).seconds == 21.0
    assert steady_state(Timing((10.0, 10.0), (BucketTime(0, 2.0), BucketTime(0, 2.0))), sharing).seconds == 22.0
    assert steady_state(Timing((10.0,), (BucketTime(0, 5.0),)), sharing).seconds == 15.0  # nothing computes meanwhile


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    gaps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), min_size=1, max_size=7),
    latency=st.integers(0, 5),
)
def test_the_buckets_are_the_best_of_all(gaps: list[tuple[int, int]], latency: int) -> None:
    ready, gradients = 0, []
    for gap, size in gaps:
        ready += gap
        gradients.append(Gradient(f"p{len(gradients)}", float(ready), size))

    def end_of(ends: list[int]) -> float:
        now, start = 0.0, 0
        for end in ends:
            part = gradients[start:end]
            now = max(now, part[-1].ready) + latency + 0.1 * sum(item.bytes for item in part)
            start = end
        return now

    count = len(gradients)
    every = [[*cuts, count] for size in range(count) for cuts in combinations(range(1, count), size)]
    ends, finish = earliest_end(gradients, latency, 0.1)
    assert finish == pytest.approx(min(map(end_of, every))) == pytest.approx(end_of(ends))


def test_by_size_closes_a_bucket_when_it_is_full() -> None:
    gradients = [Gradient(f"p{number}", float(number), 10) for number in range(5)]
    assert by_size(gradients, 20) == [2, 4, 5]
    assert by_size(gradients, 20, first=5) == [1, 3, 5]
