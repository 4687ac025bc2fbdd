"""The greedy moves: they mean the redistribution, and hold no more than the larger of both ends."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.errors import LayoutError
from sennit.ir.layout import Layout, Pending, Reduction, Split
from sennit.ir.layout_numpy import assemble, distribute, regroup
from sennit.ir.mesh import Mesh
from sennit.reshard import MoveKind, moves


@st.composite
def problems(draw: st.DrawFn) -> tuple[Layout, Layout]:
    sizes = draw(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=3))
    mesh = Mesh.make({"xyz"[i]: size for i, size in enumerate(sizes)})
    shape = tuple(prod(sizes) * draw(st.integers(1, 2)) for _ in range(draw(st.integers(1, 2))))

    def layout(pending: bool) -> Layout:
        current = Layout(mesh, shape)
        for axis in mesh.axes:
            options: list[object] = [None]
            if pending:
                options.append(Pending(Reduction.SUM))
            for dim, extent in enumerate(shape):
                options += [Split(dim, s) for s in range(1, extent + 1) if extent % (s * axis.size) == 0]
            try:
                candidate = current.with_entry(axis.name, draw(st.sampled_from(options)))  # type: ignore[arg-type]
            except LayoutError:
                continue
            current = candidate if candidate.is_even else current
        return current

    return layout(pending=True), layout(pending=False)


@settings(max_examples=300)
@given(problems())
def test_moves_mean_the_redistribution(problem: tuple[Layout, Layout]) -> None:
    source, target = problem
    array = np.random.default_rng(0).integers(0, 1000, source.shape)
    pieces, layout = distribute(array, source), source
    for move in moves(source, target):
        pieces = regroup(layout, move.result, (move.axis,), pieces)
        layout = move.result
    assert layout == target
    np.testing.assert_array_equal(assemble(target, pieces), array)


@settings(max_examples=300)
@given(problems())
def test_moves_hold_no_more_than_both_ends(problem: tuple[Layout, Layout]) -> None:
    source, target = problem
    steps = moves(source, target)
    if any(_is_taken(source, axis, split) for axis, split in target.entries):
        return  # an axis takes a digit that another one holds: the docstring says so
    bound = max(source.local_elements(), target.local_elements())
    assert all(move.result.local_elements() <= bound for move in steps)


def _is_taken(layout: Layout, axis: str, split: object) -> bool:
    try:
        return not layout.with_entry(axis, split).is_even  # type: ignore[arg-type]
    except LayoutError:
        return True


def test_a_pending_sum_is_scattered_not_reduced_and_sliced() -> None:
    mesh = Mesh.parse("x=2,y=2")
    steps = moves(Layout.parse("[4,4]{sum:x,y}", mesh), Layout.parse("[4{x},4]", mesh))
    assert [(move.kind, move.axis) for move in steps] == [(MoveKind.REDUCE_SCATTER, "x"), (MoveKind.ALL_REDUCE, "y")]


def test_layouts_of_different_arrays_are_refused() -> None:
    mesh = Mesh.parse("x=2")
    with pytest.raises(LayoutError, match="use one mesh and one shape"):
        moves(Layout(mesh, (4,)), Layout(mesh, (6,)))
    with pytest.raises(LayoutError, match=r"layout \[5\{x\}\] is uneven"):
        moves(Layout.parse("[5{x}]", mesh), Layout(mesh, (5,)))
    with pytest.raises(LayoutError, match="resolve it first"):
        moves(Layout.parse("[4]{sum:x}", mesh), Layout.parse("[4]{max:x}", mesh))
