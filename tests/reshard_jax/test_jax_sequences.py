"""Sequences of steps for JAX: legal, within the memory bound, and chosen by what they touch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jax")

from jax_problems import Problem, problem, problems

from sennit.ir.layout import Layout, Split
from sennit.ir.mesh import Mesh
from sennit.reshard.fused_jax import choose, sequences
from sennit.reshard.phases_jax import Phase, TouchCost, Work, touched, ways, work
from sennit.reshard.pieces_jax import positions
from sennit.reshard.redistribution import Step, StepKind

MESHES = ((2, 2, 2), (4, 2), (8,), (2, 3), (6,), (3, 2, 2), (4, 4), (2, 2, 2, 2))
CHANGES = {  # what an axis does before and after a step of the kind
    StepKind.SLICE: (False, True),
    StepKind.ALL_TO_ALL: (True, True),
    StepKind.ALL_GATHER: (True, False),
}


def layouts(case: Problem) -> tuple[Layout, Layout]:
    mesh = Mesh.make(dict(case.axes))
    before, after = (
        Layout.block(mesh, case.shape, dict(enumerate(dims))).refined() for dims in (case.before, case.after)
    )
    return before, after


def steps_of(way: tuple[Phase, ...]) -> tuple[Step, ...]:
    return tuple(step for phase in way for step in phase.steps)


def check_legal(source: Layout, target: Layout, steps: tuple[Step, ...]) -> None:
    bound = max(source.local_elements(), target.local_elements())
    at = source
    for step in steps:
        assert step.source == at
        assert step.result.local_elements() <= bound
        changed = {axis for axis in at.mesh.names if at.entry(axis) != step.result.entry(axis)}
        assert changed == set(step.axes)
        if step.kind is StepKind.PERMUTE:
            assert step.result.local_shape() == at.local_shape()
        else:
            for axis in step.axes:
                was, now = (isinstance(layout.entry(axis), Split) for layout in (at, step.result))
                assert (was, now) == CHANGES[step.kind]
        at = step.result
    assert at == target


@settings(derandomize=True, deadline=None, max_examples=150)
@given(problems(MESHES))
def test_every_sequence_is_legal_and_within_the_bound(case: Problem) -> None:
    source, target = layouts(case)
    if positions([source, target]) is None:
        way = choose(source, target, 4)
        assert way is not None
        check_legal(source, target, steps_of(way))
        return
    for steps in sequences(source, target):
        check_legal(source, target, steps)
        kinds = [step.kind for step in steps]
        order = [StepKind.SLICE, StepKind.ALL_TO_ALL, StepKind.PERMUTE, StepKind.ALL_GATHER]
        assert kinds == sorted(kinds, key=order.index)  # the normal form


@settings(derandomize=True, deadline=None, max_examples=60)
@given(problems(MESHES), st.sampled_from([1, 4, 8]))
def test_the_choice_touches_least(case: Problem, itemsize: int) -> None:
    source, target = layouts(case)
    if positions([source, target]) is None:
        return
    costs = []
    for steps in sequences(source, target):
        every = positions([source, *(step.result for step in steps)])
        assert every is not None
        for way in ways(steps, every):
            assert steps_of(way) == steps  # however they are lowered, the steps are the same
            costs.append(touched(way, itemsize, every))
    found = choose(source, target, itemsize)
    if found is not None:
        every = positions([source, *(step.result for step in steps_of(found))])
        assert every is not None
        assert touched(found, itemsize, every) == min(costs)


def kinds_of(case: Problem) -> list[str] | None:
    way = choose(*layouts(case), 4)
    return None if way is None else [step.kind.value for step in steps_of(way)]


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        # nothing changes
        (problem("x=2,y=4", (1024, 4096), "x -", "x -"), None),
        # nothing is communicated
        (problem("x=2,y=4", (1024, 4096), "x -", "x y"), ["slice"]),
        # one exchange for two axes that leave two dims for a third
        (problem("x=2,y=4", (64, 64, 4096), "x y -", "- - xy"), ["all_to_all"]),
        # what would be gathered along a minor dim is first brought to dim 0, and leads there
        (problem("x=8", (1024, 4096), "- x", "- -"), ["all_to_all", "all_gather"]),
        # an axis that is free shrinks the pieces before the others move
        (problem("x=2,y=4", (1024, 4096), "x -", "- y"), ["slice", "all_gather"]),
        # other names alone
        (problem("x=4,y=2", (1024, 4096), "xy -", "yx -"), ["permute"]),
        # blocks of 2 and of 3 have no common digits
        (problem("x=2,y=3", (36, 5), "x -", "y -"), ["slice", "permute", "all_gather"]),
        # the same with no axis that is free: blocks of one dim go to the other, and whole blocks are put in order
        # between
        (problem("x=2,y=3", (36, 36), "x y", "y x"), ["all_to_all", "permute", "all_to_all"]),
    ],
)
def test_what_is_chosen_when(case: Problem, kinds: list[str] | None) -> None:
    assert kinds_of(case) == kinds


def test_a_dear_step_makes_for_fewer_steps() -> None:
    source, target = layouts(problem("x=8", (1024, 4096), "- x", "- -"))
    way = choose(source, target, 4, TouchCost(start=1e9, permute=1e9))
    assert way is not None
    assert [phase.step.kind.value for phase in way] == ["all_gather"]


def test_many_axes_are_planned_in_bounded_work() -> None:
    mesh = Mesh.make({f"a{index}": 2 for index in range(12)})
    names = list(mesh.names)
    source = Layout.block(mesh, (4096, 4096), {0: names})
    target = Layout.block(mesh, (4096, 4096), {1: names[::-1]})
    way = choose(source, target, 4)
    assert way is not None
    check_legal(source, target, steps_of(way))
    assert [phase.step.kind.value for phase in way] == ["all_to_all"]


def test_the_work_of_ways() -> None:
    source, target = layouts(problem("x=2,y=4", (1024, 4096), "x y", "- yx"))
    (steps,) = (steps for steps in sequences(source, target) if [step.kind.value for step in steps] == ["all_to_all"])
    size = source.local_elements() * 4
    every = positions([source, target])
    assert every is not None
    whole, parts = ways(steps, every)
    assert [phase.in_parts for phase in (*whole, *parts)] == [False, True]
    assert work(whole, 4, every) == Work(starts=1, sent=size, copied=2 * size, temporary=1.5 * size)
    assert work(parts, 4, every) == Work(permutes=1, sent=size / 2, copied=2 * size, temporary=size / 2)
