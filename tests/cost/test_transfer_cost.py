from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sennit.cluster import Basis, Cluster, Figure, Topology, load
from sennit.cost import bus_bytes, collective, point_to_point
from sennit.ir.program import CollectiveKind

KINDS = tuple(CollectiveKind)
LARGE = 1 << 32


def laptop(ranks: int) -> Topology:
    return Topology.of(load(f"laptop:{ranks}"))


def test_the_closed_forms_of_a_ring() -> None:
    topology, p, n = laptop(4), 4, 1 << 20
    hop, rate, start, adding = 2 * 30e-6, 3e9, 200e-6, 0.7e9
    part = (p - 1) / p * n
    expected = {
        CollectiveKind.ALL_REDUCE: start + 2 * (p - 1) * hop + 2 * part / rate + part / adding,
        CollectiveKind.REDUCE_SCATTER: start + (p - 1) * hop + part / rate + part / adding,
        CollectiveKind.ALL_GATHER: start + (p - 1) * hop + part / rate,
        CollectiveKind.ALL_TO_ALL: start + hop + part / rate,
    }
    for kind, seconds in expected.items():
        assert collective(topology, kind, range(p), n).seconds(topology) == pytest.approx(seconds)
    assert point_to_point(topology, 0, 3, n).seconds(topology) == pytest.approx(hop + n / rate)


def test_bytes_on_the_wire() -> None:
    assert bus_bytes(CollectiveKind.ALL_REDUCE, 4, 1000) == 1500
    assert bus_bytes(CollectiveKind.ALL_GATHER, 4, 1000) == 750
    assert bus_bytes(CollectiveKind.REDUCE_SCATTER, 4, 1000) == 750
    assert bus_bytes(CollectiveKind.ALL_TO_ALL, 4, 1000) == 750
    assert point_to_point(laptop(2), 0, 1, 1000).wire_bytes == 1000


# large-message bus bandwidths in GB/s: nccl-tests#149, #212, #272, coreweave/nccl-tests#43
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("dgx-a100", 200, 236), ("dgx-h100", 480, 480), ("h200x8", 475, 475), ("gb200-nvl72", 835, 847)],
)
def test_published_bus_bandwidth_within_a_tenth(name: str, low: float, high: float) -> None:
    topology = Topology.of(load(name))
    transfer = collective(topology, CollectiveKind.ALL_REDUCE, range(topology.cluster.devices), LARGE)
    assert 0.9 * low <= transfer.wire_bytes / transfer.seconds(topology) / 1e9 <= 1.1 * high


def test_small_messages_take_the_low_latency_protocol_and_large_ones_the_full_rate() -> None:
    topology = Topology.of(load("dgx-a100"))
    small = collective(topology, CollectiveKind.ALL_REDUCE, range(8), 1024)
    large = collective(topology, CollectiveKind.ALL_REDUCE, range(8), LARGE)
    assert small.algorithm == "tree, LL"
    assert large.algorithm == "ring"


def test_a_group_over_nodes_is_bound_by_its_nics() -> None:
    topology = Topology.of(load("dgx-a100:4"))
    transfer = collective(topology, CollectiveKind.ALL_REDUCE, range(32), LARGE)
    nics = [size for wire, size in transfer.load if topology.wires[wire].link == "nic"]
    assert len(nics) == 2 * 32  # every NIC, both ways
    assert transfer.wire_bytes / transfer.seconds(topology) == pytest.approx(8 * 25e9 * 0.96, rel=0.02)


def test_a_pair_of_each_device_uses_all_links_of_a_full_mesh() -> None:
    topology = Topology.of(load("mi300x"))
    transfer = collective(topology, CollectiveKind.ALL_REDUCE, range(8), LARGE)
    assert transfer.algorithm == "direct"
    assert transfer.wire_bytes / transfer.seconds(topology) == pytest.approx(7 * 48e9, rel=0.01)


def test_a_start_is_a_time_or_work_of_the_cores() -> None:
    """The same alone; as work it is in the part that whatever else the cores do makes longer."""
    plain = load("laptop:4")
    assert plain.host is not None
    start = Figure(2e-3, Basis.MEASURED, "for this test")
    timed = replace(plain, collective_start=start)
    worked = replace(timed, host=replace(plain.host, starts_use_cores=True))
    one, other = (
        collective(Topology.of(cluster), CollectiveKind.ALL_REDUCE, range(4), 1 << 20) for cluster in (timed, worked)
    )
    assert one.seconds(Topology.of(timed)) == pytest.approx(other.seconds(Topology.of(worked)))
    assert one.latency - other.latency == pytest.approx(start.value)
    assert other.drain(Topology.of(worked)) - one.drain(Topology.of(timed)) == pytest.approx(start.value)


def test_a_group_of_one_moves_nothing() -> None:
    topology = laptop(2)
    for kind in KINDS:
        assert collective(topology, kind, [1], 1 << 20).seconds(topology) == 0.0


def test_a_cost_says_what_it_rests_on() -> None:
    topology = laptop(2)
    cost = point_to_point(topology, 0, 1, 1000).cost(topology)
    assert cost.basis is Basis.ESTIMATED
    assert "send on laptop" in cost.source


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.sampled_from(["laptop:8", "dgx-a100:2", "dgx-h100", "mi300x:2"]),
    st.sampled_from(KINDS),
    st.sets(st.integers(0, 7), min_size=2, max_size=8),
    st.integers(1, 1 << 28),
)
def test_more_bytes_never_cost_less_and_no_wire_carries_more_than_it_can(
    name: str, kind: CollectiveKind, members: set[int], size: int
) -> None:
    topology = Topology.of(load(name))
    transfer = collective(topology, kind, sorted(members), size)
    seconds = transfer.seconds(topology)
    assert all(bytes_ / topology.wires[wire].bandwidth <= seconds for wire, bytes_ in transfer.load)
    assert collective(topology, kind, sorted(members), 2 * size).seconds(topology) >= seconds


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.sampled_from(KINDS), st.integers(1, 1 << 28), st.floats(1.0, 16.0))
def test_a_faster_link_never_costs_more(kind: CollectiveKind, size: int, factor: float) -> None:
    text = str(load("dgx-a100"))
    assert "bandwidth = { value = 300000000000.0" in text
    fast = text.replace("bandwidth = { value = 300000000000.0", f"bandwidth = {{ value = {300e9 * factor!r}")
    slow, faster = Topology.of(load("dgx-a100")), Topology.of(Cluster.parse(fast))
    before = collective(slow, kind, range(8), size).seconds(slow)
    assert collective(faster, kind, range(8), size).seconds(faster) <= before * (1 + 1e-12)
