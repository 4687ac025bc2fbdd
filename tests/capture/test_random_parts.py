"""Every way to draw is taken apart into `sennit.uniform`, and draws what its definition says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sennit.capture import capture_call
from sennit.run.random import uniform
from sennit.testing.graph_torch import run_graph_torch

SHAPE = (40, 50)


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "rand": torch.rand(SHAPE, dtype=torch.float64),
            "rand_like": torch.rand_like(x),
            "between": torch.empty_like(x).uniform_(-2.0, 3.0),
            "coin": torch.empty_like(x).bernoulli_(0.3),
            "coins": torch.bernoulli(x),
            "dice": torch.randint(1, 7, SHAPE),
            "normal": torch.randn_like(x),
            "wide": torch.empty_like(x).normal_(5.0, 2.0),
            "coarse": torch.randn(SHAPE, dtype=torch.bfloat16),
            "dropped": nn.functional.dropout(x, 0.25, True),
            "all": nn.functional.dropout(x, 1.0, True),
            "loss": (x * self.weight).sum(),
        }


def test_each_draw_is_what_it_says() -> None:
    torch.manual_seed(0)
    x = torch.rand(SHAPE, dtype=torch.float64)
    captured = capture_call(Draws().double(), (x,))
    seed = torch.tensor([3, 4])
    state = {"weight": torch.ones((), dtype=torch.float64), "x": x, "seed": seed}
    found = run_graph_torch(captured.graph, {**state, "tangent.loss": torch.ones((), dtype=torch.float64)})

    def drawn(number: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return uniform(seed, number, SHAPE, dtype)

    assert torch.equal(found["rand"], drawn(0))
    assert torch.equal(found["rand_like"], drawn(1))
    assert torch.equal(found["between"], drawn(2) * 5.0 - 2.0)
    assert torch.equal(found["coin"], (drawn(3, torch.float32) < 0.3).double())
    assert torch.equal(found["coins"], (drawn(4) < x).double())
    assert torch.equal(found["dice"], (drawn(5) * 6).floor().long() + 1)
    assert set(found["dice"].unique().tolist()) == {1, 2, 3, 4, 5, 6}
    for path, mean, deviation in (("normal", 0.0, 1.0), ("wide", 5.0, 2.0), ("coarse", 0.0, 1.0)):
        values = found[path].double()
        assert abs(values.mean() - mean) < 0.1 * deviation
        assert abs(values.std() / deviation - 1) < 0.1
    kept = found["dropped"] != 0
    assert abs(kept.double().mean() - 0.75) < 0.05
    assert torch.equal(found["dropped"][kept], x[kept] * (1 / 0.75))
    assert torch.equal(found["all"], torch.zeros_like(x))
    numbers = [op.args[1] for op in captured.graph.ops if op.kind == "sennit.uniform"]
    assert numbers == sorted(set(numbers))  # a normal takes two
