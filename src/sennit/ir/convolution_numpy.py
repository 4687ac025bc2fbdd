"""Convolution and its derivative on numpy arrays, as their definition: the oracle for split convolutions.

    y[b, o, p] = bias[o] + sum over c, k of x[b, c, p * stride + k * dilation - padding] * w[o, c, k]

with c running over the channels of o's group, and x zero outside. The derivative is that of this sum with respect to x,
w and bias, taken term by term. Transposed convolutions are not defined here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from sennit.errors import GraphError
from sennit.ir.layout_numpy import Array

__all__ = ["convolution", "convolution_backward"]

Sizes = Sequence[int]


def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Array:
    _check(transposed)
    spatial = weight.ndim - 2
    sizes = tuple(
        (x.shape[2 + d] + 2 * padding[d] - dilation[d] * (weight.shape[2 + d] - 1) - 1) // stride[d] + 1
        for d in range(spatial)
    )
    result = np.zeros((x.shape[0], weight.shape[0], *sizes), x.dtype)
    padded = _padded(x, padding)
    for offset, window in _windows(weight.shape[2:], sizes, stride, dilation):
        for part_in, part_out in _groups(weight, groups):
            here: Any = (..., *offset)
            term = np.einsum("bc...,oc->bo...", padded[:, part_in][window], weight[part_out][here])
            result[:, part_out] += term
    return result if bias is None else result + bias.reshape((-1, *(1,) * spatial))


def convolution_backward(
    grad: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Array, ...]:
    _check(transposed)
    padded = _padded(x, padding)
    grad_x, grad_weight = np.zeros_like(padded), np.zeros_like(weight)
    for offset, window in _windows(weight.shape[2:], grad.shape[2:], stride, dilation):
        for part_in, part_out in _groups(weight, groups):
            seen: Array = padded[:, part_in][window]
            here: Any = (..., *offset)
            grad_x[:, part_in][window] += np.einsum("bo...,oc->bc...", grad[:, part_out], weight[part_out][here])
            flat = (len(grad), -1, prod(grad.shape[2:]))
            grad_weight[part_out][here] += np.einsum("bop,bcp->oc", grad[:, part_out].reshape(flat), seen.reshape(flat))
    inside = tuple(slice(pad, pad + size) for pad, size in zip(padding, x.shape[2:], strict=True))
    grad_bias = grad.sum(axis=(0, *range(2, grad.ndim)))
    results = (grad_x[(slice(None), slice(None), *inside)], grad_weight, grad_bias)
    return tuple(result for result, wanted in zip(results, output_mask, strict=True) if wanted)


def _check(transposed: bool) -> None:
    if transposed:
        raise GraphError("a transposed convolution has no numpy meaning", fix="add it to ir/convolution_numpy.py")


def _padded(x: Array, padding: Sizes) -> Array:
    return np.pad(x, ((0, 0), (0, 0), *((pad, pad) for pad in padding)))


def _windows(
    kernel: Sizes, sizes: Sizes, stride: Sizes, dilation: Sizes
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """For each offset of the kernel, the elements of the padded input that it meets, one per output position."""
    for offset in product(*map(range, kernel)):
        starts = [at * step for at, step in zip(offset, dilation, strict=True)]
        window = tuple(
            slice(start, start + step * (size - 1) + 1, step)
            for start, step, size in zip(starts, stride, sizes, strict=True)
        )
        yield offset, (slice(None), slice(None), *window)


def _groups(weight: Array, groups: int) -> Iterator[tuple[slice, slice]]:
    inner, outer = weight.shape[1], weight.shape[0] // groups
    for group in range(groups):
        yield slice(group * inner, (group + 1) * inner), slice(group * outer, (group + 1) * outer)
