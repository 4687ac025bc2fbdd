"""Random plans of real families equal the serial run, and programs with one thing changed are refused or equal.

A few seeds here; `benchmarks/plan/random_plans.py` runs thousands."""

from __future__ import annotations

import random

import pytest
import torch
from plan_subjects import subject
from torch import Tensor

from sennit.errors import SennitError
from sennit.ir.graph import Graph
from sennit.ir.program import Program
from sennit.plan import lower
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.testing.faults import random_fault
from sennit.testing.random_plans import layers_of, random_decisions

FAMILIES = ["gpt2", "mixtral", "timm swin"]


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
    given = subject(name)
    assert equal(run_in_process(program_of(given.graph, seed), given.state), given.reference)


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("single_core")
def test_random_faults_are_refused_or_change_nothing() -> None:
    given = subject("gpt2")
    program, made, refused = program_of(given.graph, 3), 0, 0
    for seed in range(150):
        fault = random_fault(program, random.Random(seed))
        if fault is None:
            continue
        made += 1
        try:
            verify(fault.program, given.graph)
        except SennitError:
            refused += 1
        else:
            assert equal(run_in_process(fault.program, given.state), given.reference), fault.what
    assert made > 100
    assert refused > 0.7 * made


@pytest.mark.filterwarnings("default")
def test_the_layers_of_a_family() -> None:
    graph = subject("gpt2").graph
    assert layers_of(graph) == ("transformer.h.0", "transformer.h.1")
