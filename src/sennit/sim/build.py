"""A program as tasks of the clock: costs, partners and, where devices run alike, one device for all of a lane.

An *actor* is a lane with the devices that it stands for. Unfolded, every device is an actor. Folded, every lane is one: its
devices run the same steps, so they run at the same times wherever the cluster treats them alike. A folded collective is the
*bundle* of what all its groups move, a folded transfer that of all pairs, and the bundle's bytes lie on the wires together.

**When folding is exact.** Every layout is even (equal costs), groups lie within their lane, and the parts of each bundle are
told apart by nothing that the clock sees: equal latency, and wires of equal sorts with equal bytes, where the sort of a wire
is the list of all bundles with the bytes that each lays on it. Equal rates then satisfy the fairness of `sim/engine.py` for
all parts, by induction over events. Where one of these fails, `build` does not fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sennit.cluster import Cluster, Topology
from sennit.cost import Transfer, collective, operator_cost, point_to_point
from sennit.errors import ProgramError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Ref
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute, Lane, Program, Receive, Send
from sennit.sim.engine import Tasks, Workers
from sennit.sim.lane import Job, LaneCode, compile_lane

__all__ = ["Actor", "Built", "build"]

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Actor:
    code: LaneCode
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Party:
    """Who takes part in a collective: the groups of an actor's devices, and all their devices in order."""

    groups: tuple[Group, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Transfers that run as one. `unit` is the most bytes that one part lays on a wire."""

    parts: tuple[Transfer, ...]
    latency: float
    drain: float
    unit: float
    load: tuple[tuple[int, float], ...]
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Built:
    """`task_of[actor][job]` is the task of a job; `members[task]` are its (actor, job) pairs, senders before receivers."""

    actors: tuple[Actor, ...]
    tasks: Tasks
    task_of: list[list[int]]
    members: list[list[tuple[int, int]]]
    wire_bytes: list[int]
    types: list[dict[str, TensorType]]


def build(program: Program, cluster: Cluster, topology: Topology, *, fold: bool) -> Built:
    blocking = cluster.host is not None and cluster.host.blocking
    # the order of lanes in a program means nothing: put them in one order
    lanes = sorted(program.lanes, key=lambda lane: (lane.devices, lane.name))
    codes = [compile_lane(lane, blocking) for lane in lanes]
    if fold:
        builder = _Builder(program, cluster, topology, [Actor(code, code.lane.devices) for code in codes])
        if builder.folds():
            return builder.build()
    single = [Actor(code, (device,)) for code in codes for device in code.lane.devices]
    return _Builder(program, cluster, topology, sorted(single, key=lambda actor: actor.devices)).build()


class _Builder:
    def __init__(self, program: Program, cluster: Cluster, topology: Topology, actors: list[Actor]) -> None:
        self.program, self.cluster, self.topology, self.actors = program, cluster, topology, actors
        self.tasks = Tasks()
        self.members: list[list[tuple[int, int]]] = []
        self.wire_bytes: list[int] = []
        self.partners: dict[object, int] = {}  # tasks that other actors may join
        self.missing: dict[int, tuple[int, ...]] = {}  # by task that still waits for some, all of its devices
        self.transfers: dict[object, Transfer] = {}
        self.bundles: dict[object, Bundle] = {}
        self.groups: dict[tuple[int, tuple[str, ...]], dict[int, Group]] = {}  # by mesh and axes, then device
        self.parties: dict[tuple[int, int, tuple[str, ...]], Party] = {}
        self.local = _Local()
        self.types = [self.local.types(actor) for actor in actors]
        self.costs: dict[tuple[int, int], list[float]] = {}
        self.seconds: dict[object, float] = {}

    # ---- folding -------------------------------------------------------------------------------------------------------

    def folds(self) -> bool:
        """Whether one device can stand for each lane; see the module's text."""
        if self.cluster.host is not None and self.cluster.nodes > 1:
            return False
        lanes = {actor.code.lane.name: actor.code.lane for actor in self.actors}
        for number, (actor, types) in enumerate(zip(self.actors, self.types, strict=True)):
            if not self.local.is_even(actor.code):
                return False
            inside = set(actor.devices)
            for job in actor.code.jobs:
                match job.step:
                    case Collective():
                        party = self._party(job.step, number)
                        if not inside.issuperset(party.devices):
                            return False
                        self._collective(job.step, party, types)
                    case Send(to=to) if to in lanes:
                        self._send(job.step, actor.code.lane, lanes[to], range(len(actor.devices)), types)
                    case _:
                        pass
        return _alike(list(self.bundles.values()))

    # ---- tasks ---------------------------------------------------------------------------------------------------------

    def build(self) -> Built:
        task_of: list[list[int]] = []
        for number, actor in enumerate(self.actors):
            counts: dict[object, int] = {}
            costs = self._costs(number)
            workers = self._workers(actor.devices)
            row: list[int] = []
            for position, job in enumerate(actor.code.jobs):
                if isinstance(job.step, Compute):
                    row.append(self._compute(number, position, costs[position], workers))
                else:
                    row.append(self._joint(number, position, job, counts))
            task_of.append(row)
        for task, partners in self.missing.items():
            number, position = self.members[task][0]
            actor = self.actors[number]
            here = {device for member, _ in self.members[task] for device in self.actors[member].devices}
            absent = ", ".join(str(device) for device in sorted(set(partners) - here))
            raise ProgramError(
                f"'{actor.code.jobs[position].name}' waits for device {absent}, which has no such step",
                where=f"program {self.program.name!r}, lane {actor.code.lane.name!r}",
                fix="give each send its receive, and each device of a group the same collectives in the same order",
            )
        order = self.tasks.order
        for actor, row in zip(self.actors, task_of, strict=True):
            for task, job in zip(row, actor.code.jobs, strict=True):
                for before in job.waits:
                    order(row[before], task)
        return Built(tuple(self.actors), self.tasks, task_of, self.members, self.wire_bytes, self.types)

    def _compute(self, number: int, position: int, seconds: float, workers: Workers) -> int:
        self.members.append([(number, position)])
        self.wire_bytes.append(0)
        return self.tasks.add(0.0, seconds, workers=workers if seconds else ())

    def _joint(self, number: int, position: int, job: Job, counts: dict[object, int]) -> int:
        """The task of a collective or a transfer: made by the first who comes, joined by the others."""
        actor, types = self.actors[number], self.types[number]
        lane = actor.code.lane
        step = job.step
        partners: tuple[int, ...] = ()
        match step:
            case Collective():
                party = self._party(step, number)
                channel: tuple[object, ...] = (party.groups, job.stream)
                partners = party.devices
                bundle: Bundle | None = self._collective(step, party, types)
            case Send(to=to):
                other = self.program.lane(to)
                places = self._places(actor)
                channel = (lane.name, to, places)
                bundle = self._send(step, lane, other, places, types)
                partners = (*actor.devices, *(other.devices[place] for place in places))
            case Receive(origin=origin):
                places = self._places(actor)
                channel = (origin, lane.name, places)
                other = self.program.lane(origin)
                partners = (*(other.devices[place] for place in places if place < len(other.devices)), *actor.devices)
                bundle = None
            case _:
                raise AssertionError(f"{step} is no joint step")
        count = counts.get(channel, 0)
        counts[channel] = count + 1
        key = (channel, count)
        task = self.partners.get(key)
        if task is None:
            task = self.partners[key] = self.tasks.add(0.0, 0.0)
            self.members.append([])
            self.wire_bytes.append(0)
        self._enter(task, number, position, step, partners)
        if bundle is not None:
            self._set(task, bundle, partners)
        return task

    def _enter(self, task: int, number: int, position: int, step: object, partners: tuple[int, ...]) -> None:
        members = self.members[task]
        if isinstance(step, Send):
            members.insert(0, (number, position))  # a sender stands before its receiver
        else:
            members.append((number, position))
        if isinstance(step, Collective):
            other = self.actors[members[0][0]].code.jobs[members[0][1]].step
            if isinstance(other, Collective) and other.kind is not step.kind:
                raise ProgramError(
                    f"devices {list(partners)} meet in {other.kind.value} and in {step.kind.value}",
                    where=f"program {self.program.name!r}, lane {self.actors[number].code.lane.name!r}",
                    fix="give every device of the group the same collectives in the same order",
                )
        if sum(len(self.actors[actor].devices) for actor, _ in members) == len(partners):
            self.missing.pop(task, None)
        else:
            self.missing[task] = partners

    def _set(self, task: int, bundle: Bundle, devices: tuple[int, ...]) -> None:
        tasks = self.tasks
        if bundle.latency + bundle.drain < tasks.latency[task] + tasks.drain[task]:
            return  # pieces are uneven: the largest decides
        tasks.latency[task], tasks.drain[task] = bundle.latency, bundle.drain
        if bundle.drain:
            tasks.unit[task], tasks.load[task] = bundle.unit, bundle.load
            if self.cluster.host is not None and self.cluster.host.transfers_use_cores:
                tasks.workers[task] = self._workers(devices)
        self.wire_bytes[task] = bundle.wire_bytes

    def _places(self, actor: Actor) -> tuple[int, ...]:
        """Which of its lane's devices an actor stands for."""
        return tuple(actor.code.lane.devices.index(device) for device in actor.devices)

    def _workers(self, devices: Sequence[int]) -> Workers:
        if self.cluster.host is None:
            return ()
        counts: dict[int, int] = {}
        for device in devices:
            node = self.cluster.node_of(device)
            counts[node] = counts.get(node, 0) + 1
        return tuple(counts.items())

    # ---- what things cost ----------------------------------------------------------------------------------------------

    def _costs(self, number: int) -> list[float]:
        """Seconds by job, 0 for what is no compute; devices with the same local types share the list."""
        actor, types = self.actors[number], self.types[number]
        key = (id(actor.code), id(types))
        if key not in self.costs:
            self.costs[key] = [
                self._seconds(job.step, job.reads, types) if isinstance(job.step, Compute) else 0.0
                for job in actor.code.jobs
            ]
        return self.costs[key]

    def _seconds(self, step: Compute, names: tuple[str, ...], types: dict[str, TensorType]) -> float:
        """Layers and micro-batches repeat: one operator on the same local types, by identity, is costed once."""
        local = tuple([id(types[name]) for name in names] + [id(types[buffer.name]) for buffer in step.results])
        constants = tuple([arg for arg in step.args if not isinstance(arg, Ref)])
        key = (step.kind, len(names), local, constants)
        if key not in self.seconds:
            self.seconds[key] = operator_cost(step, types, self.cluster.device).seconds
        return self.seconds[key]

    def _party(self, step: Collective, number: int) -> Party:
        """The groups of an actor's devices; meshes are told apart by identity, as layouts are."""
        mesh = step.result.layout.mesh
        key = (number, id(mesh), step.axes)
        if key not in self.parties:
            known = self.groups.setdefault((id(mesh), step.axes), {})
            for device in self.actors[number].devices:
                if device not in known:
                    group = mesh.group(device, step.axes)
                    known.update(dict.fromkeys(group, group))
            groups = tuple(dict.fromkeys(known[device] for device in self.actors[number].devices))
            self.parties[key] = Party(groups, tuple(sorted(device for group in groups for device in group)))
        return self.parties[key]

    def _collective(self, step: Collective, party: Party, types: dict[str, TensorType]) -> Bundle:
        is_input = step.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
        moved = types[step.source if is_input else step.result.name]
        key = (id(step.kind), id(party), id(moved))
        if key not in self.bundles:
            parts = [self._transfer(step.kind, group, moved.bytes) for group in party.groups]
            self.bundles[key] = self._bundle(parts)
        return self.bundles[key]

    def _transfer(self, kind: CollectiveKind, group: Group, size: int) -> Transfer:
        key = (kind, group, size)
        if key not in self.transfers:
            self.transfers[key] = collective(self.topology, kind, group, size)
        return self.transfers[key]

    def _send(self, step: Send, lane: Lane, other: Lane, places: Sequence[int], types: dict[str, TensorType]) -> Bundle:
        if len(lane.devices) != len(other.devices):
            raise ProgramError(
                f"lane {lane.name!r} has {len(lane.devices)} devices and sends to lane {other.name!r}, which has "
                f"{len(other.devices)}",
                where=f"program {self.program.name!r}",
                fix="give both lanes the same number of devices: the i-th sends to the i-th",
            )
        size = types[step.source].bytes
        key = (lane.name, other.name, tuple(places), size)
        if key not in self.bundles:
            pairs = [(lane.devices[place], other.devices[place]) for place in places]
            self.bundles[key] = self._bundle([point_to_point(self.topology, *pair, size) for pair in pairs])
        return self.bundles[key]

    def _bundle(self, parts: list[Transfer]) -> Bundle:
        load: dict[int, float] = {}
        for part in parts:
            for wire, size in part.load:
                load[wire] = load.get(wire, 0.0) + size
        wires = self.topology.wires
        drain = max([*(part.floor for part in parts), *(size / wires[wire].bandwidth for wire, size in load.items())])
        return Bundle(
            tuple(parts),
            max(part.latency for part in parts),
            drain,
            max((size for part in parts for _, size in part.load), default=0.0),
            tuple(sorted(load.items())),
            parts[0].wire_bytes,
        )


class _Local:
    """Local types of buffers. Many buffers share a layout, and devices of an even lane share all types.

    Layouts are told apart by identity: the program keeps them alive, and to compare them costs more than it saves.
    """

    def __init__(self) -> None:
        self.even: dict[int, bool] = {}  # by layout
        self.shared: dict[tuple[int, DType], TensorType] = {}  # by layout and element type, of even layouts
        self.tables: dict[int, dict[str, TensorType]] = {}  # by code, of even lanes

    def is_even(self, code: LaneCode) -> bool:
        return all(self._layout_is_even(buffer) for buffer in code.buffers.values())

    def types(self, actor: Actor) -> dict[str, TensorType]:
        table = self.tables.get(id(actor.code))
        if table is None:
            table = {name: self._type(buffer, actor.devices[0]) for name, buffer in actor.code.buffers.items()}
            if self.is_even(actor.code):
                self.tables[id(actor.code)] = table
        return table

    def _layout_is_even(self, buffer: Buffer) -> bool:
        key = id(buffer.layout)
        if key not in self.even:
            self.even[key] = buffer.layout.is_even
        return self.even[key]

    def _type(self, buffer: Buffer, device: int) -> TensorType:
        if not self._layout_is_even(buffer):
            return TensorType(buffer.local_shape(device), buffer.dtype)
        key = (id(buffer.layout), buffer.dtype)
        if key not in self.shared:
            self.shared[key] = TensorType(buffer.local_shape(device), buffer.dtype)
        return self.shared[key]


def _alike(bundles: list[Bundle]) -> bool:
    """Whether the parts of every bundle see the same: see the module's text."""
    laid: dict[int, list[tuple[int, float]]] = {}
    for number, bundle in enumerate(bundles):
        for wire, size in bundle.load:
            laid.setdefault(wire, []).append((number, round(size, 3)))
    sorts: dict[tuple[tuple[int, float], ...], int] = {}
    sort = {wire: sorts.setdefault(tuple(items), len(sorts)) for wire, items in laid.items()}
    for bundle in bundles:
        seen = {
            (part.latency, part.floor, tuple(sorted((round(size, 3), sort[wire]) for wire, size in part.load)))
            for part in bundle.parts
        }
        if len(seen) > 1:
            return False
    return True
