"""What is made in pieces although its operands are whole: biases of positions, spread over samples; gradients of tables
that are split.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sennit.capture import capture_call
from sennit.capture.rules.certify import Certifier
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Program
from sennit.plan import lower, propagate
from sennit.plan.search.ways import Way, split_as
from sennit.plan.verify import verify
from sennit.plan.zoo.batch import data_parallel
from sennit.run import run_in_process
from sennit.testing.eager_torch import Float64
from sennit.testing.families_torch import families
from sennit.testing.graph_torch import run_graph_torch
from sennit.testing.parity_torch import state_of
from sennit.testing.random_plans import trained

BATCH, HEADS, TOKENS, WIDTH = 8, 2, 6, 8


class Biased(nn.Module):
    """Attention with a trained bias of positions, masked for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        allowed = torch.ones(x.shape[0], 1, TOKENS, TOKENS, dtype=torch.bool).tril()
        mask = torch.where(allowed, self.bias.unsqueeze(0), -1e9)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()


def same(program: Program, graph, state: dict[str, Tensor]) -> None:
    whole, outputs = run_graph_torch(graph, state), run_in_process(program, state)
    for key, value in whole.items():
        torch.testing.assert_close(outputs[key], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2;mb=2"])
def test_a_bias_is_not_spread_over_all_samples_on_every_device(mesh: str) -> None:
    torch.manual_seed(0)
    model, x = Biased().double(), torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    captured = capture_call(model, (x,), {})
    graph = trained(captured.graph)
    plan = data_parallel(graph, Mesh.parse(mesh))
    program = lower(propagate(plan))
    verify(program, plan.graph, certifier=Certifier())
    scores = (BATCH, HEADS, TOKENS, TOKENS)
    spread = [buffer for buffer in program.lanes[0].buffers().values() if buffer.layout.shape == scores]
    assert spread
    assert all(buffer.layout.local_elements() == BATCH // 4 * HEADS * TOKENS * TOKENS for buffer in spread)
    same(program, graph, state_of(captured, model, {"x": x}, 5, 9))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("way", ["tp=2,vocab", "tp=2,sp,vocab"])
def test_the_gradient_of_a_split_table_is_made_in_pieces(way: str) -> None:
    """T5's table has three readers: the gradient is a sum of three, each in the table's piece."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    sample = families()["t5"].build(1)
    with Float64():
        captured = capture_call(sample.model.train(), (), sample.kwargs, training=True)
    graph = trained(captured.graph)
    table = next(item.value.type for item in graph.inputs if item.path == "shared.weight")
    plan = split_as(Way.parse(way), graph, Mesh.parse("dp=1,tp=2"))
    program = lower(propagate(plan))
    verify(program, plan.graph, certifier=Certifier())
    lane = program.lanes[0]
    moved = [step.result for step in lane.steps if isinstance(step, Collective)]
    assert not [buffer for buffer in moved if buffer.type.shape == table.shape]
    whole = [
        b
        for b in lane.buffers().values()
        if b.type.shape == table.shape and b.layout.local_elements() == table.elements
    ]
    assert not whole
    same(program, plan.graph, state_of(captured, sample.model, sample.kwargs, 5, 9))
