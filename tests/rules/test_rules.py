"""Operator rules are certified by execution: every strategy of every operator of a real graph is run on pieces."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.capture.rules import Letters, decide, localize, map_split, propose, rule_of
from sennit.errors import PlanError
from sennit.ir.aten_numpy import apply, bind
from sennit.ir.dtype import DType
from sennit.ir.dtype_numpy import numpy_dtype
from sennit.ir.graph import Op, Phase
from sennit.ir.layout import Layout, Pending, Reduction, Split
from sennit.ir.layout_numpy import assemble, distribute
from sennit.ir.mesh import Mesh


def representatives(graph) -> list[Op]:
    """One operator per kind, shapes and arguments that are not names."""
    types = graph.types()
    found = {}
    for op in graph.ops:
        key = (op.kind, tuple(types[name] for name in op.reads), str([a for a in op.args if not hasattr(a, "name")]))
        found.setdefault(key, op)
    return list(found.values())


def random_value(rng: np.random.Generator, tensor, *, bound: int) -> np.ndarray:
    match tensor.dtype:
        case DType.BOOL:
            return rng.random(tensor.shape) < 0.5
        case DType.I64:
            return rng.integers(0, bound, tensor.shape)
        case _:
            return np.asarray(rng.standard_normal(tensor.shape), numpy_dtype(tensor.dtype))


def strategies_of(op: Op, types, size: int):
    """Every strategy that any entries of the reads can propose, and every letter."""
    found = {}
    for position, name in enumerate(op.reads):
        shape = types[name].shape
        entries = [Pending(Reduction.SUM)]
        for dim, extent in enumerate(shape):
            entries += [Split(dim, stride) for stride in range(1, extent + 1) if extent % (stride * size) == 0]
        for entry in entries:
            everyone = [entry] * len(op.reads) if isinstance(entry, Pending) else None
            have = everyone or [entry if other == position else None for other in range(len(op.reads))]
            alone = [entry if other == position else None for other in range(len(op.reads))]
            for strategy in (*propose(op, types, size, have), *propose(op, types, size, alone)):
                found.setdefault(strategy)
    rule = rule_of(op, types)
    for letter in rule.letters if isinstance(rule, Letters) else ():
        try:
            found.setdefault(decide(op, types, size, letter))
        except PlanError:
            continue  # the dim does not divide
    return [strategy for strategy in found if not strategy.is_replicated]


def certify(op: Op, types, strategy, size: int, rng: np.random.Generator) -> None:
    mesh = Mesh.make({"a": size})
    bound = min([extent for name in op.reads for extent in types[name].shape] or [1])
    values = {name: random_value(rng, types[name], bound=bound) for name in op.reads}
    whole = apply(op.kind, *bound_call(op, values))
    layouts = [Layout.make(mesh, types[name].shape, {"a": e}) for name, e in zip(op.reads, strategy.reads, strict=True)]
    made = [Layout.make(mesh, v.type.shape, {"a": e}) for v, e in zip(op.results, strategy.results, strict=True)]
    pieces: list[dict] = [{} for _ in made]
    # random parts for pending reads: a linear operator must not depend on where the value lies
    cut = [scatter(values[name], layout, rng) for name, layout in zip(op.reads, layouts, strict=True)]
    args, kwargs = localize(op, [layout.local_shape() for layout in made])
    for point in mesh.points():
        local = {name: parts[point] for name, parts in zip(op.reads, cut, strict=True)}
        for result, out in zip(pieces, apply(op.kind, *bound_call(op, local, args, kwargs)), strict=True):
            result[point] = out
    for layout, parts, expected in zip(made, pieces, whole, strict=True):
        close = 1e-9 if all(types[name].dtype is not DType.F32 for name in op.reads) else 1e-5
        np.testing.assert_allclose(assemble(layout, parts), expected, close, close, err_msg=f"{op} {strategy}")


def bound_call(op: Op, values, args=None, kwargs=None):
    args, kwargs = (op.args, op.kwargs) if args is None else (args, kwargs)
    return bind(args, values), {key: bind(arg, values) for key, arg in kwargs}


def scatter(value: np.ndarray, layout: Layout, rng: np.random.Generator):
    pieces = distribute(value, layout)
    if layout.pending and value.dtype.kind == "f":
        noise = np.asarray(rng.standard_normal(value.shape), value.dtype)
        first, second, *_ = pieces
        pieces[first], pieces[second] = np.asarray(pieces[first] + noise), np.asarray(pieces[second] - noise)
    return pieces


def test_every_strategy_computes_what_the_operator_does(small_gpt) -> None:
    graph, types = small_gpt.graph, small_gpt.graph.types()
    rng = np.random.default_rng(0)
    certified = 0
    for op in representatives(graph):
        if prod(v.type.elements for v in op.results) > 1e9:
            continue
        for strategy in strategies_of(op, types, 2):
            certify(op, types, strategy, 2, rng)
            certified += 1
    assert certified > 300


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


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4).map(tuple)


@settings(max_examples=200)
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
