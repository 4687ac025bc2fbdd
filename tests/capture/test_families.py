"""Every family is captured as it is, and its graph computes what eager torch does, dropout included."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import pytest

from sennit.ir.graph import Graph, OutputKind, Phase, Role
from sennit.testing.families_torch import families
from sennit.testing.parity_torch import Compared, compare

FAMILIES = families()
DRAWS = {  # random operators of the forward pass; a draw in a branch that is certain is none
    "gpt2": 7,
    "llama": 0,
    "mixtral": 4,
    "mixtral batch": 4,
    "t5": 24,
    "mbart": 12,
    "bert": 7,
    "vit": 7,
    "swin": 12,
    "resnet": 0,
    "timm vit": 5,
    "timm swin": 7,
    "timm resnet": 0,
    "evoformer": 15,
}


@cache
def compared(name: str, training: bool) -> Compared:
    family = FAMILIES[name]
    if importlib.util.find_spec(family.library) is None:
        pytest.skip(f"{family.library} is not installed")
    return compare(family.build(family.layers), training=training)


@pytest.mark.usefixtures("single_core")
@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_the_graph_equals_eager(name: str, training: bool) -> None:
    found = compared(name, training)
    # the loss is taken apart, so its sum may be added in another order; all gradients are exact
    losses = {output.key for output in found.captured.graph.outputs if output.path in ("", *LOSS_PATHS)}
    assert {key: value for key, value in found.inexact.items() if key not in losses} == {}
    assert max(found.differences.values()) < 1e-14


LOSS_PATHS = ("loss", "result", "masked", "distogram")


def check_gradients(graph: Graph) -> None:
    trained = {item.path for item in graph.inputs if item.role is Role.PARAM}
    assert {output.path for output in graph.outputs if output.kind is OutputKind.GRADIENT} == trained


def check_draws(graph: Graph, name: str) -> None:
    drawn = [op for op in graph.ops if op.kind == "sennit.uniform"]
    assert len(drawn) == DRAWS[name]
    assert all(op.phase is Phase.FORWARD for op in drawn)
    numbers = [op.args[1] for op in drawn]
    assert len(set(numbers)) == len(numbers)


def check_origins(graph: Graph) -> None:
    """Nearly every operator knows its module, so that plans can name it; what autograd adds up belongs to none."""
    unknown = [op for op in graph.ops if not op.module and not (op.phase is Phase.BACKWARD and op.seq is None)]
    assert len(unknown) < 0.25 * len(graph.ops)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_is_complete(name: str) -> None:
    graph = compared(name, True).captured.graph
    check_gradients(graph)
    check_draws(graph, name)
    check_origins(graph)
    assert Graph.parse(str(graph)) == graph
    inference = compared(name, False).captured.graph
    assert not any(op.phase is Phase.BACKWARD or op.kind == "sennit.uniform" for op in inference.ops)


CHECKS: dict[str, Callable[[Graph], bool]] = {
    "gpt2": lambda graph: _tied(graph, "transformer.wte.weight", "lm_head.weight"),
    "t5": lambda graph: _tied(graph, "shared.weight", "lm_head.weight"),
    "resnet": lambda graph: any(output.path.endswith("running_var") for output in graph.outputs),
    "mixtral": lambda graph: any(op.kind == "aten.topk.default" for op in graph.ops),
    "evoformer": lambda graph: len(graph.select("blocks.0.row.*", "aten.native_layer_norm.default")) == 6,
}


def _tied(graph: Graph, kept: str, gone: str) -> bool:
    paths = [item.path for item in graph.inputs]
    return kept in paths and gone not in paths


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CHECKS)
def test_what_makes_a_family_hard_is_there(name: str) -> None:
    assert CHECKS[name](compared(name, True).captured.graph)
