"""What is taken apart computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sennit.capture import capture
from sennit.capture.rewrite import take_apart
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.testing.graph_torch import run_graph_torch

MODELS = {
    "log softmax": lambda x: torch.log_softmax(x, -1).square().mean(),
    "softmax": lambda x: torch.softmax(x, 1).square().mean(),
    "all": lambda x: (x * (x > -9).all(-1, keepdim=True) * (x > 0).any(1)[:, None]).square().mean(),
}
NORMS = {
    "layer norm": lambda: nn.LayerNorm((5, 6)),
    "layer norm without weights": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "layer norm without bias": lambda: nn.LayerNorm(6, bias=False),
    "batch norm": lambda: nn.BatchNorm1d(5),
    "rms norm": lambda: nn.RMSNorm(6, eps=1e-5),
}


class Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.randn(6)), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * self.scale).pow(3).mean()


class Function(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.scale, self.name = nn.Parameter(torch.randn(6)), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MODELS[self.name](x * self.scale)


def check(model: nn.Module, kinds: str) -> Graph:
    torch.manual_seed(0)
    model = model.double()
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    graph = capture(model, (x,))
    chosen = [op for op in graph.ops if any(part in op.kind for part in kinds.split("|"))]
    assert chosen
    apart = take_apart(graph, chosen)
    assert not {op.kind for op in chosen} & {op.kind for op in apart.ops}
    assert Graph.parse(str(apart)) == apart
    state = {path: value.detach() for path, value in [*model.named_parameters(), *model.named_buffers()]}
    state |= {"x": x, "tangent": torch.ones((), dtype=torch.float64)}
    whole, parts = run_graph_torch(graph, state), run_graph_torch(apart, state)
    for key, value in whole.items():
        torch.testing.assert_close(parts[key], value, rtol=1e-12, atol=1e-13)
    return apart


@pytest.mark.parametrize("name", MODELS)
def test_functions(name: str) -> None:
    check(Function(name), "softmax|aten.all.dim|aten.any.dim")


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    model = Norm(NORMS[name]())
    if name == "rms norm":
        graph = capture(model.double(), (torch.randn(4, 5, 6, dtype=torch.float64),))
        if not any("rms_norm" in op.kind for op in graph.ops):
            pytest.skip("this release of torch traces rms norm in parts")
    check(model, "_norm")


def test_what_is_not_taken_apart(small_gpt) -> None:
    graph = small_gpt.graph
    with pytest.raises(PlanError, match=r"aten.mm.default is not taken apart[\s\S]*choose among _log_softmax"):
        take_apart(graph, graph.select(kind="aten.mm.default"))
