"""Values of the first rank, on all ranks: parameters and buffers at the start, buffers before each forward pass, as under DDP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["broadcast", "broadcast_together"]


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Each tensor gets the first rank's values, in a message of its own."""
    first = dist.get_global_rank(group, 0)
    works = [dist.broadcast(tensor.detach(), first, group=group, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()


def broadcast_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """The same in one message for each element type: a layer of batch norm has three small buffers, and every step starts with them."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor.detach())
    flat = {dtype: torch.cat([tensor.reshape(-1) for tensor in some]) for dtype, some in by_type.items()}
    broadcast(tuple(flat.values()), group)
    if group.rank() == 0:
        return
    for dtype, some in by_type.items():
        parts = torch.split(flat[dtype], [tensor.numel() for tensor in some])
        for tensor, values in zip(some, parts, strict=True):
            tensor.copy_(values.view_as(tensor))
