"""The figures of the table in plan/schedules.py, against the recurrence; and that every pattern prints, parses and
runs.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.errors import PlanError
from sennit.plan.grid import Durations, Held, chain, draw, times
from sennit.plan.pattern import Pattern, one_forward_one_backward
from sennit.plan.schedules import (
    chimera,
    dual_pipe_v,
    gpipe,
    interlaced,
    interleaved,
    pass_after_pass,
    several_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_h2,
)

UNIT = Durations(1.0, 1.0, 1.0)
lanes = st.integers(1, 8)
rounds = st.integers(1, 4)
seconds = st.sampled_from([0.5, 1.0, 2.0, 3.25])


def whole_step_idle(pattern, stages, durations=UNIT):
    grid = times(pattern, (durations,) * stages)
    return [grid.span - grid.busy(lane) for lane in range(len(pattern.rows))]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(lanes, st.integers(1, 20), seconds, seconds, seconds)
def test_gpipe_and_1f1b_idle_for_all_but_one_stage(stages, microbatches, f, b, w):
    durations = Durations(f, b, w)
    expected = pytest.approx([(stages - 1) * (f + b + w)] * stages)
    assert whole_step_idle(gpipe(stages, microbatches), stages, durations) == expected
    assert whole_step_idle(one_forward_one_backward(stages, microbatches), stages, durations) == expected
    grid = times(one_forward_one_backward(stages, microbatches), (durations,) * stages)
    assert grid.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert grid.peaks((Held(),) * stages) == tuple(min(microbatches, stages - stage) for stage in range(stages))
    assert times(gpipe(stages, microbatches), (durations,) * stages).peaks((Held(),) * stages)[0] == microbatches


@settings(derandomize=True, deadline=None, max_examples=30)
@given(lanes, rounds, st.integers(1, 4), seconds)
def test_interleaved_divides_the_bubble_by_the_chunks(lanes, rounds, chunks, f):
    pattern = interleaved(lanes, lanes * rounds, chunks)
    durations = Durations(f, f, f)
    stages = lanes * chunks
    assert whole_step_idle(pattern, stages, durations) == pytest.approx([(lanes - 1) * 3 * f] * lanes)  # of one chunk
    peak = times(pattern, (durations,) * stages).peaks((Held(),) * stages)[0]
    assert peak <= lanes * chunks + lanes - 1


@settings(derandomize=True, deadline=None, max_examples=30)
@given(lanes, st.integers(0, 12))
def test_zero_bubble(stages, more):
    microbatches = 2 * stages + more
    first = times(zero_bubble_h1(stages, microbatches), (UNIT,) * stages)
    assert first.span - first.busy(0) == pytest.approx(stages - 1)  # (S-1) (f + b - w)
    assert max(first.peaks((Held(),) * stages)) == stages
    second = times(zero_bubble_h2(stages, microbatches), (UNIT,) * stages)
    assert [second.idle(lane) for lane in range(stages)] == pytest.approx([0.0] * stages)
    assert max(second.peaks((Held(),) * stages)) == 2 * stages - 1


@settings(derandomize=True, deadline=None, max_examples=20)
@given(lanes, st.integers(0, 10))
def test_dual_pipe_v(lanes, more):
    pattern = dual_pipe_v(lanes, 2 * lanes + more)
    assert pattern.stages == tuple((lane, 2 * lanes - 1 - lane) for lane in range(lanes))
    assert whole_step_idle(pattern, 2 * lanes) == pytest.approx([lanes - 1] * lanes)
    peaks = times(pattern, (UNIT,) * 2 * lanes).peaks((Held(),) * 2 * lanes)
    assert max(peaks) <= 2 * lanes + 1  # half of a lane each


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(1, 5))
def test_chimera_of_one_unit(half):
    stages = 2 * half
    grid = times(chimera(stages, half), (Durations(1.0, 1.0, 0.0),) * stages)
    total = 2 * half  # micro-batches of both directions
    assert grid.bubble == pytest.approx((stages - 2) / (2 * total + stages - 2))


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(1, 6), st.integers(1, 10))
def test_special_schedules_run_and_print(lanes, microbatches):
    patterns = [
        (several_forward_one_backward(lanes, microbatches), 3 * lanes),
        (pass_after_pass(lanes, microbatches), 3 * lanes),
        (interlaced(lanes, microbatches, in_flight=lanes + 4), lanes + 2),
        (chimera(2 * lanes, microbatches), 2 * lanes),
    ]
    for pattern, stages in patterns:
        assert Pattern.parse(str(pattern)) == pattern
        grid = times(pattern, (UNIT,) * stages)
        assert grid.span > 0
        assert len(draw(grid).splitlines()) == len(pattern.rows)


def test_grid_is_drawn():
    grid = times(one_forward_one_backward(2, 3), (Durations(1.0, 1.0, 1.0),) * 2)
    assert draw(grid) == (
        "lane 0 F0 F1 .  .  B0 -  F2 B1 -  .  B2 -\n"  # 2 s of backward on each lane
        "lane 1 .  F0 B0 -  F1 B1 -  F2 B2 -  .  .\n"
    )


def test_transfers_take_time_and_no_lane():
    pattern = one_forward_one_backward(2, 1)
    slow = times(pattern, (Durations(1.0, 1.0, 0.0),) * 2, transfer={(0, 1): 0.5})
    assert slow.span == pytest.approx(5.0)
    assert slow.busy(0) == pytest.approx(2.0)


def test_a_pattern_that_waits_for_itself_is_refused():
    pattern = Pattern.parse("0F0 0B0 1F0 1B0\n2F0 2B0")
    with pytest.raises(PlanError, match="wait for each other"):
        times(pattern, (UNIT,) * 3, chain(3))


def test_bad_sizes():
    with pytest.raises(PlanError, match="groups of 4"):
        interleaved(4, 6, 2)
    with pytest.raises(PlanError, match="even number"):
        chimera(3, 4)
    with pytest.raises(PlanError, match="at least 8"):
        dual_pipe_v(4, 7)


def test_a_picture_has_a_block_for_each_task():
    from sennit.report.schedule_svg import schedules_svg

    grid = times(zero_bubble_h1(3, 4), (UNIT,) * 3)
    picture = schedules_svg([("H1", grid)])
    assert picture.count('class="block') == 3 * 3 * 4
    assert "lane 2" in picture
