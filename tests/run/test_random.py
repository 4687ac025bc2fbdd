"""Random numbers: torch equals numpy bit for bit, pieces equal the whole, and the numbers look random."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.errors import GraphError
from sennit.ir.dtype import DType
from sennit.ir.random_numpy import stream, uniform_at
from sennit.ir.random_numpy import uniform as uniform_numpy
from sennit.run.random import uniform

words = st.integers(-(2**63), 2**63 - 1)
shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
TYPES = {DType.F64: torch.float64, DType.F32: torch.float32, DType.F16: torch.float16}


@settings(derandomize=True, deadline=None, max_examples=150)
@given(words, words, st.integers(0, 10**6), shapes, st.sampled_from(list(TYPES)))
def test_torch_equals_numpy(seed: int, step: int, number: int, shape: tuple[int, ...], dtype: DType) -> None:
    ours = uniform(torch.tensor([seed, step]), number, shape, TYPES[dtype]).numpy()
    oracle = uniform_numpy(np.array([seed, step]), number, shape, dtype)
    assert ours.dtype == oracle.dtype
    assert np.array_equal(ours, oracle)
    assert ((oracle >= 0) & (oracle < 1)).all()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.data(), words, shapes)
def test_any_piece_equals_the_whole(data: st.DataObject, seed: int, shape: tuple[int, ...]) -> None:
    indices = [np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))) for size in shape]
    pair = np.array([seed, 3])
    whole = uniform_numpy(pair, 7, shape, DType.F64)
    piece = uniform_at(pair, 7, shape, DType.F64, indices)
    assert np.array_equal(piece, whole[np.ix_(*indices)] if shape else whole)
    ours = uniform(
        torch.from_numpy(pair), 7, shape, torch.float64, indices=[torch.from_numpy(part) for part in indices]
    )
    assert np.array_equal(ours.numpy(), piece)


def test_indices_beyond_32_bits() -> None:
    """An activation of a large model has more than 2^32 elements; none is made to look at a few."""
    shape = (2**20, 2**16, 4)
    at = [np.array([2**20 - 1]), np.array([2**16 - 1]), np.arange(4)]
    pair = np.array([1, 2])
    flat = uniform_at(pair, 0, (2**38,), DType.F64, [np.arange(2**38 - 4, 2**38)])
    assert np.array_equal(uniform_at(pair, 0, shape, DType.F64, at).ravel(), flat)
    ours = uniform(torch.tensor([1, 2]), 0, shape, torch.float64, indices=[torch.from_numpy(part) for part in at])
    assert np.array_equal(ours.numpy().ravel(), flat)


def test_known_values() -> None:
    """What was drawn once is drawn for ever: a run can be resumed under another version."""
    assert stream(0, 0, 0) == (2558736989570252433, 354382101987777749)
    assert uniform_numpy(np.array([42, 7]), 3, (3,), DType.F64).tolist() == [
        0.892399051553439,
        0.9503253172420213,
        0.5577709311906149,
    ]


def test_bf16_is_the_top_bits() -> None:
    pair = torch.tensor([5, 6])
    coarse = uniform(pair, 1, (1000,), torch.bfloat16).double()
    fine = uniform(pair, 1, (1000,), torch.float64)
    assert torch.equal(coarse, (fine * 256).floor() / 256)


def test_integers_are_refused() -> None:
    with pytest.raises(GraphError, match="random numbers of type i64"):
        uniform_numpy(np.array([1, 2]), 0, (3,), DType.I64)


def chi_squared(values: np.ndarray, cells: int) -> float:
    """How many standard deviations the chi-squared statistic of uniform cells is off its mean."""
    counts = np.bincount((values * cells).astype(int), minlength=cells)
    statistic = ((counts - len(values) / cells) ** 2).sum() / (len(values) / cells)
    return abs(statistic - (cells - 1)) / math.sqrt(2 * (cells - 1))


@pytest.mark.parametrize("by", ["index", "step", "number", "seed"])
def test_the_numbers_look_random(by: str) -> None:
    """Along the index, and also along steps, operators and seeds, each of which is a stream of its own: uniform in one
    dimension and in pairs, no correlation of neighbours. The draw is fixed, so this fails for ever or never."""
    count = 40_000
    if by == "index":
        values = uniform_numpy(np.array([1, 2]), 3, (count,), DType.F64)
    else:
        names = ["seed", "step", "number"]
        keys = np.ones((count // 20, 3), np.int64)
        keys[:, names.index(by)] = np.arange(count // 20)
        values = np.concatenate([uniform_numpy(key[:2], int(key[2]), (20,), DType.F64) for key in keys])
        values = values.reshape(-1, 20).T.ravel()  # neighbours are neighbouring streams
    assert chi_squared(values, 100) < 4
    pairs = np.floor(values[:-1:2] * 20) * 20 + np.floor(values[1::2] * 20)
    assert chi_squared((pairs + 0.5) / 400, 400) < 4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) * math.sqrt(count) < 4
    low = uniform_numpy(np.array([1, 2]), 3, (count,), DType.F64) * 2**53 % 256 / 256  # the last bits too
    assert chi_squared(low, 256) < 4
