from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_strategies import regions

from sennit.errors import LayoutError, ParseError
from sennit.ir.region import Region

quick = settings(derandomize=True, deadline=None, max_examples=150)
pairs = st.integers(0, 2).flatmap(lambda rank: st.tuples(regions(rank=rank), regions(rank=rank)))


def points(region: Region) -> set[tuple[int, ...]]:
    """The set that a region stands for."""
    return set(product(*(dim.tolist() for dim in region.indices())))


@quick
@given(pairs)
def test_intersect_size_and_contains_are_those_of_sets(pair: tuple[Region, Region]) -> None:
    left, right = pair
    assert points(left.intersect(right)) == points(left) & points(right)
    assert left.intersect(right) == right.intersect(left)
    assert left.size == len(points(left))
    assert left.contains(right) == (points(right) <= points(left))
    assert left.contains(left.intersect(right))


@quick
@given(pairs)
def test_within_gives_local_indices(pair: tuple[Region, Region]) -> None:
    outer, other = pair
    inner = other.intersect(outer)
    table = np.arange(7 ** len(outer.dims)).reshape([7] * len(outer.dims))
    piece = table[np.ix_(*outer.indices())] if outer.dims else table
    local = inner.within(outer)
    picked = piece[np.ix_(*local.indices())] if outer.dims else piece
    assert picked.ravel().tolist() == sorted(int(table[point]) for point in points(inner))


@quick
@given(pairs)
def test_within_takes_what_is_contained_and_nothing_else(pair: tuple[Region, Region]) -> None:
    outer, inner = pair
    if outer.contains(inner):
        assert inner.within(outer).size == inner.size
    else:
        with pytest.raises(LayoutError, match=r"is not inside .*\n  fix: "):
            inner.within(outer)


@quick
@given(st.integers(0, 3).flatmap(lambda rank: regions(rank=rank)))
def test_text_round_trip(region: Region) -> None:
    assert Region.parse(str(region)) == region


@quick
@given(st.integers(0, 3).flatmap(lambda rank: regions(rank=rank)))
def test_indices_and_shape(region: Region) -> None:
    assert Region.of_indices(region.indices()) == region
    assert region.shape == tuple(len(dim) for dim in region.indices())
    assert region.is_box == all(len(d) == 0 or d[-1] - d[0] == len(d) - 1 for d in region.indices())


@pytest.mark.parametrize(
    ("text", "region"),
    [
        ("()", Region(())),
        ("(0:4)", Region.full([4])),
        ("(2:4,0:8)", Region.box([2, 0], [4, 8])),
        ("(0:2+4:6,none)", Region((((0, 2), (4, 6)), ()))),
    ],
)
def test_golden_text(text: str, region: Region) -> None:
    assert str(region) == text
    assert Region.parse(text) == region


def test_an_empty_region_is_inside_any_other() -> None:
    empty, outer = Region.parse("(none,5:7)"), Region.parse("(0:2,0:3)")
    assert outer.contains(empty)
    assert empty.within(outer).size == 0


@pytest.mark.parametrize("text", ["(4:2)", "(0:2+2:4)", "(0:3+1:4)", "(4:6+0:2)", "(-1:2)", "(3:3)"])
def test_intervals_out_of_order(text: str) -> None:
    with pytest.raises(
        LayoutError, match=r"dim 0 of a region is \[.*\]\n  fix: give ascending, disjoint, non-touching"
    ):
        Region.parse(text)


@pytest.mark.parametrize("text", ["", "(", "(0)", "(0:2,)", "(0:2) x", "(some)"])
def test_text_that_is_no_region(text: str) -> None:
    with pytest.raises(ParseError, match="expected"):
        Region.parse(text)
