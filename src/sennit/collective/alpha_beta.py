"""What an algorithm takes on a cluster, in closed form: quick enough to rank every candidate at every size.

Each move between ranks takes the latency of its route and bytes / bandwidth. With the routes of the cluster,

    depth   = the longest chain of moves that each need what the one before wrote, in latency alone
    chain   = the same, with each move's bytes over its narrowest wire
    load    = the most, over wires, of all bytes on the wire / its bandwidth
    seconds = start + max(chain, depth + load) + messages between nodes of the busiest rank * `per_message`

which is exact for a lone chain and for a full wire, and too low where chains wait for each other's wires: the
chunk-level simulator knows that. Of the protocols of the links the fastest is taken. Moves inside a rank are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sennit.cluster import Topology
from sennit.ir.collective import Algorithm, MoveKind

__all__ = ["AlgorithmCost", "alpha_beta", "array_chunks"]

AlgorithmCost = Callable[[Algorithm, int], float]  # the algorithm and the bytes of its array: seconds


def array_chunks(algorithm: Algorithm) -> int:
    """Chunks of the array that the size of a collective counts: the larger of input and output, as nccl-tests does."""
    spec = algorithm.collective
    return max(max(spec.input_chunks(rank), spec.output_chunks(rank)) for rank in range(spec.ranks))


def alpha_beta(topology: Topology, *, per_message: float = 0.0) -> AlgorithmCost:
    """The closed form for a cluster. `per_message`: seconds that a NIC needs for a message beside its bytes."""
    hops: dict[tuple[str | None, int, int], _Hop] = {}  # found once for all algorithms and sizes

    def cost(algorithm: Algorithm, size: int) -> float:
        topology.cluster.require(algorithm.collective.ranks, f"algorithm {algorithm.name!r}")
        return min(
            _seconds(topology, algorithm, size, per_message, protocol, hops)
            for protocol in (None, *topology.protocols())
        )

    return cost


@dataclass(frozen=True, slots=True)
class _Hop:
    """From a rank to another: its wires, seconds to start, and seconds a byte on the narrowest wire."""

    route: tuple[int, ...]
    latency: float
    per_byte: float
    between_nodes: bool


def _hop(topology: Topology, source: int, target: int, protocol: str | None) -> _Hop:
    route = topology.route(source, target)
    wires = [topology.wires[wire] for wire in route]
    per_byte = max((1 / (wire.bandwidth * wire.speed(protocol).efficiency) for wire in wires), default=0.0)
    nodes = topology.cluster.node_of(source), topology.cluster.node_of(target)
    return _Hop(route, sum(wire.speed(protocol).latency for wire in wires), per_byte, nodes[0] != nodes[1])


def _seconds(
    topology: Topology,
    algorithm: Algorithm,
    size: int,
    per_message: float,
    protocol: str | None,
    hops: dict[tuple[str | None, int, int], _Hop],
) -> float:
    chunk = size / array_chunks(algorithm)
    ready: dict[tuple[int, str, int], tuple[float, float]] = {}  # by chunk: (depth, chain)
    load: Counter[int] = Counter()
    messages: Counter[int] = Counter()
    for move in algorithm.moves:
        source, target = move.source, move.target
        key = protocol, source.rank, target.rank
        hop = hops.get(key) or hops.setdefault(key, _hop(topology, source.rank, target.rank, protocol))
        for wire in hop.route:
            load[wire] += source.count
        messages[source.rank] += hop.between_nodes
        needed = [(source.rank, source.buffer, source.start + i) for i in range(source.count)]
        written = [(target.rank, target.buffer, target.start + i) for i in range(target.count)]
        if move.kind is MoveKind.REDUCE:
            needed += written
        before = [ready[cell] for cell in needed if cell in ready]
        depth = max((item[0] for item in before), default=0.0) + hop.latency
        chain = max((item[1] for item in before), default=0.0) + hop.latency + source.count * chunk * hop.per_byte
        ready |= dict.fromkeys(written, (depth, chain))
    depth = max((item[0] for item in ready.values()), default=0.0)
    chain = max((item[1] for item in ready.values()), default=0.0)
    wires = topology.wires
    full = max(
        (n * chunk / (wires[w].bandwidth * wires[w].speed(protocol).efficiency) for w, n in load.items()), default=0.0
    )
    start = topology.cluster.collective_start
    waits = (start.value if start is not None else 0.0) + per_message * max(messages.values(), default=0)
    return waits + max(chain, depth + full)
