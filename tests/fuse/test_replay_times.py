"""Seconds of calls on a GPU, without the host's part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.fuse.replay_times_torch import Replays, calls_of, captured, graphed_seconds, queued_seconds, replayed


@settings(derandomize=True, deadline=None, max_examples=60)
@given(rough=st.floats(1e-8, 1.0), turns=st.integers(1, 64))
def test_a_graph_has_calls_for_its_length_and_every_turn_as_often(rough: float, turns: int) -> None:
    calls = calls_of(rough, turns)
    assert 1 <= calls <= 200
    assert calls <= turns or calls % turns == 0
    assert calls == 1 or calls * rough <= 4.1e-4


def test_one_long_replay_is_not_in_the_median() -> None:
    assert Replays((2.0, 1.0, 1.0, 9.0, 1.2), 2e9).quartiles == (1.0, 1.2, 2.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_are_no_shorter_than_the_memory_allows() -> None:
    x = torch.ones(1 << 26, device="cuda")
    rough = queued_seconds(lambda: x.mul(2.0))
    found = replayed(captured(lambda value: value.mul(2.0), [[x]], rough), rounds=5)
    assert len(found.times) == 5
    assert min(found.times) > 2 * x.nbytes / 20e12  # no memory is that fast
    assert found.clock > 1e8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_launched_on_the_current_stream_is_in_the_graph_that_a_tuner_times() -> None:
    x = torch.ones(1 << 26, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        alone = graphed_seconds(lambda: x.mul(2.0))
    torch.cuda.synchronize()
    assert min(alone, graphed_seconds(lambda: x.mul(2.0))) > 2 * x.nbytes / 20e12
