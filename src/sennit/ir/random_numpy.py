"""Random numbers that do not depend on how an array is split: each is a function of its position in the whole array.

`sennit.uniform(%seed, number, [shape], dtype)` fills an array with numbers in [0, 1). The element with flat index i
(row-major, in the *whole* array) is a pure function of (seed, step, number, i): `%seed` is the pair (seed, step),
`number` counts the random operators of a graph. So a device that holds any piece computes the values of its own
indices, in any order, and a parallel run draws what the serial run draws.

Two more arguments, `steps` and `first`, make an array that is itself a piece of a larger one (`plan/co_shard.py`). A
dim has factors (size, step), major to minor; the element whose indices have the digits j lies in the larger array at
first + sum of step * digit. Without them it is the array itself: one factor a dim, row-major, from 0.

The generator is SplitMix64 in its counter form, with one stream per (seed, step, number), as in Steele, Lea and Flood,
"Fast splittable pseudorandom number generators" (OOPSLA 2014). All arithmetic is on 64-bit words, modulo 2^64; `>>`
shifts zeros in.

    mix(z):   z ^= z >> 30;  z *= 0xbf58476d1ce4e5b9;  z ^= z >> 27;  z *= 0x94d049bb133111eb;  z ^ (z >> 31)
    fold(h, w) = mix((h ^ w) + G)                 G = 0x9e3779b97f4a7c15, the golden ratio
    start = fold(fold(fold(0, seed), step), number)
    gamma = an odd word made from start, with at least 24 changes between neighbouring bits
    word_i = mix(start + (i + 1) * gamma)

A float with b bits of precision is the top b bits of its word times 2^-b: exact, and below 1. Two streams with
different gammas share no more than single words, however long they are.

`stream` makes (start, gamma); `uniform` is the operator; `uniform_at` gives any rectangular set of its elements. The
torch version (`run/random.py`) shares `stream` and is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from sennit.errors import GraphError
from sennit.ir.dtype import DType
from sennit.ir.dtype_numpy import numpy_dtype
from sennit.ir.layout_numpy import Array

__all__ = ["MULTIPLIERS", "SHIFTS", "Steps", "precision", "row_major", "stream", "uniform", "uniform_at"]

SHIFTS = (30, 27, 31)
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


Steps = Sequence[Sequence[tuple[int, int]]]  # for each dim its factors (size, step), major to minor


def uniform(
    seed: Array, number: int, shape: Sequence[int], dtype: DType, steps: Steps | None = None, first: int = 0
) -> Array:
    """The whole array."""
    return uniform_at(seed, number, shape, dtype, [np.arange(size) for size in shape], steps, first)


def uniform_at(
    seed: Array,
    number: int,
    shape: Sequence[int],
    dtype: DType,
    indices: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]],
    steps: Steps | None = None,
    first: int = 0,
) -> Array:
    """The elements at the product of `indices`, one list of indices per dim of the whole `shape`."""
    start, gamma = stream(int(seed[0]), int(seed[1]), number)
    words = np.full([len(part) for part in indices], (start + (first + 1) * gamma) & _WORD, np.uint64)
    bits = precision(dtype)
    with np.errstate(over="ignore"):  # words wrap; numpy says so where an array has no dims
        for dim, (factors, part) in enumerate(zip(steps or row_major(shape), indices, strict=True)):
            ahead = np.zeros(len(part), np.uint64)
            for size, step in reversed(factors):
                ahead += (part % size).astype(np.uint64) * np.uint64(gamma * step & _WORD)
                part = part // size
            words = words + ahead.reshape([-1 if other == dim else 1 for other in range(len(shape))])
        return np.asarray((_mix(words) >> np.uint64(64 - bits)) * 2.0**-bits).astype(numpy_dtype(dtype))


def stream(seed: int, step: int, number: int) -> tuple[int, int]:
    """Where the words of one operator in one step start, and how far apart they are."""
    start = 0
    for word in (seed, step, number):
        start = _mix_word((start ^ (word & _WORD)) + _GOLDEN & _WORD)
    gamma = start
    for multiplier in (
        0xFF51AFD7ED558CCD,
        0xC4CEB9FE1A85EC53,
    ):  # another mixer, so that gamma tells nothing of the words
        gamma = (gamma ^ gamma >> 33) * multiplier & _WORD
    gamma = (gamma ^ gamma >> 33) | 1
    if (gamma ^ gamma >> 1).bit_count() < 24:  # long runs of equal bits would be left to the mixer alone
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return start, gamma


def row_major(shape: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The steps of an array that is no piece: how far apart in the flat index two neighbours along each dim are."""
    return tuple(((size, prod(shape[dim + 1 :])),) for dim, size in enumerate(shape))


def precision(dtype: DType) -> int:
    """Bits of the significand."""
    found = {DType.F64: 53, DType.F32: 24, DType.F16: 11, DType.BF16: 8}.get(dtype)
    if found is None:
        raise GraphError(f"random numbers of type {dtype.value}", fix="draw floats, then compare or round them")
    return found


def _mix(words: Array) -> Array:
    words = (words ^ words >> np.uint64(SHIFTS[0])) * np.uint64(MULTIPLIERS[0])
    words = (words ^ words >> np.uint64(SHIFTS[1])) * np.uint64(MULTIPLIERS[1])
    return np.asarray(words ^ words >> np.uint64(SHIFTS[2]))


def _mix_word(word: int) -> int:
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        word = (word ^ word >> shift) * multiplier & _WORD
    return word ^ word >> SHIFTS[2]
