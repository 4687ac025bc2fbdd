"""Every algorithm of the library does what its collective asks: as moves, as numbers, and compiled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sennit.collective.compile import compile_algorithm
from sennit.collective.library import (
    all_pairs_all_gather,
    all_pairs_all_reduce,
    all_pairs_reduce_scatter,
    binary_tree,
    chain_broadcast,
    direct_all_to_all,
    direct_all_to_next,
    double_tree_all_reduce,
    halving_doubling_all_reduce,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    recipe,
    recipes,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    spread_all_to_next,
    three_step_all_to_all,
    tree_broadcast,
    two_step_all_to_all,
)
from sennit.collective.library.catalog import Options
from sennit.collective.verify import verify_algorithm, verify_schedule
from sennit.errors import CollectiveError
from sennit.ir.algorithm_numpy import run_algorithm
from sennit.ir.collective import Algorithm, Move
from sennit.ir.schedule_numpy import run_schedule

Make = Callable[[], Algorithm]


def cases() -> list[tuple[str, Make]]:
    found: list[tuple[str, Make]] = []

    def add(name: str, make: Make) -> None:
        found.append((name, make))

    for ranks in (2, 3, 4, 5, 8):
        add(f"ring {ranks}", lambda r=ranks: ring_all_reduce(r))
        add(
            f"ring {ranks}, 2 channels, 2 instances, in place",
            lambda r=ranks: ring_all_reduce(r, channels=2, instances=2, in_place=True),
        )
        add(f"ring gather {ranks}", lambda r=ranks: ring_all_gather(r, channels=2))
        add(f"ring gather {ranks}, in place", lambda r=ranks: ring_all_gather(r, instances=2, in_place=True))
        add(f"ring scatter {ranks}", lambda r=ranks: ring_reduce_scatter(r, channels=2, instances=2))
        add(f"ring scatter {ranks}, in place", lambda r=ranks: ring_reduce_scatter(r, in_place=True))
        add(f"pairs {ranks}", lambda r=ranks: all_pairs_all_reduce(r, instances=2))
        add(f"pairs {ranks}, in place", lambda r=ranks: all_pairs_all_reduce(r, in_place=True))
        add(f"pairs gather {ranks}", lambda r=ranks: all_pairs_all_gather(r))
        add(f"pairs scatter {ranks}", lambda r=ranks: all_pairs_reduce_scatter(r, instances=2))
        add(f"pairs scatter {ranks}, in place", lambda r=ranks: all_pairs_reduce_scatter(r, in_place=True))
        add(f"direct exchange {ranks}", lambda r=ranks: direct_all_to_all(r, instances=2))
        add(f"halving {ranks}", lambda r=ranks: halving_doubling_all_reduce(r, instances=2))
        add(f"halving {ranks}, in place", lambda r=ranks: halving_doubling_all_reduce(r, in_place=True))
        add(f"trees {ranks}", lambda r=ranks: double_tree_all_reduce(r, pieces=3))
        add(f"trees {ranks}, in place", lambda r=ranks: double_tree_all_reduce(r, in_place=True))
        add(f"tree broadcast {ranks}", lambda r=ranks: tree_broadcast(r, root=1, pieces=2))
        add(f"chain {ranks}", lambda r=ranks: chain_broadcast(r, root=r - 1, pieces=3, in_place=True))
        add(f"next {ranks}", lambda r=ranks: direct_all_to_next(r))
    for nodes, per_node in ((1, 4), (2, 3), (3, 2), (2, 4), (3, 3)):
        add(f"levels {nodes}x{per_node}", lambda m=nodes, g=per_node: hierarchical_all_reduce((g, m), channels=2))
        add(
            f"levels {nodes}x{per_node}, in place",
            lambda m=nodes, g=per_node: hierarchical_all_reduce((g, m), in_place=True),
        )
        add(
            f"level gather {nodes}x{per_node}", lambda m=nodes, g=per_node: hierarchical_all_gather((g, m), instances=2)
        )
        add(f"two steps {nodes}x{per_node}", lambda m=nodes, g=per_node: two_step_all_to_all(m, g, instances=2))
        add(f"three steps {nodes}x{per_node}", lambda m=nodes, g=per_node: three_step_all_to_all(m, g))
        add(f"spread next {nodes}x{per_node}", lambda m=nodes, g=per_node: spread_all_to_next(m, g, instances=2))
    add("three levels", lambda: hierarchical_all_reduce((2, 3, 2)))
    add("three levels, in place", lambda: hierarchical_all_reduce((2, 2, 2), instances=2, in_place=True))
    add("three levels gather", lambda: hierarchical_all_gather((2, 3, 2), in_place=True))
    for m, g in ((2, 3), (3, 2)):
        add(f"ring of nodes {m}x{g}", lambda m=m, g=g: ring_all_reduce(m * g, channels=g, per_node=g))
        add(f"ring gather of nodes {m}x{g}", lambda m=m, g=g: ring_all_gather(m * g, channels=g, per_node=g))
        add(f"ring scatter of nodes {m}x{g}", lambda m=m, g=g: ring_reduce_scatter(m * g, channels=g, per_node=g))
    add("one rank", lambda: ring_all_reduce(1))
    return found


@pytest.mark.parametrize("make", [make for _, make in cases()], ids=[name for name, _ in cases()])
def test_an_algorithm_and_its_schedule_do_what_the_collective_asks(make: Make) -> None:
    algorithm = make()
    verify_algorithm(algorithm)
    schedule = compile_algorithm(algorithm)
    verify_schedule(schedule)
    spec = algorithm.collective
    draw = np.random.default_rng(0)
    inputs = [draw.integers(-9, 9, (spec.input_chunks(rank), 2)) for rank in range(spec.ranks)]
    meant = run_algorithm(algorithm, inputs)
    got = run_schedule(schedule, inputs, seed=1)
    for rank in range(spec.ranks):
        for index in range(spec.output_chunks(rank)):
            value = spec.after(rank, index)
            if value is None:
                continue
            wanted = sum(
                inputs[source][chunk] for chunk, bits in value for source in range(spec.ranks) if bits >> source & 1
            )
            np.testing.assert_array_equal(meant[rank][index], wanted)
            np.testing.assert_array_equal(got[rank][index], wanted)


def sent(algorithm: Algorithm) -> dict[int, int]:
    """Chunks that each rank sends to others."""
    counts = dict.fromkeys(range(algorithm.collective.ranks), 0)
    for move in algorithm.moves:
        if move.source.rank != move.target.rank:
            counts[move.source.rank] += move.source.count
    return counts


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_are_what_the_tables_say(ranks: int) -> None:
    once = ranks - 1  # in parts of n / ranks
    assert set(sent(ring_all_reduce(ranks)).values()) == {2 * once}
    assert set(sent(all_pairs_all_reduce(ranks)).values()) == {2 * once}
    assert set(sent(ring_all_gather(ranks)).values()) == {once}
    assert set(sent(ring_reduce_scatter(ranks)).values()) == {once}
    assert max(sent(chain_broadcast(ranks, pieces=4)).values()) == 4


def test_halving_sends_what_a_ring_sends() -> None:
    assert set(sent(halving_doubling_all_reduce(8)).values()) == {2 * 7}


def crossing(algorithm: Algorithm, per_node: int) -> list[Move]:
    return [move for move in algorithm.moves if move.source.rank // per_node != move.target.rank // per_node]


def test_between_nodes_a_hierarchy_sends_less_than_a_ring() -> None:
    flat = sum(move.source.count for move in crossing(ring_all_reduce(8), 4))  # chunks of n/8
    levels = sum(move.source.count for move in crossing(hierarchical_all_reduce((4, 2)), 4))
    assert (flat, levels) == (2 * 14, 16)
    by_rank = {move.source.rank for move in crossing(hierarchical_all_reduce((4, 2)), 4)}
    assert by_rank == set(range(8)), "every rank uses its own NIC"


def test_channels_of_a_ring_use_all_nics_on_their_own_rails() -> None:
    moves = crossing(ring_all_gather(8, channels=4, per_node=4), 4)
    assert {move.source.rank for move in moves} == set(range(8))
    assert all(move.source.rank % 4 == move.target.rank % 4 for move in moves)


def test_messages_between_nodes_of_an_all_to_all() -> None:
    nodes, per_node = 3, 4
    direct = crossing(direct_all_to_all(12), per_node)
    two = crossing(two_step_all_to_all(nodes, per_node), per_node)
    three = crossing(three_step_all_to_all(nodes, per_node), per_node)
    assert [len(direct), len(two), len(three)] == [12 * 8, 12 * 2, 3 * 2]
    assert {sum(move.source.count for move in moves) for moves in (direct, two, three)} == {12 * 8}


def test_all_nics_carry_an_all_to_next() -> None:
    moves = crossing(spread_all_to_next(2, 4), 4)
    assert [(move.source.rank, move.target.rank, move.source.count) for move in moves] == [
        (0, 4, 1),
        (1, 5, 1),
        (2, 6, 1),
        (3, 7, 1),
    ]


@pytest.mark.parametrize("ranks", range(1, 34))
def test_a_binary_tree_is_one_and_is_flat(ranks: int) -> None:
    parents = binary_tree(ranks)
    assert set(parents) == set(range(1, ranks))
    depth = {0: 0}
    for rank, parent in parents.items():
        depth[rank] = depth[parent] + 1  # a parent comes first
    assert max(depth.values()) <= ranks.bit_length()
    inner = set(parents.values())
    assert all(rank % 2 == 0 for rank in inner)
    assert all(list(parents.values()).count(rank) <= 2 for rank in inner)
    if ranks % 2 == 0:
        assert not inner & {ranks - 1 - rank for rank in inner}
    else:
        assert len(inner & {(rank + 1) % ranks for rank in inner}) <= 1


def test_the_catalogue_builds_all_it_names() -> None:
    for item in recipes():
        for options in item.worth_trying:
            algorithm = item.build(2, 2, options)
            assert algorithm.name == item.name
            assert algorithm.collective.name is item.collective
    assert str(Options(channels=4)) == "(channels=4)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: recipe("ring_all_reduse"), "did you mean 'ring_all_reduce'"),
        (lambda: hierarchical_all_reduce(()), "levels"),
        (lambda: two_step_all_to_all(0, 2), "0 nodes of 2 ranks"),
        (lambda: spread_all_to_next(2, 0), "2 nodes of 0 ranks"),
        (lambda: ring_all_reduce(0), "0 ranks"),
        (lambda: ring_all_reduce(6, per_node=4), "6 ranks in nodes of 4"),
        (lambda: chain_broadcast(4, root=4), "root 4"),
    ],
)
def test_what_cannot_be_built(call: Make, message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        call()
