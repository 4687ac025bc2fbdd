"""A fused group as numbers: what the estimator sees.

A group becomes a small graph. Each operator is a node, and so is each value that it reads from outside. Edges go from a producer to its readers. A node has

    one of KINDS (or "other", or "input")                             what it does
    log2(1 + x / 2^10) of bytes read, bytes written, elements         how much of it
    log2 of the innermost size, of the size that it reduces over      how it lies
    flags: float32, half precision, integer, a view, a reduction, a product, written for others, an input that is broadcast
    log2 of its own time by the roofline, in nanoseconds

and the group as a whole the logarithm of its time by the roofline (`kernel_cost.py`), of its bytes in and out, and counts of operators, inputs and outputs. The estimator predicts the
logarithm of time over roofline time, so sizes that were never seen change what is predicted little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, prod

import numpy as np
from numpy.typing import NDArray

from sennit.fuse.kernel_cost import Roofline, traffic
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Op
from sennit.ir.operators import is_view
from sennit.ir.strategy_check import Kernel

__all__ = ["GLOBAL_WIDTH", "KINDS", "NODE_WIDTH", "GroupFeatures", "features_of"]

KINDS = (
    "input",
    "other",
    "mm",
    "addmm",
    "bmm",
    "convolution",
    "convolution_backward",
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "exp",
    "log",
    "pow",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "silu",
    "gelu",
    "gelu_backward",
    "tanh_backward",
    "relu",
    "threshold_backward",
    "where",
    "masked_fill",
    "ge",
    "gt",
    "le",
    "lt",
    "eq",
    "ne",
    "_to_copy",
    "clone",
    "cat",
    "constant_pad_nd",
    "slice_backward",
    "select_backward",
    "embedding",
    "index",
    "gather",
    "sum",
    "mean",
    "amax",
    "var_mean",
    "_softmax",
    "_softmax_backward_data",
    "_log_softmax",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "full",
    "full_like",
    "zeros_like",
    "bitwise_and",
    "logical_not",
    "view",
    "permute",
    "expand",
)
_SIZES = 6
_FLAGS = 8
NODE_WIDTH = len(KINDS) + _SIZES + _FLAGS
GLOBAL_WIDTH = 8


@dataclass(frozen=True, slots=True)
class GroupFeatures:
    """`nodes` [n, NODE_WIDTH], `edges` [e, 2] from producer to reader, `whole` [GLOBAL_WIDTH], and the roofline's seconds."""

    nodes: NDArray[np.float32]
    edges: NDArray[np.int64]
    whole: NDArray[np.float32]
    roofline: float


def features_of(kernel: Kernel, written: frozenset[str], roofline: Roofline) -> GroupFeatures:
    types = roofline.types
    number: dict[str, int] = {}
    rows: list[NDArray[np.float32]] = []
    edges: list[tuple[int, int]] = []
    for name in kernel.reads:
        number[name] = len(rows)
        rows.append(_input(types[name]))
    for op in kernel.body:
        here = len(rows)
        edges += [(number[name], here) for name in dict.fromkeys(op.reads)]
        number.update((value.name, here) for value in op.results)
        rows.append(_operator(op, types, written, roofline))
    seconds = roofline.estimate(kernel, written).seconds
    moved = traffic(kernel, written, types)
    busy = [op for op in kernel.body if not is_view(op.kind)]
    whole = [
        _log(seconds * 1e9),
        _size(moved),
        _size(sum(types[name].bytes for name in kernel.reads)),
        log2(1 + len(busy)),
        log2(1 + len(kernel.reads)),
        log2(1 + len(written)),
        float(any(_name(op) in ("mm", "addmm", "bmm", "convolution", "convolution_backward") for op in busy)),
        log2(1 + sum(_reduced(op, types) > 1 for op in busy)),
    ]
    return GroupFeatures(
        np.stack(rows),
        np.array(edges, dtype=np.int64).reshape(-1, 2),
        np.array(whole, dtype=np.float32),
        seconds,
    )


def _name(op: Op) -> str:
    return op.kind.split(".")[1] if op.kind.startswith("aten.") else "other"


def _log(value: float) -> float:
    return log2(max(value, 1e-3))


def _size(value: float) -> float:
    return log2(1 + value / 1024)


def _row(kind: str, sizes: list[float], flags: list[bool]) -> NDArray[np.float32]:
    row = np.zeros(NODE_WIDTH, dtype=np.float32)
    row[KINDS.index(kind if kind in KINDS else "other")] = 1.0
    row[len(KINDS) : len(KINDS) + _SIZES] = sizes
    row[len(KINDS) + _SIZES :] = flags
    return row


def _types(dtype: DType) -> list[bool]:
    is_half = dtype in (DType.F16, DType.BF16)
    is_float = dtype in (DType.F32, DType.F64)
    return [is_float, is_half, not is_half and not is_float]


def _input(kind: TensorType) -> NDArray[np.float32]:
    inner = kind.shape[-1] if kind.shape else 1
    sizes = [0.0, _size(kind.bytes), _size(kind.elements), log2(1 + inner), 0.0, 0.0]
    return _row("input", sizes, [*_types(kind.dtype), False, False, False, False, kind.elements <= 1])


def _operator(
    op: Op, types: Mapping[str, TensorType], written: frozenset[str], roofline: Roofline
) -> NDArray[np.float32]:
    name, result = _name(op), op.results[0].type
    read = sum(types[value].bytes for value in set(op.reads))
    made = sum(value.type.bytes for value in op.results)
    inner = result.shape[-1] if result.shape else 1
    view = is_view(op.kind)
    alone = 0.0 if view else roofline.estimate(Kernel((op,)), frozenset(v.name for v in op.results)).seconds
    reduced = _reduced(op, types)
    sizes = [_size(read), _size(made), _size(result.elements), log2(1 + inner), log2(reduced), _log(alone * 1e9)]
    flags = [
        *_types(result.dtype),
        view,
        reduced > 1,
        name in ("mm", "addmm", "bmm", "convolution", "convolution_backward"),
        any(value.name in written for value in op.results),
        any(types[value].elements < result.elements for value in op.reads),
    ]
    return _row("view" if view and name not in KINDS else name, sizes, flags)


def _reduced(op: Op, types: Mapping[str, TensorType]) -> float:
    """How many elements go into one of the result, where the operator makes fewer than it reads; the width of what it normalises."""
    if not op.reads or is_view(op.kind):
        return 1.0
    if _name(op).strip("_").startswith(("softmax", "log_softmax", "native_layer_norm")):
        shape = types[op.reads[0]].shape
        return float(shape[-1]) if shape else 1.0
    largest = max(types[name].elements for name in op.reads)
    return max(1.0, largest / max(1, prod(op.results[0].type.shape)))
