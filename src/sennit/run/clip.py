"""The norm of all gradients, over all stages and pieces, and clipping by it.

Each element counts once: of the replicas of a piece the first speaks, of the stages that hold a tied weight its owner.
One reduction over all ranks gives everyone the same norm,

    n = (sum |g|^p)^(1/p),   or max |g| for p = inf,

and each rank scales what it holds by min(1, max_norm / (n + 1e-6)), as torch does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sennit.reshard.private_torch import local_of
from sennit.run.homes import Homes

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    tensors: Mapping[str, DTensor], homes: Homes, max_norm: float, norm_type: float, device: torch.device
) -> Tensor:
    """Clip in place; the norm, the same on all ranks."""
    gradients = {path: local_of(tensor.grad) for path, tensor in tensors.items() if isinstance(tensor.grad, DTensor)}
    rank = dist.get_rank()
    with torch.no_grad():
        counted = [local for path, local in gradients.items() if homes.speaks(path, rank)]
        norm = _norm(counted, norm_type, device)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for local in gradients.values():
            local.mul_(factor.to(local.dtype))
    return norm


def _norm(counted: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    if norm_type == float("inf"):
        for local in counted:
            if local.numel():
                total = torch.maximum(total, local.abs().max().double())
        dist.all_reduce(total, dist.ReduceOp.MAX)
        return total
    for local in counted:
        total = total + torch.linalg.vector_norm(local, norm_type, dtype=torch.float64) ** norm_type
    dist.all_reduce(total)
    return total ** (1 / norm_type)
