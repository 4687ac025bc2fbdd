"""What an operator has to do, in words that a profile can be asked with: its family, its size, and what bounds it.

    work := family, features, flops, bytes, element type

The *family* groups operators whose times follow one curve: products of one element type, attention forward, layer norm backward,
additions. The *features* place a member within it, in binary logarithms, so that interpolation is over ratios of sizes:

| family | features |
|---|---|
| product, convolution (forward, by input, by weight) | m, n, k, batch, and whether a row is no whole number of 16 bytes |
| attention (forward, backward; causal or not) | batch x heads, queries, keys, head size |
| rows (softmax, norms and their derivatives) | elements, elements of a row |
| reduction | elements, results, and whether the innermost dim is summed over |
| picks (embedding and its derivative) | elements, rows of the table |
| anything else | bytes moved |

*Scattered* arguments are those whose neighbours in the innermost dim do not lie side by side in memory: a transposed view. A copy
or a pointwise operator that reads one and writes in order is of another family than one that does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import log2, prod

from sennit.cost.operator import Product, moved_bytes, products
from sennit.ir.dtype import DType, TensorType
from sennit.ir.program import Compute, reads

__all__ = ["Work", "works"]

UNALIGNED = 4.0  # how far apart the feature puts products with and without whole vectors


@dataclass(frozen=True, slots=True)
class Work:
    """`general` is the family to ask where nobody measured `family`."""

    family: str
    features: tuple[float, ...]
    flops: int
    bytes: int
    dtype: DType
    general: str | None = None
    products: tuple[Product, ...] = ()


def works(step: Compute, types: Mapping[str, TensorType], scattered: Collection[str] = ()) -> tuple[Work, ...]:
    """One for most operators; a convolution's derivative is one for each of its results."""
    name = stem(step.kind)
    moved = moved_bytes(step, types)
    inner = products(step, types)
    dtype = _dtype(step, types)
    if name.startswith("_scaled_dot_product") or name == "scaled_dot_product_attention":
        return (_attention(name, step, types, inner, moved, dtype),)
    if name in ("convolution", "conv2d", "conv1d", "_convolution"):
        return (_product(f"convolution {dtype.value}", inner[0], moved, dtype),)
    if name == "convolution_backward":
        return _convolution_backward(step, inner, moved, dtype)
    if inner:
        return (_product(f"product {dtype.value}", inner[0], moved, dtype),)
    return (_memory_bound(name, step, types, scattered, moved, dtype),)


def stem(kind: str) -> str:
    """`aten.add_.Tensor` and `aten.add.Scalar` are both `add`."""
    name = kind.split(".")[1] if "." in kind else kind
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


def _dtype(step: Compute, types: Mapping[str, TensorType]) -> DType:
    """That of the first floating result or argument."""
    for name in (*(buffer.name for buffer in step.results), *reads(step)):
        if types[name].dtype.is_float:
            return types[name].dtype
    return types[step.results[0].name].dtype if step.results else DType.F32


def _log(size: float) -> float:
    return log2(max(1.0, size))


def _product(family: str, item: Product, moved: int, dtype: DType) -> Work:
    vector = max(1, 16 // dtype.itemsize)
    whole = item.n % vector == 0 and item.k % vector == 0
    features = (_log(item.m), _log(item.n), _log(item.k), _log(item.batch), 0.0 if whole else UNALIGNED)
    return Work(family, features, item.flops, moved, dtype, None, (item,))


def _convolution_backward(step: Compute, inner: tuple[Product, ...], moved: int, dtype: DType) -> tuple[Work, ...]:
    mask = step.args[-1]
    wanted = mask if isinstance(mask, tuple) else (True, True, False)
    parts = [part for part, asked in zip(("input", "weight"), wanted, strict=False) if asked]
    share = moved // max(1, len(parts))
    return tuple(
        _product(f"convolution by {part} {dtype.value}", item, share, dtype)
        for part, item in zip(parts, inner, strict=False)
    )


def _attention(
    name: str,
    step: Compute,
    types: Mapping[str, TensorType],
    inner: tuple[Product, ...],
    moved: int,
    dtype: DType,
) -> Work:
    scores = inner[0]
    causal = any(arg is True for arg in step.args) or any(value is True for _, value in step.kwargs)
    way = "backward" if name.endswith("backward") else "forward"
    kernel = next((kind for kind in ("flash", "cudnn", "efficient") if kind in name), "any")
    family = f"attention {way} {'causal ' if causal else ''}{dtype.value}"
    flops = sum(item.flops for item in inner) // (2 if causal else 1)
    features = (_log(scores.batch), _log(scores.m), _log(scores.n), _log(scores.k))
    return Work(f"{kernel} {family}", features, flops, moved, dtype, f"flash {family}")


ROWS = {
    "_softmax": "softmax",
    "_log_softmax": "log softmax",
    "_softmax_backward_data": "softmax backward",
    "_log_softmax_backward_data": "log softmax backward",
    "native_layer_norm": "layer norm",
    "native_layer_norm_backward": "layer norm backward",
    "_fused_rms_norm": "rms norm",
    "_fused_rms_norm_backward": "rms norm backward",
}
CHANNELS = {
    "native_batch_norm": "batch norm",
    "_native_batch_norm_legit": "batch norm",
    "_native_batch_norm_legit_functional": "batch norm",
    "cudnn_batch_norm": "batch norm",
    "_batch_norm_with_update": "batch norm",
    "native_batch_norm_backward": "batch norm backward",
    "cudnn_batch_norm_backward": "batch norm backward",
    "batch_norm_backward": "batch norm backward",
}
REDUCTIONS = ("sum", "mean", "amax", "amin", "var_mean", "prod")
PICKS = {"embedding": "embedding", "embedding_dense_backward": "embedding backward"}
COPIES = ("clone", "copy", "contiguous", "_to_copy", "slice", "concat")


def _memory_bound(
    name: str,
    step: Compute,
    types: Mapping[str, TensorType],
    scattered: Collection[str],
    moved: int,
    dtype: DType,
) -> Work:
    inputs = [types[item] for item in reads(step)]
    results = [types[buffer.name] for buffer in step.results]
    largest = max([*inputs, *results], key=lambda item: item.elements)
    if name in ROWS or name in CHANNELS:
        row = largest.shape[-1] if name in ROWS else largest.shape[1]
        family = f"{ROWS.get(name) or CHANNELS[name]} {dtype.value}"
        return Work(family, (_log(largest.elements), _log(row)), 0, moved, dtype, f"rows {dtype.value}")
    if name in REDUCTIONS and inputs and results:
        inner = bool(results[0].shape) and results[0].shape[-1] == inputs[0].shape[-1] != 1
        features = (_log(inputs[0].elements), _log(results[0].elements), 0.0 if inner else UNALIGNED)
        return Work(f"reduction {dtype.value}", features, 0, moved, dtype)
    if name in PICKS:
        table = (inputs[0] if name == "embedding" else results[0]).shape[0]
        picked = results[0] if name == "embedding" else inputs[0]
        return Work(f"{PICKS[name]} {dtype.value}", (_log(picked.elements), _log(table)), 0, moved, dtype)
    mixed = len({item in scattered for item in reads(step) if prod(types[item].shape) == largest.elements}) > 1
    out_of_order = mixed or (name in COPIES and any(item in scattered for item in reads(step)))
    general = f"{'scattered' if out_of_order else 'pointwise'} {dtype.value}"
    family = general if out_of_order else f"{name} {dtype.value}"
    return Work(family, (_log(moved),), 0, moved, dtype, general)
