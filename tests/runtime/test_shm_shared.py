"""Inputs in memory of the group, which peers read where they are: the same results whoever has one there, wherever the
output lies, and whatever is written to them right after a call.
"""

from __future__ import annotations

import pytest
import shared_jobs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shm_ranks import Failed, Ranks, good

from sennit.collective.runtime.code import INPUT, OUTPUT
from sennit.collective.runtime.shm_abi import NOWHERE, load_core
from sennit.collective.runtime.shm_plan import LoadedCode, SharedCache, make_plan
from sennit.collective.runtime.shm_table import default_table
from sennit.ir.collective import CollectiveName
from sennit.ir.dtype import DType

compiled_only = pytest.mark.skipif(load_core() is None, reason="the compiled core was not built")
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=compiled_only), False])
@pytest.mark.parametrize(("size", "inside"), [(2, [0, 1]), (3, [1]), (4, [0, 1, 2, 3])])
def test_whoever_has_it_there(ranks: Ranks, size: int, inside: list[int], compiled: bool) -> None:
    results = ranks.run(size, shared_jobs.collectives, inside, [(1, "f32"), (1003, "i32"), (9001, "u8")], compiled)
    assert min(good(results)) >= 4 * 3  # the plans of those that have other inputs say so too


@compiled_only
@settings(derandomize=True, deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_sizes_and_types(ranks: Ranks, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    inside = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    cases = st.tuples(st.integers(1, 30_000), st.sampled_from(["u8", "bf16", "f32", "i64"]))
    good(ranks.run(size, shared_jobs.collectives, inside, data.draw(st.lists(cases, min_size=1, max_size=2)), True))


@compiled_only
@pytest.mark.parametrize("size", [2, 3, 4])
def test_who_has_it_there_changes_from_call_to_call(ranks: Ranks, size: int) -> None:
    good(ranks.run(size, shared_jobs.one_after_another, 60))


@compiled_only
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_named(mortal: Ranks, victim: int) -> None:
    results = mortal.run(3, shared_jobs.killed, victim)
    for rank in {0, 1, 2} - {victim}:
        failed = results[rank]
        assert isinstance(failed, Failed)
        assert (failed.cause, failed.ranks) == ("died", (victim,)), failed.text


@pytest.mark.parametrize("rank", [0, 2])
def test_where_an_output_may_lie(rank: int) -> None:
    """In parts from the input on: as the in-place form of the collective has it, where that is right."""
    table = default_table(4, 4)
    wanted = {
        CollectiveName.ALL_REDUCE: 0,
        CollectiveName.ALL_GATHER: -rank,  # the input lies in the output
        CollectiveName.REDUCE_SCATTER: rank,
        CollectiveName.ALL_TO_ALL: NOWHERE,
    }
    for name, over in wanted.items():
        loaded = LoadedCode.load(table.code(name, MIB), rank, 0)
        plan = make_plan(loaded, MIB, DType.F32, None, MIB, shared_from=0)
        assert (plan.record.shared, plan.record.over) == (1, over), name


def test_it_is_read_there_where_that_pays() -> None:
    table, near, far = default_table(4, 4), SharedCache(32 * MIB, 24 * MIB), SharedCache(32 * MIB)

    def shared(name: CollectiveName, part: int, cache: SharedCache = near) -> bool:
        loaded = LoadedCode.load(table.code(name, part), 0, 0)
        assert loaded.code.parts(0, INPUT)
        assert loaded.code.parts(0, OUTPUT)
        return loaded.is_shared(part, cache)

    for name in (CollectiveName.ALL_GATHER, CollectiveName.REDUCE_SCATTER, CollectiveName.ALL_TO_ALL):
        assert [shared(name, size * KIB) for size in (64, 127, 128)] == [False, False, True], "four parts of an array"
        assert shared(name, 128 * KIB, far)
    # of an all-reduce the sums are written over what was just read
    assert [shared(CollectiveName.ALL_REDUCE, size * MIB) for size in (1, 8, 9)] == [False, False, True]
    assert not shared(CollectiveName.ALL_REDUCE, 9 * MIB, far)
