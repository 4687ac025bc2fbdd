"""What an operator has to do, in words that a profile can be asked with: its family, its size, and what bounds it.

    work := family, features, flops, bytes, element type

The *family* groups operators whose times follow one curve: products of one element type, attention forward, layer norm
backward, additions. The *features* place a member within it, in binary logarithms, so that interpolation is over ratios
of sizes:

| family | features |
|---|---|
| product | m, n, k, batch, and whether a row is no whole number of 16 bytes |
| convolution (forward, by input, by weight) | m, n, k, elements of the kernel, input over output positions |
| attention (forward, backward; causal or not) | batch x heads, queries, keys, head size |
| rows (softmax, norms and their derivatives) | elements, elements of a row |
| reduction | elements, results, and whether the innermost dim is summed over |
| picks (embedding and its derivative) | rows picked, elements of a row, rows of the table |
| anything else | bytes moved |

How the arguments lie in memory (`ir/memory_order.py`) decides too. A pointwise operator or a copy whose arguments all
lie as its result does is of its own family. With one that is broadcast, has gaps or has its rows in another order it is
*strided*, with one whose rows are not whole *scattered*, whatever it computes. A convolution or a batch norm of images
whose last dim is not innermost is one with channels last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, prod

from sennit.cost.operator import Product, moved_bytes, products
from sennit.ir.dtype import DType, TensorType
from sennit.ir.memory_order import MemoryOrder
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


def works(step: Compute, types: Mapping[str, TensorType], orders: Mapping[str, MemoryOrder]) -> tuple[Work, ...]:
    """One for most operators; a convolution's derivative is one for each of its results."""
    name = _stem(step.kind)
    moved = moved_bytes(step, types)
    inner = products(step, types)
    dtype = _dtype(step, types)
    if name.startswith("_scaled_dot_product") or name == "scaled_dot_product_attention":
        return (_attention(name, step, types, inner, moved, dtype),)
    if name in ("convolution", "conv2d", "conv1d", "_convolution"):
        return (_convolution("convolution", inner[0], step, types, orders, moved, dtype),)
    if name == "convolution_backward":
        return _convolution_backward(step, types, orders, inner, moved, dtype)
    if inner:
        return (_product(f"product {dtype.value}", inner[0], moved, dtype),)
    return (_memory_bound(name, step, types, orders, moved, dtype),)


def _stem(kind: str) -> str:
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
    return Work(family, features, item.flops, moved, dtype)


def _channels_last(step: Compute, orders: Mapping[str, MemoryOrder]) -> str:
    last = any(item in orders and not orders[item].rows_are_whole for item in reads(step)[:2])
    return "channels-last " if last else ""


def _convolution(
    family: str,
    item: Product,
    step: Compute,
    types: Mapping[str, TensorType],
    orders: Mapping[str, MemoryOrder],
    moved: int,
    dtype: DType,
) -> Work:
    """Of a forward convolution, or of a part of its derivative: grad_output, input, weight come first there."""
    backward = family != "convolution"
    names = reads(step)
    image, weight = (types[names[1]], types[names[2]]) if backward else (types[names[0]], types[names[1]])
    kernel = prod(weight.shape[2:])
    positions = image.shape[0] * prod(image.shape[2:])
    features = (_log(item.m), _log(item.n), _log(item.k), _log(kernel), _log(positions / max(1, item.m)))
    name = f"{family} {_channels_last(step, orders)}{dtype.value}"
    return Work(name, features, item.flops, moved, dtype)


