"""Forward operators computed again in the backward pass: the same results, and less that is kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.fuse.kernel_torch import kernel_module, sample_inputs
from sennit.fuse.recompute import recomputed
from sennit.ir.graph import Graph, Phase
from sennit.ir.strategy_check import Kernel

GELU = """graph "gelu" {
  input %x : f32[64,32] "x"
  param %w : f32[32,128] "w"
  param %v : f32[128,8] "v"
  tangent %t : f32[64,8] "t"
  forward %h : f32[64,128] = aten.mm.default(%x, %w)
  forward %half : f32[64,128] = aten.mul.Tensor(%h, 0.5)
  forward %tanh : f32[64,128] = aten.tanh.default(%h)
  forward %one : f32[64,128] = aten.add.Tensor(%tanh, 1.0)
  forward %g : f32[64,128] = aten.mul.Tensor(%half, %one)
  forward %y : f32[64,8] = aten.mm.default(%g, %v)
  backward %vt : f32[8,128] = aten.permute.default(%v, [1, 0])
  backward %dg : f32[64,128] = aten.mm.default(%t, %vt)
  backward %gt : f32[128,64] = aten.permute.default(%g, [1, 0])
  backward %dv : f32[128,8] = aten.mm.default(%gt, %t)
  backward %a : f32[64,128] = aten.mul.Tensor(%dg, %one)
  backward %b : f32[64,128] = aten.mul.Tensor(%dg, %half)
  backward %c : f32[64,128] = aten.tanh_backward.default(%b, %tanh)
  backward %d : f32[64,128] = aten.add.Tensor(%a, %c)
  backward %xt : f32[32,64] = aten.permute.default(%x, [1, 0])
  backward %dw : f32[32,128] = aten.mm.default(%xt, %d)
  result "y" %y
  gradient "v" %dv
  gradient "w" %dw
}"""


def kept(graph: Graph) -> set[str]:
    """Forward values that backward operators read."""
    made = {value.name for op in graph.ops if op.phase is Phase.FORWARD for value in op.results}
    return {name for op in graph.ops if op.phase is Phase.BACKWARD for name in op.reads} & made


def results(graph: Graph) -> dict[str, torch.Tensor]:
    module, reads, writes = kernel_module(Kernel(graph.ops), frozenset(output.name for output in graph.outputs))
    return dict(zip(writes, module(*sample_inputs(reads, graph.types(), "cpu")), strict=True))


def test_what_is_inside_a_gelu_is_computed_from_the_product_before_it() -> None:
    graph = Graph.parse(GELU)
    again = recomputed(graph, least=1)
    assert kept(graph) == {"g", "one", "half", "tanh"}
    assert kept(again) == {"g", "h"}  # g is in memory for the product behind it
    copies = [op.name for op in again.ops if op.name.endswith(".again")]
    assert sorted(copies) == ["half.again", "one.again", "tanh.again"]
    assert all(op.phase is Phase.BACKWARD for op in again.ops if op.name in copies)
    assert Graph.parse(str(again)) == again
    before, after = results(graph), results(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_small_values_and_those_behind_a_library_call_are_kept() -> None:
    graph = Graph.parse(GELU)
    assert recomputed(graph, least=64 * 128 * 4 + 1) == graph
    # read again behind the second product, as a residual is, a value is in memory
    residual = GELU.replace("result", "forward %r : f32[64,8] = aten.mm.default(%one, %v)\n  result", 1)
    lines = residual.splitlines()
    moved = next(line for line in lines if "%r :" in line)
    lines.remove(moved)
    lines.insert(next(n for n, line in enumerate(lines) if "backward" in line), moved)
    assert "one" in kept(recomputed(Graph.parse("\n".join(lines)), least=1))


def test_a_wide_softmax_of_narrow_numbers_is_computed_again_and_a_plain_one_is_not() -> None:
    text = """graph "loss" {
  input %x : f32[64,32] "x"
  param %w : f32[32,256] "w"
  tangent %t : KIND[64,256] "t"
  forward %h : f32[64,256] = aten.mm.default(%x, %w)
  forward %f : KIND[64,256] = aten._to_copy.default(%h, dtype=KIND)
  forward %s : KIND[64,256] = aten._log_softmax.default(%f, 1, false)
  forward %z : KIND[] = aten.sum.default(%s)
  backward %d : KIND[64,256] = aten._log_softmax_backward_data.default(%t, %s, 1, KIND)
  result "z" %z
  result "d" %d
}"""
    assert kept(recomputed(Graph.parse(text.replace("KIND", "f64")), least=1)) == {"h"}
    assert kept(recomputed(Graph.parse(text.replace("KIND", "f32")), least=1)) == {"s"}


@pytest.fixture(scope="module")
def graphs(small_gpt) -> tuple[Graph, dict[str, torch.Tensor]]:
    return small_gpt.graph, results(small_gpt.graph)


@settings(derandomize=True, deadline=None, max_examples=6)
@given(least=st.sampled_from([1, 64, 512, 2048, 8192]))
def test_a_model_gives_the_same_bits(graphs, least: int) -> None:
    graph, before = graphs
    again = recomputed(graph, least=least)
    after = results(again)
    assert all(torch.equal(before[name], after[name]) for name in before)
    if least == 1:
        assert len(again.ops) > len(graph.ops)
        types = again.types()
        assert sum(types[name].bytes for name in kept(again)) < sum(types[name].bytes for name in kept(graph))
