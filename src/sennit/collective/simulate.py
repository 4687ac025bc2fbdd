"""A schedule on a cluster, timed chunk by chunk: what every thread block does when.

**A message** from rank r to rank s, of b bytes, by protocol p (`protocol.py`) over the wires of `cluster/topology.py`:

    t = alpha(p, wires) + b / min(thread-block rate of p, fair share of each wire, at the part of it that p carries)

The first term passes between the end of sending and the moment the receiver may read; the sender goes on meanwhile. The
second occupies the sending thread block and the wires; shares are max-min fair among all that sends at the time
(`sim/engine.py`).

**A thread block** does its instructions one after another, all of them for a tile, then all for the next. An
instruction that receives waits for its message; one that sends waits for a free slot: message n of a connection for the
end of the receive of n - slots, with the slots of the protocol, or those that the schedule was proved with where they
are more; and all wait for the steps that they come `after`. A receive that does not send on takes b / rate to copy from
the slot, and so does a local copy or reduction. A reduction of k sources at once moves k + 2 times b through memory
where a single one moves 3, and takes (k + 2) / 3 as long. A fused instruction is one pass over the data: what it sends
sets its time.

**Tiles and slices.** Chunks are run in tiles so small that the longest message of the schedule fits a slot. (MSCCL's
executor keeps the tiles long and cuts messages of several chunks instead; `export_xml.py` says what that can lead to.)
A message is passed on in the protocol's slices, none below 32 KiB, so that sending and receiving overlap within an
instruction.

**Also counted**: `launch` seconds before the first instruction; for each message through a NIC the seconds that the NIC
and its host thread are busy with it (`Machine.nic_message`).

**Approximations.** k `instances` of a schedule share its wires and run alike: one stands for all, with k times the
thread-block rate and slots k times as long. More than `Machine.most_tiles` tiles are run as that many longer ones:
alpha is paid less often, and a chain of hops overlaps less. 4 tiles instead of 16 change an all-to-all of 1 GiB on 32
devices by -1.2 % and an all-to-next on 24 by +5 %. The credit for a freed slot arrives at once. Memory bandwidth of a
device is not a limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.cluster import Cluster, Topology
from sennit.collective.protocol import Protocol
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveSpec, CustomCollective
from sennit.ir.schedule import Instruction, Schedule
from sennit.ir.timeline import Category, Event, Origin, Timeline
from sennit.sim.engine import Load, Run, Tasks, run

__all__ = ["Fold", "Machine", "block_rate", "bus_bandwidth", "chunk_bytes", "simulate_schedule", "simulate_seconds"]

SMALLEST_SLICE = 32 << 10  # of one instance: NCCL does not cut finer


@dataclass(frozen=True, slots=True)
class Machine:
    """What the cluster's description does not say. `nic_message` is assumed, not measured: see docs/collective.md.
    `launch` None takes the protocol's. `block_rate` is of Simple, None by the rule of `block_rate`."""

    nic_message: float = 1e-6
    launch: float | None = None
    block_rate: float | None = None
    most_tiles: int = 16


@dataclass(frozen=True, slots=True)
class Fold:
    """Ranks that stand for all others (`simulate_fold.py`).

    `canonical` is by rank: where a symmetry that takes it to its representative takes every rank. `wires` is by wire:
    the wire that stands for its orbit, and for how many ends of a representative's message it does.
    """

    topology: Topology
    ranks: tuple[int, ...]
    canonical: tuple[tuple[int, ...], ...]
    wires: tuple[tuple[int, int], ...]

    def connection(self, connection: tuple[int, int, int]) -> tuple[int, int, int]:
        """The same connection, with a representative as its sender."""
        sender, receiver, channel = connection
        moved = self.canonical[sender]
        return moved[sender], moved[receiver], channel


