"""Experts with a capacity: the same model where nothing is dropped, and an all-to-all of the dispatched tokens where
experts are split.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter

import pytest
import torch

from sennit.capture import capture_call, experts_by_capacity
from sennit.errors import CaptureError
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective
from sennit.plan import lower, propagate, zoo
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.testing.eager_torch import Float64
from sennit.testing.families_torch import Sample
from sennit.testing.family_parity_torch import build
from sennit.testing.graph_torch import run_graph_torch
from sennit.testing.parity_torch import state_of
from sennit.testing.random_plans import trained

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install sennit[hf]"
    ),
    pytest.mark.filterwarnings("default"),  # those of the libraries
]

LAYERS, EXPERTS, CHOSEN = 2, 4, 2


def mixture(factor: float) -> Sample:
    """A Mixtral whose four samples are four groups of tokens."""
    sample = build("mixtral batch")
    registry = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    registry.register("capacity", experts_by_capacity(groups=4, factor=factor))
    sample.model.config._experts_implementation = "capacity"
    return sample


def test_with_capacity_for_all_nothing_is_dropped() -> None:
    sample = mixture(EXPERTS / CHOSEN)
    model = sample.model.eval()
    with torch.no_grad():
        routed = model(**sample.kwargs).logits
        model.config._experts_implementation = "batch"
        torch.testing.assert_close(routed, model(**sample.kwargs).logits)


@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize(("factor", "mesh"), [(2.0, "dp=2,ep=2"), (0.75, "ep=4"), (0.75, "ep=2;mb=2")])
def test_dispatched_tokens_are_exchanged(factor: float, mesh: str) -> None:
    sample = mixture(factor)
    with Float64():
        captured = capture_call(sample.model.train(), (), sample.kwargs, training=True)
    graph, state = trained(captured.graph), state_of(captured, sample.model, sample.kwargs, 5, 9)
    laid = Mesh.parse(mesh)
    program = lower(propagate(zoo.expert_parallel(graph, laid)))
    verify(program, graph)
    outputs = run_in_process(program, state)
    for key, whole in run_graph_torch(graph, state).items():
        torch.testing.assert_close(outputs[key].double(), whole.double(), rtol=1e-12, atol=1e-12)
    (lane,) = program.lanes
    large = [
        step for step in lane.steps if isinstance(step, Collective) and step.axes == ("ep",) and _is_of_tokens(step)
    ]
    microbatches = laid.time[0].size if laid.time else 1
    assert Counter(step.kind.value for step in large) == {"all_to_all": 4 * LAYERS * microbatches}


def _is_of_tokens(step: Collective) -> bool:
    """Not a gradient of a parameter, and not a list of numbers: activations here have three dims or more."""
    shape = step.result.layout.shape
    return len(shape) > 2 and shape[:2] != (1, 1)


def test_mistakes() -> None:
    with pytest.raises(CaptureError, match="capacity factor of 0"):
        experts_by_capacity(groups=4, factor=0)
    sample = mixture(1.0)
    importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(
        "capacity", experts_by_capacity(groups=5, factor=1.0)
    )
    with pytest.raises(CaptureError, match="32 tokens in 5 groups"):
        sample.model(**sample.kwargs)
