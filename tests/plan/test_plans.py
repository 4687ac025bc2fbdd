"""Plans: what the zoo decides, what propagation makes of it, and how mistakes are told."""

from __future__ import annotations

from collections import Counter

import pytest

from sennit.errors import MeshError, PlanError
from sennit.ir.graph import Phase
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Program, Receive, Send
from sennit.plan import (
    Moment,
    Pattern,
    Plan,
    data_inputs,
    data_parallel,
    lower,
    order,
    pipeline,
    place,
    propagate,
    tensor_parallel,
    transform,
)

LAYERS = ("blocks.0", "blocks.1")


def megatron(graph, mesh: str) -> Program:
    plan = tensor_parallel(graph, Mesh.parse(mesh), qkv="*.qkv", column="*.up", row="*.proj|*.down")
    return lower(propagate(plan))


def collectives(program: Program) -> Counter[tuple[str, str]]:
    return Counter(
        (step.kind.value, step.axes[0]) for lane in program.lanes for step in lane.steps if isinstance(step, Collective)
    )


def test_data_parallel_reduces_each_gradient_once(small_gpt) -> None:
    program = lower(propagate(data_parallel(small_gpt.graph, Mesh.parse("dp=4"))))
    gradients = len(small_gpt.graph.outputs) - 1
    assert collectives(program) == {("all_reduce", "dp"): gradients + 2}  # and the loss, and the count of targets


def test_the_decisions_of_megatron_give_the_collectives_of_megatron(small_gpt) -> None:
    layers = len(LAYERS)
    assert collectives(megatron(small_gpt.graph, "tp=4")) == {("all_reduce", "tp"): layers * (2 + 2)}


def test_parameters_follow_the_operators_that_were_split(small_gpt) -> None:
    (lane,) = megatron(small_gpt.graph, "tp=2").lanes
    layouts = {item.path: str(item.buffer.layout) for item in lane.inputs}
    assert layouts["blocks.0.attention.qkv.weight"] == "[96{tp:16},32]"  # three chunks, each in two blocks
    assert layouts["blocks.0.attention.qkv.bias"] == "[96{tp:16}]"
    assert layouts["blocks.0.attention.proj.weight"] == "[32,32{tp}]"
    assert layouts["blocks.0.up.weight"] == "[128{tp},32]"
    assert layouts["blocks.0.down.bias"] == "[32]"


def test_a_pipeline_sends_activations_forward_and_gradients_back(small_gpt) -> None:
    program = lower(propagate(pipeline(small_gpt.graph, Mesh.parse("pp=2;mb=4"), layers=LAYERS)))
    first, second = program.lanes
    # four micro-batches each way; the shared embedding's gradient goes to the first stage once, and its sum comes back
    assert sum(isinstance(step, Send) for step in first.steps) == 5
    assert sum(isinstance(step, Receive) for step in first.steps) == 5
    assert {output.path for output in first.outputs} & {output.path for output in second.outputs} == {"tokens.weight"}


def test_counts_of_targets_are_taken_before_the_micro_batches(small_gpt) -> None:
    decisions = propagate(data_parallel(small_gpt.graph, Mesh.parse("dp=2;mb=4")))
    moments = {op.kind: decisions.moment[op.name] for op in small_gpt.graph.ops}
    counts = [
        op for op in small_gpt.graph.ops if op.kind == "aten.sum.default" and decisions.moment[op.name] is Moment.BEFORE
    ]
    compared = {name for count in counts for name in count.reads}
    assert compared == {op.name for op in small_gpt.graph.ops if op.kind == "aten.ne.Scalar" and op.name in compared}
    assert all(decisions.moment[name] is Moment.BEFORE for name in compared)
    assert compared
    # the rows of targets are as large as the logits: of one micro-batch at a time
    assert moments["aten.scatter.value"] is Moment.DURING
    (loss,) = [op for op in small_gpt.graph.ops if op.name == small_gpt.graph.outputs[0].name]
    assert decisions.moment[loss.name] is Moment.AFTER
    assert moments["aten.gelu.default"] is Moment.DURING


def test_a_users_own_plan(small_gpt) -> None:
    graph, mesh = small_gpt.graph, Mesh.parse("tp=2")
    plan = Plan("only the feed-forward", graph, mesh)
    plan = transform(plan, graph.select("*.up", "aten.addmm.default", Phase.FORWARD), dim="n", axis="tp")
    program = lower(propagate(plan))
    # nobody asked for `down` to be split, but it follows what it reads
    assert collectives(program)["all_reduce", "tp"] == 2 * len(LAYERS)


def test_mistakes_are_told_with_what_to_change(small_gpt) -> None:
    graph, mesh = small_gpt.graph, Mesh.parse("dp=2,tp=2")
    plan = Plan("mine", graph, mesh)
    up = graph.select("*.up", "aten.addmm.default", Phase.FORWARD)
    with pytest.raises(MeshError, match=r"unknown axis 'cp'[\s\S]*dp=2, tp=2[\s\S]*use one of these axes"):
        transform(plan, up, dim="n", axis="cp")
    once = transform(plan, up, dim="n", axis="tp")
    with pytest.raises(PlanError, match=r"axis 'tp' is used twice[\s\S]*blocks.0.up"):
        transform(once, up, dim="k", axis="tp")
    with pytest.raises(PlanError, match=r"input 'tokens': dim 0 of size 8 does not divide over dp=3"):
        data_parallel(graph, Mesh.parse("dp=3"))
    with pytest.raises(PlanError, match=r"input 'tokens' of shape \[8, 12\] has no dim 'm'"):
        transform(plan, data_inputs(graph), dim="m", axis="dp")
    with pytest.raises(PlanError, match=r"2 layers for 4 stages"):
        pipeline(graph, Mesh.parse("pp=4"), layers=LAYERS)
    with pytest.raises(PlanError, match=r"time axes a, b"):
        Plan("mine", graph, Mesh.parse("dp=2;a=2,b=2"))


def test_mistakes_in_places_and_orders(small_gpt) -> None:
    graph, mesh = small_gpt.graph, Mesh.parse("pp=2,dp=2;mb=2")
    plan = Plan("mine", graph, mesh)
    block = graph.select("blocks.0|blocks.0.*", phase=Phase.FORWARD)
    placed = place(plan, block, mesh.at(pp=0))
    with pytest.raises(PlanError, match=r"is placed twice"):
        place(placed, block[:1], mesh.at(pp=1))
    with pytest.raises(PlanError, match=r"devices \[8, 9\] are not in the plan's mesh"):
        place(plan, block, Mesh.parse("dp=2;mb=2@8-9"))
    with pytest.raises(PlanError, match=r"stage 0 lies on dp=2;mb=2, not on"):
        place(placed, graph.select("blocks.1*", phase=Phase.FORWARD), mesh.at(pp=1), stage=0)
    with pytest.raises(PlanError, match=r"a pattern of 2 lanes and 4 micro-batches for a plan of 1 lanes and 2"):
        order(placed, Pattern.parse("F0 F1 F2 F3 B0 B1 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3"))


def test_a_pattern_that_cannot_be_followed_is_refused(small_gpt) -> None:
    plan = pipeline(small_gpt.graph, Mesh.parse("pp=2;mb=2"), layers=LAYERS)
    # the first stage wants its gradient of micro-batch 0 before the second has seen it; the second starts with 1
    stuck = order(plan, Pattern.parse("F0 B0 F1 B1\nF1 B1 F0 B0"))
    with pytest.raises(
        PlanError, match=r"the stages wait for each other[\s\S]*stage0 waits for %[\s\S]*stage1 waits for %"
    ):
        lower(propagate(stuck))
