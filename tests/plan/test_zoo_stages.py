"""Pipelines of the zoo on real families: every gradient, buffer and loss equals that of the unsplit graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from sennit.capture import capture_call
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective
from sennit.plan import Plan, lower, propagate, zoo
from sennit.plan.verify import verify
from sennit.plan.zoo.stages import runs_of
from sennit.run import run_in_process
from sennit.testing.eager_torch import Float64
from sennit.testing.families_torch import families
from sennit.testing.family_parity_torch import build
from sennit.testing.graph_torch import run_graph_torch
from sennit.testing.parity_torch import state_of
from sennit.testing.random_plans import trained

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


@cache
def subject(name: str) -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    if importlib.util.find_spec(families()[name].library) is None:
        pytest.skip(f"{families()[name].library} is not installed")
    sample = build(name)
    with Float64():
        captured = capture_call(sample.model.train(), (), sample.kwargs, training=True)
    graph = trained(captured.graph)
    state = state_of(captured, sample.model, sample.kwargs, 5, 9)
    return graph, state, run_graph_torch(graph, state)


def check(plan: Plan, state: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    program = lower(propagate(plan))
    verify(program, plan.graph)
    outputs = run_in_process(program, state)
    assert set(outputs) == set(reference)
    for key, whole in reference.items():
        torch.testing.assert_close(outputs[key].double(), whole.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize("case", CASES)
def test_pipelines_equal_the_serial_run(case: str) -> None:
    family, planner, mesh = CASES[case]
    graph, state, reference = subject(family)
    check(planner(graph, Mesh.parse(mesh)), state, reference)
