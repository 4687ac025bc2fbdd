"""Copies of strided parts in larger elements give what plain copies give, and touch nothing else."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.reshard.selection_torch import combine, widened

KINDS = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 24),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from((1, 2, 3, 8)),
    st.booleans(),
)
def test_a_copy_is_a_copy(
    kind: torch.dtype, outer: int, middle: int, run: int, first: int, gap: int, unit: int, packed: bool
) -> None:
    """A block of runs inside a wider array, from a packed one or from another such block, at any offset."""
    run, gap, first = run * unit, gap * unit, first * unit
    width = first + run + gap
    generator = torch.Generator().manual_seed(run * 100 + first)
    whole = torch.randint(0, 2, (outer, middle, width), generator=generator).to(kind)
    source = torch.randint(0, 2, (outer, middle, run if packed else width), generator=generator).to(kind)
    values = source if packed else source[..., :run]
    wanted = whole.clone()
    wanted[..., first : first + run] = values
    place = whole[..., first : first + run]
    combine(place, values, None)
    assert torch.equal(whole, wanted)
    large, small = widened(place, values)
    assert large.shape == small.shape
    assert large.numel() * large.element_size() == place.numel() * place.element_size()


def test_short_runs_become_elements() -> None:
    whole, values = torch.zeros(8, 32), torch.ones(8, 4)
    large, small = widened(whole[:, 4:8], values)
    assert large.dtype == small.dtype == torch.complex128
    assert large.numel() == 8
    assert widened(whole[:, 3:7], values)[0].dtype == torch.float32  # not at a multiple of 16 bytes
    assert widened(whole[:, :16], torch.ones(8, 16))[0].dtype == torch.float32  # long runs are quick as they are
