"""The optimizer step as operators: it equals torch's, under any plan, and ZeRO-1 follows from cutting its state."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Role
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Program
from sennit.ir.program_numpy import run_program
from sennit.plan import Plan, data_parallel, lower, pipeline, propagate, tensor_parallel, transform
from sennit.plan.update import SGD, AdamW, scalars, states_of, with_optimizer
from sennit.plan.verify import verify
from sennit.run import run_in_process

RATE, STEP = 1e-2, 3
OPTIMIZERS = {"momentum": SGD(0.9, 0.1), "plain": SGD(), "adamw": AdamW()}


def megatron(graph: Graph, mesh: str) -> Plan:
    return tensor_parallel(graph, Mesh.parse(mesh), qkv="*.qkv", column="*.up", row="*.proj|*.down")


PLANS = {
    "serial": lambda graph: Plan("serial", graph, Mesh.parse("@0")),
    "data, micro-batches": lambda graph: data_parallel(graph, Mesh.parse("dp=2;mb=2")),
    "tensor": lambda graph: megatron(graph, "tp=2"),
    "pipeline": lambda graph: pipeline(graph, Mesh.parse("pp=2;mb=2"), layers=("blocks.0", "blocks.1")),
    "ZeRO-1": lambda graph: cut_state(data_parallel(graph, Mesh.parse("dp=2"))),
}


def cut_state(plan: Plan) -> Plan:
    for item in states_of(plan.graph):
        plan = transform(plan, [item], dim=0, axis="dp")
    return plan


def program_of(plan: Plan) -> Program:
    program = lower(propagate(plan))
    verify(program, plan.graph)
    return program


def expected(optimizer: SGD | AdamW, state: dict, gradients: dict) -> dict[str, torch.Tensor]:
    """What torch's optimizer makes of the parameters, with the state that it is given."""
    names = list(gradients)
    parameters = [torch.nn.Parameter(state[name].clone()) for name in names]
    for parameter, name in zip(parameters, names, strict=True):
        parameter.grad = gradients[name].clone()
    if isinstance(optimizer, SGD):
        made = torch.optim.SGD(parameters, RATE, momentum=optimizer.momentum, weight_decay=0.0)
        for parameter, name in zip(parameters, names, strict=True):
            made.state[parameter]["momentum_buffer"] = state.get(f"{name}@momentum", torch.zeros(())).clone()
        with torch.no_grad():
            for parameter in parameters:
                parameter -= RATE * optimizer.weight_decay * parameter
    else:
        made = torch.optim.AdamW(parameters, RATE, weight_decay=optimizer.weight_decay)
        for parameter, name in zip(parameters, names, strict=True):
            made.state[parameter] = {
                "step": torch.tensor(STEP - 1.0),
                "exp_avg": state[f"{name}@exp_avg"].clone(),
                "exp_avg_sq": state[f"{name}@exp_avg_sq"].clone(),
            }
    made.step()
    return {name: parameter.detach() for name, parameter in zip(names, parameters, strict=True)}


def state_for(graph: Graph, optimizer: SGD | AdamW, state: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    kept = {
        item.path: torch.rand(item.value.type.shape, generator=generator, dtype=torch.float64) * 0.01
        for item in states_of(graph)
    }
    numbers = {path: torch.tensor(value, dtype=torch.float64) for path, value in scalars(optimizer, RATE, STEP).items()}
    return {**state, **kept, **numbers}


@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", PLANS)
def test_new_parameters_equal_those_of_torch(name: str, kind: str, small_gpt) -> None:
    optimizer = OPTIMIZERS[kind]
    graph = with_optimizer(small_gpt.graph, optimizer)
    state = state_for(graph, optimizer, small_gpt.state)
    gradients = {path: value for path, value in small_gpt.reference.items() if path != "loss"}
    program = program_of(PLANS[name](graph))
    made = run_in_process(program, state)
    for path, whole in expected(optimizer, state, gradients).items():
        torch.testing.assert_close(made[path], whole, rtol=1e-11, atol=1e-13)
    if name == "ZeRO-1" and kind == "adamw":  # and in the reference interpreter
        oracle = run_program(program, {path: tensor.numpy() for path, tensor in state.items()})
        np.testing.assert_allclose(oracle["blocks.0.up.weight@exp_avg"], made["blocks.0.up.weight@exp_avg"], rtol=1e-12)


def test_cutting_the_state_scatters_gradients_and_gathers_parameters(small_gpt) -> None:
    graph = with_optimizer(small_gpt.graph, AdamW())
    parameters = sum(item.role is Role.PARAM for item in graph.inputs)
    (lane,) = program_of(PLANS["ZeRO-1"](graph)).lanes
    kinds = Counter(step.kind.value for step in lane.steps if isinstance(step, Collective))
    # the gradient of the positions is made in its piece, of a sum over the batch that is reduced before
    assert kinds == {"reduce_scatter": parameters - 1, "all_gather": parameters, "all_reduce": 2 + 1}


def test_a_graph_without_gradients_has_no_update(small_gpt) -> None:
    from dataclasses import replace

    forward = replace(small_gpt.graph, outputs=small_gpt.graph.outputs[:1])
    with pytest.raises(PlanError, match=r"has no gradient"):
        with_optimizer(forward, SGD())
