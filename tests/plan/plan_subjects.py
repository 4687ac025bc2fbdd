"""Families as captured training steps, each with its values and what the unsplit graph makes of them. Captured once in a process."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

import pytest
from torch import Tensor

from sennit.capture import capture_call
from sennit.ir.graph import Graph
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
