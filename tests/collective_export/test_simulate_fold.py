"""A folded simulation gives the times of the whole one, and what is not symmetric is not folded."""

from __future__ import annotations

import pytest

from sennit.cluster import load
from sennit.collective.baseline import direct_all_to_all, fastest
from sennit.collective.compile import compile_algorithm
from sennit.collective.library import all_pairs_all_reduce, ring_all_reduce, tree_broadcast, two_step_all_to_all
from sennit.collective.protocol import Protocol
from sennit.collective.simulate import Machine, simulate_schedule, simulate_seconds
from sennit.collective.simulate_fold import fold
from sennit.ir.schedule import Schedule


def schedules() -> list[tuple[str, Schedule]]:
    return [
        ("ndv4:2", direct_all_to_all(16)),
        ("ndv4:2", compile_algorithm(two_step_all_to_all(2, 8))),
        ("ndv4:3", compile_algorithm(two_step_all_to_all(3, 8))),
        ("mi300x", compile_algorithm(all_pairs_all_reduce(8))),
        ("dgx-a100", compile_algorithm(ring_all_reduce(8))),
        ("dgx1-v100", direct_all_to_all(8)),
    ]


@pytest.mark.parametrize(
    ("name", "schedule"), schedules(), ids=lambda value: value if isinstance(value, str) else value.name
)
def test_the_folded_time_is_the_whole_time(name: str, schedule: Schedule) -> None:
    cluster = load(name)
    folded = fold(schedule, cluster)
    if folded is None:
        assert name == "dgx1-v100"  # its devices share PCIe
        return
    assert len(folded.ranks) < cluster.devices
    for size in (1 << 12, 1 << 22):
        for protocol in (Protocol.SIMPLE, Protocol.LL):
            settings = {"protocol": protocol, "machine": Machine(most_tiles=3), "instances": 2}
            whole = simulate_schedule(schedule, cluster, size, **settings).span  # type: ignore[arg-type]
            quick = simulate_seconds(schedule, cluster, size, fold=folded, **settings)  # type: ignore[arg-type]
            assert quick == pytest.approx(whole, rel=1e-9)


def test_what_treats_ranks_differently_is_not_folded() -> None:
    assert fold(compile_algorithm(tree_broadcast(8)), load("dgx-a100")) is None
    # an instance's half of what crosses comes from the first ranks of a node, the other half from the last
    assert fold(compile_algorithm(two_step_all_to_all(2, 8, instances=2)), load("ndv4:2")) is None


def test_the_best_protocol_of_many_ranks() -> None:
    cluster, schedule = load("ndv4:8"), direct_all_to_all(64)
    best = fastest(schedule, cluster, 1 << 20, (1,), None, (Protocol.SIMPLE,), fold(schedule, cluster))
    assert best.seconds > 0
    assert best.protocol == "Simple"
