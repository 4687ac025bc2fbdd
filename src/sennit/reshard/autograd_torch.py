"""Redistribution of plain tensors under autograd: `redistribute_tensor(local, source, target)`.

**What the gradient is.** Stack the pieces of all ranks into one long vector. A redistribution with sums is a linear map
A of it, and backward is its transpose: run the reversed plan, where gather becomes reduce_scatter, a slice is padded
with zeros, an exchange goes back with sums (`lower_torch.transposed`). This is the gradient of the sum of all ranks'
losses with respect to each rank's own piece, as in `torch.distributed.nn` and in shard_map.

So replicas get parts: the gradient of the array itself is the sum of the gradients over the axes along which the
*source* is replicated. In terms of layouts, the gradient of a replicated piece is pending, that of a pending piece is
replicated: `gradient_layout` says so, and the gradient may itself be redistributed from there. (DTensor's convention is
the other one: `dtensor_torch.py` keeps it.)

All ranks that hold a piece of the result must run backward through it, as all ran forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sennit.errors import LayoutError
from sennit.ir.layout import Layout, Pending, Reduction, Split
from sennit.reshard.execute_torch import Executor, Running, current_executor
from sennit.reshard.redistribution import Redistribution

__all__ = ["RunningTensor", "gradient_layout", "redistribute_tensor"]


def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of an array lies: split alike, pending where the array is replicated, replicated where it is
    pending.
    """
    entries: dict[str, Split | Pending | None] = {}
    for axis in layout.mesh.axes:
        match layout.entry(axis.name):
            case Pending(op):
                if op is not Reduction.SUM:
                    raise LayoutError(f"a pending {op.value} has no gradient layout", where=f"layout {layout}")
            case Split() as split:
                entries[axis.name] = split
            case None:
                entries[axis.name] = Pending(Reduction.SUM)
    return Layout.make(layout.mesh, layout.shape, entries)


@dataclass(frozen=True, slots=True)
class RunningTensor:
    """A redistribution under way; `wait` returns the piece of the target, with its gradient recorded."""

    local: Tensor
    redistribution: Redistribution
    executor: Executor
    budget: int | None
    running: Running

    def wait(self) -> Tensor:
        result = self.running.wait()
        if not (self.local.requires_grad and torch.is_grad_enabled()):
            return result
        arguments = _Arguments(self.redistribution, self.executor, self.budget, adjoint=False, result=result)
        applied: Tensor = _Apply.apply(self.local, arguments)  # type: ignore[no-untyped-call]
        return applied


def redistribute_tensor(
    local: Tensor,
    source: Layout,
    target: Layout,
    *,
    budget: int | None = None,
    executor: Executor | None = None,
) -> RunningTensor:
    """Start to move this rank's piece of `source` to its piece of `target`."""
    executor = current_executor() if executor is None else executor
    redistribution = executor.planned(source, target, local.element_size(), budget)
    return RunningTensor(local, redistribution, executor, budget, executor.start(redistribution, local, budget=budget))


@dataclass(frozen=True, slots=True)
class _Arguments:
    redistribution: Redistribution
    executor: Executor
    budget: int | None
    adjoint: bool
    result: Tensor | None = None  # what was computed before autograd was asked


class _Apply(torch.autograd.Function):
    """A linear map or its adjoint; each is the other's backward, so any order of derivative works."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, arguments: _Arguments) -> Tensor:
        ctx.arguments = arguments
        if arguments.result is not None:
            return arguments.result
        how = arguments
        return how.executor.start(how.redistribution, tensor, budget=how.budget, adjoint=how.adjoint).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        done: _Arguments = ctx.arguments
        back = _Arguments(done.redistribution, done.executor, done.budget, adjoint=not done.adjoint)
        return _Apply.apply(gradients[0], back), None  # type: ignore[no-untyped-call]
