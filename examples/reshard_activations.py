"""Tensor-parallel to sequence-parallel activations inside a training step, with sennit moving them.

    torchrun --nproc-per-node 4 examples/reshard_activations.py

A block of two matrices is split by columns and rows over four ranks (tensor parallel); between blocks the activations
lie split by sequence (sequence parallel), so that norms and residuals are computed once per token. Each block therefore
moves its activations twice: sequence shards to whole sequences on the way in (all_gather), pending sums to sequence
shards on the way out (reduce_scatter), and the reverse of both in backward. The model is plain DTensor code;
`sennit.serve_dtensor()` serves the moves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import sennit

SEQUENCE, WIDTH, HIDDEN, BLOCKS = 24, 16, 32, 2


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        scale = WIDTH**-0.5
        up, down = torch.randn(WIDTH, HIDDEN) * scale, torch.randn(HIDDEN, WIDTH) * scale
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(1)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(0)]))

    def forward(self, x: DTensor) -> DTensor:
        whole = x.redistribute(placements=[Replicate()])  # sequence parallel -> tensor parallel
        out = torch.relu(whole @ self.up) @ self.down  # a pending sum over the ranks
        return x + out.redistribute(placements=[Shard(0)])  # tensor parallel -> sequence parallel


def train(mesh: DeviceMesh, steps: int = 5, rate: float = 0.02) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(mesh) for _ in range(BLOCKS)))
    x = distribute_tensor(torch.randn(SEQUENCE, WIDTH), mesh, [Shard(0)])
    wanted = distribute_tensor(torch.randn(SEQUENCE, WIDTH), mesh, [Shard(0)])
    losses: list[float] = []
    for _ in range(steps):
        loss = ((model(x) - wanted) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
                parameter.grad = None
        losses.append(loss.full_tensor().item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    stock = train(mesh)
    with sennit.serve_dtensor() as log:
        served = train(mesh)
    if dist.get_rank() == 0:
        print(f"{'step':>4s} {'DTensor':>12s} {'sennit':>12s}")
        for step, (left, right) in enumerate(zip(stock, served, strict=True)):
            print(f"{step:4d} {left:12.8f} {right:12.8f}")
        print(f"{log.served} redistributions served, {sum(log.left.values())} left to torch")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
