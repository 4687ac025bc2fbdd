"""Packed rows of tables have the bits of the table's; rows that are left out of a head come back to their places."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.fuse.looked_up import LookUp
from sennit.fuse.table_rows_torch import HeadRows, LeftOut, looked_up_rows, looked_up_table

ROWS, WIDTH = 12, 3


def look_up(padding: int = -1) -> LookUp:
    return LookUp("indices", 4, ROWS, WIDTH, 8, "table", "source", "places", padding)


rows_of_a_table = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(rows_of_a_table, rows_of_a_table, st.integers(-1, ROWS - 1))
def test_packed_rows_are_rows_of_the_table(own: list[int], others: list[int], padding: int) -> None:
    item, places = look_up(padding), torch.tensor(own)
    union = torch.unique(torch.tensor(own + others))
    source = torch.randn(len(own), WIDTH, generator=torch.Generator().manual_seed(len(own)))
    table = looked_up_table(item, source, places)
    assert torch.equal(looked_up_rows(item, source, places, union), table[union])
    outside = torch.ones(ROWS, dtype=torch.bool)
    outside[union] = False
    assert not table[outside].any()


@st.composite
def blocks_and_union(draw: st.DrawFn) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Some blocks of the table's rows, in any order, and rows that travel packed."""
    cuts = sorted({0, ROWS, *draw(st.sets(st.integers(1, ROWS - 1), max_size=4))})
    blocks = draw(st.permutations(list(pairwise(cuts))))
    union = sorted(draw(st.sets(st.integers(0, ROWS - 1), min_size=1)))
    return blocks[: draw(st.integers(1, len(blocks)))], torch.tensor(union)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(blocks_and_union())
def test_rows_that_are_left_out_do_not_travel_and_the_others_come_back(
    case: tuple[list[tuple[int, int]], torch.Tensor],
) -> None:
    blocks, union = case
    rows = torch.cat([torch.arange(*block) for block in blocks])
    region = rows[:, None].repeat(1, WIDTH).float()
    is_packed = torch.isin(rows, union)
    left_out = LeftOut.of(region, blocks, union)
    assert left_out.sent == int((~is_packed).sum())
    assert sorted(region[: left_out.sent, 0].tolist()) == sorted(rows[~is_packed].float().tolist())
    region[: left_out.sent] += 100  # it is summed on the way
    region[left_out.sent :] = torch.nan  # what did not travel is worth nothing
    left_out.move_back()
    assert torch.equal(region[~is_packed, 0], rows[~is_packed] + 100.0)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(blocks_and_union(), st.sampled_from([0.5, 1.0]))
def test_the_heads_rows_are_added_whatever_block_they_come_in(
    case: tuple[list[tuple[int, int]], torch.Tensor], scale: float
) -> None:
    _, union = case
    cuts = [0, 5, ROWS]
    head = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    packed = torch.randn(union.numel(), WIDTH, generator=torch.Generator().manual_seed(1))
    kept = HeadRows(union, torch.empty(union.numel(), WIDTH), scale)
    for first, last in reversed(list(pairwise(cuts))):
        kept.keep(first, head[first:last] * scale)
    out = torch.empty_like(packed)
    kept.add(packed, 0.5, out)
    assert torch.equal(out, (head[union] + packed) * 0.5)
