"""Operator rules are certified by execution: every way to split every operator of real graphs is run on pieces."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.capture.rules import Letters, decide, map_split, propose, rule_of
from sennit.errors import PlanError
from sennit.ir.graph import Phase
from sennit.ir.layout import Layout, Pending, Reduction, Split
from sennit.ir.layout_numpy import distribute
from sennit.ir.mesh import Mesh
from sennit.testing.rule_ways import failures


def test_every_way_computes_what_the_operator_does(small_gpt) -> None:
    tried, wrong = failures(small_gpt.graph)
    assert not wrong
    assert tried > 500


def test_a_bias_is_added_once(small_gpt) -> None:
    (op,) = small_gpt.graph.select("blocks.0.down", "aten.addmm.default", Phase.FORWARD)
    strategy = decide(op, small_gpt.graph.types(), 2, "k")
    assert strategy.reads[0] == Pending(Reduction.SUM)
    assert strategy.results == (Pending(Reduction.SUM),)


def test_a_fused_qkv_splits_in_chunks(small_gpt) -> None:
    (op,) = small_gpt.graph.select("blocks.0.attention.qkv", "aten.addmm.default", Phase.FORWARD)
    assert decide(op, small_gpt.graph.types(), 2, "n", chunks=3).results == (Split(1, 16),)  # 96 = 3 x 2 x 16
    with pytest.raises(PlanError, match=r"dim 'n' of size 96 does not divide into 3 x 5 pieces[\s\S]*attention.qkv"):
        decide(op, small_gpt.graph.types(), 5, "n", chunks=3)
    with pytest.raises(PlanError, match=r"has no dim 'z'[\s\S]*its dims are n, m, k"):
        decide(op, small_gpt.graph.types(), 2, "z")


def test_a_chunk_keeps_digits_that_lie_within_it(small_gpt) -> None:
    graph, types = small_gpt.graph, small_gpt.graph.types()
    op = next(op for op in graph.ops if op.kind == "aten.split_with_sizes.default")  # 96 in three parts of 32
    (_, within) = propose(op, types, 2, [Split(2, 16)])
    assert within.results == (Split(2, 16),) * 3
    (_,) = propose(op, types, 2, [Split(2, 48)])  # blocks of 48 run over the edges


def test_a_view_is_split_by_the_dims_of_its_result(small_gpt) -> None:
    graph, types = small_gpt.graph, small_gpt.graph.types()
    op = next(op for op in graph.ops if op.kind == "aten.view.default" and len(op.results[0].type.shape) == 4)
    assert decide(op, types, 2, "i2").results == (Split(2, op.results[0].type.shape[2] // 2),)


def test_operators_that_index_name_their_local_form(small_gpt) -> None:
    graph, types = small_gpt.graph, small_gpt.graph.types()
    (op, *_) = graph.select("tokens", "aten.embedding.default", Phase.FORWARD)
    rows = decide(op, types, 2, "v")
    assert (rows.form, rows.results) == ("embedding", (Pending(Reduction.SUM),))
    assert decide(op, types, 2, "d").form is None
    rule = rule_of(op, types)
    assert isinstance(rule, Letters)
    assert rule.letters == ("v", "d", "i0", "i1")


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4).map(tuple)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(shapes, st.data())
def test_a_digit_keeps_its_elements_in_another_shape(source: tuple[int, ...], data: st.DataObject) -> None:
    factors = data.draw(st.permutations(sorted(source, reverse=True)))
    target = data.draw(st.sampled_from([tuple(factors), (prod(source),), (*source, 1), (1, *source)]))
    dim = data.draw(st.integers(0, len(source) - 1))
    size = data.draw(st.sampled_from([2, 3]))
    stride = data.draw(st.sampled_from([1, 2, 3, 4]))
    split = Split(dim, stride)
    mapped = map_split(source, target, split, size)
    if mapped is None:
        return
    mesh = Mesh.make({"a": size})
    flat = np.arange(prod(source))
    before = distribute(flat.reshape(source), Layout.make(mesh, source, {"a": split}))
    after = distribute(flat.reshape(target), Layout.make(mesh, target, {"a": mapped}))
    for point in mesh.points():
        np.testing.assert_array_equal(before[point].ravel(), after[point].ravel())
