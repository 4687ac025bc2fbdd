"""Several tensors in one flat one: rows of pieces are what a rank sends and gathers, and `join` is the inverse of
`pack`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.errors import GraphError
from sennit.ir.flat_numpy import join, pack, parts
from sennit.run.rank import _take_apart


@st.composite
def tensors(draw: st.DrawFn) -> tuple[int, list[tuple[np.ndarray, tuple[int, int]]]]:
    """How many pieces, and tensors each with a dim of outer * pieces * inner elements."""
    pieces, found = draw(st.sampled_from([1, 2, 3, 4])), []
    for number in range(draw(st.integers(1, 4))):
        outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        before, after = draw(st.lists(st.integers(1, 3), max_size=2)), draw(st.lists(st.integers(1, 3), max_size=2))
        shape = (*before, outer * pieces * inner, *after)
        array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + 1000 * number
        found.append((array, (len(before), inner)))
    return pieces, found


@settings(derandomize=True, deadline=None, max_examples=100)
@given(tensors())
def test_rows_are_what_a_rank_sends_to_each_member(given_: tuple[int, list]) -> None:
    pieces, items = given_
    arrays, cuts = [array for array, _ in items], [cut for _, cut in items]
    rows = pack(arrays, pieces, cuts).reshape(pieces, -1)
    for member, row in enumerate(rows):
        expected = [_take_apart(torch.from_numpy(array), *cut, pieces)[member].numpy() for array, cut in items]
        if pieces == 1:
            expected = arrays
        for part, whole in zip(parts(row, [array.shape for array in expected]), expected, strict=True):
            np.testing.assert_array_equal(part, whole)
    for array, same in zip(arrays, join(rows, pieces, cuts, [array.shape for array in arrays]), strict=True):
        np.testing.assert_array_equal(array, same)


def test_other_sizes_are_refused() -> None:
    with pytest.raises(GraphError, match=r"a row of 5 elements is to be parts of \[2, 2\]"):
        parts(np.zeros(5), [(2,), (2,)])
    with pytest.raises(GraphError, match=r"rows of 3 elements are joined to tensors that have 2 in each"):
        join(np.zeros(6), 2, [(0, 2)], [(4,)])
