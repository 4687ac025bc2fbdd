"""The chunk-level simulator: hand-calculable cases, invariants, and NCCL's models."""

from __future__ import annotations

import msgspec
import pytest
from hand_made import all_pairs_all_reduce, chunk, ring_all_reduce
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import Cluster, load
from sennit.collective.baseline import (
    direct_all_to_all,
    direct_all_to_next,
    fastest,
    nccl_all_reduce,
    nccl_all_to_next,
    nccl_ring,
    simulated_cost,
)
from sennit.collective.protocol import Protocol
from sennit.collective.selection import fill
from sennit.collective.simulate import Machine, block_rate, bus_bandwidth, simulate_schedule
from sennit.collective.verify import verify_schedule
from sennit.errors import ClusterError, CollectiveError
from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.schedule import Block, Instruction, Opcode, RankSchedule, Schedule

BARE = Machine(nic_message=0.0, launch=0.0)


def hop() -> Schedule:
    """Rank 0 to rank 1, one message."""
    return direct_all_to_next(2)


def test_one_message_takes_alpha_and_its_bytes() -> None:
    cluster = load("ndv4")
    size = 32 << 10  # one slice
    rate = block_rate(cluster, Protocol.SIMPLE, BARE)
    assert rate == pytest.approx(20e9)
    timeline = simulate_schedule(hop(), cluster, size, machine=BARE)
    send, receive = timeline.events
    assert send.stop == pytest.approx(size / rate)
    assert receive.start == pytest.approx(size / rate + 3.4e-6)
    assert timeline.span == pytest.approx(2 * size / rate + 3.4e-6)  # the receiver copies from the slot
    assert timeline.wire_bytes() == size
    assert [event.name for event in timeline.critical_path()] == ["send input[0:1]", "receive output[0:1]"]


def test_many_instances_are_limited_by_the_wire_and_few_by_their_blocks() -> None:
    cluster, size = load("ndv4"), 64 << 20
    wire = 300e9 * 0.75
    alone = simulate_schedule(hop(), cluster, size, machine=BARE).span
    many = simulate_schedule(hop(), cluster, size, instances=24, machine=BARE).span
    assert size / 20e9 < alone < 1.1 * size / 20e9
    assert size / wire < many < 1.3 * size / wire


def test_a_nic_is_busy_with_each_message() -> None:
    cluster = load("ndv4:2")
    schedule = direct_all_to_all(16)
    free = simulate_schedule(schedule, cluster, 16 << 10, protocol=Protocol.LL, machine=BARE).span
    busy = simulate_schedule(schedule, cluster, 16 << 10, protocol=Protocol.LL, machine=Machine(1e-6, 0.0)).span
    assert busy - free == pytest.approx(8e-6, rel=0.2)  # 8 messages through each NIC


def test_a_sender_waits_for_a_free_slot() -> None:
    """The receiver is held up by a long local copy; the sender can be ahead by the slots of its connection, not more."""
    spec = CollectiveSpec(CollectiveName.ALL_TO_NEXT, 2, 12)
    sends = tuple(Instruction(Opcode.SEND, source=chunk("input", i)) for i in range(12))
    slow = Instruction(Opcode.COPY, chunk("input", 0, 12), chunk("output", 0, 12))
    receives = (slow, *(Instruction(Opcode.RECEIVE, target=chunk("output", i)) for i in range(12)))
    schedule = Schedule(
        "slow",
        spec,
        1,
        (RankSchedule(0, (Block(1, None, 0, sends),)), RankSchedule(1, (Block(None, 0, 0, receives),))),
    )
    events = simulate_schedule(schedule, load("ndv4"), 12 << 10, protocol=Protocol.LL, machine=BARE).events
    copied = next(event for event in events if event.name.startswith("copy"))
    sent = [event for event in events if event.name.startswith("send")]
    assert sum(event.stop < copied.stop for event in sent) == 8  # LL has 8 slots
    assert sent[8].start >= copied.stop


