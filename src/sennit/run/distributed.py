"""The communicator on torch.distributed: any backend that has the collectives, gloo and NCCL among them.

Process groups are made once per set of ranks, before the first step, by all ranks in the same order (`groups_of`). Transfers
between two ranks are numbered, and the number is the tag: a receive takes the message that the program matched it with.
Device d of the program is rank d.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.ir.layout import Reduction
from sennit.run.rank import Group

__all__ = ["ProcessCommunicator"]


@dataclass(frozen=True, slots=True)
class _Work:
    """A torch work handle and how to get the result once it is done. It keeps its source alive until then."""

    work: dist.Work
    source: Tensor
    result: Callable[[], Tensor]

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result()


class ProcessCommunicator:
    """This process's end. Make one per program; it makes the process groups that the program needs."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        everyone = tuple(range(dist.get_world_size()))
        self.groups = {
            group: dist.group.WORLD if group == everyone else dist.new_group(list(group)) for group in groups
        }
        self.counts: dict[tuple[int, int], int] = defaultdict(int)
        self.sending: list[_Work] = []

    def all_reduce(self, group: Group, tensor: Tensor, op: Reduction) -> _Work:
        result = tensor.clone()  # the source may still be read, or share memory with what is
        work = dist.all_reduce(result, _op(op), group=self.groups[group], async_op=True)
        assert work is not None
        return _Work(work, tensor, lambda: result)

    def all_gather(self, group: Group, tensor: Tensor) -> _Work:
        parts = list(tensor.new_empty((len(group), *tensor.shape)).unbind(0))
        work = dist.all_gather(parts, tensor, group=self.groups[group], async_op=True)
        assert work is not None
        return _Work(work, tensor, lambda: torch.stack(parts))

    def reduce_scatter(self, group: Group, tensor: Tensor, op: Reduction) -> _Work:
        result = torch.empty_like(tensor[0])
        work = dist.reduce_scatter(result, list(tensor.unbind(0)), _op(op), group=self.groups[group], async_op=True)
        assert work is not None
        return _Work(work, tensor, lambda: result)

    def all_to_all(self, group: Group, tensor: Tensor) -> _Work:
        result = torch.empty_like(tensor)
        work = dist.all_to_all_single(result, tensor, group=self.groups[group], async_op=True)
        assert work is not None
        return _Work(work, tensor, lambda: result)

    def _tag(self, source: int, target: int) -> int:
        self.counts[source, target] += 1
        return self.counts[source, target]

    def send(self, tensor: Tensor, to: int) -> None:
        work = dist.isend(tensor, to, tag=self._tag(dist.get_rank(), to))
        assert work is not None
        self.sending.append(_Work(work, tensor, lambda: tensor))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, origin: int) -> _Work:
        result = torch.empty(shape, dtype=dtype)
        work = dist.irecv(result, origin, tag=self._tag(origin, dist.get_rank()))
        assert work is not None
        return _Work(work, result, lambda: result)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work in self.sending:
            work.wait()
        self.sending.clear()


def _op(op: Reduction) -> dist.ReduceOp.RedOpType:
    match op:
        case Reduction.SUM:
            return dist.ReduceOp.SUM
        case Reduction.PROD:
            return dist.ReduceOp.PRODUCT
        case Reduction.MAX:
            return dist.ReduceOp.MAX
        case Reduction.MIN:
            return dist.ReduceOp.MIN
