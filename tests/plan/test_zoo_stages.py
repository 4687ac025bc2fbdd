"""Pipelines of the zoo on real families: every gradient, buffer and loss equals that of the unsplit graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from plan_subjects import TWO_BLOCKS, check, subject

from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Compute, Free, defines, reads
from sennit.plan import Plan, lower, propagate, zoo
from sennit.plan.zoo.stages import runs_of

CASES: dict[str, tuple[str, Callable[[Graph, Mesh], Plan], str]] = {
    "gpipe": ("gpt2", partial(zoo.pipeline, schedule="gpipe"), "pp=2;mb=2"),
    "zero bubble h1": ("gpt2", partial(zoo.pipeline, schedule="zero bubble h1"), "pp=2,dp=2;mb=2"),
    "zero bubble h2": ("llama", partial(zoo.pipeline, schedule="zero bubble h2"), "pp=2;mb=4"),
    "interleaved": ("t5", partial(zoo.pipeline, schedule="interleaved"), "pp=2;mb=2"),
    "dual pipe v": ("mbart", partial(zoo.pipeline, schedule="dual pipe v"), "pp=2;mb=4"),
    "chimera": ("bert", zoo.chimera, "pp=2;mb=2"),
    "interlaced t5": ("t5", zoo.interlaced, "pp=2;mb=2"),
    "interlaced mbart": ("mbart", zoo.interlaced, "pp=4;mb=4"),
    "interlaced, data": ("gpt2", zoo.interlaced, "pp=2,dp=2;mb=2"),
}


@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize("case", CASES)
def test_pipelines_equal_the_serial_run(case: str) -> None:
    family, planner, mesh = CASES[case]
    given = subject(family)
    check(planner(given.graph, Mesh.parse(mesh)), given)


@pytest.mark.usefixtures("single_core")
def test_each_pass_of_a_recycled_stack_is_a_stage() -> None:
    given = subject(TWO_BLOCKS)
    plan = zoo.recycled(given.graph, Mesh.parse("pp=2;mb=4"), layers=("blocks.0", "blocks.1"))
    assert len(plan.stages) == 3 * 2
    check(plan, given)


def test_layers_are_cut_into_runs_of_about_equal_work() -> None:
    graph = subject("t5").graph
    assert runs_of(graph, (), 2) == [("encoder.block.0", "encoder.block.1"), ("decoder.block.0", "decoder.block.1")]
    assert [len(run) for run in runs_of(graph, (), 3)] == [2, 1, 1]  # a decoder's layer has two attentions
    with pytest.raises(PlanError, match=r"4 layers for 5 stages"):
        runs_of(graph, (), 5)


@pytest.mark.parametrize("family", ["t5", "mbart", "gpt2"])
def test_an_interlaced_plan_moves_no_vocabulary_and_holds_none_whole(family: str) -> None:
    graph = subject(family).graph
    vocabulary = max(op.type.shape[0] for op in (item.value for item in graph.inputs) if op.type.shape)
    program = lower(propagate(zoo.interlaced(graph, Mesh.parse("pp=2;mb=2"))))
    for lane in program.lanes:
        buffers = lane.buffers()
        for step in lane.steps:
            if not isinstance(
                step, Compute | Free
            ):  # tied tables have several gradients: their sum stays in pieces, too
                moved = [buffers[name] for name in reads(step)] + list(defines(step))
                assert not any(vocabulary in buffer.layout.shape for buffer in moved), step
        everywhere = [buffer for buffer in buffers.values() if "pp" in buffer.layout.mesh]
        held = [buffer for buffer in everywhere if vocabulary in buffer.local_shape(lane.devices[0])]
        assert not held


def test_mistakes() -> None:
    graph = subject("gpt2").graph
    with pytest.raises(PlanError, match=r"no schedule '2f2b'[\s\S]*GPipe, 1F1B"):
        zoo.pipeline(graph, Mesh.parse("pp=2;mb=2"), schedule="2f2b")
    with pytest.raises(PlanError, match=r"Chimera with 3 stages"):
        zoo.chimera(graph, Mesh.parse("pp=3;mb=2"))
    mesh = Mesh.parse("pp=5;mb=2")
    with pytest.raises(PlanError, match=r"vocabulary of \d+ does not divide over 5 devices"):
        zoo.interlaced(graph, mesh, layers=("transformer.h.0", "transformer.h.1", "transformer.ln_f", "a", "b"))
