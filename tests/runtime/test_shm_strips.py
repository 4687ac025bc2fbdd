"""Calls that are cut into strips give what uncut ones give, whoever runs the strips, and fail as these do."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import offered_jobs
import pulled_jobs
import pytest
import shared_jobs
import shm_jobs
import strip_jobs
from hypothesis import given
from hypothesis import strategies as st
from shm_ranks import Failed, Ranks, good, segments

from sennit.collective.runtime.shm_abi import load_core
from sennit.collective.runtime.shm_segment import Capacity, Layout
from sennit.collective.runtime.shm_strips import cpu_quota, strip_ranges, strips_for, threads_for

compiled_core = pytest.mark.skipif(load_core() is None, reason="the compiled core was not built")
UNREAD = "this kernel does not let processes read each other's memory"


# ---- how many, and which elements ------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 8), st.sampled_from([8, 16, 32, 64]))
def test_ranges_tile_the_elements_and_begin_with_lines(elements: int, strips: int, alignment: int) -> None:
    ranges = strip_ranges(elements, strips, alignment)
    assert len(ranges) == strips
    assert ranges[0][0] == 0
    assert ranges[-1][1] == elements
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert all(first % alignment == 0 or first == elements for first, _ in ranges)
    sizes = [stop - first for first, stop in ranges]
    assert all(size >= 0 for size in sizes)
    assert max(sizes) - min(sizes) < 2 * alignment  # as even as whole lines allow


def test_small_calls_are_not_cut() -> None:
    assert [strips_for(n << 10, 4, exchanged=False) for n in (0, 64, 256, 512, 65536)] == [1, 1, 2, 4, 4]
    assert [strips_for(n << 20, 4, exchanged=True) for n in (0, 1, 2, 4, 64)] == [1, 1, 2, 4, 4]
    assert strips_for(10, 3, exchanged=False, least=1) == 3


@pytest.mark.parametrize(
    ("cores", "quota", "sharers", "busy", "wanted"),
    [
        ([set(range(16))] * 4, None, 1, 1, 4),  # anywhere
        ([set(range(16))] * 8, None, 1, 1, 2),
        ([set(range(2))] * 4, None, 1, 1, 1),
        ([{0, 1}, {2, 3}, {4, 5}, {6, 7}], None, 1, 1, 2),  # each on its share
        ([{0, 1, 2}, {3}], None, 1, 1, 1),  # all ranks have as many
        ([set(range(16))] * 2, None, 8, 1, 2),  # two of eight that run anywhere
        ([{0, 1}, {2, 3}], None, 8, 1, 2),  # two of eight, each on its share
        ([set(range(16))] * 4, None, 1, 2, 3),  # one of four cores of a rank computes meanwhile
        ([set(range(16))] * 4, None, 1, 4, 1),
        ([set(range(16))] * 4, 8.0, 1, 1, 2),  # a container that may use half of them
        ([set(range(16))] * 4, 2.5, 1, 1, 1),
        ([set(range(64))] * 2, None, 1, 1, 4),  # no more than that
    ],
)
def test_threads_of_a_rank(cores: list[set[int]], quota: float | None, sharers: int, busy: int, wanted: int) -> None:
    assert threads_for(cores, quota, sharers, busy) == wanted


def test_the_least_limit_of_a_container_and_of_those_around_it(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("1:cpu:/elsewhere\n0::/outer/inner\n")
    assert cpu_quota(tmp_path, own) is None
    (inner / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, own) is None
    (tmp_path / "outer" / "cpu.max").write_text("250000 100000\n")
    (inner / "cpu.max").write_text("400000 100000\n")
    assert cpu_quota(tmp_path, own) == 2.5
    assert cpu_quota(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize("slot", [1 << 14, 1 << 20, 1000])
def test_strips_have_memory_of_their_own(slot: int) -> None:
    layout = Layout(3, Capacity(slot=slot, wide=0, flags=100, ring=1 << 12, arena=1 << 16), strips=4)
    pieces = [(layout.rings, layout.staging()), (layout.arena(0), layout.size)]
    for strip in range(4):
        begin = layout.staging(strip)
        pieces += [(layout.doorbells(strip), layout.flags(strip)), (begin, begin + 3 * layout.staging_step)]
        pieces += [(layout.flags(strip), layout.flags(strip) + 4 * 3 * 100 * 128)]
    pieces.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(pieces))
    assert layout.reserved <= layout.doorbells(1)


# ---- what they compute -----------------------------------------------------------------------------------------------


@compiled_core
@pytest.mark.parametrize(("size", "threads", "sizes"), [(2, 4, [0, 1, 17, 1001]), (3, 2, [1001]), (5, 3, [5003])])
def test_every_collective_and_reduction(ranks: Ranks, size: int, threads: int, sizes: list[int]) -> None:
    checked = good(ranks.run(size, shm_jobs.matrix, True, sizes, ["f64", "bf16", "i32", "bool"], threads))
    assert len(set(checked)) == 1
    assert checked[0] > 0


@compiled_core
@pytest.mark.parametrize(
    ("size", "threads", "direct_from", "ring_from"),
    [(3, 2, None, None), (5, 3, None, None), (4, 4, 1000, None), (4, 2, None, 0), (3, 3, 1000, 4096)],
)
def test_calls_in_any_order(
    ranks: Ranks, size: int, threads: int, direct_from: int | None, ring_from: int | None
) -> None:
    found = good(ranks.run(size, shm_jobs.random_calls, 7, 40, direct_from, ring_from, True, threads))
    assert found == [40] * size


@compiled_core
@pytest.mark.parametrize("cache", [1 << 30, 1 << 10])
def test_ranks_that_read_each_others_memory(ranks: Ranks, cache: int) -> None:
    if not good(ranks.run(4, shm_jobs.direct, [1, 33, 5003], cache, 3))[0]:
        pytest.skip(UNREAD)


@compiled_core
def test_sums_of_what_is_read_in_other_processes(ranks: Ranks) -> None:
    if good(ranks.run(3, pulled_jobs.every_type, [1001, 4099], pulled_jobs.SLICES, 3))[0] is None:
        pytest.skip(UNREAD)
    good(ranks.run(3, pulled_jobs.changed_at_once, 30, 2))


@compiled_core
@pytest.mark.parametrize("offering", [[], [1], [0, 1, 2]])
def test_ranks_that_offer_their_inputs(ranks: Ranks, offering: list[int]) -> None:
    cases = [(1 << 17, "f64"), (500_001, "u8"), (300_001, "i16")]
    if not good(ranks.run(3, offered_jobs.exchanges, offering, cases, 3))[0]:
        pytest.skip(UNREAD)


@compiled_core
@pytest.mark.parametrize("inside", [[], [1], [0, 1, 2]])
def test_inputs_in_memory_of_the_group(ranks: Ranks, inside: list[int]) -> None:
    cases = [(1, "f32"), (1003, "i32"), (9001, "u8")]
    shared = good(ranks.run(3, shared_jobs.collectives, inside, cases, True, 3))
    assert len(set(shared)) == 1
    good(ranks.run(3, shared_jobs.one_after_another, 30, 2))


@compiled_core
def test_arrays_that_overlap(ranks: Ranks) -> None:
    good(ranks.run(3, shm_jobs.overlaps, True, 3))


# ---- who runs them ---------------------------------------------------------------------------------------------------


@compiled_core
def test_helpers_end_with_their_group(ranks: Ranks) -> None:
    assert good(ranks.run(3, strip_jobs.helpers_come_and_go, 20)) == [2] * 3


@compiled_core
@pytest.mark.parametrize("absent", [[0], [0, 1, 2]])
def test_the_caller_runs_what_no_helper_takes(ranks: Ranks, absent: list[int]) -> None:
    good(ranks.run(3, strip_jobs.without_helpers, absent))


@compiled_core
def test_helpers_that_sleep_and_ranks_that_are_late(ranks: Ranks) -> None:
    good(ranks.run(4, strip_jobs.with_pauses, 60))


@compiled_core
def test_the_way_that_took_less_is_taken_and_the_other_one_tried(ranks: Ranks) -> None:
    alone, helped = 0, 1
    first = [helped, alone, alone, helped, helped]
    wanted = first + [helped] * 4 + [alone] * 11 + [helped] + [alone] * 3  # the trial is the 21st call
    assert good(ranks.run(3, strip_jobs.learns)) == [wanted] * 3


@compiled_core
def test_helpers_whose_cores_others_want(ranks: Ranks) -> None:
    good(ranks.run(2, strip_jobs.busy, 30))


def test_without_a_compiler_calls_are_not_cut(ranks: Ranks) -> None:
    good(ranks.run(2, shm_jobs.matrix, False, [1001], ["f32"], 4))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@compiled_core
@pytest.mark.parametrize("elements", [1000, 1 << 20])
def test_a_killed_rank_is_named(mortal: Ranks, elements: int) -> None:
    results = mortal.run(3, strip_jobs.killed, 2, elements)
    for rank in (0, 1):
        failed = results[rank]
        assert isinstance(failed, Failed)
        assert (failed.cause, failed.ranks) == ("died", (2,)), failed.text
    assert segments() == []
    good(mortal.run(2, shm_jobs.cycles, 1))


@compiled_core
def test_a_rank_that_never_comes(ranks: Ranks) -> None:
    results = ranks.run(3, strip_jobs.absent, 1)
    for rank in (0, 2):
        assert (results[rank].cause, results[rank].ranks) == ("late", (1,)), results[rank].text


@compiled_core
def test_another_size_is_named(ranks: Ranks) -> None:
    for failed in ranks.run(3, strip_jobs.other_size):
        assert isinstance(failed, Failed)
        assert failed.cause == "mismatch", failed.text
        assert "rank 1: all_reduce of 5001 f32, sum" in failed.text


@compiled_core
def test_a_rank_that_is_interrupted(ranks: Ranks) -> None:
    results = ranks.run(3, strip_jobs.interrupted)
    assert results[0] == "interrupted"
    for rank in (1, 2):
        assert (results[rank].cause, results[rank].ranks) == ("left", (0,)), results[rank].text


@compiled_core
def test_a_forked_child_has_no_helpers(ranks: Ranks) -> None:
    for text, status in good(ranks.run(2, strip_jobs.forked)):
        assert "a group that process" in text
        assert status == 0


@compiled_core
def test_a_process_that_ends_with_helpers(ranks: Ranks) -> None:
    assert good(ranks.run(2, strip_jobs.ends_without_closing)) == [signal.SIGTERM] * 2
