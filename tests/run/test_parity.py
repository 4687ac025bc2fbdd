"""A parallel step equals the serial step: every gradient, in float64, on threads and on real processes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from sennit.errors import PlanError, RunError
from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.ir.program_numpy import run_program
from sennit.plan import Plan, data_inputs, data_parallel, lower, pipeline, propagate, tensor_parallel, transform
from sennit.plan.verify import verify
from sennit.run import LocalRanks, emit_lane, run_in_process

LAYERS = ("blocks.0", "blocks.1")
ROUNDING = 1e-13


def megatron(graph, mesh: str) -> Plan:
    return tensor_parallel(graph, Mesh.parse(mesh), qkv="*.qkv", column="*.up", row="*.proj|*.down")


def staged(graph, mesh: str) -> Plan:
    return pipeline(graph, Mesh.parse(mesh), layers=LAYERS)


def program_of(plan: Plan) -> Program:
    program = lower(propagate(plan))
    verify(program, plan.graph)
    return program


PLANS = {
    "serial": lambda graph: Plan("serial", graph, Mesh.parse("@0")),
    "data": lambda graph: data_parallel(graph, Mesh.parse("dp=4")),
    "data, micro-batches": lambda graph: data_parallel(graph, Mesh.parse("dp=2;mb=4")),
    "micro-batches": lambda graph: data_parallel(graph, Mesh.parse("dp=1;mb=4")),
    "tensor": lambda graph: megatron(graph, "tp=4"),
    "tensor, data": lambda graph: megatron(graph, "dp=2,tp=2"),
    "tensor, data, micro-batches": lambda graph: megatron(graph, "tp=2,dp=2;mb=2"),
    "pipeline": lambda graph: staged(graph, "pp=2"),
    "pipeline, micro-batches": lambda graph: staged(graph, "pp=2;mb=4"),
    "pipeline, data, micro-batches": lambda graph: staged(graph, "pp=2,dp=2;mb=4"),
}


@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize("name", PLANS)
def test_in_one_process(name: str, small_gpt) -> None:
    program = program_of(PLANS[name](small_gpt.graph))
    differences = small_gpt.differences(run_in_process(program, small_gpt.state))
    # eager torch sums the loss in one kernel, in another order than the parts it is taken into
    assert differences.pop("loss") <= ROUNDING
    splits_a_reduction = name not in ("serial", "pipeline")
    assert max(differences.values()) <= (ROUNDING if splits_a_reduction else 0.0)


def test_a_pipeline_is_bitwise_the_serial_program(small_gpt) -> None:
    serial, pipelined = (
        run_in_process(program_of(PLANS[name](small_gpt.graph)), small_gpt.state) for name in ("serial", "pipeline")
    )
    assert all(torch.equal(serial[path], pipelined[path]) for path in serial)


@pytest.mark.parametrize("name", ["tensor, data", "pipeline, data, micro-batches"])
def test_the_reference_interpreter_agrees(name: str, small_gpt) -> None:
    program = program_of(PLANS[name](small_gpt.graph))
    outputs = run_program(program, {path: tensor.numpy() for path, tensor in small_gpt.state.items()})
    differences = small_gpt.differences({path: torch.from_numpy(array) for path, array in outputs.items()})
    assert max(differences.values()) <= ROUNDING


def test_untied_embeddings(untied_gpt) -> None:
    program = program_of(staged(untied_gpt.graph, "pp=2,dp=2;mb=2"))
    assert max(untied_gpt.differences(run_in_process(program, untied_gpt.state)).values()) <= ROUNDING


def random_plan(graph, rng: random.Random) -> Plan:
    """Random splits of random operators over a random mesh, in one stage or two; what the rules refuse is left out."""
    sizes = {"dp": rng.choice([1, 2]), "tp": rng.choice([2, 4]), "cp": rng.choice([1, 2])}
    time = {"mb": rng.choice([1, 2])}
    if rng.random() < 0.3:
        plan = pipeline(graph, Mesh.make({"pp": 2, **sizes}, time), layers=LAYERS)
    else:
        plan = transform(Plan("random", graph, Mesh.make(sizes, time)), data_inputs(graph), dim=0, axis=("dp", "mb"))
    for op in rng.sample(graph.ops, 12):
        for axis in ("tp", "cp"):
            try:
                plan = transform(
                    plan, [op], dim=rng.choice(["m", "n", "k", "b", "d", "i0", "i1", "i2", "i3"]), axis=axis
                )
            except PlanError:
                continue
    while True:
        try:
            propagate(plan)
        except PlanError as error:
            if "has no room for axis" not in str(error):
                raise
            plan = replace(plan, splits=plan.splits[:-1])
        else:
            return plan


@pytest.mark.parametrize("seed", range(12))
def test_random_plans(seed: int, small_gpt) -> None:
    plan = random_plan(small_gpt.graph, random.Random(seed))
    program = program_of(plan)
    assert max(small_gpt.differences(run_in_process(program, small_gpt.state)).values()) <= ROUNDING


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("name", ["data", "tensor, data", "pipeline, data, micro-batches"])
def test_on_real_processes(name: str, small_gpt, ranks) -> None:
    result = ranks.run(program_of(PLANS[name](small_gpt.graph)), small_gpt.state, repeats=2)
    assert max(small_gpt.differences(result.outputs).values()) <= ROUNDING
    assert len(result.seconds) == 2


def test_the_wrong_number_of_ranks(small_gpt, ranks) -> None:
    program = program_of(PLANS["pipeline"](small_gpt.graph))
    with pytest.raises(RunError, match=r"is for devices \[0, 1\], but there are 4 ranks"):
        ranks.run(program, small_gpt.state)


def test_wrong_inputs(small_gpt) -> None:
    program = program_of(PLANS["data"](small_gpt.graph))
    state = dict(small_gpt.state)
    tokens = state.pop("tokens")
    with pytest.raises(RunError, match="no value for tokens"):
        run_in_process(program, state)
    with pytest.raises(RunError, match=r"tokens is torch.int64 \[4, 12\], but the program was made for i64\[8,12\]"):
        run_in_process(program, {**state, "tokens": tokens[:4]})


def test_the_source_is_one_text_per_lane(small_gpt) -> None:
    program = program_of(PLANS["pipeline, data, micro-batches"](small_gpt.graph))
    source = emit_lane(program, program.lanes[0])
    assert source.startswith('"""stage0 of program \'pipeline 1F1B\': devices 0-1, mesh dp=2;mb=4.')
    assert "    # blocks.0.up, forward, mb 0\n" in source
    assert "rank.send(add_3_mb0, 'stage1')" in source
    assert "# f64[8{dp,mb},12,32]" in source
