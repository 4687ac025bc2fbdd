"""Groups that reach from the forward into the backward pass: legal in a step that is one phase, with the same results."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import load
from sennit.errors import PlanError
from sennit.fuse.compiled_cost import Compiled
from sennit.fuse.kernel_cost import Staged
from sennit.fuse.kernel_set import KernelSet, Limits
from sennit.fuse.kernel_torch import kernel_module, sample_inputs
from sennit.fuse.model import Channel, Grouping, StepModel
from sennit.fuse.moves import AS_COMPILED, fused_greedily
from sennit.fuse.one_phase import as_one_phase
from sennit.ir.graph import Graph, Phase
from sennit.ir.strategy import Strategy
from sennit.ir.strategy_check import kernels

LOSS = """graph "loss" {
  input %x : f32[16,8] "x"
  param %w : f32[8,32] "w"
  tangent %t : f32[16,32] "t"
  forward %h : f32[16,32] = aten.mm.default(%x, %w)
  forward %s : f32[16,32] = aten.mul.Tensor(%h, 0.5)
  forward %p : f32[16,32] = aten._log_softmax.default(%s, 1, false)
  backward %q : f32[16,32] = aten._log_softmax_backward_data.default(%t, %p, 1, f32)
  backward %d : f32[16,32] = aten.mul.Tensor(%q, 0.5)
  backward %xt : f32[8,16] = aten.permute.default(%x, [1, 0])
  backward %dw : f32[8,32] = aten.mm.default(%xt, %d)
  result "p" %p
  gradient "w" %dw
}"""


def model_of(graph: Graph) -> StepModel:
    return StepModel(graph, Compiled(Staged.of(graph, load("h200x8").device)), Channel(0.0, 0.0))


def results(graph: Graph, strategy: Strategy) -> dict[str, torch.Tensor]:
    """Of the graph, kernel by kernel in the strategy's order."""
    types = graph.types()
    names = [item.value.name for item in graph.inputs]
    values = dict(zip(names, sample_inputs(names, types, "cpu"), strict=True))
    found = kernels(strategy, graph)
    for kernel in found:
        made = frozenset(value.name for op in kernel.body for value in op.results)
        module, reads, writes = kernel_module(kernel, made)
        values.update(zip(writes, module(*[values[name] for name in reads]), strict=True))
    return {output.name: values[output.name] for output in graph.outputs}


def phases_of(graph: Graph, strategy: Strategy) -> list[set[Phase]]:
    phase = {op.name: op.phase for op in graph.ops}
    return [{phase[name] for name in group.ops} for group in strategy.groups]


def test_a_log_softmax_and_its_backward_pass_are_one_group_of_a_step_in_one_phase() -> None:
    graph = Graph.parse(LOSS)
    joined = as_one_phase(graph)
    model = model_of(joined)
    strategy = model.strategy("across", fused_greedily(model, AS_COMPILED), ())
    assert {Phase.FORWARD, Phase.BACKWARD} in phases_of(graph, strategy)
    assert len(kernels(strategy, joined)) < len(graph.ops)  # they have an order
    apart = model_of(graph)
    assert {Phase.FORWARD, Phase.BACKWARD} not in phases_of(
        graph, apart.strategy("", fused_greedily(apart, AS_COMPILED), ())
    )


def test_the_same_groups_are_refused_where_the_loss_is_handed_out_between() -> None:
    graph = Graph.parse(LOSS)
    model = model_of(as_one_phase(graph))
    with pytest.raises(PlanError, match="mixes forward and backward"):
        kernels(model.strategy("across", fused_greedily(model, AS_COMPILED), ()), graph)


def test_only_the_phase_of_operators_changes() -> None:
    graph = Graph.parse(LOSS)
    joined = as_one_phase(graph)
    assert (joined.inputs, joined.outputs, joined.types()) == (graph.inputs, graph.outputs, graph.types())
    assert [(op.name, op.kind, op.args) for op in joined.ops] == [(op.name, op.kind, op.args) for op in graph.ops]


@given(seed=st.integers(0, 1 << 16))
@settings(derandomize=True, deadline=None, max_examples=20)
def test_random_groups_across_the_phases_have_an_order_and_the_same_results(seed: int) -> None:
    graph = as_one_phase(Graph.parse(LOSS))
    model, draw = model_of(graph), random.Random(seed)
    moved = KernelSet(model, Grouping(), Limits())
    for _ in range(draw.randrange(1, 12)):
        moved.random_move(draw)
    found = results(graph, model.strategy("moved", moved.grouping(), ()))
    for name, value in results(graph, Strategy("none")).items():
        assert torch.equal(value, found[name])
