"""Compiled schedules as the collectives of a simulated program: `simulate_fully(program, cluster, collectives=...)`.

A schedule is simulated alone, chunk by chunk, on the devices that it was compiled for (rank r on device r). Its time
becomes the transfer's: what a message of one byte takes is latency, the rest is the time that its bytes need; and what
it sends lies on the wires of the routes, so that other transfers of the program share them with it. Sizes are asked for
by class (`cost/size_class.py`).

Groups that are not the first devices of the cluster, nor lie as those do some nodes further on (`sim/transfers.py`
moves them), keep the closed forms of the cluster's library.
"""

from __future__ import annotations

from collections.abc import Mapping

from sennit.cluster import Cluster, Topology
from sennit.collective.protocol import Protocol
from sennit.collective.simulate import chunk_bytes, simulate_schedule
from sennit.cost import CollectiveTimes, Transfer, bus_bytes, by_size_class
from sennit.ir.program import CollectiveKind
from sennit.ir.schedule import Schedule

__all__ = ["schedule_times"]


def schedule_times(
    schedules: Mapping[tuple[CollectiveKind, int], Schedule],
    cluster: Cluster,
    *,
    protocol: Protocol = Protocol.SIMPLE,
    instances: int = 1,
) -> CollectiveTimes:
    """`schedules` by collective and number of ranks. The whole array counts as the size, as in `cost/transfer.py`."""
    topology = Topology.of(cluster)

    def seconds(schedule: Schedule, size: int) -> float:
        return simulate_schedule(schedule, cluster, size, protocol=protocol, instances=instances).span

    def times(kind: CollectiveKind, group: tuple[int, ...], size: int) -> Transfer | None:
        schedule = schedules.get((kind, len(group)))
        if schedule is None or group != tuple(range(len(group))):
            return None
        latency = seconds(schedule, 1)
        load = _load(schedule, topology, size)
        drain = max(0.0, seconds(schedule, size) - latency)
        return Transfer(latency, load, f"schedule {schedule.name}", bus_bytes(kind, len(group), size), floor=drain)

    return by_size_class(times)


def _load(schedule: Schedule, topology: Topology, size: int) -> tuple[tuple[int, float], ...]:
    """Bytes by wire of all that the schedule sends."""
    chunk = chunk_bytes(schedule.collective, size)
    load: dict[int, float] = {}
    for rank in schedule.ranks:
        for block in rank.blocks:
            for instruction in block.instructions:
                if not instruction.opcode.sends or block.send is None:
                    continue
                place = instruction.source or instruction.target
                assert place is not None
                for wire in topology.route(rank.rank, block.send):
                    load[wire] = load.get(wire, 0.0) + place.count * chunk
    return tuple(sorted(load.items()))
