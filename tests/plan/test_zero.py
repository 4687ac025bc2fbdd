"""ZeRO: parameters live in pieces, gradients come in them; what is gathered and scattered, and when; equal to the
serial step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from sennit.errors import PlanError
from sennit.ir.graph import Graph, OutputKind, Role
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Program
from sennit.ir.timeline import MemoryKind
from sennit.plan import Plan, lower, propagate, zoo
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.run.memory import predicted_memory

LAYERS = ("blocks.0", "blocks.1")


def program_of(plan: Plan) -> Program:
    program = lower(propagate(plan))
    verify(program, plan.graph)
    return program


def of_parameters(program: Program, graph: Graph) -> Counter[str]:
    """Collectives over dp by kind, of parameters (gathers) and gradients (the rest).

    Losses and counts of targets have no dims.
    """
    found = [
        step
        for lane in program.lanes
        for step in lane.steps
        if isinstance(step, Collective) and step.axes == ("dp",) and step.result.layout.shape
    ]
    return Counter(step.kind.value for step in found)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2;mb=2"])
def test_gathers_and_scatters(level: int, mesh: str, untied_gpt) -> None:
    graph, batches = untied_gpt.graph, 2 if "mb" in mesh else 1
    program = program_of(zoo.zero(graph, Mesh.parse(mesh), level=level))
    parameters = sum(item.role is Role.PARAM for item in graph.inputs)
    found = of_parameters(program, graph)
    assert set(found) == {"all_gather", "reduce_scatter"}
    # position embeddings are looked up once for all samples: their gradient is a sum over micro-batches before it is
    # looked up
    once = 1 if level > 1 and batches > 1 else 0
    assert found["reduce_scatter"] == parameters * (batches if level > 1 else 1) - once
    if level < 3:
        assert found["all_gather"] == parameters
    else:  # forward all of them, backward those that derivatives read (no embeddings, no biases)
        assert parameters * batches < found["all_gather"] < 2 * parameters * batches
    assert max(untied_gpt.differences(run_in_process(program, untied_gpt.state)).values()) <= 1e-13


def test_every_output_lies_as_its_parameter(untied_gpt) -> None:
    program = program_of(zoo.zero(untied_gpt.graph, Mesh.parse("dp=2"), level=3))
    (lane,) = program.lanes
    homes = {item.path: item.buffer.layout for item in lane.inputs if item.role is Role.PARAM}
    assert {str(layout) for path, layout in homes.items() if path.endswith("up.weight")} == {"[128{dp},32]"}
    assert all(any(layout.entries) for layout in homes.values())
    buffers = lane.buffers()
    for output in lane.outputs:
        if output.kind is OutputKind.GRADIENT:
            assert buffers[output.name].layout == homes[output.path]


def test_each_level_holds_less(untied_gpt) -> None:
    plans: list[Plan] = [zoo.data_parallel(untied_gpt.graph, Mesh.parse("dp=4;mb=2"))]
    plans += [zoo.zero(untied_gpt.graph, Mesh.parse("dp=4;mb=2"), level=level) for level in (1, 2, 3)]
    most = [predicted_memory(program_of(plan), 0)[1] for plan in plans]
    homes = [kinds[MemoryKind.PARAMETERS] for kinds in most]
    assert homes[1] == homes[2] == homes[3] == homes[0] // 4  # and so is the state of the optimizer
    gradients = [kinds[MemoryKind.GRADIENTS] for kinds in most]
    assert gradients[2] < gradients[1]


COMPOSED: dict[str, Callable[[Graph], Plan]] = {
    "tensor": lambda graph: zoo.tensor_parallel(graph, Mesh.parse("dp=2,tp=2")),
    "sequence": lambda graph: zoo.tensor_parallel(graph, Mesh.parse("dp=2,tp=2"), sequence=True),
    "pipeline": lambda graph: zoo.pipeline(graph, Mesh.parse("pp=2,dp=2;mb=2"), layers=LAYERS),
    "co-shard": lambda graph: zoo.co_shard(graph, Mesh.parse("dp=2,tp=2"), pieces=2),
}


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("level", [1, 3])
def test_composed_with_other_plans(name: str, level: int, untied_gpt) -> None:
    inner = COMPOSED[name](untied_gpt.graph)
    plan = zoo.sharded(inner, level=level)
    program = program_of(plan)
    assert max(untied_gpt.differences(run_in_process(program, untied_gpt.state)).values()) <= 1e-13
    before = {item.path: item.buffer for lane in program_of(inner).lanes for item in lane.inputs}
    after = {item.path: item.buffer for lane in program.lanes for item in lane.inputs}
    whole = set(zoo.kept_whole(plan))
    for path, buffer in after.items():
        if path.endswith(("weight", "bias")):
            factor = 1 if path in whole else 2
            assert buffer.layout.local_elements() * factor == before[path].layout.local_elements(), path
    # vectors that tensor parallelism has cut have no other dim
    assert all(path.endswith((".qkv.bias", ".up.bias")) for path in whole)


def test_mistakes_are_told(untied_gpt) -> None:
    graph = untied_gpt.graph
    with pytest.raises(PlanError, match=r"no level 4 of ZeRO"):
        zoo.zero(graph, Mesh.parse("dp=2"), level=4)
    with pytest.raises(PlanError, match=r"mesh tp=2 has no axis 'dp'"):
        zoo.sharded(zoo.tensor_parallel(graph, Mesh.parse("tp=2")), level=3)
    large = zoo.zero(graph, Mesh.parse("dp=2"), level=1, least=1000)
    assert "blocks.0.up.weight" not in zoo.kept_whole(large)
    assert "blocks.0.up.bias" in zoo.kept_whole(large)
