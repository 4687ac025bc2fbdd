"""A dim of size 1 in a piece is not one of the whole: `squeeze` drops what it drops of the whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sennit.capture import capture
from sennit.ir.mesh import Mesh
from sennit.plan import data_parallel, lower, propagate
from sennit.plan.verify import verify
from sennit.run import run_in_process


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 1)

    def forward(self, features: Tensor, wanted: Tensor) -> Tensor:
        found = self.score(features)
        return (found.squeeze() - wanted).square().sum() + found.squeeze((0, 1)).sum() + found.squeeze(-1).sum()


def test_one_row_a_device() -> None:
    torch.manual_seed(0)
    model = Scores().double()
    batch = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    graph = capture(model, batch)
    assert {op.kind for op in graph.ops if "squeeze" in op.kind and "un" not in op.kind} == {"aten.squeeze.dims"}
    program = lower(propagate(data_parallel(graph, Mesh.parse("dp=4"))))
    verify(program, graph)
    model(*batch).backward()
    state = {path: parameter.detach() for path, parameter in model.named_parameters()}
    state |= {"features": batch[0], "wanted": batch[1], "tangent": torch.ones((), dtype=torch.float64)}
    found = run_in_process(program, state)
    for path, parameter in model.named_parameters():
        assert torch.allclose(found[path], parameter.grad, rtol=1e-12)
