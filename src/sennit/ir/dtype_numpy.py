"""Element types in numpy: the type of each name, and the type that torch gives to the result of a pointwise operator.

Promotion follows torch, not numpy. Operands weigh by kind: an array with dims, then a zero-dim array, then a Python
number. The heaviest kind present decides, unless a lighter one is of a higher class (bool < integer < float). Inside
one kind, the higher class wins as it is (i64 with f32 is f32), and the wider type inside one class. A Python float is
an f32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sennit.errors import GraphError
from sennit.ir.dtype import DType
from sennit.ir.layout_numpy import Array

__all__ = ["numpy_dtype", "result_type"]


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    if dtype is DType.BF16:
        raise GraphError(
            "numpy has no bf16",
            where="the reference interpreter",
            fix="capture the model in f32 or f64 to check it; bf16 runs on torch only",
        )
    names = {"f": "float", "i": "int", "u": "uint"}
    return np.dtype("bool" if dtype is DType.BOOL else names[dtype.value[0]] + dtype.value[1:])


def result_type(*operands: Array | bool | int | float) -> np.dtype[Any]:
    """The element type of a pointwise result: see the rule at the top."""
    by_weight: list[np.dtype[Any] | None] = [None, None, None]  # arrays with dims, zero-dim arrays, numbers
    for operand in operands:
        weight, dtype = _weigh(operand)
        known = by_weight[weight]
        by_weight[weight] = dtype if known is None else _promote(known, dtype)
    found = [dtype for dtype in by_weight if dtype is not None]
    result = found[0]
    for lighter in found[1:]:
        result = lighter if _rank(lighter) > _rank(result) else result
    return result


def _weigh(operand: Array | bool | int | float) -> tuple[int, np.dtype[Any]]:
    match operand:
        case bool():
            return 2, np.dtype(np.bool_)
        case int():
            return 2, np.dtype(np.int64)
        case float():
            return 2, np.dtype(np.float32)
        case _:
            return (0 if operand.ndim else 1), operand.dtype


def _rank(dtype: np.dtype[Any]) -> int:
    return {"b": 0, "i": 1, "u": 1, "f": 2}[dtype.kind]


def _promote(left: np.dtype[Any], right: np.dtype[Any]) -> np.dtype[Any]:
    if _rank(left) != _rank(right):
        return max(left, right, key=_rank)  # numpy would say f64 to i64 with f32
    return np.promote_types(left, right)
