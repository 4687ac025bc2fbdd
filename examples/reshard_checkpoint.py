"""A checkpoint written on 4 ranks, loaded on 6 under another layout, within a byte budget.

    torchrun --nproc-per-node 6 examples/reshard_checkpoint.py /tmp/checkpoint

Ranks 0 to 3 save with `torch.distributed.checkpoint` from a 2 x 2 mesh. All six ranks load into a 3 x 2 mesh: every
saved chunk is read by one rank and goes from there to the ranks that need a part of it.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

import sennit

BUDGET = 128 << 10
SHAPES = {"up": (96, 384), "down": (384, 96), "bias": (99,), "embed": (102, 60)}


def weight_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def save(folder: str) -> None:
    """On ranks 0 to 3; the others take part in making the mesh only."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("fsdp", "tp"))
    writers = dist.new_group(list(range(4)))
    if mesh.get_coordinate() is None:
        return
    state = {
        name: distribute_tensor(
            weight_of(name), mesh, [Shard(0), Shard(1) if len(shape) > 1 else Replicate()], src_data_rank=None
        )
        for name, shape in SHAPES.items()
    }
    dcp.save(state, checkpoint_id=folder, process_group=writers)


def load(folder: str, budget: int = BUDGET) -> list[str]:
    """The names of weights that came out wrong on this rank."""
    mesh = DeviceMesh("cpu", torch.arange(6).reshape(3, 2), mesh_dim_names=("fsdp", "tp"))
    places = {name: [Shard(len(shape) - 1), Shard(0)] for name, shape in SHAPES.items()}
    targets = {name: zeros(*shape, device_mesh=mesh, placements=places[name]) for name, shape in SHAPES.items()}
    sennit.load_checkpoint(folder, targets, budget=budget)
    wrong = []
    for name, target in targets.items():
        want = distribute_tensor(weight_of(name), mesh, places[name], src_data_rank=None)
        if not torch.equal(target.to_local(), want.to_local()):
            wrong.append(name)
    return wrong


def main() -> None:
    dist.init_process_group("gloo")
    folder = sys.argv[1] if len(sys.argv) > 1 else "checkpoint"
    save(folder)
    dist.barrier()
    wrong = load(folder)
    print(f"rank {dist.get_rank()}: {len(SHAPES)} weights loaded, {len(wrong)} wrong {wrong or ''}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
