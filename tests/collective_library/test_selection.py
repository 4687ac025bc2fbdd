"""Selection tables: filled by ranking, saved and read back, explained; and the closed form that ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import Topology, load
from sennit.collective.alpha_beta import alpha_beta
from sennit.collective.library import (
    all_pairs_all_reduce,
    chain_broadcast,
    direct_all_to_all,
    hierarchical_all_reduce,
    ring_all_reduce,
    spread_all_to_next,
    two_step_all_to_all,
)
from sennit.collective.library.all_to_next import direct_all_to_next
from sennit.collective.selection import SelectionTable, fill
from sennit.collective.verify import verify_algorithm
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName

REDUCE, EXCHANGE = CollectiveName.ALL_REDUCE, CollectiveName.ALL_TO_ALL


def table(name: str, collectives: tuple[CollectiveName, ...], sizes: tuple[int, ...]) -> SelectionTable:
    cluster = load(name)
    cost = alpha_beta(Topology.of(cluster))
    return fill(
        name,
        cluster.nodes,
        cluster.device.per_node,
        cost,
        "estimated, alpha-beta",
        collectives=collectives,
        sizes=sizes,
    )


def test_the_closed_form_of_a_ring() -> None:
    topology = Topology.of(load("dgx-a100"))
    size = 1 << 30
    cost = alpha_beta(topology)(ring_all_reduce(8), size)
    wire = topology.wires[0]
    # LL128 starts faster and carries 95%: at this size the plain protocol wins
    start = load("dgx-a100").collective_start
    assert start is not None
    assert cost == pytest.approx(start.value + 14 * (2 * wire.latency + size / 8 / wire.bandwidth))


def test_small_arrays_want_few_steps_and_large_ones_few_bytes() -> None:
    chosen = table("dgx-a100", (REDUCE,), (1 << 10, 1 << 28))
    assert chosen.choose(REDUCE, 1).algorithm == "all_pairs_all_reduce"
    cost = alpha_beta(Topology.of(load("dgx-a100:2")))
    flat, levels, pairs = ring_all_reduce(16), hierarchical_all_reduce((8, 2)), all_pairs_all_reduce(16)
    assert cost(pairs, 1 << 10) < cost(levels, 1 << 10) < cost(flat, 1 << 10)
    assert cost(levels, 1 << 30) < cost(flat, 1 << 30)
    assert cost(levels, 1 << 30) < cost(pairs, 1 << 30)


def test_two_steps_win_only_where_messages_cost() -> None:
    topology = Topology.of(load("ndv4:4"))
    direct, two = direct_all_to_all(32), two_step_all_to_all(4, 8)
    free, dear = alpha_beta(topology), alpha_beta(topology, per_message=5e-6)
    assert free(direct, 1 << 16) < free(two, 1 << 16)
    assert dear(two, 1 << 16) < dear(direct, 1 << 16)


def test_all_nics_beat_one() -> None:
    cost = alpha_beta(Topology.of(load("ndv4:3")))
    ratio = cost(direct_all_to_next(24), 1 << 28) / cost(spread_all_to_next(3, 8), 1 << 28)
    assert 4 < ratio < 8


def test_a_pipeline_hides_the_depth_of_a_chain() -> None:
    cost = alpha_beta(Topology.of(load("dgx-a100")))
    assert cost(chain_broadcast(8, pieces=16), 1 << 28) < cost(chain_broadcast(8, pieces=1), 1 << 28) / 3


def test_more_ranks_than_the_cluster_has() -> None:
    with pytest.raises(Exception, match="9 devices are needed"):
        alpha_beta(Topology.of(load("dgx-a100")))(ring_all_reduce(9), 1024)


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-a100:2", "mi300x"])
def test_a_table_prints_and_parses_back(name: str) -> None:
    filled = table(name, (REDUCE, EXCHANGE), (1 << 10, 1 << 28))
    again = SelectionTable.parse(str(filled))
    assert again == filled
    assert hash(again) == hash(filled)
    for collective in (REDUCE, EXCHANGE):
        for size in (0, 1000, 1 << 20, 1 << 33):
            verify_algorithm(again.build(collective, size))


def test_it_says_why() -> None:
    text = table("dgx-a100", (REDUCE,), (1 << 10, 1 << 28)).why(REDUCE, 4096)
    assert text.startswith("all_reduce of 0 B ")
    assert "on dgx-a100: all_pairs_all_reduce" in text
    assert "least latency" in text
    assert "at 1 KiB, next " in text
    assert text.endswith("Costs are estimated, alpha-beta.")


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6, unique=True), st.integers(0, 1 << 21), st.randoms())
def test_the_fastest_candidate_is_chosen_at_every_size_tried(sizes: list[int], asked: int, draw) -> None:  # type: ignore[no-untyped-def]
    """With a cost that is as irregular as can be."""
    costs: dict[tuple[str, int, int], float] = {}

    def cost(algorithm: Algorithm, size: int) -> float:
        return costs.setdefault((algorithm.name, len(algorithm.moves), size), draw.random())

    sizes = sorted(sizes)
    filled = fill("mine", 1, 2, cost, "invented", collectives=[REDUCE], sizes=sizes)
    for size in sizes:
        row = filled.choose(REDUCE, size)
        took = cost(filled.build(REDUCE, size), size)
        assert took == min(seconds for (_, _, at), seconds in costs.items() if at == size)
        assert row.from_bytes <= size
    assert filled.choose(REDUCE, asked).serves(REDUCE, asked)
    assert SelectionTable.parse(str(filled)) == filled


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('algorithm = "all_pairs', 'algorithm = "all_pears', "did you mean 'all_pairs_all_reduce'"),
        ("from_bytes = 0", "from_bytes = 8", "begins at 8 bytes"),
        ("from_bytes", "form_bytes", "no selection table"),
        ("nodes = 1", "nodes = 0", "0 nodes"),
        ('collective = "all_reduce"', 'collective = "all_gather"', "is no all_gather"),
        ("[[row]]", "[[row", "no selection table"),
    ],
)
def test_a_table_that_is_none(old: str, new: str, message: str) -> None:
    text = str(table("dgx-a100", (REDUCE,), (1 << 10, 1 << 28)))
    assert old in text
    with pytest.raises(CollectiveError, match=message):
        SelectionTable.parse(text.replace(old, new, 1), where="table.toml")


def test_what_cannot_be_chosen_or_filled() -> None:
    with pytest.raises(CollectiveError, match="no row for all_to_all of 8 bytes"):
        table("dgx-a100", (REDUCE,), (1024,)).choose(EXCHANGE, 8)
    with pytest.raises(CollectiveError, match="the library has no gather"):
        table("dgx-a100", (CollectiveName.GATHER,), (1024,))
    with pytest.raises(CollectiveError, match="larger than the one before"):
        table("dgx-a100", (REDUCE,), (1024, 1024))