def _convolution_backward(
    step: Compute,
    types: Mapping[str, TensorType],
    orders: Mapping[str, MemoryOrder],
    inner: tuple[Product, ...],
    moved: int,
    dtype: DType,
) -> tuple[Work, ...]:
    mask = step.args[-1]
    wanted = mask if isinstance(mask, tuple) else (True, True, False)
    parts = [part for part, asked in zip(("input", "weight"), wanted, strict=False) if asked]
    share = moved // max(1, len(parts))
    return tuple(
        _convolution(f"convolution by {part}", item, step, types, orders, share, dtype)
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
    causal = _is_causal(name, step)
    way = "backward" if name.endswith("backward") else "forward"
    kernel = next((kind for kind in ("flash", "cudnn", "efficient") if kind in name), "any")
    family = f"attention {way} {'causal ' if causal else ''}{dtype.value}"
    flops = sum(item.flops for item in inner) // (2 if causal else 1)
    features = (_log(scores.batch), _log(scores.m), _log(scores.n), _log(scores.k))
    return Work(f"{kernel} {family}", features, flops, moved, dtype, f"cudnn {family}")


def _is_causal(name: str, step: Compute) -> bool:
    """The place of `is_causal` differs between kernels; a call that is written shorter has no other flag."""
    places = {
        "_scaled_dot_product_flash_attention": 4,
        "_scaled_dot_product_flash_attention_for_cpu": 4,
        "_scaled_dot_product_efficient_attention": 6,
        "_scaled_dot_product_cudnn_attention": 6,
        "_scaled_dot_product_flash_attention_backward": 11,
        "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
        "_scaled_dot_product_efficient_attention_backward": 11,
        "_scaled_dot_product_cudnn_attention_backward": 14,
    }
    place = places.get(name, len(step.args))
    if place < len(step.args):
        return step.args[place] is True
    return any(arg is True for arg in step.args) or dict(step.kwargs).get("is_causal") is True


ROWS = {
    "_softmax": "softmax",
    "_log_softmax": "log softmax",
    "_softmax_backward_data": "softmax backward",
    "_log_softmax_backward_data": "log softmax backward",
    "nll_loss_forward": "nll loss",
    "nll_loss_backward": "nll loss backward",
    "native_layer_norm": "layer norm",
    "native_layer_norm_backward": "layer norm backward",
    "_fused_rms_norm": "rms norm",
    "_fused_rms_norm_backward": "rms norm backward",
}
CHANNELS = {
    "native_batch_norm": "batch norm",
    "_native_batch_norm_legit": "batch norm",
    "_native_batch_norm_legit_functional": "batch norm",
    "cudnn_batch_norm": "cudnn batch norm",
    "_batch_norm_with_update": "batch norm",
    "native_batch_norm_backward": "batch norm backward",
    "cudnn_batch_norm_backward": "cudnn batch norm backward",
    "batch_norm_backward": "batch norm backward",
}
REDUCTIONS = ("sum", "mean", "amax", "amin", "var_mean", "prod")
PICKS = {"embedding": "embedding", "embedding_dense_backward": "embedding backward"}
POINTS_ELSEWHERE = (  # these go to places that their arguments name
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "index",
    "index_put",
    "gather",
    "scatter",
    "scatter_add",
)
COPIES = ("clone", "copy", "contiguous", "_to_copy", "slice", "concat", "pack", "join")


def _memory_bound(
    name: str,
    step: Compute,
    types: Mapping[str, TensorType],
    orders: Mapping[str, MemoryOrder],
    moved: int,
    dtype: DType,
) -> Work:
    inputs = [types[item] for item in reads(step)]
    results = [types[buffer.name] for buffer in step.results]
    largest = max([*inputs, *results], key=lambda item: item.elements)
    if name in ROWS or name in CHANNELS:
        row = largest.shape[-1] if name in ROWS else largest.shape[1]
        order = _channels_last(step, orders) if name in CHANNELS else ""
        family = f"{ROWS.get(name) or CHANNELS[name]} {order}{dtype.value}"
        return Work(family, (_log(largest.elements), _log(row)), 0, moved, dtype, f"rows {dtype.value}")
    if name in REDUCTIONS and inputs and results:
        inner = bool(results[0].shape) and results[0].shape[-1] == inputs[0].shape[-1] != 1
        features = (_log(inputs[0].elements), _log(results[0].elements), 0.0 if inner else UNALIGNED)
        return Work(f"reduction {dtype.value}", features, 0, moved, dtype)
    if name in PICKS:
        table = (inputs[0] if name == "embedding" else results[0]).shape[0]
        picked = results[0] if name == "embedding" else inputs[0]
        rows = picked.elements // max(1, picked.shape[-1])
        features = (_log(rows), _log(picked.shape[-1]), _log(table))
        return Work(f"{PICKS[name]} {dtype.value}", features, 0, moved, dtype)
    way = None if name in POINTS_ELSEWHERE else _way(name, step, types, orders, largest.elements)
    family = f"{way or name} {dtype.value}"
    return Work(family, (_log(moved),), 0, moved, dtype, family if way else f"pointwise {dtype.value}")


def _way(
    name: str, step: Compute, types: Mapping[str, TensorType], orders: Mapping[str, MemoryOrder], elements: int
) -> str | None:
    """Whether arguments make a pointwise operator `strided` or `scattered`; None where all lie as the result."""
    found: list[MemoryOrder] = []
    broadcast = False
    for item in reads(step):
        if types[item].elements == elements or name in ("cat", "stack"):
            found.append(orders.get(item) or MemoryOrder.plain(len(types[item].shape)))
        elif types[item].elements > 1:
            broadcast = True
    if name in (*COPIES, "cat", "stack", "roll"):  # these write in order, whatever they read
        found.append(MemoryOrder.plain(len(found[0].dims)) if found else MemoryOrder(()))
    if any(item.dims != found[0].dims for item in found):
        apart = sum(not item.rows_are_whole for item in found)
        # what a concatenation reads, it copies piece by piece
        return "scattered" if (2 * apart > len(found) if name in ("cat", "stack") else apart) else "strided"
    return "strided" if broadcast or any(not item.dense for item in found) else None
