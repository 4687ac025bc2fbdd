"""Patterns: a grid of tasks that prints, parses back and is complete."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.errors import ParseError, PlanError
from sennit.plan import Pattern, Work, one_forward_one_backward


def test_one_forward_one_backward_is_the_known_grid() -> None:
    assert str(one_forward_one_backward(2, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3"


@given(st.integers(1, 6), st.integers(1, 8))
def test_it_prints_and_parses_back(stages: int, microbatches: int) -> None:
    pattern = one_forward_one_backward(stages, microbatches)
    assert Pattern.parse(str(pattern)) == pattern


@given(st.integers(1, 6), st.integers(1, 8))
def test_a_stage_holds_no_more_micro_batches_than_stages_behind_it(stages: int, microbatches: int) -> None:
    for stage, tasks in enumerate(one_forward_one_backward(stages, microbatches).rows):
        held = most = 0
        for task in tasks:
            held += 1 if task.work is Work.FORWARD else -1
            most = max(most, held)
        assert most <= stages - stage


def test_rows_of_several_stages_name_them() -> None:
    text = "0F0 1F0 1B0 0B0 1W0 0W0\n0F0 2F0 2B0 0B0 0W0"
    pattern = Pattern.parse(text)
    assert str(pattern) == text
    assert pattern.stages == ((0, 1), (0, 2))
    assert pattern.work(2) == {Work.FORWARD, Work.BACKWARD}


def test_incomplete_patterns_are_refused() -> None:
    with pytest.raises(PlanError, match=r"0F0 runs twice"):
        Pattern.parse("F0 B0 F0 B1")
    with pytest.raises(PlanError, match=r"0F1 is missing"):
        Pattern.parse("F0 B0 B1")
    with pytest.raises(PlanError, match=r"0B0 runs too early"):
        Pattern.parse("B0 F0")
    with pytest.raises(PlanError, match=r"stage 0 has only F and W"):
        Pattern.parse("F0 W0")
    with pytest.raises(PlanError, match=r"stage 0 has other work"):
        Pattern.parse("0F0 0B0\n0F0")
    with pytest.raises(ParseError, match=r"expected a task like F0, B3 or 2W1, not 'X1'"):
        Pattern.parse("F0 X1")
