"""The table of data movement is sound: what it accepts keeps the array, by the numpy meaning of layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sennit.errors import LayoutError, ProgramError
from sennit.ir.dtype import DType
from sennit.ir.graph import Phase, Ref, Role
from sennit.ir.layout import Entry, Layout, Pending, Split
from sennit.ir.layout_numpy import assemble, distribute, regroup
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute, Lane, LaneInput, Program, Step
from sennit.ir.program_check import check_program

MESH = Mesh.make({"a": 2, "b": 3, "c": 2})
SHAPE = (12, 5)  # one dim splits evenly over some axes, the other over none
MOVES = [*CollectiveKind, "sennit.slice", "sennit.partial"]

entries = st.one_of(
    st.none(), st.just(Pending()), st.builds(Split, st.integers(0, 1), st.sampled_from([1, 2, 3, 4, 6]))
)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[str, ...]]:
    """Two layouts of one array that differ over some axes, and those axes."""
    before: dict[str, Entry | None] = {axis: draw(entries) for axis in MESH.names}
    axes = draw(st.lists(st.sampled_from(MESH.names), min_size=1, max_size=2, unique=True))
    after = {**before, **{axis: draw(entries) for axis in axes}}
    try:
        return Layout.make(MESH, SHAPE, before), Layout.make(MESH, SHAPE, after), tuple(axes)
    except LayoutError:  # the strides of two axes overlap
        assume(False)
        raise


def accepts(move: CollectiveKind | str, source: Layout, target: Layout, axes: tuple[str, ...]) -> bool:
    x, y = Buffer("x", "t", DType.I64, source), Buffer("y", "t", DType.I64, target)
    step: Step = (
        Compute(move, (Ref("x"),), (), (y,), Phase.FORWARD) if isinstance(move, str) else Collective(move, "x", y, axes)
    )
    program = Program("one move", (Lane("all", MESH.devices, (LaneInput(Role.INPUT, x, "x"),), (step,), ()),))
    try:
        check_program(program)
    except ProgramError:
        return False
    return True


@settings(derandomize=True, deadline=None, max_examples=200)
@given(changes())
def test_what_is_accepted_keeps_the_array(change: tuple[Layout, Layout, tuple[str, ...]]) -> None:
    source, target, axes = change
    accepted = [move for move in MOVES if accepts(move, source, target, axes)]
    assert len(accepted) <= 1  # the rows of the table exclude each other
    if accepted:
        array = np.arange(1, 61, dtype=np.int64).reshape(SHAPE)
        moved = regroup(source, target, axes, distribute(array, source))
        np.testing.assert_array_equal(assemble(target, moved), array)


@pytest.mark.parametrize(
    ("move", "before", "after"),
    [
        (CollectiveKind.ALL_REDUCE, Pending(), None),
        (CollectiveKind.ALL_GATHER, Split(0, 4), None),
        (CollectiveKind.REDUCE_SCATTER, Pending(), Split(0, 4)),
        (CollectiveKind.ALL_TO_ALL, Split(0, 4), Split(1, 2)),
        ("sennit.slice", None, Split(1, 2)),
        ("sennit.partial", None, Pending()),
    ],
)
def test_each_row_is_accepted_by_its_move_alone(move: CollectiveKind | str, before: Entry, after: Entry) -> None:
    source = Layout.make(MESH, SHAPE, {"a": Split(0, 2), "b": before})
    target = source.with_entry("b", after)
    assert [other for other in MOVES if accepts(other, source, target, ("b",))] == [move]
