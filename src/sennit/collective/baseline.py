"""What NCCL does, on the same machine as our schedules: the baselines of every comparison.

| | algorithm | as |
|---|---|---|
| all-reduce, ring | in a node one ring; across nodes one for each NIC, which enters and leaves every node by another device | a schedule |
| all-reduce, tree | several nodes: a chain in each, two binary trees across | the closed form below |
| all-reduce, NVLS | the switch reduces and multicasts | the closed form of `cost/transfer.py` |
| all-to-all | grouped send and receive with every peer at once | a schedule |
| all-to-next | send to the next rank, receive from the one before | a schedule |

NCCL chooses algorithm, protocol and number of channels by its tuning model. Here the fastest of all choices is taken,
so a baseline is never slower than NCCL would be on this machine for having chosen badly.

**Tree**, m nodes of g devices and N NICs, as NCCL's tuning has it: an array goes up and down, so twice (g - 1) hops in
the node and twice log2 m between nodes, and every NIC carries 2 n / N bytes each way:

    launch + 2 ((g - 1) alpha_in + ceil(log2 m) alpha_out) + max(2 n / device link, 2 n / N / NIC)

Inside one node that is the latency of the ring and more bytes: it is left out there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2

from sennit.cluster import Cluster, Topology
from sennit.collective.alpha_beta import AlgorithmCost
from sennit.collective.compile import compile_algorithm
from sennit.collective.protocol import Protocol
from sennit.collective.simulate import Fold, Machine, simulate_seconds
from sennit.cost.transfer import collective
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec
from sennit.ir.program import CollectiveKind
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule

__all__ = [
    "Baseline",
    "direct_all_to_all",
    "direct_all_to_next",
    "fastest",
    "nccl_all_reduce",
    "nccl_all_to_all",
    "nccl_all_to_next",
    "nccl_ring",
    "simulated_cost",
]


@dataclass(frozen=True, slots=True)
class Baseline:
    algorithm: str
    protocol: str
    channels: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.protocol}, {self.channels} channel{'s' if self.channels != 1 else ''}"


def fastest(
    schedule: Schedule,
    cluster: Cluster,
    size: int,
    channels: Sequence[int],
    machine: Machine | None = None,
    protocols: Sequence[Protocol] = tuple(Protocol),
    fold: Fold | None = None,
) -> Baseline:
    """The best protocol and number of instances for a size, of those whose thread blocks a device can hold at once:
    blocks wait for each other, so all must run, one a multiprocessor. `fold` (`simulate_fold.py`) makes it quick on
    many ranks.
    """
    blocks = max((len(rank.blocks) for rank in schedule.ranks), default=1)
    fitting = [count for count in channels if count * blocks <= cluster.device.matmul.units.value] or [1]
    found = [
        Baseline(
            schedule.name,
            protocol.value,
            count,
            simulate_seconds(schedule, cluster, size, protocol=protocol, instances=count, machine=machine, fold=fold),
        )
        for protocol in protocols
        if protocol.transport.slots >= schedule.slots
        for count in fitting
    ]
    return min(found, key=lambda baseline: baseline.seconds)


def simulated_cost(cluster: Cluster, channels: Sequence[int] = (1, 4), machine: Machine | None = None) -> AlgorithmCost:
    """What an algorithm takes, compiled and simulated, for `selection.fill`: slower to ask than `alpha_beta`, and aware
    of contention, slots and thread blocks. Schedules are kept while the function lives.
    """
    schedules: dict[Algorithm, Schedule] = {}

    def cost(algorithm: Algorithm, size: int) -> float:
        if algorithm not in schedules:
            schedules[algorithm] = compile_algorithm(algorithm)
        return fastest(schedules[algorithm], cluster, size, channels, machine).seconds

    return cost


def nccl_all_reduce(cluster: Cluster, size: int, machine: Machine | None = None) -> Baseline:
    rings = _rings(cluster)
    best = fastest(
        nccl_ring(cluster), cluster, size, [n for n in (1, 2, 4, 8, 16, 24) if n * len(rings) <= 32], machine
    )
    others = [*_trees(cluster, size), *_multicast(cluster, size)]
    return min([best, *others], key=lambda baseline: baseline.seconds)


def nccl_all_to_all(cluster: Cluster, size: int, machine: Machine | None = None) -> Baseline:
    """`size` is what a rank holds."""
    return fastest(direct_all_to_all(cluster.devices), cluster, size, (1, 2), machine, (Protocol.SIMPLE, Protocol.LL))


def nccl_all_to_next(cluster: Cluster, size: int, machine: Machine | None = None) -> Baseline:
    return fastest(direct_all_to_next(cluster.devices), cluster, size, (1, 2), machine, (Protocol.SIMPLE, Protocol.LL))


def _trees(cluster: Cluster, size: int) -> Iterator[Baseline]:
    if cluster.nodes == 1 or cluster.nic is None:
        return
    topology, g = Topology.of(cluster), cluster.device.per_node
    for protocol in Protocol:
        link = protocol.transport.link
        hops = 2 * ceil(log2(cluster.nodes)) * topology.latency(0, g, link)
        near, far = _rate(topology, 0, 1, link) if g > 1 else inf, _rate(topology, 0, g, link)
        if g > 1:
            hops += 2 * (g - 1) * topology.latency(0, 1, link)
        seconds = protocol.transport.launch + hops + max(2 * size / near, 2 * size / cluster.nic.per_node / far)
        yield Baseline("tree", protocol.value, cluster.nic.per_node, seconds)


def _rate(topology: Topology, source: int, target: int, link: str | None) -> float:
    wires = [topology.wires[number] for number in topology.route(source, target)]
    return min(wire.bandwidth * wire.speed(link).efficiency for wire in wires)


def _multicast(cluster: Cluster, size: int) -> Iterator[Baseline]:
    topology = Topology.of(cluster)
    transfer = collective(topology, CollectiveKind.ALL_REDUCE, range(cluster.devices), size)
    if transfer.algorithm == "multicast":
        yield Baseline("NVLS", "Simple", 1, transfer.seconds(topology))


# ---- schedules -------------------------------------------------------------------------------------------------------


def _rings(cluster: Cluster) -> list[list[int]]:
    size = cluster.device.per_node
    starts = range(cluster.nic.per_node) if cluster.nodes > 1 and cluster.nic is not None else range(1)
    step = size // len(starts)
    return [
        [node * size + (start * step + place) % size for node in range(cluster.nodes) for place in range(size)]
        for start in starts
    ]


def nccl_ring(cluster: Cluster) -> Schedule:
    """A ring all-reduce over all devices, in place; a ring a channel, each over its own chunks."""
    rings = _rings(cluster)
    ranks = cluster.devices
    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks * len(rings), in_place=True)
    return Schedule(
        "ring",
        spec,
        2,
        tuple(
            RankSchedule(
                rank, tuple(_ring_block(ring, ring.index(rank), channel) for channel, ring in enumerate(rings))
            )
            for rank in range(ranks)
        ),
    )


def _ring_block(ring: list[int], at: int, channel: int) -> Block:
    size = len(ring)

    def place(step: int) -> Place:
        return Place("output", channel * size + (at - step) % size, 1)

    def code() -> Iterator[Instruction]:
        yield Instruction(Opcode.SEND, source=place(0))
        for step in range(1, size - 1):
            yield Instruction(Opcode.RECEIVE_REDUCE_SEND, source=place(step))
        yield Instruction(Opcode.RECEIVE_REDUCE_COPY_SEND, target=place(size - 1))
        for step in range(size, 2 * size - 2):
            yield Instruction(Opcode.RECEIVE_COPY_SEND, target=place(step))
        yield Instruction(Opcode.RECEIVE, target=place(2 * size - 2))

    return Block(ring[(at + 1) % size], ring[at - 1], channel, tuple(code()))


def direct_all_to_all(ranks: int) -> Schedule:
    """To every peer at once; sending and receiving in blocks of their own."""
    spec = CollectiveSpec(CollectiveName.ALL_TO_ALL, ranks, 1)

    def blocks(rank: int) -> Iterator[Block]:
        yield Block(None, None, 0, (Instruction(Opcode.COPY, Place("input", rank, 1), Place("output", rank, 1)),))
        for distance in range(1, ranks):
            to, back = (rank + distance) % ranks, (rank - distance) % ranks
            yield Block(to, None, 0, (Instruction(Opcode.SEND, source=Place("input", to, 1)),))
            yield Block(None, back, 0, (Instruction(Opcode.RECEIVE, target=Place("output", back, 1)),))

    return Schedule(
        "send and receive", spec, 1, tuple(RankSchedule(rank, tuple(blocks(rank))) for rank in range(ranks))
    )


def direct_all_to_next(ranks: int) -> Schedule:
    spec = CollectiveSpec(CollectiveName.ALL_TO_NEXT, ranks, 1)

    def blocks(rank: int) -> Iterator[Block]:
        if rank + 1 < ranks:
            yield Block(rank + 1, None, 0, (Instruction(Opcode.SEND, source=Place("input", 0, 1)),))
        if rank:
            yield Block(None, rank - 1, 0, (Instruction(Opcode.RECEIVE, target=Place("output", 0, 1)),))

    return Schedule(
        "send and receive", spec, 1, tuple(RankSchedule(rank, tuple(blocks(rank))) for rank in range(ranks))
    )
