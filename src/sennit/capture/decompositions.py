"""What torch takes apart while it traces, before anything is planned.

An operator is taken apart where its parts have rules and it has none (or a worse one), or where a part must be a tensor
of its own: the loss, so that its count of targets can be had before the first micro-batch. Everything else stays whole:
one kernel is faster than its parts, and what a plan needs in parts only where it splits it is rewritten later
(`capture/rewrite.py`).

| operator | becomes | because |
|---|---|---|
| nll_loss and its backward | gather, masks, a count | the count is had early, the gather can be split |
| mean | a sum, divided by a number | a mean of parts is no mean, a sum of parts is a sum |
| zeros_like, new_zeros, ... | full | what is filled does not depend on the tensor whose shape it takes |
| as_strided of a contiguous tensor, in its order | view | strides are of storage, and pieces have others |
| tril, triu | comparisons of positions | positions can be split |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["decompositions"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that `torch_private.joint_graph` traces with: an operator to the function that is traced in its place."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    wanted: list[Any] = [aten.nll_loss_forward, aten.nll_loss_backward, aten._safe_softmax, aten.tril, aten.triu]
    wanted += [aten.split.Tensor, aten.t, aten.transpose.int]
    return {
        **get_decompositions(wanted),
        aten.mean.default: _mean,
        aten.mean.dim: _mean,
        aten.zeros_like.default: _filled_like(0),
        aten.ones_like.default: _filled_like(1),
        aten.full_like.default: lambda x, value, **options: _full(x, x.shape, value, **options),
        aten.new_zeros.default: lambda x, size, **options: _full(x, size, 0, **options),
        aten.new_ones.default: lambda x, size, **options: _full(x, size, 1, **options),
        aten.new_full.default: lambda x, size, value, **options: _full(x, size, value, **options),
        aten.as_strided.default: _as_strided,
        aten.as_strided_scatter.default: _as_strided_scatter,
    }


def _mean(
    x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    total = torch.sum(x, dims, keepdim, dtype=dtype) if x.ndim else x.to(dtype or x.dtype)
    return total / prod(x.shape[position] for position in dims)


def _filled_like(value: int) -> Callable[..., Tensor]:
    return lambda x, **options: _full(x, x.shape, value, **options)


def _full(x: Tensor, size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **storage: Any) -> Tensor:
    return torch.full(tuple(size), value, dtype=dtype or x.dtype, device=storage.get("device") or x.device)


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    return x.view(tuple(size)) if _is_view(x, size, stride, offset) else NotImplemented


def _as_strided_scatter(
    x: Tensor, values: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    """The derivative of the above: every element is replaced."""
    return values.reshape(x.shape) if _is_view(x, size, stride, offset) else NotImplemented


def _is_view(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> bool:
    in_order = [prod(size[position + 1 :]) for position in range(len(size))]
    same = all(mine == given or extent == 1 for mine, given, extent in zip(in_order, stride, size, strict=True))
    return x.is_contiguous() and same and prod(size) == x.numel() and not offset
