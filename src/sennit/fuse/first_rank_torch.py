"""Values of the first rank, on all ranks: parameters and buffers at the start, buffers before each forward pass that
follows a synchronised one, as under DDP. And whether all ranks are about to do what the first one does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.errors import RunError

__all__ = ["Together", "agree", "broadcast"]


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Each tensor gets the first rank's values, in a message of its own."""
    first = dist.get_global_rank(group, 0)
    works = [dist.broadcast(tensor.detach(), first, group=group, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()


def agree(text: str, group: dist.ProcessGroup) -> None:
    """Refuses to go on where a rank has another text than the first one, and names it."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, hashlib.sha256(text.encode()).hexdigest(), group=group)
    different = [rank for rank, other in enumerate(found) if other != found[0]]
    if different:
        raise RunError(
            f"ranks {different} have another model or strategy than rank 0; nothing was run",
            fix="build the same model with the same sample shapes, and pass the same strategy, on every rank",
        )


class Together:
    """The first rank's values of some tensors on their way, in one message for each element type: a layer of batch norm
    has three small buffers, and every step has them to send.

    They are sent when they are made, at the end of a forward pass: the channel is idle until the first gradient. Before
    the next forward pass they would wait behind all gradients that are still on their way.
    """

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor.detach())
        self._is_first = group.rank() == 0
        self._parts = [(some, torch.cat([tensor.reshape(-1) for tensor in some])) for some in by_type.values()]
        self._versions = [tensor._version for some, _ in self._parts for tensor in some]
        first = dist.get_global_rank(group, 0)
        self._works = [dist.broadcast(flat, first, group=group, async_op=True) for _, flat in self._parts]

    def arrive(self) -> None:
        """Wait, and take them; unless somebody changed one of the tensors meanwhile, which is newer."""
        for work in self._works:
            if work is not None:
                work.wait()
        is_changed = self._versions != [tensor._version for some, _ in self._parts for tensor in some]
        if self._is_first or is_changed:
            return
        for some, flat in self._parts:
            for tensor, values in zip(some, torch.split(flat, [tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(values.view_as(tensor))
