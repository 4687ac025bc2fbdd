"""The kernels of the core give what numpy gives, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_jobs import allowed, draw

from sennit.collective.runtime.reduce_numpy import divide, held_dtype, reduce_all
from sennit.collective.runtime.shm_abi import DTYPES, REDUCTIONS, CallRecord, Reduction, load_core
from sennit.ir.dtype import DType
from sennit.ir.layout_numpy import Array

core = load_core()
pytestmark = pytest.mark.skipif(core is None, reason="the compiled core was not built")


def by_core(dtype: DType, reduction: Reduction, operands: list[Array]) -> Array:
    assert core is not None
    record = CallRecord(dtype=DTYPES.index(dtype), reduction=REDUCTIONS.index(reduction), itemsize=dtype.itemsize)
    target = np.empty_like(operands[0])
    sources = (ctypes.c_void_p * len(operands))(*(operand.ctypes.data for operand in operands))
    core.sennit_reduce(ctypes.addressof(record), target.ctypes.data, sources, len(operands), target.size)
    return target


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.sampled_from(list(DType)),
    st.sampled_from(REDUCTIONS),
    st.integers(1, 6),
    st.integers(0, 5000),
    st.integers(0, 99),
)
def test_kernels(dtype: DType, reduction: Reduction, count: int, elements: int, seed: int) -> None:
    if allowed(dtype, reduction):
        operands = draw(seed, count, elements, dtype)
        np.testing.assert_array_equal(
            by_core(dtype, reduction, operands).view(np.uint8), reduce_all(dtype, reduction, operands).view(np.uint8)
        )


def every_half(dtype: DType) -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(held_dtype(dtype))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.PROD, Reduction.MIN, Reduction.MAX])
def test_every_half_with_some_others(dtype: DType, reduction: Reduction) -> None:
    """All bit patterns: without a leading one, infinite, not a number.

    Of the latter only that they are none is compared.
    """
    for other in (0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E01, 0x3F80, 0x7F7F):
        operands = [every_half(dtype), np.full(1 << 16, other, dtype=np.uint16).view(held_dtype(dtype))]
        mine, theirs = (f(dtype, reduction, operands).view(np.uint16) for f in (by_core, reduce_all))
        infinite = 0x7C00 if dtype is DType.F16 else 0x7F80
        nan_mine, nan_theirs = ((bits & 0x7FFF) > infinite for bits in (mine, theirs))
        np.testing.assert_array_equal(nan_mine, nan_theirs)
        zeros = (mine & 0x7FFF) == 0  # min and max of two zeros may be either
        same = nan_mine | zeros & ((theirs & 0x7FFF) == 0) if reduction in (Reduction.MIN, Reduction.MAX) else nan_mine
        np.testing.assert_array_equal(mine[~same], theirs[~same])


def test_division_goes_towards_zero() -> None:
    np.testing.assert_array_equal(divide(DType.I8, np.array([-7, 7, -128], dtype=np.int8), 2), [-3, 3, -64])
    np.testing.assert_array_equal(
        divide(DType.F16, np.array([1.0], dtype=np.float16), 3), np.float16(1) / np.float16(3)
    )


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.I8])
def test_the_target_may_be_an_operand(dtype: DType, place: int) -> None:
    operands = draw(3, 5, 3001, dtype)
    wanted = reduce_all(dtype, Reduction.SUM, operands)
    assert core is not None
    record = CallRecord(dtype=DTYPES.index(dtype), reduction=0, itemsize=dtype.itemsize)
    sources = (ctypes.c_void_p * 5)(*(operand.ctypes.data for operand in operands))
    core.sennit_reduce(ctypes.addressof(record), operands[place].ctypes.data, sources, 5, 3001)
    np.testing.assert_array_equal(operands[place].view(np.uint8), wanted.view(np.uint8))