@given(st.sampled_from(["ndv4", "dgx2-v100", "ndv4:2"]), st.integers(10, 28), st.sampled_from(Protocol), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=25)
def test_never_below_the_wires_and_more_bandwidth_is_never_slower(
    name: str, power: int, protocol: Protocol, pairs: bool
) -> None:
    cluster, size = load(name), 1 << power
    schedule = all_pairs_all_reduce(8) if pairs else ring_all_reduce(8)
    machine = Machine(most_tiles=4)
    span = simulate_schedule(schedule, cluster, size, protocol=protocol, instances=4, machine=machine).span
    assert span >= 2 * 7 / 8 * size / cluster.link[0].bandwidth.value  # what every device must send
    assert span >= protocol.transport.launch + 2 * 2 * 0.3e-6
    wide = _wider(cluster)
    assert (
        simulate_schedule(schedule, wide, size, protocol=protocol, instances=4, machine=machine).span <= span * 1.0001
    )


def _wider(cluster: Cluster) -> Cluster:
    links = tuple(
        msgspec.structs.replace(link, bandwidth=msgspec.structs.replace(link.bandwidth, value=2 * link.bandwidth.value))
        for link in cluster.link
    )
    return msgspec.structs.replace(cluster, link=links)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ClusterError, match="16 devices"):
        simulate_schedule(ring_all_reduce(16), load("ndv4"), 1024)
    with pytest.raises(CollectiveError, match="0 bytes"):
        simulate_schedule(ring_all_reduce(4), load("ndv4"), 0)
    with pytest.raises(CollectiveError, match="unknown protocol 'LL64'"):
        Protocol.named("LL64")


def test_the_models_of_nccl_are_right_schedules() -> None:
    for schedule in (nccl_ring(load("ndv4:2")), direct_all_to_all(5), direct_all_to_next(5)):
        verify_schedule(schedule)


def test_calibration_stays_within_ten_percent() -> None:
    """Of published bus bandwidth; benchmarks/collective/predict.py prints all five systems."""
    size = 1 << 30
    ring = nccl_ring(load("dgx-a100"))
    assert isinstance(ring.collective, CollectiveSpec)
    for name, published in (("dgx-a100", 218e9), ("dgx-h100", 370e9)):
        span = simulate_schedule(ring, load(name), size, instances=24, machine=Machine(most_tiles=4)).span
        assert bus_bandwidth(ring.collective, size, span) == pytest.approx(published, rel=0.1)
    assert nccl_all_reduce(load("h200x8"), size, Machine(most_tiles=1)).algorithm == "NVLS"


def test_all_pairs_beats_the_ring_where_latency_counts_and_loses_where_bytes_do() -> None:
    cluster = load("ndv4")
    pairs, ring = all_pairs_all_reduce(8), ring_all_reduce(8)
    machine = Machine(most_tiles=2)
    for size, wins in ((1 << 10, True), (1 << 28, False)):
        ours, theirs = (fastest(s, cluster, size, (1, 4, 24), machine).seconds for s in (pairs, ring))
        assert (ours < theirs) == wins


def test_a_device_holds_no_more_blocks_than_multiprocessors() -> None:
    best = fastest(all_pairs_all_reduce(8), load("ndv4"), 1 << 20, (1, 8, 24), Machine(most_tiles=1))
    assert best.channels <= 108 // 8
    assert str(nccl_all_to_next(load("ndv4"), 1024)).startswith("send and receive, LL, ")


def test_across_nodes_a_tree_is_a_baseline_too() -> None:
    small = nccl_all_reduce(load("ndv4:2"), 1024, Machine(most_tiles=1))
    assert (small.algorithm, small.protocol) == ("tree", "LL")
    # up and down: 7 hops in the node and 1 between nodes
    assert small.seconds == pytest.approx(6.6e-6 + 2 * (7 * 0.6e-6 + 2.7e-6), rel=0.01)


def test_a_selection_table_is_filled_by_simulation() -> None:
    cost = simulated_cost(load("ndv4"), machine=Machine(most_tiles=1))
    table = fill("ndv4", 1, 8, cost, "simulated", collectives=[CollectiveName.ALL_REDUCE], sizes=[1 << 10])
    assert table.choose(CollectiveName.ALL_REDUCE, 1 << 10).algorithm == "all_pairs_all_reduce"
