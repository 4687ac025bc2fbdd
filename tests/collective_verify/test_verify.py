"""What the verifier accepts, what it refuses, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rings import ring_algorithm, ring_schedule

from sennit.collective.compile import CompileOptions, compile_algorithm
from sennit.collective.verify import outputs_of, verify_algorithm, verify_schedule
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, everyone
from sennit.ir.schedule import Schedule

EXCHANGE = 'custom "exchange" { rank 0 input=2 wants [0@{1}, any] rank 1 input=2 wants [0@{0}, 0@{0-1}] }'
IN_PLACE = 'custom "one" { rank 0 input=2 at=0 wants [0@{0-1}, 1@{0}] rank 1 input=2 at=0 wants [any, any] }'


def schedule_of(collective: str, left: str, right: str, slots: int = 1) -> Schedule:
    text = f'schedule "s" {collective} slots={slots} {{ rank 0 {{ {left} }} rank 1 {{ {right} }} }}'
    return Schedule.parse(text)


def test_the_proof_counts_what_it_shows() -> None:
    proof = verify_schedule(ring_schedule(4))
    assert (proof.ranks, proof.blocks, proof.steps, proof.messages) == (4, 4, 28, 24)
    assert (proof.slots, proof.output_chunks, proof.ordered_pairs) == (2, 16, 12)
    assert "cannot deadlock with 2 slots" in str(proof)


def test_a_ring_is_right_as_algorithm_and_compiled() -> None:
    algorithm = ring_algorithm(5)
    verify_algorithm(algorithm)
    assert outputs_of(algorithm) == (tuple(everyone(5, index) for index in range(5)),) * 5
    for fuse in (True, False):
        verify_schedule(compile_algorithm(algorithm, CompileOptions(fuse=fuse)))


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (
            "copy r0.input[0:1] to r0.output[0:1]",
            r"output\[0\] of rank 0 holds chunk 0 of rank 0 at the end, and should hold",
        ),
        ("copy r0.output[0:1] to r1.output[0:1]", r"output\[0\] of rank 0 is read before anything is written"),
        (
            'copy r0.input[0:1] to r1.output[0:1] reduce r0.input[0:1] to r1.output[0:1] "mine.py:7"',
            r"counted twice: output\[0\] of rank 1 holds chunk 0 of rank 0, and chunk 0 of rank 0 is added\n  where: mine.py:7",
        ),
        ("", "holds nothing that was written at the end"),
    ],
)
def test_algorithms_that_compute_something_else(moves: str, message: str) -> None:
    text = f'algorithm "a" all_reduce(ranks=2, chunks=1) {{ {moves} }}'
    with pytest.raises(CollectiveError, match=message):
        verify_algorithm(Algorithm.parse(text))


def test_messages_must_match() -> None:
    send = "block 0 send=1 channel=0 { send from input[0:1] }"
    with pytest.raises(CollectiveError, match="sends 1 messages to rank 1 on channel 0, which receives 0"):
        verify_schedule(schedule_of(EXCHANGE, send, ""))
    wide = "block 0 receive=0 channel=0 { receive to output[0:2] }"
    with pytest.raises(CollectiveError, match="has 1 chunks and is received as 2"):
        verify_schedule(schedule_of(EXCHANGE, send, wide))


def test_a_circle_of_waits_is_a_deadlock_whatever_the_slots() -> None:
    blocks = (
        "block 0 channel=0 { copy from input[0:1] to output[0:1] after 1.0 } "
        "block 1 channel=1 { copy from input[1:2] to output[1:2] after 0.0 }"
    )
    with pytest.raises(CollectiveError, match="deadlocks whatever the number of slots"):
        verify_schedule(schedule_of(EXCHANGE, blocks, ""))


def test_too_few_slots_are_a_deadlock_that_names_the_least() -> None:
    with pytest.raises(CollectiveError, match=r"deadlocks with 1 slots(.|\n)*give the schedule 2 slots"):
        verify_schedule(ring_schedule(3, slots=1))


REDUCES = "block 0 receive=1 channel=0 { receive_reduce to output[0:1] }"
SENDS = "block 0 send=0 channel=0 { send from input[0:1] }"


def test_a_race_names_both_steps_and_the_chunk() -> None:
    racing = f"{REDUCES} block 1 channel=1 {{ copy from input[1:2] to output[0:1] }}"
    with pytest.raises(CollectiveError, match=r"race on (in|out)put\[0\] of rank 0") as caught:
        verify_schedule(schedule_of(IN_PLACE, racing, SENDS))
    text = str(caught.value)
    assert "rank 0, block 0, step 0: receive_reduce to output[0:1]" in text
    assert "rank 0, block 1, step 0: copy from input[1:2] to output[0:1]" in text
    assert "let the later one wait: after" in text


def test_in_place_input_and_output_are_one_memory() -> None:
    reads = "block 1 send=1 channel=1 { send from input[0:1] }"
    takes = "block 1 receive=0 channel=1 { receive to input[1:2] }"
    with pytest.raises(CollectiveError, match="race on"):
        verify_schedule(schedule_of(IN_PLACE, f"{REDUCES} {reads}", f"{SENDS} {takes}"))
    ordered = REDUCES.replace(" }", " after 1.0 }")
    verify_schedule(schedule_of(IN_PLACE, f"{ordered} {reads}", f"{SENDS} {takes}"))


def test_messages_order_steps_across_ranks() -> None:
    """Rank 0 reads a chunk to send it, and another block of it overwrites the chunk with the answer."""
    left = "block 0 send=1 channel=0 { send from input[0:1] } block 1 receive=1 channel=1 { receive to input[0:1] }"
    right = (
        "block 0 receive=0 channel=0 { receive to input[1:2] } "
        "block 1 send=0 channel=1 { send from input[0:1] after 0.0 }"
    )
    wants = 'custom "swap" { rank 0 input=2 at=0 wants [0@{1}, any] rank 1 input=2 at=0 wants [any, 0@{0}] }'
    verify_schedule(schedule_of(wants, left, right))
    with pytest.raises(CollectiveError, match="race on"):
        verify_schedule(schedule_of(wants, left, right.replace(" after 0.0", "")))


def test_slots_are_not_an_order_to_rely_on() -> None:
    """With one slot the second send comes after the first receive, so rank 0 seems to be safe; with two it is not."""
    left = (
        "block 0 send=1 channel=0 { send from input[0:1] send from input[0:1] } "
        "block 1 receive=1 channel=1 { receive to input[1:2] }"
    )
    right = (
        "block 0 receive=0 channel=0 { receive to input[1:2] receive to output[0:1] after 1.0 } "
        "block 1 send=0 channel=1 { send from input[1:2] }"
    )
    wants = 'custom "c" { rank 0 input=2 wants [any] rank 1 input=2 wants [0@{0}] }'
    with pytest.raises(CollectiveError, match=r"race on input\[1\] of rank 1"):
        verify_schedule(schedule_of(wants, left, right))


def test_a_wrong_result_names_the_last_writer() -> None:
    schedule = ring_schedule(3)
    ranked = schedule.ranks[1]
    block = ranked.blocks[0]
    steps = tuple(
        replace(step, target=None, source=step.target, opcode=type(step.opcode).RECEIVE_REDUCE_SEND)
        if index == 2
        else step
        for index, step in enumerate(block.instructions)
    )
    wrong = replace(ranked, blocks=(replace(block, instructions=steps),))
    with pytest.raises(CollectiveError, match=r"of rank 1 holds .* and should hold chunk \d of ranks 0-2"):
        verify_schedule(replace(schedule, ranks=(schedule.ranks[0], wrong, schedule.ranks[2])))
