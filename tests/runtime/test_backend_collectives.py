"""The c10d backend against gloo: random sequences of calls, forms that gloo has not, refusals, groups of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_work import (
    alone,
    arguments,
    callback_waits,
    compare_sequences,
    compiled,
    inference,
    joined,
    large_all_reduces,
    memory_of_the_group,
    plain_calls,
    profiled,
    programs,
    refusals,
    short_ways,
    sparse_sums,
    special_forms,
    tuned,
)

from sennit.cluster.ranks_torch import GlooRanks
from sennit.collective.runtime.shm_abi import load_core

SIZE = 4
SPLIT = ["a", "b", "a", "b"]  # two hosts, whose ranks do not follow one another
UNEVEN = ["a", "b", "b", "b"]
FOUR = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    users = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor")
    with GlooRanks(SIZE, preload=("sennit.collective.runtime.group_torch", *users)) as started:
        yield started


@pytest.mark.parametrize(
    ("hosts", "first", "count"),
    [(None, 0, 100), (SPLIT, 5000, 60), (UNEVEN, 6000, 20), (FOUR, 8000, 20)],
    ids=["one", "two", "uneven", "four"],
)
def test_random_sequences_are_equal_on_gloo(ranks: GlooRanks, hosts: list[str] | None, first: int, count: int) -> None:
    """benchmarks/collective/random_sequences.py runs thousands."""
    for rank, differences in enumerate(ranks.call(compare_sequences, first, count, hosts)):
        assert not differences, f"rank {rank}: {differences[:3]}"


@pytest.mark.parametrize("hosts", [None, SPLIT, UNEVEN, FOUR], ids=["one", "two", "uneven", "four"])
def test_large_arrays_and_calls_in_a_row(ranks: GlooRanks, hosts: list[str] | None) -> None:
    assert ranks.call(large_all_reduces, hosts) == [[]] * SIZE


def test_forms_that_gloo_has_not(ranks: GlooRanks) -> None:
    assert ranks.call(special_forms) == [[]] * SIZE


def test_calls_that_were_made_before_take_the_short_way(ranks: GlooRanks) -> None:
    if load_core() is None:
        pytest.skip("the core is not compiled")
    assert ranks.call(short_ways) == [[]] * SIZE


def test_calls_without_torch_are_the_same_calls(ranks: GlooRanks) -> None:
    assert ranks.call(plain_calls) == [[]] * SIZE


@pytest.mark.parametrize("hosts", [None, SPLIT, FOUR], ids=["one", "two", "four"])
def test_sums_of_sparse_tensors(ranks: GlooRanks, hosts: list[str] | None) -> None:
    assert ranks.call(sparse_sums, hosts) == [[]] * SIZE


def test_what_cannot_be_served_is_refused_and_the_group_stays_good(ranks: GlooRanks) -> None:
    for said in ranks.call(refusals):
        sparse, largest, compressed, device, bits, kind, parts, rows, total, closed = said
        for layout in (sparse, compressed):
            assert "to_dense" in layout
        assert "MAX of a sparse tensor" in largest
        assert "on meta" in device
        assert "BAND of torch.float32" in bits
        assert "SUM of torch.uint16" in kind
        assert "all_gather of 3 elements of torch.float32 and parts of 2" in parts
        assert f"all_to_all of {SIZE + 1} rows over {SIZE} ranks" in rows
        assert total == str(SIZE)
        assert "closed" in closed


@pytest.mark.parametrize("hosts", [None, SPLIT, FOUR], ids=["one", "two", "four"])
def test_tensors_of_inference_mode_on_any_thread(ranks: GlooRanks, hosts: list[str] | None) -> None:
    assert ranks.call(inference, hosts) == [[]] * SIZE


def test_arguments_that_cannot_be_meant_leave_the_group_good(ranks: GlooRanks) -> None:
    for said in ranks.call(arguments):
        reduced, gathered, received, average, factor, peer, root, total = said
        for output in (reduced, gathered, received):
            assert "an output of shape [4], strides [0], whose elements share memory" in output
        assert "of bools there is no average" in average
        assert "PREMUL_SUM of torch.int64" in factor
        assert "the factor 0.5" in factor
        for named in (peer, root):
            assert f"a call names rank {SIZE} in a group of {SIZE}" in named
        assert total == str(SIZE)


def test_a_callback_may_wait_for_the_call_that_it_makes(ranks: GlooRanks) -> None:
    assert ranks.call(callback_waits) == [[]] * SIZE


def test_ddp_with_uneven_inputs(ranks: GlooRanks) -> None:
    assert ranks.call(joined) == [[]] * SIZE


def test_compiled_programs_call_collectives(ranks: GlooRanks) -> None:
    assert ranks.call(compiled) == [[]] * SIZE


def test_a_tuned_table_chooses(ranks: GlooRanks) -> None:
    for small, large, said in ranks.call(tuned):
        assert small == "all_pairs_all_reduce"
        assert large == "ring_all_reduce"
        assert f"a table for 2 nodes of {SIZE} ranks in a group of {SIZE}" in said


def test_groups_of_one_rank(ranks: GlooRanks) -> None:
    assert ranks.call(alone) == [[rank + 1.0] * 2 for rank in range(SIZE)]


@pytest.mark.parametrize(("hosts", "shares"), [(None, True), (SPLIT, True), (FOUR, False)], ids=["one", "two", "four"])
def test_memory_of_the_group(ranks: GlooRanks, hosts: list[str] | None, shares: bool) -> None:
    assert ranks.call(memory_of_the_group, hosts, shares) == [[]] * SIZE


@pytest.mark.parametrize("hosts", [None, SPLIT], ids=["one", "two"])
def test_programs_of_others_give_what_they_give_on_gloo(ranks: GlooRanks, hosts: list[str] | None) -> None:
    """DDP, DTensor, FSDP2 with torch.distributed.checkpoint. The orders of sums differ, by rounding."""
    for differences in ranks.call(programs, hosts):
        assert set(differences) == {"ddp", "dtensor", "fsdp and checkpoint"}
        assert all(value < 1e-4 for value in differences.values()), differences


def test_calls_stand_in_traces(ranks: GlooRanks) -> None:
    wanted = {"all_reduce": 3, "broadcast": 1, "all_to_all": 1, "barrier": 1, "send": 1, "recv": 1}
    assert ranks.call(profiled) == [{f"sennit:{name}": count for name, count in wanted.items()}] * SIZE
