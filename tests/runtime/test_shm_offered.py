"""Exchanges in which each rank says where its input is read, by the pages that it lies in: the same results whoever
offers, whatever overlaps.
"""

from __future__ import annotations

import offered_jobs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shm_ranks import Failed, Ranks, good

from sennit.collective.runtime.shm_abi import load_core
from sennit.collective.runtime.shm_pages import PageMap
from sennit.ir.dtype import DType

pytestmark = pytest.mark.skipif(load_core() is None, reason="the compiled core was not built")
MIB = 1 << 20


def may(results: list[bool]) -> None:
    if not all(good(results)):
        pytest.skip("this kernel does not let processes read each other's memory")


@pytest.mark.parametrize(
    ("size", "offering"), [(2, [0, 1]), (2, [1]), (3, []), (3, [0, 2]), (4, [0, 1, 2, 3]), (5, [3])]
)
def test_whoever_offers(ranks: Ranks, size: int, offering: list[int]) -> None:
    cases = [(MIB // size + 1, "u8"), (MIB // 4 // size + 5, "f32")]
    may(ranks.run(size, offered_jobs.exchanges, offering, cases))


@settings(derandomize=True, deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_sizes_and_types(ranks: Ranks, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    offering = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    dtypes = data.draw(st.lists(st.sampled_from([DType.U8, DType.BF16, DType.F32, DType.I64]), min_size=1, max_size=2))
    counts = [-(-MIB // size // dtype.itemsize) + data.draw(st.integers(0, 40_000)) for dtype in dtypes]
    cases = [(n, dtype.value) for n, dtype in zip(counts, dtypes, strict=True)]
    may(ranks.run(size, offered_jobs.exchanges, offering, cases))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_who_offers_changes_from_call_to_call(ranks: Ranks, size: int) -> None:
    may(ranks.run(size, offered_jobs.one_after_another, 60))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_named_whether_it_offers_or_stages(mortal: Ranks, victim: int) -> None:
    results = mortal.run(3, offered_jobs.killed, victim)
    for rank in {0, 1, 2} - {victim}:
        failed = results[rank]
        assert isinstance(failed, Failed)
        assert (failed.cause, failed.ranks) == ("died", (victim,)), failed.text


def test_the_kernel_says_which_pages_an_array_lies_in() -> None:
    assert offered_jobs.told_by_the_kernel("small") in (0, -1)
    huge = offered_jobs.told_by_the_kernel("huge")
    if huge in (-1, -2):
        pytest.skip("this kernel does not say" if huge == -1 else "this kernel gave no huge pages")
    assert huge == 1


def test_a_page_map_is_closed_once() -> None:
    pages = PageMap()
    pages.close()
    pages.close()
    assert pages.descriptor == -1
