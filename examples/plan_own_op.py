"""An operator of one's own, with a rule that says how it may be split, in a tensor-parallel model.

    torchrun --nproc-per-node 2 examples/plan_own_op.py

The rule is an annotation of dims, like an einsum: `... d, d -> ... d` reads "split any dim of x, or d of both". Before
it is used, it is certified: the operator is run on pieces and on the whole, and a rule that is wrong is refused.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sennit
from sennit.ir.graph import Graph, Phase
from sennit.ir.mesh import Mesh
from sennit.plan import Plan, transform

WIDTH, HIDDEN = 32, 64


@sennit.rule("example::gated", "... d, d -> ... d")
@torch.library.custom_op("example::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor) -> Tensor:
    """A kernel of one's own would stand here."""
    return x * torch.tanh(gate)


@gated.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(x)


def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, gate = ctx.saved_tensors
    t = torch.tanh(gate)
    return grad * t, (grad * x * (1 - t * t)).flatten(0, -2).sum(0)


gated.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gate = nn.Parameter(torch.linspace(-1, 1, HIDDEN))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        error = self.down(gated(self.up(x), self.gate)) - wanted
        return (error * error).sum() / error.numel()


def megatron(graph: Graph, mesh: Mesh) -> Plan:
    plan = transform(Plan("own operator", graph, mesh), graph.select("up", "*mm*", Phase.FORWARD), dim="n", axis="tp")
    plan = transform(plan, graph.select(kind="example.gated*"), dim="d", axis="tp")
    return transform(plan, graph.select("down", "*mm*", Phase.FORWARD), dim="k", axis="tp")


def main() -> None:
    torch.manual_seed(0)
    model, batch = MLP(), (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    expected = model(*batch).item()
    parallel = sennit.parallelize(model, batch, plan=megatron, mesh="tp=2")
    loss = parallel(*batch)
    loss.backward()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}, on one device {expected:.6f}")
        print(f"the gate lies as {parallel.home('gate').layout}")
        print(*[line for line in parallel.source().splitlines() if "example.gated" in line], sep="\n")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
