"""Collectives between real processes give what numpy gives, bit for bit: every type, reduction and size, in both
machines.
"""

from __future__ import annotations

import os

import pytest
import shm_jobs
from shm_ranks import Ranks, good

from sennit.collective.runtime.shm_abi import load_core
from sennit.ir.dtype import DType

compiled_core = pytest.mark.skipif(load_core() is None, reason="the compiled core was not built")
machines = pytest.mark.parametrize(
    "compiled", [pytest.param(True, marks=compiled_core, id="compiled"), pytest.param(False, id="python")]
)


@compiled_core
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_collective_type_and_reduction(ranks: Ranks, size: int) -> None:
    sizes = {2: [0, 1, 17, 1001], 3: [1, 1001], 4: [17], 5: [5003]}[size]
    checked = good(ranks.run(size, shm_jobs.matrix, True, sizes, [dtype.value for dtype in DType]))
    assert checked == [len(sizes) * (4 * 5 + 5 * 8 + 7)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_the_machine_in_python(ranks: Ranks, size: int) -> None:
    good(ranks.run(size, shm_jobs.matrix, False, [1, 1001], ["f32", "bf16", "i8", "bool"]))


@machines
@pytest.mark.parametrize("size", [2, 4])
def test_algorithms_of_the_library_in_all_lowerings(ranks: Ranks, size: int, compiled: bool) -> None:
    assert good(ranks.run(size, shm_jobs.library_codes, compiled)) == [7 * 3 * 2 * 2] * size


@machines
@pytest.mark.parametrize("size", [2, 5])
def test_messages_and_sizes_that_differ(ranks: Ranks, size: int, compiled: bool) -> None:
    good(ranks.run(size, shm_jobs.messages, compiled))


@compiled_core
@pytest.mark.parametrize(
    ("size", "direct_from", "ring_from"),
    [(3, None, None), (5, None, None), (4, 1000, None), (4, None, 0), (3, 1000, 4096), (5, None, 1)],
)
def test_calls_in_any_order(ranks: Ranks, size: int, direct_from: int | None, ring_from: int | None) -> None:
    assert good(ranks.run(size, shm_jobs.random_calls, 1, 60, direct_from, ring_from, True)) == [60] * size


def test_calls_in_any_order_in_python(ranks: Ranks) -> None:
    assert good(ranks.run(3, shm_jobs.random_calls, 2, 25, None, 1000, False)) == [25] * 3


@compiled_core
@pytest.mark.parametrize("cache", [1 << 30, 1 << 10])
@pytest.mark.parametrize("size", [2, 5])
def test_ranks_that_read_each_others_memory(ranks: Ranks, size: int, cache: int) -> None:
    may = good(ranks.run(size, shm_jobs.direct, [1, 33, 5003], cache))
    assert len(set(may)) == 1, "ranks differ in whether they may"
    if not may[0]:
        pytest.skip("this kernel does not let processes read each other's memory")


@compiled_core
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.parametrize("places", [[0, 0, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 1], [0, 0]])
def test_ranks_that_take_turns_on_cores(ranks: Ranks, places: list[int]) -> None:
    good(ranks.run(len(places), shm_jobs.takes_turns, places))


def test_the_bits_do_not_depend_on_algorithm_or_size(ranks: Ranks) -> None:
    results = good(ranks.run(4, shm_jobs.bits))
    assert len(set(results)) == 1, "ranks differ"
    assert len(set(results[0])) == 1, "algorithms or sizes differ"


@machines
def test_arrays_that_overlap(ranks: Ranks, compiled: bool) -> None:
    good(ranks.run(3, shm_jobs.overlaps, compiled))


def test_a_tuned_table(ranks: Ranks) -> None:
    assert good(ranks.run(4, shm_jobs.tuned)) == [["ring_all_reduce", "all_pairs_all_reduce", "broadcast"]] * 4


def test_threads_and_groups(ranks: Ranks) -> None:
    good(ranks.run(3, shm_jobs.threads_and_groups))
