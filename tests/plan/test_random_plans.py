"""Random plans of real families equal the serial run, and programs with one thing changed are refused or equal.

A few seeds here; `benchmarks/plan/random_plans.py` runs thousands."""

from __future__ import annotations

import importlib.util
import random
from functools import cache

import pytest
import torch
from torch import Tensor

from sennit.capture import capture_call
from sennit.errors import SennitError
from sennit.ir.graph import Graph
from sennit.ir.program import Program
from sennit.plan import lower
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.testing.eager_torch import Float64
from sennit.testing.families_torch import families
from sennit.testing.faults import random_fault
from sennit.testing.graph_torch import run_graph_torch
from sennit.testing.parity_torch import state_of
from sennit.testing.random_plans import layers_of, random_decisions, trained

FAMILIES = ["gpt2", "mixtral", "timm swin"]


@cache
def subject(name: str) -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    family = families()[name]
    if importlib.util.find_spec(family.library) is None:
        pytest.skip(f"{family.library} is not installed")
    sample = family.build(family.layers)
    with Float64():
        captured = capture_call(sample.model.train(), (), sample.kwargs, training=True)
    graph = trained(captured.graph)
    state = state_of(captured, sample.model, sample.kwargs, 5, 9)
    return graph, state, run_graph_torch(graph, state)


def equal(outputs: dict[str, Tensor], reference: dict[str, Tensor]) -> bool:
    assert set(outputs) == set(reference)
    return all(torch.allclose(outputs[key].double(), whole.double(), 1e-12, 1e-12) for key, whole in reference.items())


def program_of(graph: Graph, seed: int) -> Program:
    program = lower(random_decisions(graph, random.Random(seed)))
    verify(program, graph)
    return program


@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_equal_the_serial_run(name: str, seed: int) -> None:
    graph, state, reference = subject(name)
    assert equal(run_in_process(program_of(graph, seed), state), reference)


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("single_core")
def test_random_faults_are_refused_or_change_nothing() -> None:
    graph, state, reference = subject("gpt2")
    program, made, refused = program_of(graph, 3), 0, 0
    for seed in range(150):
        fault = random_fault(program, random.Random(seed))
        if fault is None:
            continue
        made += 1
        try:
            verify(fault.program, graph)
        except SennitError:
            refused += 1
        else:
            assert equal(run_in_process(fault.program, state), reference), fault.what
    assert made > 100
    assert refused > 0.7 * made


@pytest.mark.filterwarnings("default")
def test_the_layers_of_a_family() -> None:
    graph, _, _ = subject("gpt2")
    assert layers_of(graph) == ("transformer.h.0", "transformer.h.1")
