"""The order of a lane's source: counts of the batch travel under the forward pass, and nothing waits for a gradient
before the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import pytest

from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Compute, Exchange, Free, Lane, Program, Receive, Send, defines, reads
from sennit.ir.program_check import check_program
from sennit.plan import lower, propagate, zoo
from sennit.run import emit_lane
from sennit.run.order import ordered

PLANS = {
    "data parallel": (zoo.data_parallel, "dp=2"),
    "data parallel, micro-batches": (zoo.data_parallel, "dp=2;mb=2"),
    "ZeRO-1": (partial(zoo.zero, level=1), "dp=2;mb=2"),
    "ZeRO-2": (partial(zoo.zero, level=2), "dp=2;mb=2"),
    "ZeRO-3": (partial(zoo.zero, level=3), "dp=2;mb=2"),
    "tensor and sequence parallel": (partial(zoo.tensor_parallel, sequence=True), "dp=2,tp=2"),
    "context parallel": (zoo.context_parallel, "cp=2"),
    "pipeline": (zoo.pipeline, "pp=2,dp=2;mb=2"),
    "interlaced": (zoo.interlaced, "pp=2;mb=2"),
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_reordered_program_is_a_right_one(plan: str, small_gpt) -> None:
    """It has the steps of the program, frees what it frees, passes the program's own check (no step before what it
    reads, nothing can deadlock), and talks to other lanes in the same order.
    """
    planner, mesh = PLANS[plan]
    program = lower(propagate(planner(small_gpt.graph, Mesh.parse(mesh))))
    after = replace(program, lanes=tuple(ordered(lane, ahead=False).lane for lane in program.lanes))
    check_program(after)
    for lane, moved in zip(program.lanes, after.lanes, strict=True):
        assert Counter(map(repr, lane.steps)) == Counter(map(repr, moved.steps))
        assert of_kinds(lane, Send, Receive, Exchange) == of_kinds(moved, Send, Receive, Exchange)
        assert_in_order(moved)


@pytest.mark.parametrize("plan", ["pipeline", "interlaced"])
def test_receives_are_posted_a_task_ahead(plan: str, small_gpt) -> None:
    """In the order of the program, which numbers them; the next task's before this one's operators, and no others."""
    planner, mesh = PLANS[plan]
    program = lower(propagate(planner(small_gpt.graph, Mesh.parse(mesh))))
    for lane in program.lanes:
        moved = ordered(lane).lane
        assert Counter(map(repr, lane.steps)) == Counter(map(repr, moved.steps))
        assert of_kinds(lane, Receive) == of_kinds(moved, Receive)
        assert of_kinds(lane, Send) == of_kinds(moved, Send)
        assert_in_order(moved)
        steps = [step for step in lane.steps if not isinstance(step, Free)]
        runs = [
            [step.result.name for step in run] for kind, run in groupby(steps, lambda s: isinstance(s, Receive)) if kind
        ]
        posted = {step.result.name: at for at, step in enumerate(moved.steps) if isinstance(step, Receive)}
        read = {name: first_read(moved, name) for run in runs for name in run}
        assert runs
        for this, following in pairwise(runs):
            assert max(posted[name] for name in following) < min(read[name] for name in this)
        for this, _, third in zip(runs, runs[1:], runs[2:], strict=False):
            assert min(posted[name] for name in third) > min(read[name] for name in this)


def of_kinds(lane: Lane, *kinds: type) -> list[Any]:
    return [step for step in lane.steps if isinstance(step, kinds)]


def first_read(lane: Lane, name: str) -> int:
    """By an operator, or at the end as a result of the lane."""
    found = (at for at, step in enumerate(lane.steps) if not isinstance(step, Free) and name in reads(step))
    return next(found, len(lane.steps))


def assert_in_order(lane: Lane) -> None:
    """Nothing is read before it is made, or looked at after it was freed."""
    gone: set[str] = set()
    there = {item.buffer.name for item in lane.inputs}
    for step in lane.steps:
        if isinstance(step, Free):
            gone.add(step.source)
        else:
            assert set(reads(step)) <= there - gone
            there |= {buffer.name for buffer in defines(step)}


def test_the_count_of_targets_goes_first(small_gpt) -> None:
    program = lower(propagate(zoo.data_parallel(small_gpt.graph, Mesh.parse("dp=2"))))
    (lane,) = program.lanes
    first = next(number for number, step in enumerate(ordered(lane).lane.steps) if isinstance(step, Collective))
    before = ordered(lane).lane.steps[: first + 1]
    kinds = [step.kind for step in before if isinstance(step, Compute)]
    assert not {"aten.embedding.default", "aten.mm.default", "aten.addmm.default"} & set(kinds)
    assert len(before) < 12  # what counts the targets and nothing else


def test_nothing_waits_in_the_backward_pass(small_gpt) -> None:
    """The only wait before the last collective is started is for the count, which was started with the step."""
    program = lower(propagate(zoo.data_parallel(small_gpt.graph, Mesh.parse("dp=2"))))
    (lane,) = program.lanes
    lines = [line.split("  #")[0].strip() for line in emit_lane(program, lane).splitlines()]
    started = [number for number, line in enumerate(lines) if ".add(" in line or "rank.all_reduce(" in line]
    waits = [number for number, line in enumerate(lines) if line.endswith(".wait()") and number < started[-1]]
    assert len(waits) == 1
    assert waits[0] - started[0] > 50


LARGE = """
program "held" {
  mesh m0 = dp=2
  lane both on 0-1 {
    param %w : f32[4,2] of %w on m0 "w"
    input %t : i64[8{dp}] of %t on m0 "t"
    forward %a : f32[4,2]{sum:dp} of %a on m0 = sennit.partial(%w) for %w ""
    all_reduce %ra : f32[4,2] of %a on m0 = %a over dp
    free %a
    forward %x : f32[4,2] of %x on m0 = aten.relu.default(%ra) for %x ""
    free %ra
    forward %y : f32[4,2] of %y on m0 = aten.relu.default(%w) for %y ""
    result "x" %x
    result "y" %y
  }
}
"""


def test_what_would_hold_much_stays() -> None:
    """The reduced tensor is half of the results."""
    (lane,) = Program.parse(LARGE).lanes
    assert ordered(lane).lane == lane


def test_a_running_sum_takes_its_terms_as_they_come(small_gpt) -> None:
    """With ZeRO-2 each micro-batch's gradient is scattered and added: put off, all of them would be held."""
    program = lower(propagate(zoo.zero(small_gpt.graph, Mesh.parse("dp=2;mb=2"), level=2)))
    for lane in program.lanes:
        late = ordered(lane).late
        sums = [step for step in lane.steps if isinstance(step, Compute) and step.kind == "sennit.accumulate"]
        assert sums
        assert not late & {step.results[0].name for step in sums}
