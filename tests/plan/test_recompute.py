"""Recomputation: the same values from less memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import load
from sennit.errors import PlanError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Op, Phase, Ref, Value
from sennit.ir.graph_numpy import run_graph
from sennit.ir.mesh import Mesh
from sennit.plan import Plan, data_parallel, lower, pipeline, propagate, recompute, tensor_parallel
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.sim import simulate

LAYERS = ("blocks.0", "blocks.1")
PLANS = {
    "serial": lambda graph: Plan("serial", graph, Mesh.parse("@0")),
    "tensor": lambda graph: tensor_parallel(
        graph, Mesh.parse("tp=2,dp=2;mb=2"), qkv="*.qkv", column="*.up", row="*.proj|*.down"
    ),
    "pipeline": lambda graph: pipeline(graph, Mesh.parse("pp=2,dp=2;mb=4"), layers=LAYERS),
}


def by_layer(plan: Plan) -> Plan:
    for layer in LAYERS:
        plan = recompute(plan, plan.graph.select(f"{layer}|{layer}.*", phase=Phase.FORWARD))
    return plan


@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_those_without_it_to_the_last_bit(name: str, small_gpt) -> None:
    plain = PLANS[name](small_gpt.graph)
    thrifty = by_layer(plain)
    outputs = []
    for plan in (plain, thrifty):
        program = lower(propagate(plan))
        verify(program, plan.graph)
        outputs.append(run_in_process(program, small_gpt.state))
    assert all(torch.equal(outputs[0][path], outputs[1][path]) for path in outputs[0])


def test_activations_take_less_memory(small_gpt) -> None:
    plain = data_parallel(small_gpt.graph, Mesh.parse("dp=2"))
    thrifty = by_layer(plain)
    cluster = load("dgx-a100")
    peaks = [simulate(lower(propagate(plan)), cluster).peak_memory(0) for plan in (plain, thrifty)]
    assert peaks[1] < 0.9 * peaks[0]


@settings(derandomize=True, deadline=None, max_examples=15)
@given(draw=st.data())
def test_any_choice_of_operators_gives_the_same_graph_values(small_gpt, draw: st.DataObject) -> None:
    graph = small_gpt.graph
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    chosen = draw.draw(st.lists(st.sampled_from(forward), unique_by=lambda op: op.name))
    again = recompute(Plan("serial", graph, Mesh.parse("@0")), chosen).graph
    inputs = {item.value.name: small_gpt.state[item.path].numpy() for item in graph.inputs}
    one, other = run_graph(graph, inputs), run_graph(again, inputs)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    names = {value.name for op in chosen for value in op.results}
    assert not any(names & set(op.reads) for op in again.ops if op.phase is Phase.BACKWARD)


def test_only_forward_operators_of_the_graph_can_be_recomputed(small_gpt) -> None:
    plan = data_parallel(small_gpt.graph, Mesh.parse("dp=2"))
    with pytest.raises(PlanError, match=r"backward operator[\s\S]*forward operators only"):
        recompute(plan, plan.graph.select("blocks.0*", phase=Phase.BACKWARD))
    other = Op("aten.neg.default", (Ref("loss"),), (), (Value("strange", TensorType((), DType.F64)),), Phase.FORWARD)
    with pytest.raises(PlanError, match=r"strange is not an operator of the plan's graph"):
        recompute(plan, [other])
