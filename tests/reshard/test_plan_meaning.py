"""A plan means what its two layouts say: the pieces of the target are those of the array that the source stands for."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_strategies import Pair, any_pairs, cross_pairs, even_pairs, pending_pairs, uneven_pairs

from sennit.ir.layout import Layout, Pending
from sennit.ir.layout_numpy import Array, assemble
from sennit.ir.mesh import Mesh, Point
from sennit.reshard import Candidate, Mode, StepKind, plan
from sennit.reshard.execute_numpy import run_numpy, trace_numpy
from sennit.reshard.stream import staging

modes = st.sampled_from([Mode.AUTO, Mode.COLLECTIVE, Mode.DIRECT])


def pieces_of(layout: Layout) -> tuple[Array, dict[Point, Array]]:
    """An array and pieces of it. Parts of a pending value are random, so that no part is the identity by chance."""
    random = np.random.default_rng(7)
    pieces: dict[Point, Array] = {}
    parts: dict[Point, Array] = {}
    pending = [layout.mesh.index(name) for name, _ in layout.pending]
    for point in layout.mesh.points():
        part = tuple(point[axis] for axis in pending)
        if part not in parts:
            parts[part] = random.integers(-9, 99, size=layout.shape)
        region = layout.region(point)
        pieces[point] = parts[part][np.ix_(*region.indices())] if layout.shape else parts[part].copy()
    return assemble(layout, pieces), pieces


def check(pair: Pair, mode: Mode, budget: int | None = None) -> None:
    source, target = pair
    found = plan(source, target, mode=mode, budget=budget)
    whole, pieces = pieces_of(source)
    run = trace_numpy(found, pieces)
    np.testing.assert_array_equal(assemble(target, run.pieces), whole)
    certificate = found.certificate
    assert run.peak == certificate.peak
    assert certificate.peak <= certificate.peak_bound
    assert certificate.received >= certificate.received_bound - 1e-9
    # each step starts where the one before ended
    for before, after in zip(found.steps, found.steps[1:], strict=False):
        assert after.source == before.result or before.continues_in(after)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(even_pairs(), modes)
def test_even_layouts_with_any_strides(pair: Pair, mode: Mode) -> None:
    check(pair, mode)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(uneven_pairs(), modes)
def test_uneven_layouts(pair: Pair, mode: Mode) -> None:
    check(pair, mode)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(pending_pairs(), modes)
def test_pending_sums(pair: Pair, mode: Mode) -> None:
    check(pair, mode)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(cross_pairs(), modes)
def test_from_mesh_to_mesh(pair: Pair, mode: Mode) -> None:
    check(pair, mode)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(even_pairs())
def test_there_and_back_is_the_identity(pair: Pair) -> None:
    source, target = pair
    _, pieces = pieces_of(source)
    back = run_numpy(plan(target, source), run_numpy(plan(source, target), pieces))
    for point, piece in pieces.items():
        np.testing.assert_array_equal(back[point], piece)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(even_pairs())
def test_refining_the_layouts_first_changes_nothing(pair: Pair) -> None:
    source, target = pair
    coarse, fine = plan(source, target), plan(source.refined(), target.refined())
    assert coarse.steps == fine.steps
    assert coarse.certificate == fine.certificate


@settings(derandomize=True, deadline=None, max_examples=60)
@given(any_pairs(), st.sampled_from([32, 64, 200, 1000]))
def test_a_budget_is_kept(pair: Pair, budget: int) -> None:
    source, target = pair
    if 4 * 2 * len({*source.mesh.devices, *target.mesh.devices}) > budget:
        return  # one element to all devices might be too much; test_plan_errors has that case
    check(pair, Mode.AUTO, budget)
    found = plan(source, target, budget=budget)
    assert found.certificate.staging * 4 <= budget
    for step in found.steps:
        assert step.kind is not StepKind.EXCHANGE or staging(step) * 4 <= budget


def test_a_large_array_streams_in_parts_that_keep_all_devices_busy() -> None:
    source = Layout.parse("[4096{x},1024]", _mesh("x=8"))
    found = plan(source, Layout.parse("[4096,1024{x}]", source.mesh), budget=1 << 18)
    assert found.certificate.candidate is Candidate.STREAMED
    # what a device sends and receives, 2 * 7/8 of 2 MiB, in parts of 256 KiB
    assert len(found.steps) == pytest.approx(14, abs=2)
    assert all(step.region is not None and step.region.size == found.steps[0].region.size for step in found.steps[:-1])


def test_nothing_to_do() -> None:
    layout = Layout.parse("[8{x},8{y}]", _mesh("x=2,y=2"))
    found = plan(layout, layout)
    assert (found.steps, found.certificate.candidate) == ((), Candidate.NOTHING)
    assert found.certificate.received == found.certificate.seconds == 0


def test_the_same_mesh_by_other_names_is_one_mesh() -> None:
    source = Layout.parse("[12{x,y}]", _mesh("x=2,y=3"))
    found = plan(source, Layout.parse("[12{z}]", _mesh("z=6")))
    assert found.steps == ()


def test_every_element_leaves_the_source_mesh_once() -> None:
    source, target = Layout.parse("[8{x},6]", _mesh("x=2")), Layout.parse("[8,6]", _mesh("y=4@2-5"))
    found = plan(source, target)
    assert [step.kind for step in found.steps] == [StepKind.EXCHANGE, StepKind.ALL_GATHER]
    assert found.certificate.received == found.certificate.received_bound == prod(source.shape)


def test_a_sum_is_reduced_before_anything_grows() -> None:
    mesh = _mesh("x=2,y=4")
    found = plan(Layout.parse("[16{x},8]{sum:y}", mesh), Layout.parse("[16,8{y}]", mesh), mode=Mode.COLLECTIVE)
    kinds = [step.kind for step in found.steps]
    assert kinds.index(StepKind.REDUCE_SCATTER) < kinds.index(StepKind.ALL_GATHER)
    assert StepKind.ALL_REDUCE not in kinds


def test_replicas_share_an_all_reduce() -> None:
    mesh = _mesh("x=2,y=4")
    found = plan(Layout.parse("[16,8]{sum:y}", mesh), Layout.parse("[16,8]", mesh), mode=Mode.COLLECTIVE)
    assert found.steps[0].kind is StepKind.SLICE
    assert found.certificate.received == found.certificate.received_bound


def test_a_sum_that_stays_pending_stays_where_it_is() -> None:
    mesh = _mesh("x=2,y=2")
    source = Layout.parse("[8{x},4]{sum:y}", mesh)
    found = plan(source, Layout.parse("[8,4{x}]{sum:y}", mesh))
    assert all(isinstance(step.result.entry("y"), Pending) for step in found.steps)
    check((source, found.target), Mode.DIRECT)


def _mesh(text: str) -> Mesh:
    return Mesh.parse(text)
