"""Stages that share devices, lie on all of them, or have unequal meshes: every gradient equals the serial step's, in
the reference interpreter and on threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sennit.capture.rewrite import take_apart
from sennit.errors import PlanError
from sennit.ir.graph import Graph, Output, OutputKind, Phase, Role
from sennit.ir.mesh import Axis, AxisKind, Mesh
from sennit.ir.program import Collective, Compute, Exchange, Program, Receive, Send
from sennit.ir.program_numpy import run_program
from sennit.plan import Pattern, Plan, data_inputs, lower, order, pipeline, place, propagate, transform
from sennit.plan.lower_index import weight_work
from sennit.plan.verify import verify
from sennit.run import run_in_process

ROUNDING = 1e-13
HALVES = (
    "blocks.0.norm1|blocks.0.attention*",
    "blocks.0.norm2|blocks.0.up|blocks.0.down",
    "blocks.1.norm1|blocks.1.attention*",
    "blocks.1.norm2|blocks.1.up|blocks.1.down",
)


def batch(plan: Plan, *axes: str) -> Plan:
    return transform(plan, data_inputs(plan.graph), dim=0, axis=axes)


def forward(graph: Graph, modules: str):
    return graph.select(modules, phase=Phase.FORWARD)


def halves(graph: Graph, mesh: str, devices: tuple[int, ...], pattern: str | None = None) -> Plan:
    """Four stages on two devices."""
    laid = Mesh.parse(mesh)
    plan = batch(Plan("halves", graph, laid), "mb")
    for stage, (modules, device) in enumerate(zip(HALVES, devices, strict=True)):
        plan = place(plan, forward(graph, modules), laid.at(pp=device), stage)
    return plan if pattern is None else order(plan, Pattern.parse(pattern))


def chimera(graph: Graph) -> Plan:
    """Half of the batch goes down the devices, half goes up: a stage lies on a device for each."""
    mesh = Mesh.parse("x=2;mb=2")
    down, up = (Mesh((Axis("dp", 2), Axis("mb", 2, AxisKind.TIME)), devices) for devices in ((0, 1), (1, 0)))
    plan = Plan("chimera", graph, mesh)
    plan = place(plan, forward(graph, "blocks.0|blocks.0.*"), down)
    plan = place(plan, forward(graph, "blocks.1|blocks.1.*"), up)
    return batch(plan, "mb", "dp")


def interlaced(graph: Graph, mesh: str = "pp=2;mb=2") -> Plan:
    """The embedding and the head on all devices, split on the vocabulary; the layers in stages between them."""
    laid = Mesh.parse(mesh)
    graph = take_apart(graph, graph.select(kind="aten._log_softmax.default|aten._log_softmax_backward_data.default"))
    plan = batch(Plan("interlaced", graph, laid), *(("dp",) if "dp" in laid else ()), "mb")
    plan = place(plan, forward(graph, "tokens"), laid)
    for stage in range(2):
        plan = place(plan, forward(graph, f"blocks.{stage}|blocks.{stage}.*"), laid.at(pp=stage))
    plan = place(plan, forward(graph, "head"), laid, 3)
    (embedding,) = graph.select("tokens", "aten.embedding.default", Phase.FORWARD)
    plan = transform(plan, [embedding], dim="v", axis="pp")
    return transform(plan, graph.select("head", "aten.mm.default", Phase.FORWARD), dim="n", axis="pp")


def unequal(graph: Graph) -> Plan:
    """The first block data parallel on four devices, the second tensor parallel on two."""
    plan = Plan("unequal", graph, Mesh.parse("x=6;mb=2"))
    plan = place(plan, forward(graph, "blocks.0|blocks.0.*"), Mesh.parse("dp=4;mb=2@0-3"))
    plan = place(plan, forward(graph, "blocks.1|blocks.1.*"), Mesh.parse("tp=2;mb=2@4-5"))
    plan = batch(plan, "mb", "dp")
    products = "aten.addmm.default"
    plan = transform(
        plan, graph.select("blocks.1.attention.qkv", products, Phase.FORWARD), dim="n", axis="tp", chunks=3
    )
    plan = transform(plan, graph.select("blocks.1.up", products, Phase.FORWARD), dim="n", axis="tp")
    return transform(
        plan, graph.select("blocks.1.attention.proj|blocks.1.down", products, Phase.FORWARD), dim="k", axis="tp"
    )


def zero_bubble(graph: Graph) -> Plan:
    plan = pipeline(graph, Mesh.parse("pp=2;mb=2"), layers=("blocks.0", "blocks.1"))
    return order(plan, Pattern.parse("F0 F1 B0 W0 B1 W1\nF0 B0 F1 B1 W0 W1"))


def zero(graph: Graph, mesh: str, *, regather: bool = False, early: bool = False) -> Plan:
    """Parameters live in pieces over dp, cut on the first dim that divides."""
    laid = Mesh.parse(mesh)
    plan = batch(Plan("zero", graph, laid), *(axis.name for axis in laid.axes))
    for item in graph.inputs:
        if item.role is Role.PARAM:
            dim = next(d for d, size in enumerate(item.value.type.shape) if size % laid.size("dp") == 0)
            plan = transform(plan, [item], dim=dim, axis="dp")
    return replace(plan, regather=regather, reduce_early=early)


PLANS: dict[str, Callable[[Graph], Plan]] = {
    "interleaved": lambda graph: halves(graph, "pp=2;mb=2", (0, 1, 0, 1)),
    "a V": lambda graph: halves(graph, "pp=2;mb=2", (0, 1, 1, 0)),
    "one device": lambda graph: halves(graph, "pp=1;mb=2", (0, 0, 0, 0)),
    "chimera": chimera,
    "interlaced": interlaced,
    "interlaced, data": lambda graph: interlaced(graph, "pp=2,dp=2;mb=2"),
    "unequal": unequal,
    "weights apart": zero_bubble,
    "ZeRO-1": lambda graph: zero(graph, "dp=2;mb=2"),
    "ZeRO-2": lambda graph: zero(graph, "dp=2;mb=2", early=True),
    "ZeRO-3": lambda graph: zero(graph, "dp=4", regather=True),
    "ZeRO-3, micro-batches": lambda graph: zero(graph, "dp=2;mb=2", regather=True, early=True),
}


def program_of(plan: Plan) -> Program:
    program = lower(propagate(plan))
    assert Program.parse(str(program)) == program
    verify(program, plan.graph)
    return program


@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize("name", PLANS)
def test_every_gradient_equals_the_serial_step(name: str, small_gpt) -> None:
    import torch

    program = program_of(PLANS[name](small_gpt.graph))
    arrays = {path: tensor.numpy() for path, tensor in small_gpt.state.items()}
    outputs = {path: torch.from_numpy(array) for path, array in run_program(program, arrays).items()}
    assert max(small_gpt.differences(outputs).values()) <= ROUNDING
    assert max(small_gpt.differences(run_in_process(program, small_gpt.state)).values()) <= ROUNDING


def kinds(program: Program) -> Counter[type]:
    return Counter(type(step) for lane in program.lanes for step in lane.steps)


def test_stages_of_one_device_need_no_transfer(small_gpt) -> None:
    found = kinds(program_of(PLANS["one device"](small_gpt.graph)))
    assert not found[Send] + found[Receive] + found[Exchange] + found[Collective]


def test_where_a_v_turns_nothing_is_sent(small_gpt) -> None:
    interleaved, v = (kinds(program_of(PLANS[name](small_gpt.graph))) for name in ("interleaved", "a V"))
    assert v[Send] < interleaved[Send]


def test_an_interlaced_plan_never_gathers_the_vocabulary(small_gpt) -> None:
    program = program_of(interlaced(small_gpt.graph))
    for lane in program.lanes:
        for step in lane.steps:
            if isinstance(step, Collective) and step.kind.value == "all_gather":
                assert 48 not in step.result.layout.shape, step


def test_zero_gathers_once_or_for_each_task(small_gpt) -> None:
    parameters = sum(item.role is Role.PARAM for item in small_gpt.graph.inputs)

    def gathers(name: str) -> int:
        steps = program_of(PLANS[name](small_gpt.graph)).lanes[0].steps
        return sum(isinstance(step, Collective) and step.kind.value == "all_gather" for step in steps)

    assert gathers("ZeRO-1") == gathers("ZeRO-2") == parameters
    assert parameters < gathers("ZeRO-3") <= 2 * parameters


def test_gradients_of_weights_wait_for_nobody(small_gpt) -> None:
    graph = small_gpt.graph
    apart = weight_work(graph)
    products = [op for op in graph.ops if op.phase is Phase.BACKWARD and op.kind == "aten.mm.default"]
    assert sum(op.name in apart for op in products) == len(products) // 2  # one of each pair makes a weight's gradient
    for op in graph.ops:
        if op.phase is Phase.BACKWARD and op.name not in apart:
            assert not any(graph.producers()[name].name in apart for name in op.reads if name in graph.producers())


def test_a_stage_needs_its_backward_tasks(small_gpt) -> None:
    plan = halves(small_gpt.graph, "pp=1;mb=1", (0, 0, 0, 0), "0F0 1F0 2F0 3F0 3B0 2B0 1B0")
    with pytest.raises(PlanError, match=r"the pattern has no task for[\s\S]*stage 0 runs 0F0"):
        lower(propagate(plan))


def test_a_row_has_the_stages_of_its_lane(small_gpt) -> None:
    plan = halves(small_gpt.graph, "pp=2;mb=1", (0, 1, 0, 1))
    with pytest.raises(
        PlanError,
        match=r"row 0 of the pattern runs stages \[0, 1\], and its lane, devices \[0\], holds stages \[0, 2\]",
    ):
        order(plan, Pattern.parse("0F0 1F0 1B0 0B0\n2F0 3F0 3B0 2B0"))


def test_a_parameter_lies_on_one_mesh_of_a_device(small_gpt) -> None:
    graph, mesh = small_gpt.graph, Mesh.parse("pp=2")
    plan = Plan("tied over two meshes", graph, mesh)
    plan = place(plan, forward(graph, "tokens"), mesh)
    plan = place(plan, forward(graph, "head"), mesh.at(pp=1))
    (embedding,) = graph.select("tokens", "aten.embedding.default", Phase.FORWARD)
    plan = transform(plan, [embedding], dim="v", axis="pp")
    with pytest.raises(PlanError, match=r"'tokens.weight' is read on pp=2 as \[48\{pp\},32\] and on @1 as \[48,32\]"):
        lower(propagate(plan))


@pytest.mark.parametrize("mesh", ["dp=2;mb=2", "dp=1;mb=4"])
def test_a_result_of_micro_batches_comes_whole(mesh: str, small_gpt) -> None:
    (logits,) = small_gpt.graph.select("head", "aten.mm.default", Phase.FORWARD)
    result = Output(OutputKind.RESULT, logits.name, "logits")
    graph = replace(small_gpt.graph, outputs=(*small_gpt.graph.outputs, result))
    arrays = {path: tensor.numpy() for path, tensor in small_gpt.state.items()}
    whole = run_program(program_of(Plan("serial", graph, Mesh.parse("@0"))), arrays)["logits"]
    program = program_of(batch(Plan("micro-batches", graph, Mesh.parse(mesh)), "dp", "mb"))
    assert any(isinstance(step, Compute) and step.kind == "sennit.concat" for step in program.lanes[0].steps)
    np.testing.assert_allclose(run_program(program, arrays)["logits"], whole, rtol=1e-12, atol=1e-13)