def block_rate(cluster: Cluster, protocol: Protocol, machine: Machine) -> float:
    """Bytes a second of one thread block.

    `protocol.py` has the figures of an A100; a block of another device is as much faster as its multiprocessor has more
    memory bandwidth. NCCL's own search goes the same way: it tries up to 20 GB/s a channel there, 60 on H100, 90 on
    Blackwell.
    """
    figure = protocol.transport.block_rate
    if machine.block_rate is not None:
        return machine.block_rate * figure / Protocol.SIMPLE.transport.block_rate
    return figure * (cluster.device.bandwidth.value / cluster.device.matmul.units.value) / (1555e9 / 108)


def chunk_bytes(collective: CollectiveSpec | CustomCollective, size: int) -> float:
    """Bytes of a chunk where the larger of a rank's input and output has `size` bytes, as nccl-tests counts sizes."""
    return size / max(max(collective.input_chunks(r), collective.output_chunks(r)) for r in range(collective.ranks))


def bus_bandwidth(collective: CollectiveSpec, size: int, seconds: float) -> float:
    """Bytes a second, as nccl-tests defines it: what a device's link carries in a bandwidth-optimal algorithm."""
    n = collective.ranks
    factor = {
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_to_all": (n - 1) / n,
    }
    return factor.get(collective.name.value, 1.0) * size / seconds


def simulate_schedule(
    schedule: Schedule,
    cluster: Cluster,
    size_bytes: int,
    *,
    protocol: Protocol = Protocol.SIMPLE,
    instances: int = 1,
    machine: Machine | None = None,
) -> Timeline:
    """The simulated timeline: a stream a thread block, an event an instruction and tile. Rank r runs on device r."""
    if size_bytes < 1 or instances < 1:
        raise CollectiveError(f"{size_bytes} bytes with {instances} instances", fix="use at least 1 of each")
    cluster.require(schedule.collective.ranks, f"schedule {schedule.name!r}")
    machine = machine or Machine()
    topology = Topology.of(cluster)
    built = _Build(schedule, topology, protocol, size_bytes, instances, machine).build()
    times = run(built.tasks, [wire.bandwidth for wire in topology.wires])
    if times.stuck:
        raise CollectiveError(
            f"it deadlocks with {protocol.transport.slots} slots: {len(times.stuck)} of {len(built.tasks)} parts never start",
            where=f"schedule {schedule.name!r}, protocol {protocol.value}",
            fix="use a protocol with more slots, or verify the schedule",
        )
    return Timeline(f"{schedule.name}, {protocol.value}", Origin.SIMULATED, _events(built, times))


@dataclass(frozen=True, slots=True)
class _Step:
    """One instruction of one tile: the parts of its message are tasks `first` to `last`."""

    rank: int
    stream: str
    name: str
    category: Category
    first: int
    last: int
    bytes: int


@dataclass(slots=True)
class _Built:
    tasks: Tasks
    steps: list[_Step]
    owner: list[int]  # by task, the step; -1 for an arrival, which is nobody's
    sender: list[int]  # by arrival, the task that sends


Connection = tuple[int, int, int]


