"""A one-sided program on a cluster, timed step by step: the machine of `simulate.py` without slots and messages.

| step | takes |
|---|---|
| put of b bytes | b / min(thread-block rate, fair share of each wire of the route) |
| read_reduce | alpha of the route, then as a put the other way |
| copy, reduce | b / thread-block rate |
| multi_reduce of k operands | alpha if one is remote; all remote ones cross their wires at once; k + 2 passes over memory where a reduce has 3 |
| multicast | b up this rank's wire and down the wire of every rank named, at the switch's rate |
| switch_reduce | alpha; b up the wire of every rank named and down this rank's, at the switch's rate |
| signal | nothing; it arrives after alpha where the waiting block is on another rank, at once on the same |
| wait | until the signal is there |

alpha is a hop with protocol Simple (store, fence and flag). The switch's rate (`Wire.multicast`) is calibrated in
`cluster/` to published all-reduces; a wire carries plain and switched transfers together, each taking its share of the
time. So a multicast loads its rank's wire once, whatever the number of ranks.

There are no tiles: a step moves its chunks whole. What should overlap must be cut in the algorithm (`pieces`, more
chunks). Approximations as in `simulate.py`; besides, a remote read waits one alpha and not a round trip, since no flag
follows it.
"""

from __future__ import annotations

from collections import defaultdict

from sennit.cluster import Cluster, Topology
from sennit.collective.protocol import Protocol
from sennit.collective.simulate import Machine, block_rate, chunk_bytes
from sennit.collective.switch import SwitchWires, require_switch, switch_wires
from sennit.errors import CollectiveError
from sennit.ir.one_sided import (
    Await,
    DataStep,
    LocalCopy,
    LocalReduce,
    Multicast,
    MultiReduce,
    OneSided,
    Put,
    ReadReduce,
    Signal,
    SwitchReduce,
    accesses,
)
from sennit.ir.timeline import Category, Event, Origin, Timeline
from sennit.sim.engine import Tasks, run

__all__ = ["simulate_one_sided"]

End = tuple[int, int]  # rank, block


def simulate_one_sided(
    program: OneSided, cluster: Cluster, size_bytes: int, *, instances: int = 1, machine: Machine | None = None
) -> Timeline:
    """The simulated timeline: a stream a block, an event a step that moves data. Rank r runs on device r."""
    if size_bytes < 1 or instances < 1:
        raise CollectiveError(f"{size_bytes} bytes with {instances} instances", fix="use at least 1 of each")
    cluster.require(program.collective.ranks, f"program {program.name!r}")
    topology = Topology.of(cluster)
    require_switch(program, topology)
    build = _Build(program, topology, size_bytes, instances, machine or Machine())
    times = run(build.tasks, [wire.bandwidth for wire in topology.wires])
    if times.stuck:
        raise CollectiveError(
            f"it deadlocks: {len(times.stuck)} of {len(build.tasks)} steps never start",
            where=f"one-sided program {program.name!r}",
            fix="verify the program",
        )
    events = [
        Event(rank, f"block {block}", category, name, times.start[task], times.stop[task], moved)
        for task, rank, block, category, name, moved in build.events
    ]
    end = max(times.stop, default=0.0)  # the gates move nothing, and are the last to end
    events.append(Event(0, "gates", Category.COMPUTE, "all gates passed", end, end, 0))
    return Timeline(f"{program.name}, one-sided", Origin.SIMULATED, tuple(sorted(events, key=lambda e: e.start)))


