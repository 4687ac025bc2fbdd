"""`sennit.uniform` in torch: equal bit for bit to `ir/random_numpy.py`, which defines it.

torch has no unsigned 64-bit arithmetic on all devices. Signed words wrap in the same way under + and *, and a shift
that brings zeros in is a signed shift and a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.ir.dtype import DType
from sennit.ir.random_numpy import MULTIPLIERS, SHIFTS, Steps, precision, row_major, stream

__all__ = ["uniform"]


def uniform(
    seed: Tensor,
    number: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    steps: Steps | None = None,
    first: int = 0,
    *,
    indices: Sequence[Tensor] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Numbers in [0, 1) of the whole `shape`, or those of its elements at the product of `indices` (one list per dim).

    `seed` is the pair (seed, step); keep it on the CPU, or every call waits for the device.
    """
    pair: list[int] = seed.tolist()
    start, gamma = stream(pair[0], pair[1], number)
    if indices is None:
        indices = [torch.arange(size, device=device) for size in shape]
    words = torch.full([], _signed(start + (first + 1) * gamma), dtype=torch.int64, device=device)
    for dim, (factors, part) in enumerate(zip(steps or row_major(shape), indices, strict=True)):
        ahead = torch.zeros_like(part)
        for size, step in reversed(factors):
            ahead += (part % size) * _signed(gamma * step)
            part = part // size
        words = words + ahead.view([-1 if other == dim else 1 for other in range(len(shape))])
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        words = _xor_shift(words, shift).mul_(_signed(multiplier))
    words = _xor_shift(words, SHIFTS[2])
    bits = precision(DType("bf16" if dtype is torch.bfloat16 else f"f{dtype.itemsize * 8}"))
    # at most 53 bits are left: exact in float64, and still so after the scaling and in `dtype`
    return _shift(words, 64 - bits).to(torch.float64).mul_(2.0**-bits).to(dtype)


def _xor_shift(words: Tensor, by: int) -> Tensor:
    return _shift(words, by).bitwise_xor_(words)


def _shift(words: Tensor, by: int) -> Tensor:
    return (words >> by).bitwise_and_((1 << 64 - by) - 1)


def _signed(word: int) -> int:
    """The signed number with the same 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
