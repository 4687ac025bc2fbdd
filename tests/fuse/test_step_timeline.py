"""A step's stretches cover its operators, end where gradients are made, and take their own time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.fuse.timeline_torch import in_stretches, messages_of


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9), st.data())
def test_operators_of_a_stretch_take_its_time(alone: list[float], data: st.DataObject) -> None:
    names = [f"op{place}" for place in range(len(alone))]
    cuts = sorted({0, len(alone), *data.draw(st.sets(st.integers(0, len(alone))))})
    lengths = {pair: data.draw(st.floats(0.1, 2.0)) for pair in pairwise(cuts)}
    found = in_stretches(dict(zip(names, alone, strict=True)), names, lengths)
    for (start, stop), length in lengths.items():
        inside = names[start:stop]
        assert sum(found[name] for name in inside) == pytest.approx(length)
        total = sum(alone[start:stop])
        if total > 0.01:
            for name, seconds in zip(inside, alone[start:stop], strict=True):
                assert found[name] == pytest.approx(seconds * length / total)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 3 << 19), min_size=1, max_size=6), st.integers(0, 9 << 20))
def test_messages_are_as_large_as_buckets_and_as_many_bytes_as_asked_for(sizes: list[int], nbytes: int) -> None:
    buffers = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
    found = messages_of(buffers, nbytes)
    carried = [message.nbytes for message in found]
    assert all(1 << 17 <= size <= 1 << 20 for size in carried)
    assert sum(carried) >= nbytes > sum(carried[:-1]) or not (found or nbytes)
    places = [(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in buffers]
    if max(sizes) >= 1 << 16:  # none but what the step fills
        assert all(any(start <= message.data_ptr() < stop for start, stop in places) for message in found)
