"""Capture: the graph of an unmodified model is complete, and computes what the model does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sennit.capture import capture
from sennit.errors import CaptureError, GraphError
from sennit.ir.graph import Graph, OutputKind, Phase, Role
from sennit.ir.graph_numpy import run_graph


def test_the_graph_computes_loss_and_gradients(small_gpt) -> None:
    graph = small_gpt.graph
    arrays = {item.value.name: small_gpt.state[item.path].numpy() for item in graph.inputs}
    results = run_graph(graph, arrays)
    for output in graph.outputs:
        path = "loss" if output.kind is OutputKind.LOSS else output.path
        np.testing.assert_allclose(results[output.name], small_gpt.reference[path].numpy(), rtol=1e-11, atol=1e-14)


def test_the_text_form_parses_back(small_gpt) -> None:
    assert Graph.parse(str(small_gpt.graph)) == small_gpt.graph


def test_tied_weights_are_one_value(small_gpt, untied_gpt) -> None:
    tied = [item.path for item in small_gpt.graph.inputs if item.role is Role.PARAM]
    assert "tokens.weight" in tied
    assert "head.weight" not in tied
    assert "head.weight" in [item.path for item in untied_gpt.graph.inputs]
    gradients = [output.path for output in small_gpt.graph.outputs if output.kind is OutputKind.GRADIENT]
    assert gradients.count("tokens.weight") == 1


def test_operators_know_where_they_come_from(small_gpt) -> None:
    (op,) = small_gpt.graph.select("blocks.1.up", "aten.addmm.default", Phase.FORWARD)
    assert op.line.startswith("gpt.py:")
    backward = [op for op in small_gpt.graph.ops if op.phase is Phase.BACKWARD and op.kind == "aten.mm.default"]
    forward = {op.seq for op in small_gpt.graph.ops if op.phase is Phase.FORWARD}
    assert backward
    assert all(op.seq in forward and op.module for op in backward)
    sums = [op for op in small_gpt.graph.ops if op.phase is Phase.BACKWARD and op.seq is None]
    assert {op.kind for op in sums} == {"aten.add.Tensor"}  # what autograd adds up belongs to no forward operator


def test_selecting_nothing_is_an_error(small_gpt) -> None:
    with pytest.raises(GraphError, match=r"no operator matches module 'decoder\.\*'[\s\S]*its modules are blocks"):
        small_gpt.graph.select("decoder.*")


def test_a_model_must_return_its_loss() -> None:
    with pytest.raises(
        CaptureError, match=r"Linear returns 1 tensors of shapes \[\[2, 3\]\][\s\S]*one scalar, the loss"
    ):
        capture(nn.Linear(4, 3), (torch.randn(2, 4),))


def test_an_argument_may_be_named_like_an_operator() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, add: Tensor) -> Tensor:
            return (add + self.weight).sum()

    graph = capture(Named(), (torch.randn(3),))
    assert [item.path for item in graph.inputs if item.role is Role.INPUT] == ["add"]
