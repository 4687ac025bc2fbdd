"""A backward pass with gradients first: the same operators, each after what it reads, and no gradient of a captured
model later than before.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sennit.capture import capture
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.fuse.gradient_order import gradients_first
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Graph, Input, Op, Output, OutputKind, Phase, Ref, Role, Value

NUMBER = TensorType((2,), DType.F32)


@cache
def small(layers: int) -> Graph:
    config = GPTConfig(vocabulary=16, context=8, width=8, heads=2, layers=layers, tie_embeddings=layers == 1)
    return capture(GPT(config), random_batch(config, 2, seed=0))


def places(graph: Graph) -> dict[str, int]:
    return {value.name: place for place, op in enumerate(graph.ops) for value in op.results}


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Backward passes of random operators, some of which make gradients."""
    count = draw(st.integers(1, 12))
    made = ["tangent", "x"]
    ops: list[Op] = []
    for place in range(count):
        reads = draw(st.lists(st.sampled_from(made), max_size=3))
        results = tuple(Value(f"v{place}.{part}", NUMBER) for part in range(draw(st.integers(1, 2))))
        ops.append(Op("aten.add.Tensor", tuple(map(Ref, reads)), (), results, Phase.BACKWARD))
        made += [value.name for value in results]
    names = draw(st.lists(st.sampled_from(made[2:]), unique=True, min_size=1, max_size=4))
    inputs = tuple(
        Input(role, Value(name, NUMBER), name) for name, role in (("tangent", Role.TANGENT), ("x", Role.INPUT))
    )
    outputs = tuple(Output(OutputKind.GRADIENT, name, f"weight.{name}") for name in names)
    return Graph("drawn", inputs, tuple(ops), outputs)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(graphs())
def test_the_operators_are_the_same_and_in_an_order(graph: Graph) -> None:
    ordered = gradients_first(graph)  # a graph refuses a value that is read before it is defined
    assert sorted(op.name for op in ordered.ops) == sorted(op.name for op in graph.ops)
    results = {op.name: (op.results, op.args) for op in graph.ops}
    assert {op.name: (op.results, op.args) for op in ordered.ops} == results
    phases = [op.phase for op in ordered.ops]
    assert Phase.FORWARD not in phases[phases.index(Phase.BACKWARD) :] if Phase.BACKWARD in phases else True


@pytest.mark.parametrize("layers", [1, 3])
def test_no_gradient_is_later_and_weights_come_before_inputs(layers: int) -> None:
    graph = small(layers)
    ordered = gradients_first(graph)
    before, after = places(graph), places(ordered)
    gradients = {output.path: output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    assert [path for path, name in gradients.items() if after[name] > before[name]] == []
    last = f"blocks.{layers - 1}.up.weight"
    assert after[gradients[last]] < before[gradients[last]]


def test_zeros_to_add_to_do_not_hold_up_the_first_gradient() -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.head = nn.Parameter(torch.ones(6, 4)), nn.Linear(4, 3)

        def forward(self, chosen: torch.Tensor) -> torch.Tensor:
            return self.head(self.rows[chosen]).square().sum()

    ordered = gradients_first(capture(Picked(), (torch.tensor([1, 2, 2]),)))
    after = places(ordered)
    names = {output.path: output.name for output in ordered.outputs}
    made = ordered.producers()
    zeros = [name for name in made[names["rows"]].reads if name in made and not made[name].reads]
    assert zeros
    assert all(after[names["head.weight"]] < after[name] for name in zeros)
