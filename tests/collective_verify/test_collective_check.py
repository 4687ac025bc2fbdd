"""What the checkers of form refuse, and in which words."""

from __future__ import annotations

import pytest
from rings import ring_algorithm, ring_schedule

from sennit.errors import CollectiveError
from sennit.ir.algorithm_check import check_algorithm
from sennit.ir.collective import Algorithm, CustomCollective
from sennit.ir.schedule import Schedule
from sennit.ir.schedule_check import check_schedule


def test_a_ring_is_well_formed() -> None:
    check_algorithm(ring_algorithm(3))
    check_schedule(ring_schedule(3))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("copy r0.input[0:1] to r2.output[0:1]", "there is no rank 2"),
        ("copy r0.inptu[0:1] to r1.output[0:1]", "no buffer 'inptu'"),
        ("copy r0.input[0:3] to r1.output[0:3]", r"input\[0:3\] is not a range"),
        ("copy r0.input[1:1] to r1.output[0:0]", "one chunk at least"),
        ("copy r0.input[0:2] to r1.output[0:1]", "2 chunks move to 1"),
        ("copy r0.output[0:1] to r0.output[0:1] copy r0.t[0:2] to r0.t[1:3]", "overlap"),
        ("reduce r0.input[0:1] to r0.input[0:1]", "added to itself"),
        ('copy r0.input[0:1] to r1.output[0:1] channel -1 "mine.py:3"', "mine.py:3: algorithm 'a', move 0"),
        ("scratch r2 u 1", "scratch 'u' of rank 2: there is no such rank"),
        ("scratch r0 t 1", "has a buffer of that name"),
        ("scratch r0 input 1", "has a buffer of that name"),
        ("scratch r0 u 0", "has 0 chunks"),
        ("scratch r0 u.v 1", "not one that the text form can hold"),
    ],
)
def test_algorithms_that_are_refused(body: str, message: str) -> None:
    text = f'algorithm "a" all_reduce(ranks=2, chunks=2) {{ scratch r0 t 4 {body} }}'
    with pytest.raises(CollectiveError, match=message):
        check_algorithm(Algorithm.parse(text))


def test_in_place_overlap_is_seen_through_the_alias() -> None:
    text = 'algorithm "a" all_gather(ranks=2, chunks=2, in_place) { copy r1.input[0:2] to r1.output[1:3] }'
    with pytest.raises(CollectiveError, match="overlap"):
        check_algorithm(Algorithm.parse(text))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("block 0 send=0 channel=0 { }", "sends to rank 0, itself"),
        ("block 0 receive=2 channel=0 { }", "receives from rank 2"),
        ("block 0 send=1 channel=0 { } block 1 send=1 channel=0 { }", "blocks 0 and 1 of rank 0 both send to rank 1"),
        ("block 0 channel=-1 { }", "channel -1"),
        ("block 0 channel=0 { send from input[0:1] }", "no send peer"),
        ("block 0 send=1 channel=0 { receive_copy_send to input[0:1] }", "no receive peer"),
        ("block 0 send=1 channel=0 { send to input[0:1] }", "give it a source and nothing else"),
        ("block 0 channel=0 { reduce from input[0:1] }", "give it a source and a target"),
        ("block 0 channel=0 { copy from input[0:1] to output[0:2] }", "1 chunks move to 2"),
        ("block 0 channel=0 { copy from input[0:2] to input[1:3] }", "overlap"),
        ("block 0 channel=0 { reduce from input[0:1] to input[0:1] }", "overlap"),
        ("block 0 channel=0 { copy from input[0:1] to output[4:5] }", r"block 0, step 0: copy"),
        ("block 0 channel=0 { copy from input[0:1] to output[0:1] after 1.0 }", "names block 1"),
        ("block 0 channel=0 { copy from input[0:1] to output[0:1] after 0.0 }", "own block"),
        ("block 0 channel=0 { copy from input[0:1] to output[0:1] after 0.7 }", "step 7 of a block of 1"),
    ],
)
def test_schedules_that_are_refused(blocks: str, message: str) -> None:
    text = f'schedule "s" all_reduce(ranks=2, chunks=4) slots=1 {{ rank 0 {{ {blocks} }} rank 1 {{ }} }}'
    with pytest.raises(CollectiveError, match=message):
        check_schedule(Schedule.parse(text))


@pytest.mark.parametrize(
    ("slots", "ranks", "message"),
    [
        (0, "rank 0 { } rank 1 { }", "0 slots"),
        (1, "rank 1 { } rank 0 { }", "list ranks 0 to 1"),
        (1, "rank 0 { }", "list"),
    ],
)
def test_ranks_and_slots_that_are_refused(slots: int, ranks: str, message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        check_schedule(Schedule.parse(f'schedule "s" all_reduce(ranks=2, chunks=4) slots={slots} {{ {ranks} }}'))


@pytest.mark.parametrize(
    ("inputs", "outputs", "wanted", "aliases", "message"),
    [
        ((1,), (1, 1), ((None,),), None, "1 inputs and 2 outputs"),
        ((1,), (2,), ((None,),), None, "wants 1 values"),
        ((1,), (1,), ((((1, 1),),),), None, "is to hold chunk 1 of rank 0"),
        ((1,), (1,), (((),),), None, "a sum of nothing"),
        ((1,), (1,), ((((0, 2),),),), None, "chunk 0 of rank 1"),
        ((1,), (1,), ((None,),), (1,), "alias offset 1"),
        ((1,), (1,), ((None,),), (0, 0), "2 alias offsets for 1 ranks"),
    ],
)
def test_custom_collectives_that_are_refused(inputs, outputs, wanted, aliases, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CollectiveError, match=message):
        CustomCollective("c", inputs, outputs, wanted, aliases)
