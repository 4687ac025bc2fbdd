"""Modulo schedules: right by the oracle, at the bound where a schedule is known to be, within caps always."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.errors import PlanError
from sennit.plan.grid import Durations, Held, chain, times
from sennit.plan.modulo import Problem, fits, schedule


def plain(stages, cap=inf, split=False, durations=Durations(1.0, 1.0, 1.0)):  # noqa: B008
    return Problem(
        tuple((stage,) for stage in range(stages)),
        (durations,) * stages,
        chain(stages),
        (True,) * stages,
        (Held(),) * stages,
        (float(cap),) * stages,
        split=split,
    )


def test_known_schedules_have_no_bubble():
    assert schedule(plain(16, 16)).gap == pytest.approx(0.0)
    assert schedule(plain(8, 8, split=True)).gap == pytest.approx(0.0)
    recycled = Problem(
        tuple((stage % 8,) for stage in range(24)),
        (Durations(),) * 24,
        chain(24),
        (False,) * 16 + (True,) * 8,
        (Held(),) * 24,
        (10.0,) * 8,
    )
    assert schedule(recycled, solver=False).gap == pytest.approx(0.0)
    everywhere = tuple(range(8))
    shared = Problem(
        (everywhere, *((lane,) for lane in range(8)), everywhere),
        (Durations(1, 1, 0), *(Durations(2, 2, 2),) * 8, Durations(1, 2, 0)),
        chain(10),
        (True,) * 10,
        (Held(0, 0), *(Held(),) * 8, Held(0, 0)),
        (12.0,) * 8,
    )
    found = schedule(shared, solver=False)
    assert found.gap == pytest.approx(0.0)
    assert max(times(found.pattern(40), shared.durations, shared.edges).peaks(shared.held)) <= 12


lengths = st.sampled_from([0.5, 1.0, 1.75, 2.0, 3.0])


@st.composite
def problems(draw):
    lanes = draw(st.integers(1, 4))
    stages = draw(st.integers(lanes, 3 * lanes))
    untrained = draw(st.integers(0, stages - 1))
    places = []
    for stage in range(stages):
        shared = lanes > 1 and draw(st.integers(0, 4)) == 0
        places.append(tuple(range(lanes)) if shared else (stage % lanes,))
    durations = tuple(Durations(draw(lengths), draw(lengths), draw(lengths)) for _ in range(stages))
    held = tuple(Held(draw(st.sampled_from([0.5, 1.0, 2.0])), 0.5) for _ in range(stages))
    cap = draw(st.sampled_from([inf, 12.0, 30.0]))
    one = max(sum(held[s].activations for s in range(stages) if lane in places[s]) for lane in range(lanes))
    return Problem(
        tuple(places),
        durations,
        chain(stages),
        tuple(stage >= untrained for stage in range(stages)),
        held,
        (max(cap, one),) * lanes,
        split=draw(st.booleans()),
        transfer=draw(st.sampled_from([0.0, 0.25])),
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(problems(), st.integers(1, 9))
def test_a_schedule_keeps_every_rule(problem, microbatches):
    found = schedule(problem, solver=False)
    offsets = dict(zip(problem.tasks(), found.offsets, strict=True))
    assert found.interval >= problem.bound * (1 - 1e-9)
    assert fits(problem, found.interval, offsets)
    for key, needs in problem.needs().items():
        for other, way in needs:
            assert offsets[key] >= offsets[other] + problem.seconds(other) + way - 1e-6
    for lane in range(len(problem.caps)):
        busy = sorted(
            (offsets[key] % found.interval, problem.seconds(key))
            for key in problem.tasks()
            if lane in problem.lanes[key[1]]
        )
        for (begin, length), (following, _) in zip(busy, [*busy[1:], (busy[0][0] + found.interval, 0)], strict=True):
            assert begin + length <= following + 1e-6
    grid = times(found.pattern(microbatches), problem.durations, problem.edges, problem.transfer)
    last = max(offsets[key] + problem.seconds(key) for key in problem.tasks())
    assert grid.span <= (microbatches - 1) * found.interval + last + 1e-6


@settings(derandomize=True, deadline=None, max_examples=40)
@given(problems())
def test_without_caps_lists_reach_the_resource_bound(problem):
    free = Problem(
        problem.lanes, problem.durations, problem.edges, problem.trained, problem.held, (inf,) * len(problem.caps)
    )
    assert schedule(free, solver=False).gap == pytest.approx(0.0, abs=1e-6)


def test_cp_sat_is_no_worse_than_lists():
    pytest.importorskip("ortools", reason="ortools is not installed")
    tight = plain(6, 7, split=True, durations=Durations(1.0, 1.25, 0.75))
    lists, solved = schedule(tight, solver=False), schedule(tight)
    assert solved.interval <= lists.interval
    assert fits(tight, solved.interval, dict(zip(tight.tasks(), solved.offsets, strict=True)))


def test_a_cap_below_one_microbatch_is_refused():
    with pytest.raises(PlanError, match=r"one micro-batch holds 1 on lane 0, and its cap is 0\.5"):
        plain(2, 0.5)
