"""The three uses, as the examples state them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from sennit.reshard.serve_torch import serve_dtensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def activations(rank: int) -> tuple[list[float], list[float], int, int]:
    import reshard_activations

    mesh = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("tp",))
    if rank > 3:
        return [], [], 0, 0
    stock = reshard_activations.train(mesh)
    with serve_dtensor() as log:
        served = reshard_activations.train(mesh)
    return stock, served, log.served, sum(log.left.values())


def weights(rank: int, budget: int) -> tuple[int, list[str]]:
    import reshard_weights

    return reshard_weights.transfer(budget)


def checkpoint(rank: int, folder: str, budget: int) -> tuple[list[str], str]:
    import reshard_checkpoint
    import torch.distributed as dist

    from sennit.errors import LayoutError

    reshard_checkpoint.save(folder)
    dist.barrier()
    wrong = reshard_checkpoint.load(folder, budget)
    try:
        reshard_checkpoint.load(folder, 1000)
    except LayoutError as error:
        return wrong, str(error)
    return wrong, ""
