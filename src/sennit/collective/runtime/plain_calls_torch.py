"""Collectives of tensors without torch's part of a call: for programs that make many small ones, such as
tensor-parallel inference on CPUs.

    calls = sennit.backend.calls()      # of the default group, or of another one of this backend
    calls.all_reduce(x)                 # dist.all_reduce(x)

| | microseconds of an all-reduce of 1 KiB, two ranks (`benchmarks/collective/call_overhead.py`) |
|---|---|
| `dist.all_reduce`, on a backend that does nothing | 2.1 |
| `dist.all_reduce`, on this one | 3.9 and 4.4 in two runs |
| `calls.all_reduce` | 0.5 |

A call waits until its result is there; reductions are sums; tensors are those of `dist`. They stand in one order with
the calls made through `dist`, and ranks of one call may differ in which way they make it: these are the same plans.
What the core does not know yet, or cannot take (strides, overlaps, ranks on several hosts), goes through `dist`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.collective.runtime.backend_torch import SennitGroup
from sennit.collective.runtime.private_torch import gather_single, scatter_single
from sennit.collective.runtime.shm_shortcut import FROM_ROOT, PLAIN, ROWS, SUMS
from sennit.errors import CollectiveError

__all__ = ["PlainCalls", "empty"]


def own_group(group: dist.ProcessGroup | None) -> SennitGroup:
    """The default one if none is given."""
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, SennitGroup):
        raise CollectiveError(
            f"calls of a group of {type(found).__name__}",
            fix='make it with the backend "sennit": init_process_group or new_group',
        )
    return found


def empty(*size: Any, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None) -> Tensor:
    """`torch.empty`, in memory that the ranks of a host read where it is."""
    like = torch.empty(*size, dtype=dtype, device="meta")
    return own_group(group).allocate_tensor(like.numel(), dtype=like.dtype).view(like.shape)


class PlainCalls:
    """Of one group."""

    __slots__ = ("_group", "_short")

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = own_group(group)
        self._short = self._group.short

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum of all, in place."""
        if self._short is None or not self._short.now("all_reduce", SUMS, tensor, tensor, -1):
            dist.all_reduce(tensor, group=self._group)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """The tensor of `root`, a rank of the group, to all."""
        if self._short is None or not self._short.now("broadcast", FROM_ROOT, tensor, tensor, root):
            dist.broadcast(tensor, group=self._group, group_src=root)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """The inputs of all, in the order of ranks."""
        if self._short is None or not self._short.now("all_gather", PLAIN, output, input, -1):
            gather_single(output, input, self._group)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> None:
        """Part r of the sum of all inputs, at rank r."""
        if self._short is None or not self._short.now("reduce_scatter", SUMS, output, input, -1):
            scatter_single(output, input, self._group)

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        """Rows of the input in equal pieces: piece q to rank q, piece q of the output from there."""
        if self._short is None or not self._short.now("all_to_all", ROWS, output, input, -1):
            dist.all_to_all_single(output, input, group=self._group)
