"""A fused group as numbers: what the estimator sees.

A group becomes a small graph. Each operator is a node, and so is each value that it reads from outside. Edges go from a
producer to its readers. A node has

    one of KINDS (or "other", or "input")                                what it does
    log2(1 + x / 2^10) of bytes read, bytes written, elements            how much of it
    log2 of the innermost size, of the size that it reduces over         how it lies
    log2 of m, n, k and batch of a product                               how a library cuts it
    log2 of the largest powers of two in m, n and k, up to 64            whether its rows are aligned
    log2 of its own time in nanoseconds, as measured, else by the device's profile
    log2 of the next power of two over what it reduces over              what a program over whole rows wastes
    log2 of the elements and the bytes of the part that it is in         what it is compiled with (`compiled_parts.py`)
    flags: its own time was measured; float32, half precision, integer; a view, a view with another innermost dim, a reduction, one over the innermost dim, a product; written for others, broadcast; the sort of its
    part, whether that part writes its result to memory, whether it reads something that is not one run of memory, and whether it loops over its rows

and the group as a whole the logarithms of its time by the roofline, by stages, unfused (`kernel_cost.py`), of the
longest operator of each part and by parts (`compiled_cost.py`), of its bytes, counts of operators, inputs, outputs and
reductions, what measured operators changed, instructions, waits and what loops read again, and for each sort of part
its launches, bytes, elements, the longest reduction and the most results, and how the programs of the largest one lie
on the device (`launch_shape.py`). The estimator predicts the logarithm of time over time by parts, so sizes that were
never seen change what is predicted little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2, prod

import numpy as np
from numpy.typing import NDArray

from sennit.cost import products
from sennit.fuse.compiled_cost import Compiled, Split
from sennit.fuse.compiled_parts import Part, Sort
from sennit.fuse.kernel_cost import Staged, as_step, traffic
from sennit.fuse.launch_shape import SHAPE_WIDTH, shape_features
from sennit.fuse.operator_class import Class, classify, moves_nothing, stem
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Op
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
    "sigmoid_backward",
    "silu_backward",
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
    "minimum",
    "floor",
    "cos",
    "sin",
    "_to_copy",
    "clone",
    "cat",
    "stack",
    "constant_pad_nd",
    "slice_backward",
    "select_backward",
    "embedding",
    "index",
    "gather",
    "roll",
    "sum",
    "mean",
    "amax",
    "var_mean",
    "all",
    "_softmax",
    "_softmax_backward_data",
    "_log_softmax",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "_native_batch_norm_legit_functional",
    "native_batch_norm_backward",
    "full",
    "full_like",
    "zeros_like",
    "scalar_tensor",
    "arange",
    "bitwise_and",
    "logical_not",
    "scatter",
    "embedding_dense_backward",
    "index_put",
    "cumsum",
    "view",
    "permute",
    "expand",
    "slice",
)
_SIZES = 16
_FLAGS = 19
NODE_WIDTH = len(KINDS) + _SIZES + _FLAGS
GLOBAL_WIDTH = 28 + 5 * len(Sort) + 3 * SHAPE_WIDTH


@dataclass(frozen=True, slots=True)
class GroupFeatures:
    """`nodes` [n, NODE_WIDTH], `edges` [e, 2] from producer to reader, `whole` [GLOBAL_WIDTH], and seconds by the
    roofline, by stages and by parts; `measured` says that most of its operators were, one by one.
    """

    nodes: NDArray[np.float32]
    edges: NDArray[np.int64]
    whole: NDArray[np.float32]
    roofline: float
    staged: float
    compiled: float
    measured: bool


def features_of(kernel: Kernel, written: frozenset[str], staged: Staged) -> GroupFeatures:
    types = staged.roofline.types
    split = Compiled(staged).split(kernel, written)
    part_of = {name: part for part in reversed(split.parts) for name in part.ops}
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
        rows.append(_operator(op, kernel, written, staged, part_of.get(op.name)))
    roofline = staged.roofline.estimate(kernel, written).seconds
    by_stages = staged.estimate(kernel, written).seconds
    busy = [op for op in kernel.body if not moves_nothing(op)]
    kinds = [classify(op, types) for op in busy]
    whole = [
        _log(roofline * 1e9),
        _log(by_stages * 1e9),
        _log(sum(staged.inside(op, kernel, written) for op in busy) * 1e9),
        _log(_longest(kernel, written, split, staged) * 1e9),
        _size(traffic(kernel, written, types)),
        _size(sum(types[name].bytes for name in kernel.reads)),
        log2(1 + len(busy)),
        log2(1 + len(kernel.reads)),
        log2(1 + len(written)),
        float(kinds.count(Class.PRODUCT)),
        log2(1 + kinds.count(Class.REDUCTION)),
        log2(1 + len(kernel.body) - len(busy)),
        *_of_parts(split),
    ]
    return GroupFeatures(
        np.stack(rows),
        np.array(edges, dtype=np.int64).reshape(-1, 2),
        np.array(whole, dtype=np.float32),
        roofline,
        by_stages,
        split.seconds,
        2 * sum(staged.measured_inside(op, kernel, written) is not None for op in busy) > len(busy),
    )


def _longest(kernel: Kernel, written: frozenset[str], split: Split, staged: Staged) -> float:
    """Seconds of the longest operator of each part, added up."""
    seconds = {op.name: staged.inside(op, kernel, written) for op in kernel.body}
    return sum(max((seconds[name] for name in part.ops), default=0.0) for part in split.parts)


def _of_parts(split: Split) -> list[float]:
    moved = sum(part.read + part.written for part in split.parts)
    found = [
        _log(split.seconds * 1e9),
        log2(1 + split.library * 1e9),
        _size(moved),
        _size(split.footprint),
        log2(1 + moved / max(1, split.footprint)),
        log2(1 + sum(part.launches for part in split.parts)),
        _size(sum(part.reordered for part in split.parts)),
        _size(sum(part.read + part.written for part in split.parts if not part.contiguous)),
        log2(split.seconds / split.modelled) if split.modelled > 0 else 0.0,  # views alone take no time
        log2(split.piled / split.seconds) if split.seconds > 0 and split.piled > 0 else 0.0,
        _size(sum(part.effort.instructions for part in split.parts)),
        _size(sum(part.effort.again for part in split.parts)),
        float(max((part.effort.depth for part in split.parts), default=0)),
        float(max((part.effort.passes for part in split.parts), default=0)),
        _size(sum(part.read + part.written for part in split.parts if not part.kept)),
        _log(sum(part.effort.instructions for part in split.parts) / max(1, moved)),
    ]
    for sort in Sort:
        mine = [part for part in split.parts if part.sort is sort]
        found += [
            log2(1 + sum(part.launches for part in mine)),
            _size(sum(part.read + part.written for part in mine)),
            _size(max((part.size for part in mine), default=0)),
            log2(1 + max((part.size / part.outer for part in mine), default=0.0)),
            log2(1 + max((part.outer for part in mine), default=0)),
        ]
        if sort in (Sort.POINT, Sort.ROW, Sort.COLUMN):  # of the one that moves most
            found += shape_features(max(mine, key=lambda part: part.read + part.written, default=None))
    return found


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
    sizes = [0.0, _size(kind.bytes), _size(kind.elements), log2(1 + inner), *([0.0] * (_SIZES - 4))]
    flags = [False, *_types(kind.dtype), *([False] * 6), kind.elements <= 1, *([False] * (_FLAGS - 11))]
    return _row("input", sizes, flags)


def _operator(
    op: Op, kernel: Kernel, written: frozenset[str], staged: Staged, part: Part | None
) -> NDArray[np.float32]:
    types = staged.roofline.types
    result, kind = op.results[0].type, classify(op, types)
    read = sum(types[value].bytes for value in set(op.reads))
    made = sum(value.type.bytes for value in op.results)
    inner = result.shape[-1] if result.shape else 1
    first = types[op.reads[0]].shape if op.reads else ()
    reduced = _reduced(op, kind, types)
    parts = products(as_step(op), types) if kind is Class.PRODUCT else ()
    sides = [log2(1 + side) for it in parts[:1] for side in (it.m, it.n, it.k, it.batch)] or [0.0] * 4
    whole = [log2(min(64, side & -side)) for it in parts[:1] for side in (it.m, it.n, it.k)] or [0.0] * 3
    sizes = [
        *(_size(read), _size(made), _size(result.elements), log2(1 + inner), log2(reduced)),
        *sides,
        _log(staged.inside(op, kernel, written) * 1e9),
        *whole,
        ceil(log2(reduced)) - log2(reduced),
        _size(part.size) if part is not None else 0.0,
        _size(part.read + part.written) if part is not None else 0.0,
    ]
    flags = [
        staged.measured_inside(op, kernel, written) is not None,
        *_types(result.dtype),
        kind is Class.VIEW,
        stem(op.kind) == "permute" and bool(first) and op.args[1][-1] != len(first) - 1,  # type: ignore[index]
        kind is Class.REDUCTION,
        kind is Class.REDUCTION and bool(first) and (not result.shape or result.shape[-1] != first[-1]),
        kind is Class.PRODUCT,
        any(value.name in written for value in op.results),
        any(types[value].elements < result.elements for value in op.reads),
        *(part is not None and part.sort is sort for sort in Sort),
        part is not None and op.name in part.stored,
        part is not None and not part.contiguous,
        part is not None and not part.kept,
    ]
    name = stem(op.kind)
    shown = "view" if kind is Class.VIEW and name not in KINDS else name
    return _row(shown, sizes, flags)


def _reduced(op: Op, kind: Class, types: Mapping[str, TensorType]) -> float:
    """How many elements go into one of the result, where the operator makes fewer than it reads; the width of what it
    normalises.
    """
    if not op.reads or kind is Class.VIEW:
        return 1.0
    if stem(op.kind).strip("_").startswith(("softmax", "log_softmax", "native_layer_norm")):
        shape = types[op.reads[0]].shape
        return float(shape[-1]) if shape else 1.0
    largest = max(types[name].elements for name in op.reads)
    return max(1.0, largest / max(1, prod(op.results[0].type.shape)))
