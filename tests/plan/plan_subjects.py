"""Families as captured training steps, each with its values and what the unsplit graph makes of them.

Captured once in a process.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from sennit.capture import capture_call
from sennit.ir.graph import Graph
from sennit.plan import Plan, lower, propagate
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.testing.eager_torch import Float64
from sennit.testing.families_torch import families
from sennit.testing.family_parity_torch import batched, build
from sennit.testing.graph_torch import run_graph_torch
from sennit.testing.parity_torch import state_of
from sennit.testing.random_plans import trained

TWO_BLOCKS = "evoformer of two blocks"


@dataclass(frozen=True)
class Subject:
    graph: Graph
    state: dict[str, Tensor]
    reference: dict[str, Tensor]


@cache
def subject(name: str) -> Subject:
    if name == TWO_BLOCKS:
        sample = batched(families()["evoformer"].build(2))
    elif importlib.util.find_spec(families()[name].library) is None:
        pytest.skip(f"{families()[name].library} is not installed")
    else:
        sample = build(name)
    with Float64():
        captured = capture_call(sample.model.train(), (), sample.kwargs, training=True)
    graph = trained(captured.graph)
    state = state_of(captured, sample.model, sample.kwargs, 5, 9)
    return Subject(graph, state, run_graph_torch(graph, state))


def check(plan: Plan, given: Subject) -> None:
    """The plan verifies, and what it computes is what the unsplit graph does."""
    program = lower(propagate(plan))
    verify(program, plan.graph)
    outputs = run_in_process(program, given.state)
    assert set(outputs) == set(given.reference)
    for key, whole in given.reference.items():
        torch.testing.assert_close(outputs[key].double(), whole.double(), rtol=1e-12, atol=1e-12)
