"""The reductions in numpy: the oracle of the core's kernels, and what serves where there is no core.

Operands are combined in their order. Halves are combined in f32 and rounded once, to nearest even. min and max keep
what is not a number. Integers wrap. bf16 is held as uint16, since numpy has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sennit.collective.runtime.shm_abi import Reduction
from sennit.ir.dtype import DType
from sennit.ir.dtype_numpy import numpy_dtype
from sennit.ir.layout_numpy import Array

__all__ = ["divide", "held_dtype", "reduce_all"]


def held_dtype(dtype: DType) -> np.dtype[np.generic]:
    """The numpy type in which elements are held."""
    return np.dtype(np.uint16) if dtype is DType.BF16 else numpy_dtype(dtype)


def reduce_all(dtype: DType, reduction: Reduction, operands: Sequence[Array]) -> Array:
    """AVG is a sum here: `divide` comes at the end."""
    if len(operands) == 1:
        return operands[0].copy()
    combine = _combine(dtype, reduction)
    with np.errstate(all="ignore"):
        total = _widen(dtype, operands[0])
        for operand in operands[1:]:
            total = combine(total, _widen(dtype, operand))
        return _narrow(dtype, total)


def divide(dtype: DType, array: Array, by: int) -> Array:
    """Towards zero for integers."""
    with np.errstate(all="ignore"):
        if dtype.is_float:
            wide = _widen(dtype, array)
            return _narrow(dtype, wide / wide.dtype.type(by))
        quotient = np.abs(array.astype(np.int64)) // by
        result: Array = (np.sign(array.astype(np.int64)) * quotient).astype(array.dtype)
        return result


def _combine(dtype: DType, reduction: Reduction) -> Callable[[Array, Array], Array]:
    if dtype is DType.BOOL:
        match reduction:
            case Reduction.SUM | Reduction.MAX | Reduction.BOR:
                return np.logical_or
            case Reduction.BXOR:
                return np.logical_xor
            case _:
                return np.logical_and
    table: dict[Reduction, Callable[[Array, Array], Array]] = {
        Reduction.SUM: np.add,
        Reduction.AVG: np.add,
        Reduction.PROD: np.multiply,
        Reduction.MIN: np.minimum,
        Reduction.MAX: np.maximum,
        Reduction.BAND: np.bitwise_and,
        Reduction.BOR: np.bitwise_or,
        Reduction.BXOR: np.bitwise_xor,
    }
    return table[reduction]


def _widen(dtype: DType, array: Array) -> Array:
    if dtype is DType.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype is DType.F16 else array


def _narrow(dtype: DType, array: Array) -> Array:
    if dtype is DType.F16:
        return array.astype(np.float16)
    if dtype is not DType.BF16:
        return array
    bits: NDArray[np.uint32] = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype(np.uint16)
