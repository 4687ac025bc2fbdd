"""The clock and some steps together: neither a lucky strategy nor a clock that is off by one factor decides."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.fuse.trial_choice import is_clearly_faster, weighed

SECONDS = st.lists(st.floats(0.1, 0.5), min_size=2, max_size=9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(SECONDS, st.floats(0.7, 1.5))
def test_a_clock_that_is_right_but_for_a_factor_agrees_with_the_steps(simulated: list[float], factor: float) -> None:
    steps = [[factor * seconds] * 3 for seconds in simulated]
    assert weighed(simulated, steps) == pytest.approx([factor * seconds for seconds in simulated])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(SECONDS, st.data())
def test_the_result_lies_between_its_witnesses(simulated: list[float], data: st.DataObject) -> None:
    steps = [data.draw(st.lists(st.floats(0.1, 0.6), min_size=1, max_size=5)) for _ in simulated]
    medians = [median(spent) for spent in steps]
    bias = median(found / told for found, told in zip(medians, simulated, strict=True))
    for found, told, result in zip(medians, simulated, weighed(simulated, steps), strict=True):
        low, high = sorted((found, bias * told))
        assert low * (1 - 1e-9) <= result <= high * (1 + 1e-9)


def test_many_steps_overrule_the_clock() -> None:
    simulated = [0.200, 0.210, 0.220, 0.230]
    steps = [[seconds * (1 + 0.02 * (-1) ** turn) for turn in range(40)] for seconds in (0.240, 0.205, 0.222, 0.231)]
    found = weighed(simulated, steps)
    assert min(range(4), key=found.__getitem__) == 1


def test_the_choice_of_few_noisy_steps_is_better_than_the_least_median() -> None:
    """Eight strategies 2 % apart, steps that scatter by 6 %, a clock that is off by 2 %: how much slower than the best
    the chosen ones are.
    """
    draw, lost = random.Random(0), {"median": 0.0, "weighed": 0.0}
    for _ in range(200):
        true = [0.300 * (1 + 0.02 * place) for place in range(8)]
        simulated = [seconds * draw.gauss(0.95, 0.02) for seconds in true]
        steps = [[seconds * (1 + abs(draw.gauss(0, 0.06))) for _ in range(3)] for seconds in true]
        by = {"median": [median(spent) for spent in steps], "weighed": weighed(simulated, steps)}
        for way, seconds in by.items():
            lost[way] += true[min(range(8), key=seconds.__getitem__)] / true[0] - 1
    assert lost["weighed"] < 0.9 * lost["median"]


def test_one_way_replaces_the_other_only_if_it_wins_every_turn() -> None:
    assert is_clearly_faster([0.70, 0.71, 0.69], [0.76, 0.75, 0.77])
    assert not is_clearly_faster([0.30, 0.26, 0.28], [0.29, 0.40, 0.41])  # two turns were disturbed
    assert not is_clearly_faster([0.298, 0.299, 0.297], [0.300, 0.300, 0.300])  # by less than steps scatter
    assert not is_clearly_faster([], [])
