"""Trainer to inference server: all weights of a model to other ranks, under another layout, within a byte budget.

    torchrun --nproc-per-node 6 examples/reshard_weights.py

Ranks 0 to 3 train on a 2 x 2 mesh: weights are sharded for FSDP on one axis and for tensor parallelism on the other.
Ranks 4 and 5 serve, with tensor parallelism alone. The weights go straight from the shards that exist to the shards
that are wanted; no rank holds a whole weight, and beside its own weights a rank uses at most the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import sennit

BUDGET = 64 << 10
SHAPES = {
    **{
        f"layers.{layer}.{name}": shape
        for layer in range(3)
        for name, shape in (("up", (96, 384)), ("down", (384, 96)))
    },
    "embed": (512, 96),
    "norm": (96,),
}


def trained(name: str, weight: Tensor | None = None) -> Sequence[Placement]:
    """FSDP on the first axis, tensor parallel on the second: columns of `up`, rows of `down`."""
    return [Shard(0), Shard(1 if name.endswith("up") else 0)]


def served(name: str, weight: Tensor | None = None) -> Sequence[Placement]:
    return [Shard(1 if name.endswith("up") else 0)]


def weight_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def transfer(budget: int = BUDGET) -> tuple[int, list[str]]:
    """Bytes that arrived on this rank, and the names of weights that came out wrong."""
    trainer = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("fsdp", "tp"))
    server = DeviceMesh("cpu", torch.tensor([4, 5]), mesh_dim_names=("tp",))
    weights: dict[str, DTensor] = {}
    for name, shape in SHAPES.items():
        if trainer.get_coordinate() is not None:
            weights[name] = distribute_tensor(weight_of(name), trainer, trained(name), src_data_rank=None)
        else:
            weights[name] = sennit.absent_weight(shape, torch.float32, trainer, trained(name))
    arrived, wrong = 0, []
    for name, weight in sennit.stream_weights(weights, server, served, budget=budget):
        if server.get_coordinate() is None:
            continue
        arrived += weight.to_local().nbytes
        want = distribute_tensor(weight_of(name), server, served(name), src_data_rank=None).to_local()
        if not torch.equal(weight.to_local(), want):
            wrong.append(name)
    return arrived, wrong


def main() -> None:
    dist.init_process_group("gloo")
    arrived, wrong = transfer()
    if arrived:
        print(f"rank {dist.get_rank()}: {len(SHAPES)} weights, {arrived} bytes, {len(wrong)} wrong")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
