"""What a rank need not stage, and which calls read the memory of others: said by the code alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import (
    all_pairs_all_reduce,
    all_pairs_reduce_scatter,
    direct_all_to_all,
    one_shot_all_reduce,
    read_all_reduce,
    read_reduce_scatter,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
)
from sennit.collective.runtime.code import INPUT, OUTPUT, Code, Op
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.shm_abi import LINE, SLOTS, CallRecord, GroupRecord, Inputs, Ringed
from sennit.collective.runtime.shm_algorithms import build
from sennit.collective.runtime.shm_machine_numpy import _Visit
from sennit.collective.runtime.shm_plan import LoadedCode, SharedCache, make_plan
from sennit.collective.runtime.shm_segment import Capacity, Layout
from sennit.ir.collective import Algorithm
from sennit.ir.dtype import DType

KIB, MIB = 1 << 10, 1 << 20
LIBRARY: list[Callable[[], Algorithm]] = [
    partial(make, 4)
    for make in (
        all_pairs_all_reduce,
        all_pairs_reduce_scatter,
        direct_all_to_all,
        one_shot_all_reduce,
        read_all_reduce,
        read_reduce_scatter,
        ring_all_reduce,
        ring_reduce_scatter,
    )
]


def loaded(name: str, ranks: int, rank: int, root: int | None = None) -> LoadedCode:
    return LoadedCode.load(encode_pull(build(name, ranks, root)), rank, 0)


@pytest.mark.parametrize("name", ["all_reduce slices", "reduce_scatter", "all_to_all"])
def test_a_rank_keeps_its_own_slice(name: str) -> None:
    assert [loaded(name, 5, rank).kept for rank in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["all_reduce direct", "all_gather"])
def test_what_all_read_is_staged(name: str) -> None:
    assert [loaded(name, 3, rank).kept for rank in range(3)] == [None] * 3


def read_by_peers(code: Code, rank: int) -> set[int]:
    """The chunks of the input of a rank that instructions of others name as a source, read off the tables."""
    found: set[int] = set()
    for owner in range(code.ranks):
        for block in range(code.rank_block_count(owner)):
            for step in code.block(owner, block) if owner != rank else ():
                if step.op in (Op.MULTI_REDUCE, Op.SWITCH_REDUCE):
                    sources = [tuple(map(int, row)) for row in code.operands[step.argument :][: step.peer]]
                elif step.op in (Op.GET, Op.READ_REDUCE):
                    sources = [(step.peer, step.source_buffer, step.source_chunk)]
                else:
                    continue
                for reader, buffer, chunk in sources:
                    if (reader, buffer) == (rank, INPUT):
                        found.update(range(chunk, chunk + step.count))
    return found


@pytest.mark.parametrize("make", LIBRARY)
def test_no_peer_reads_what_is_kept(make: Callable[[], Algorithm]) -> None:
    for code in (encode_pull(make()), encode(compile_one_sided(make()))):
        for rank in range(code.ranks):
            found = LoadedCode.load(code, rank, 0)
            assert found.kept is None or found.kept not in read_by_peers(found.code, rank)


def test_direct_calls() -> None:
    """Where no part is read twice, from some size on."""
    exchange = loaded("all_to_all", 4, 0)
    cache = SharedCache(256 * MIB)  # and arrays that are larger, all together, are staged
    assert [exchange.inputs(size, cache) is Inputs.DIRECT for size in (16 * KIB, 64 * KIB, 8 * MIB, 9 * MIB)] == [
        False,
        True,
        True,
        False,
    ]
    assert loaded("scatter", 4, 0, root=1).inputs(MIB) is Inputs.DIRECT
    by_slices = loaded("broadcast slices", 4, 0, root=1)
    assert [by_slices.inputs(size) is Inputs.DIRECT for size in (64 * KIB, 128 * KIB, 8 * MIB)] == [False, True, True]
    scatter = loaded("reduce_scatter", 4, 0)
    assert [scatter.inputs(size) is Inputs.DIRECT for size in (256 * KIB, 512 * KIB, 64 * MIB)] == [False, True, True]
    for name, root in (
        ("all_gather", None),
        ("broadcast", 0),
        ("all_reduce direct", None),
        ("all_reduce slices", None),
    ):
        assert loaded(name, 4, 0, root).inputs(8 * MIB) is Inputs.STAGED
    pieces = LoadedCode.load(encode_pull(tree_broadcast(4, pieces=2)), 0, 0)
    assert pieces.inputs(MIB, least=0) is Inputs.STAGED  # it passes outputs on


def test_a_near_cache_keeps_what_fits() -> None:
    """Nothing goes directly, but where a group is told so, and outputs go past the cache only where the arrays of all
    ranks do not fit.
    """
    near, far = SharedCache(32 * MIB, keeps=24 * MIB), SharedCache(32 * MIB)
    exchange, gather, spread = loaded("all_to_all", 4, 0), loaded("all_gather", 4, 0), loaded("broadcast", 4, 0, root=1)
    assert exchange.inputs(MIB // 2, far) is Inputs.DIRECT
    assert Inputs.DIRECT not in {exchange.inputs(size, near) for size in (64 * KIB, MIB // 2, 8 * MIB)}
    assert exchange.inputs(MIB, near, least=0) is Inputs.DIRECT
    assert loaded("reduce_scatter", 4, 0).inputs(MIB, near) is Inputs.STAGED
    assert (exchange.array_parts, gather.array_parts, spread.array_parts) == (2 * 4 * 4, 4 * 4 + 4, 4)
    for code, fits in ((exchange, 24 * MIB // 32), (gather, 24 * MIB // 20), (spread, 6 * MIB)):
        part = fits // 64 * 64
        large = [bool(make_plan(code, n, DType.U8, None, MIB, cache=near).record.large) for n in (part, part + 64)]
        assert large == [False, True]
        assert make_plan(code, part, DType.U8, None, MIB, cache=far).record.large
    in_turns = [
        bool(make_plan(spread, n, DType.U8, None, MIB, cache=near, cores=2).record.large) for n in (8 * MIB, 9 * MIB)
    ]
    assert in_turns == [False, True]
    rings = [make_plan(gather, MIB, DType.U8, None, MIB, cache=cache).record.ringed for cache in (near, far)]
    assert rings == [Ringed.NOTHING, Ringed.INPUT]


def test_sums_that_are_written_over_inputs_go_through_a_near_cache() -> None:
    """As long as all arrays fit, or all tiles that are under way."""
    near, far = SharedCache(32 * MIB, keeps=24 * MIB), SharedCache(32 * MIB)

    def goes_past(ranks: int, cache: SharedCache, cores: int, sizes: tuple[int, ...]) -> list[bool]:
        code = loaded("all_reduce slices", ranks, 0)
        return [bool(make_plan(code, n, DType.U8, None, MIB, cache=cache, cores=cores).record.vast) for n in sizes]

    sizes = (2 * MIB, 4 * MIB, 8 * MIB, 64 * MIB)
    assert goes_past(8, near, 2, sizes) == [False, False, True, True]
    assert goes_past(4, near, 2, sizes) == [False, False, False, False]
    assert goes_past(8, near, 8, sizes) == [False, False, False, False]  # tiles are smaller
    assert goes_past(8, far, 8, sizes) == [False, True, True, True]


def test_where_the_cache_is_near_each_rank_says_of_a_large_exchange_where_it_is_read() -> None:
    exchange, near = loaded("all_to_all", 4, 0), SharedCache(32 * MIB, keeps=24 * MIB)
    assert [exchange.inputs(part, near) for part in (MIB // 8, MIB // 4, 64 * MIB)] == [
        Inputs.STAGED,
        Inputs.EITHER,
        Inputs.EITHER,
    ]
    for name in ("reduce_scatter", "all_gather", "all_reduce slices"):
        assert loaded(name, 4, 0).inputs(16 * MIB, near) is Inputs.STAGED
    either = make_plan(exchange, 2 * MIB, DType.U8, None, MIB, inputs=Inputs.EITHER, cache=near)
    staged = make_plan(exchange, 2 * MIB, DType.U8, None, MIB, cache=near)
    assert either.record.tile == staged.record.tile < 2 * MIB  # what is staged needs tiles
    assert (either.staged, either.one_array, either.record.bounced) == (1, True, 0)


def test_ranks_that_take_turns_on_a_core_have_larger_tiles() -> None:
    gather = loaded("all_gather", 8, 0)
    tiles = [gather.tile(4 * MIB, 1, 4 * MIB, cores=cores) for cores in (None, 16, 8, 7, 2)]
    assert tiles[0] == tiles[1] == tiles[2] < tiles[3] == tiles[4]
    near = [gather.tile(n, 1, MIB, cores=2, near=True) for n in (MIB // 2, 960 * KIB, MIB, 4 * MIB)]
    assert near[:2] == [MIB // 2, 960 * KIB]  # one tile, where that is enough
    assert all(MIB // 4 < tile <= MIB // 2 for tile in near[2:])


def test_a_direct_call_is_one_tile_and_stages_nothing() -> None:
    exchange = loaded("all_to_all", 4, 0)
    direct = make_plan(exchange, MIB, DType.U8, None, 64 * KIB, inputs=Inputs.DIRECT)
    staged = make_plan(exchange, MIB, DType.U8, None, 64 * KIB)
    assert (direct.record.tile, direct.staged, direct.one_array) == (MIB, 0, False)
    assert (staged.staged, staged.one_array) == (1, True)
    assert staged.record.tile < MIB


def test_a_direct_call_with_scratch_has_tiles_of_that_alone() -> None:
    plan = make_plan(loaded("broadcast slices", 4, 0, root=1), 8 * MIB, DType.U8, None, 64 * KIB, inputs=Inputs.DIRECT)
    assert (plan.staged, plan.one_array) == (0, True)
    assert 3 * 64 * KIB < plan.record.tile <= 4 * 64 * KIB  # a slot has a slice, and nothing of the input


def test_what_many_read_lies_in_the_ring() -> None:
    ringed = {
        name: loaded(name, 8, 0, root).ringed(256 * KIB, 1)[0]
        for name, root in (
            ("all_gather", None),
            ("all_reduce slices", None),
            ("reduce_scatter", None),
            ("all_to_all", None),
            ("reduce slices", 0),
        )
    }
    assert ringed == {
        "all_gather": Ringed.INPUT,
        "all_reduce slices": Ringed.SCRATCH,  # sums are read by all, inputs by one each
        "reduce_scatter": Ringed.NOTHING,
        "all_to_all": Ringed.NOTHING,
        "reduce slices": Ringed.NOTHING,
    }
    assert loaded("all_gather", 3, 0).ringed(256 * KIB, 1) == (Ringed.NOTHING, 0)  # few read it
    assert loaded("all_gather", 8, 0).ringed(4 * KIB, 1) == (Ringed.NOTHING, 0)  # stays in the caches


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.sampled_from(LIBRARY), st.integers(0, 300_000), st.sampled_from([DType.U8, DType.F16, DType.F64]), st.booleans()
)
def test_a_place_in_the_ring_is_as_long_as_what_lies_there(
    make: Callable[[], Algorithm], elements: int, dtype: DType, pulls: bool
) -> None:
    code = encode_pull(make()) if pulls else encode(compile_one_sided(make()))
    slot = 64 * KIB
    for rank in range(code.ranks):
        call = make_plan(LoadedCode.load(code, rank, 0), elements, dtype, None, slot, ring_from=0).record
        length, grain = call.tile * call.itemsize, call.chunks * call.alignment
        stride = max(1, -(-call.tile // grain)) * call.alignment
        needed = sum(code.scratch) * stride * call.itemsize
        if call.ringed != Ringed.SCRATCH:
            staged = [call.parts[buffer] * length for buffer in (INPUT, OUTPUT) if call.touched[buffer]]
            needed = sum(-(-size // LINE) * LINE for size in ([max(staged, default=0)] if call.alias >= 0 else staged))
        assert needed <= call.place <= slot or not call.ringed


places = st.lists(st.integers(1, 1000).map(lambda lines: LINE * lines), min_size=1, max_size=60)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(places)
def test_a_place_of_the_ring_is_none_of_a_tile_under_way(sizes: list[int]) -> None:
    """A tile is under way, for some rank, until the one that comes SLOTS after it is entered."""
    slot = 1000 * LINE
    layout = Layout(1, Capacity(slot=slot, wide=0))
    group, call = GroupRecord(), CallRecord()
    group.slot_bytes, group.staging_step, group.staging_at = slot, layout.staging_step, SLOTS * slot
    visit = _Visit(group, call, threading.Lock())
    taken: list[tuple[int, int]] = []
    for size in sizes:
        call.place = size
        first = visit.next_place()
        assert SLOTS * slot <= first <= first + size <= layout.staging_step
        assert all(first >= last or first + size <= start for start, last in taken[-(SLOTS - 1) :])
        taken.append((first, first + size))