class _Build:
    """Tasks of all tiles, in the order of ranks, blocks, tiles, instructions and slices; then the edges between blocks.

    With a `fold` only the representatives of the ranks are built, and each stands for all of its orbit.
    """

    def __init__(
        self,
        schedule: Schedule,
        topology: Topology,
        protocol: Protocol,
        size: int,
        instances: int,
        machine: Machine,
        fold: Fold | None = None,
    ) -> None:
        self.fold = fold
        self.topology, self.machine, self.instances = topology, machine, instances
        self.transport = transport = protocol.transport
        chunk = chunk_bytes(schedule.collective, size)
        slot = transport.slot_bytes * instances
        longest = max(
            (_count(i) for rank in schedule.ranks for block in rank.blocks for i in block.instructions), default=1
        )
        self.tiles = max(1, min(machine.most_tiles, int(-(-chunk * longest // slot))))
        self.part = chunk / self.tiles  # bytes of a chunk in a tile
        self.schedule = schedule
        self.rate = block_rate(topology.cluster, protocol, machine) * instances
        self.tasks = Tasks()
        self.steps: list[_Step] = []
        self.owner: list[int] = []
        self.sender: list[int] = []
        self.sent: dict[Connection, list[int]] = {}  # tasks, slice by slice
        self.received: dict[Connection, list[int]] = {}
        self.routes: dict[Connection, tuple[float, list[tuple[int, float, float]]]] = {}

    def build(self) -> _Built:
        start = self._task(-1, self.transport.launch if self.machine.launch is None else self.machine.launch, 0.0)
        ranks = self.schedule.ranks
        for rank in ranks if self.fold is None else [ranks[number] for number in self.fold.ranks]:
            spans: list[list[tuple[int, int]]] = []  # by block, tile * steps + step: first and last task
            for number, block in enumerate(rank.blocks):
                spans.append([])
                before = start
                for tile in range(self.tiles):
                    for instruction in block.instructions:
                        first, last = self._instruction(
                            rank.rank, number, block.send, block.receive, block.channel, instruction, tile
                        )
                        self.tasks.order(before, first)
                        before = last
                        spans[-1].append((first, last))
            for block, own in zip(rank.blocks, spans, strict=True):
                for position, (first, _) in enumerate(own):
                    tile, step = divmod(position, len(block.instructions))
                    for wait in block.instructions[step].after:
                        there = spans[wait.block][tile * len(rank.blocks[wait.block].instructions) + wait.step]
                        self.tasks.order(there[1], first)
        self._connect()
        return _Built(self.tasks, self.steps, self.owner, self.sender)

    def _task(self, owner: int, latency: float, drain: float, unit: float = 0.0, load: Load = ()) -> int:
        self.owner.append(owner)
        self.sender.append(-1)
        return self.tasks.add(latency, drain, unit, load)

    def _instruction(
        self,
        rank: int,
        block: int,
        send: int | None,
        receive: int | None,
        channel: int,
        instruction: Instruction,
        tile: int,
    ) -> tuple[int, int]:
        size = _count(instruction) * self.part
        slices = max(1, min(self.transport.slices, int(size / self.instances / SMALLEST_SLICE)))
        opcode = instruction.opcode
        first = last = -1
        for _ in range(slices):
            if opcode.sends:
                assert send is not None
                task = self._send((rank, send, channel), size / slices)
            else:
                passes = (len(instruction.further) + 3) / 3
                task = self._task(len(self.steps), 0.0, passes * size / slices / self.rate)
            if opcode.receives:
                assert receive is not None
                connection = (receive, rank, channel)
                if self.fold is not None:
                    connection = self.fold.connection(connection)
                self.received.setdefault(connection, []).append(task)
            if last >= 0:
                self.tasks.order(last, task)
            first, last = (task if first < 0 else first), task
        category = Category.SEND if opcode.sends else Category.RECEIVE if opcode.receives else Category.COMPUTE
        name = f"{opcode.value} {instruction.target or instruction.source}" + (
            f" tile {tile}" if self.tiles > 1 else ""
        )
        sent = round(size) if opcode.sends else 0
        self.steps.append(_Step(rank, f"block {block} channel {channel}", name, category, first, last, sent))
        return first, last

    def _send(self, connection: Connection, size: float) -> int:
        if connection not in self.routes:
            self.routes[connection] = self._route(connection)
        _, wires = self.routes[connection]
        amounts: dict[int, float] = {}
        for wire, factor, extra in wires:  # folded, a route may have two wires of an orbit
            amounts[wire] = amounts.get(wire, 0.0) + size * factor + extra
        load = tuple(amounts.items())
        busy = [amount / self.topology.wires[wire].bandwidth for wire, amount in load]
        task = self._task(
            len(self.steps), 0.0, max([size / self.rate, *busy]), max((amount for _, amount in load), default=0.0), load
        )
        self.sent.setdefault(connection, []).append(task)
        return task

    def _route(self, connection: Connection) -> tuple[float, list[tuple[int, float, float]]]:
        """Seconds of latency; by wire, what a byte and what a message takes of it, in bytes."""
        sender, receiver, _ = connection
        link = self.transport.link
        wires = []
        for number in self.topology.route(sender, receiver):
            wire = self.topology.wires[number]
            extra = self.machine.nic_message * wire.bandwidth * self.instances if wire.link == "nic" else 0.0
            shared, stands_for = (number, 1) if self.fold is None else self.fold.wires[number]
            wires.append((shared, stands_for / wire.speed(link).efficiency, stands_for * extra))
        return self.topology.latency(sender, receiver, link), wires

    def _connect(self) -> None:
        slots = max(self.transport.slots, self.schedule.slots)
        for connection, sent in self.sent.items():
            received = self.received.get(connection, [])
            if len(received) != len(sent):
                raise CollectiveError(
                    f"rank {connection[0]} sends what rank {connection[1]} does not receive on channel {connection[2]}",
                    where=f"schedule {self.schedule.name!r}",
                    fix="verify the schedule",
                )
            latency, _ = self.routes[connection]
            credit = slots * max(1, len(sent) // max(1, self._messages(connection)))
            for number, (task, taken) in enumerate(zip(sent, received, strict=True)):
                arrival = self._task(-1, latency, 0.0)
                self.sender[arrival] = task
                self.tasks.order(task, arrival)
                self.tasks.order(arrival, taken)
                if number >= credit:
                    self.tasks.order(received[number - credit], task)

    def _messages(self, connection: Connection) -> int:
        sender, receiver, channel = connection
        block = next(
            block
            for block in self.schedule.ranks[sender].blocks
            if block.send == receiver
            and block.channel == channel
            and any(item.opcode.sends for item in block.instructions)
        )
        return self.tiles * sum(item.opcode.sends for item in block.instructions)


def simulate_seconds(
    schedule: Schedule,
    cluster: Cluster,
    size_bytes: int,
    *,
    protocol: Protocol = Protocol.SIMPLE,
    instances: int = 1,
    machine: Machine | None = None,
    fold: Fold | None = None,
) -> float:
    """The end of `simulate_schedule`'s timeline; with a fold (`simulate_fold.py`), of one rank in place of each orbit."""
    if fold is None:
        timeline = simulate_schedule(
            schedule, cluster, size_bytes, protocol=protocol, instances=instances, machine=machine
        )
        return timeline.span
    topology = fold.topology
    build = _Build(schedule, topology, protocol, size_bytes, instances, machine or Machine(), fold).build()
    times = run(build.tasks, [wire.bandwidth for wire in topology.wires])
    if times.stuck:
        raise CollectiveError("it deadlocks", where=f"schedule {schedule.name!r}, folded", fix="verify the schedule")
    return max(times.stop)


def _count(instruction: Instruction) -> int:
    place = instruction.source or instruction.target
    assert place is not None
    return place.count


def _events(built: _Built, times: Run) -> tuple[Event, ...]:
    """By start. `after` leads to the step whose end let this one start, through the arrival of its message."""
    order = sorted(range(len(built.steps)), key=lambda s: (times.start[built.steps[s].first], built.steps[s].rank, s))
    place = {step: position for position, step in enumerate(order)}
    events = []
    for number in order:
        step = built.steps[number]
        cause = times.cause[step.first]
        if cause >= 0 and built.sender[cause] >= 0:
            cause = built.sender[cause]
        after = place[built.owner[cause]] if cause >= 0 and built.owner[cause] >= 0 else None
        events.append(
            Event(
                step.rank,
                step.stream,
                step.category,
                step.name,
                times.start[step.first],
                times.stop[step.last],
                step.bytes,
                after,
            )
        )
    return tuple(events)
