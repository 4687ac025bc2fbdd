"""The attention kernels of CUDA as methods: what their operators want beside q, k, v and the mask, and return beside
values.

The kernel of the CPU needs nothing here: who runs it calls its operator. Those of CUDA return lengths and states of
generators, want the lengths back, and a mask that has every element, in the type of the query and with rows that begin
at multiples of 16 elements. Leading dims beyond the batch are one. Which attention becomes which kernel,
`kernels/attention_kernels.py` says.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["CudaAttention", "cuda_call"]

_CALLS = {
    "aten._scaled_dot_product_cudnn_attention.default": "cudnn_attention",
    "aten._scaled_dot_product_cudnn_attention_backward.default": "cudnn_attention_backward",
    "aten._scaled_dot_product_efficient_attention.default": "efficient_attention",
    "aten._scaled_dot_product_efficient_attention_backward.default": "efficient_attention_backward",
}
_ROWS = 16  # elements: where torch lets rows of a mask begin


def cuda_call(kind: str) -> str | None:
    """The method that is called for an operator, where it is one of these kernels."""
    return _CALLS.get(kind)


class CudaAttention:
    """The arguments are those of the operators; None stands for what follows from shapes."""

    def cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: None, keep: bool, dropout: float, causal: bool, *, scale: float
    ) -> tuple[Tensor, ...]:
        made = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            _four(q), _four(k), _four(v), mask, keep, dropout, causal, False, scale=scale
        )
        return made[0].reshape(q.shape), made[1], made[6], made[7]

    def cudnn_attention_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Tensor, seed: Tensor, offset: Tensor,
        mask: None, starts: None, ends: None, queries: None, keys: None, dropout: float, causal: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        made = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            _four(g), _four(q), _four(k), _four(v), _four(out), kept, seed, offset, mask, starts, ends,
            q.shape[-2], k.shape[-2], dropout, causal, scale=scale,
        )  # fmt: skip
        return tuple(part.reshape(given.shape) for part, given in zip(made, (q, k, v), strict=True))

    def efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: bool, dropout: float, causal: bool, *, scale: float
    ) -> tuple[Tensor, ...]:  # fmt: skip
        out, kept, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            _four(q), _four(k), _four(v), _whole(mask, q, k), keep, dropout, causal, scale=scale
        )
        return out.reshape(q.shape), kept, seed, offset

    def efficient_attention_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, kept: Tensor, seed: Tensor,
        offset: Tensor, dropout: float, wanted: list[bool], causal: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        made = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
            _four(g), _four(q), _four(k), _four(v), _whole(mask, q, k), _four(out), kept, seed, offset, dropout, wanted,
            causal, scale=scale,
        )  # fmt: skip
        shapes = (q.shape, k.shape, v.shape, (*q.shape[:-1], k.shape[-2]))
        return tuple(part.reshape(shape) for part, shape, want in zip(made, shapes, wanted, strict=True) if want)


def _four(x: Tensor) -> Tensor:
    return x if x.ndim == 4 else x.flatten(0, x.ndim - 4)


def _whole(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask of all samples and heads: expanded, not copied, where there are four dims."""
    if mask is None:
        return None
    shape, keys = (*q.shape[:-1], k.shape[-2]), k.shape[-2]
    mask = mask.to(q.dtype).expand(*mask.shape[:-1], keys)
    if len(shape) > 4:
        mask = _four(mask.expand(shape))
    if keys % _ROWS:
        mask = F.pad(mask, (0, -keys % _ROWS))[..., :keys]
    return mask.expand(*_four(q).shape[:-1], keys)