class _Build:
    """The tasks: one a step, one an arrival of a signal."""

    def __init__(self, program: OneSided, topology: Topology, size: int, instances: int, machine: Machine) -> None:
        self.topology, self.machine, self.instances = topology, machine, instances
        self.chunk = chunk_bytes(program.collective, size)
        self.rate = block_rate(topology.cluster, Protocol.SIMPLE, machine) * instances
        self.tasks = Tasks()
        self.events: list[tuple[int, int, int, Category, str, int]] = []
        self.switches: dict[tuple[int, ...], dict[int, SwitchWires]] = {}
        launch = Protocol.SIMPLE.transport.launch if machine.launch is None else machine.launch
        start = self.tasks.add(launch, 0.0)
        sent: defaultdict[tuple[End, End], list[int]] = defaultdict(list)  # arrivals
        waits: list[tuple[tuple[End, End], int, int]] = []
        for ranked in program.ranks:
            for block, steps in enumerate(ranked.blocks):
                here, before = (ranked.rank, block), start
                for step in steps:
                    match step:
                        case Signal():
                            arrival = self.tasks.add(self._alpha(ranked.rank, step.rank), 0.0)
                            self.tasks.order(before, arrival)
                            sent[here, (step.rank, step.block)].append(arrival)
                            continue
                        case Await():
                            task = self.tasks.add(0.0, 0.0)
                            waits.append((((step.rank, step.block), here), step.count, task))
                        case _:
                            task = self._move(step, ranked.rank, block)
                    self.tasks.order(before, task)
                    before = task
        for pair, count, task in waits:
            if len(sent[pair]) < count:
                (rank, block), _ = pair
                raise CollectiveError(
                    f"rank {rank} block {block} is waited for {count} times and signals {len(sent[pair])} times",
                    where=f"one-sided program {program.name!r}",
                    fix="verify the program",
                )
            self.tasks.order(sent[pair][count - 1], task)

    def _alpha(self, source: int, target: int) -> float:
        return self.topology.latency(source, target) if source != target else 0.0

    def _move(self, step: DataStep, rank: int, block: int) -> int:
        touched = accesses(step, rank)
        size = touched.reads[0][1].count * self.chunk
        load: defaultdict[int, float] = defaultdict(float)
        passes, latency = 1.0, 0.0
        match step:
            case LocalCopy() | LocalReduce():
                pass
            case Put():
                self._route(load, rank, step.rank, size)
            case ReadReduce() | MultiReduce():
                sources = [source for source, _ in touched.reads if source != rank]
                for source in sources:
                    self._route(load, source, rank, size)
                latency = max((self._alpha(source, rank) for source in sources), default=0.0)
                passes = (len(touched.reads) + 2) / 3
            case Multicast():
                self._switched(load, step.ranks, rank, size, up=(rank,), down=step.ranks)
            case SwitchReduce():
                self._switched(load, step.ranks, rank, size, up=step.ranks, down=(rank,))
                latency = max(self._alpha(source, rank) for source in step.ranks)
        amounts = tuple(load.items())
        busy = [amount / self.topology.wires[wire].bandwidth for wire, amount in amounts]
        drain = max([passes * size / self.rate, *busy])
        task = self.tasks.add(latency, drain, max((amount for _, amount in amounts), default=0.0), amounts)
        category = Category.SEND if load else Category.COMPUTE
        self.events.append((task, rank, block, category, str(step), round(size) if load else 0))
        return task

    def _route(self, load: defaultdict[int, float], source: int, target: int, size: float) -> None:
        for number in self.topology.route(source, target):
            wire = self.topology.wires[number]
            load[number] += size
            if wire.link == "nic":
                load[number] += self.machine.nic_message * wire.bandwidth * self.instances

    def _switched(
        self,
        load: defaultdict[int, float],
        named: tuple[int, ...],
        rank: int,
        size: float,
        *,
        up: tuple[int, ...],
        down: tuple[int, ...],
    ) -> None:
        ranks = tuple(sorted({*named, rank}))
        if ranks not in self.switches:
            found = switch_wires(self.topology, ranks)
            assert found is not None  # `require_switch` has seen it
            self.switches[ranks] = found
        wires = self.switches[ranks]
        for number in (*(wires[member].up for member in up), *(wires[member].down for member in down)):
            wire = self.topology.wires[number]
            assert wire.multicast is not None
            load[number] += size * wire.bandwidth / wire.multicast  # a wire is busy for size / the switch's rate
