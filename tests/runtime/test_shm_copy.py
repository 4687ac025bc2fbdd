"""Copies of several pieces at once, against one after another: the same bytes, and none besides."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.runtime.shm_abi import load_core

core = load_core()
pytestmark = pytest.mark.skipif(core is None, reason="the compiled core is missing: no C compiler at install")

ROOM = 70_000  # bytes for a piece: longer than those that are walked together from on


class PieceRecord(ctypes.Structure):
    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


long_ones = st.integers(16_000, ROOM - 200)
pieces = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 99), st.one_of(long_ones, long_ones, st.integers(0, 300))),
    min_size=1,
    max_size=8,
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(pieces, st.booleans(), st.integers(0, 1 << 30))
def test_they_are_what_single_copies_are(places: list[tuple[int, int, int]], past: bool, seed: int) -> None:
    assert core is not None
    source = np.random.default_rng(seed).integers(0, 256, len(places) * ROOM, dtype=np.uint8)
    target = np.zeros_like(source)
    wanted = target.copy()
    table = (PieceRecord * len(places))()
    for number, (to, begin, size) in enumerate(places):
        to, begin = number * ROOM + to, number * ROOM + begin
        wanted[to : to + size] = source[begin : begin + size]
        table[number] = PieceRecord(target.ctypes.data + to, source.ctypes.data + begin, size)
    core.sennit_copy.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    core.sennit_copy.restype = None
    core.sennit_copy(ctypes.addressof(table), len(places), past)
    assert np.array_equal(target, wanted)
