"""A step's stretches cover its operators, end where gradients are made, and take their own time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.fuse.timeline_torch import in_stretches


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
