"""Algorithms and schedules print and parse; the text of one is what a reader expects."""

from __future__ import annotations

import pytest
from collective_strategies import algorithms, schedules
from hypothesis import given, settings
from rings import ring_algorithm, ring_schedule

from sennit.errors import ParseError
from sennit.ir.collective import Algorithm, CustomCollective
from sennit.ir.schedule import Schedule


@given(algorithms)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_an_algorithm_reads_back(algorithm: Algorithm) -> None:
    assert Algorithm.parse(str(algorithm)) == algorithm


@given(schedules)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_a_schedule_reads_back(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


def test_the_text_of_a_ring() -> None:
    assert str(ring_algorithm(2)) == (
        'algorithm "ring2" all_reduce(ranks=2, chunks=2, in_place) {\n'
        "  reduce r1.output[0:1] to r0.output[0:1]\n"
        "  reduce r0.output[1:2] to r1.output[1:2]\n"
        "  copy r0.output[0:1] to r1.output[0:1]\n"
        "  copy r1.output[1:2] to r0.output[1:2]\n"
        "}\n"
    )
    assert str(ring_schedule(2)).startswith(
        'schedule "ring2" all_reduce(ranks=2, chunks=2, in_place) slots=2 {\n'
        "  rank 0 {\n"
        "    block 0 send=1 receive=1 channel=0 {\n"
        "      send from output[1:2]\n"
        "      receive_reduce_copy_send to output[0:1]\n"
    )


def test_the_text_of_a_custom_collective() -> None:
    custom = CustomCollective("some", (2, 1), (1, 2), ((((0, 3), (1, 1)),), (None, ((0, 2),))), (1, 0))
    text = 'custom "some" {\n  rank 0 input=2 at=1 wants [0@{0-1} + 1@{0}]\n  rank 1 input=1 at=0 wants [any, 0@{1}]\n}'
    assert str(custom) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('algorithm "a" all_reduce(ranks=2, chunks=1) { move }', "copy, reduce or '}'"),
        ('algorithm "a" all_sum(ranks=2, chunks=1) { }', "one of custom, all_reduce"),
        ('algorithm "a" all_reduce(ranks=2, chunks=1) { copy input[0:1] to r1.output[0:1] }', "r0.input"),
        ('algorithm "a" custom "c" { rank 1 input=1 wants [] } { }', "rank 0 before this"),
        ('algorithm "a" custom "c" { rank 0 input=1 wants [0@{-1}] } { }', "ranks of 0 and more"),
    ],
)
def test_bad_text_says_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        Algorithm.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0 { block 1 channel=0 { } }", "block 0 before this"),
        ("rank 0 { block 0 channel=0 { push from input[0:1] } }", "one of copy, reduce, send"),
        ("rank 0 { block 0 channel=0 { send from input[0] } }", "':'"),
        ("rank 0 { block 0 { } }", "'channel'"),
    ],
)
def test_bad_schedule_text_says_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        Schedule.parse(f'schedule "s" all_reduce(ranks=1, chunks=1) slots=1 {{ {text} }}')
