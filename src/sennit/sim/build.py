"""A program as tasks of the clock: costs, partners and, where devices run alike, one device for all of a lane.

An *actor* is a lane with the devices that it stands for. Unfolded, every device is an actor. Folded, the devices of a
lane that are of one sort are one (all of them, where no node is slower than others): they run the same steps, so they
run at the same times wherever the cluster treats them alike. A folded collective is the *bundle* of what all its groups
move, a folded transfer that of all pairs (`sim/transfers.py`).

**When folding is exact.** Every layout is even and the devices of an actor are of one sort (equal costs); the groups of
its collectives, and the parts of its exchanges, each meet the same actors: all of each, together; its transfers go to
one actor; and the parts of each bundle are alike. Equal rates then satisfy the fairness of `sim/sharing.py` for all
parts, by induction over events. Where one of these fails because some nodes have other links, devices that are alike
(`sim/likeness.py`) are tried as actors; where that fails too, `build` does not fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from sennit.cluster import Cluster, Topology
from sennit.cost import CollectiveTimes
from sennit.errors import ProgramError
from sennit.ir.program import Collective, CollectiveKind, Exchange, Program, Receive, Send
from sennit.sim.engine import Tasks, Workers
from sennit.sim.exchanges import Exchanges
from sennit.sim.lane import Job, LaneCode, compile_lane
from sennit.sim.likeness import alike_devices, different_nodes
from sennit.sim.local import LocalTypes, Machine, OperatorTimes, StepCosts, Types
from sennit.sim.optimizer import Optimizer
from sennit.sim.transfers import Bundle, Party, Transfers, alike
from sennit.sim.turns import Turn
from sennit.sim.what_if import machines_of

__all__ = ["Actor", "Built", "build"]


@dataclass(frozen=True, slots=True, eq=False)
class Actor:
    code: LaneCode
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """`task_of[actor][job]` is the task of a job.

    A task's members are (actor, job) pairs, a sender before its receiver: `joint` has those of collectives and
    transfers, any other task is the one job that `task_of` has it for.
    """

    actors: tuple[Actor, ...]
    tasks: Tasks
    task_of: list[NDArray[np.int64]]
    joint: dict[int, list[tuple[int, int]]]
    wire_bytes: dict[int, int]
    types: list[Types]
    costs: StepCosts
    machines: Sequence[Machine]

    def member(self, task: int) -> tuple[int, int]:
        """One of the (actor, job) pairs of a task."""
        if task in self.joint:
            return self.joint[task][0]
        for number, row in enumerate(self.task_of):
            found = np.flatnonzero(row == task)
            if len(found):
                return number, int(found[0])
        raise AssertionError(f"task {task} belongs to no actor")


def build(
    program: Program,
    cluster: Cluster,
    topology: Topology,
    *,
    fold: bool,
    machines: Sequence[Machine] | None = None,
    collectives: CollectiveTimes | None = None,
    optimizer: Optimizer | None = None,
    operators: OperatorTimes | None = None,
) -> Built:
    """`machines` is by device of the cluster; without it all are as described.

    `collectives` overrules the closed forms, `operators` the costs of compute, `optimizer` puts its step behind the
    others.
    """
    blocking = cluster.host is not None and cluster.host.blocking
    # the order of lanes in a program means nothing: put them in one order
    lanes = sorted(program.lanes, key=lambda lane: (lane.devices, lane.name))
    exchanges = Exchanges(program)
    channels = {label: meeting.channel for label, meeting in exchanges.meetings.items()}
    last = optimizer.name if optimizer is not None else None
    codes = [compile_lane(lane, blocking, last, channels) for lane in lanes]
    sorts = machines if machines is not None else machines_of(cluster, ())
    transfers = Transfers(topology, collectives)
    if fold:
        actors = [actor for code in codes for actor in _by_sort(code, sorts)]
        actors.sort(key=lambda actor: (actor.devices, actor.code.lane.name))
        builder = _Builder(program, cluster, transfers, exchanges, StepCosts(optimizer, operators), sorts, actors)
        if builder.folds():
            return builder.build()
        if different_nodes(topology):
            actors = _by_colour(codes, alike_devices(program, codes, topology, sorts, exchanges))
            builder = _Builder(program, cluster, transfers, exchanges, StepCosts(optimizer, operators), sorts, actors)
            if builder.folds():
                return builder.build()
    single = [Actor(code, (device,)) for code in codes for device in code.lane.devices]
    single.sort(key=lambda actor: actor.devices)
    return _Builder(program, cluster, transfers, exchanges, StepCosts(optimizer, operators), sorts, single).build()


def _by_sort(code: LaneCode, machines: Sequence[Machine]) -> list[Actor]:
    """An actor for each sort of device in a lane."""
    sorts: dict[int, list[int]] = {}
    for device in code.lane.devices:
        sorts.setdefault(id(machines[device]), []).append(device)
    if len(sorts) == 1:
        return [Actor(code, code.lane.devices)]
    return [Actor(code, tuple(devices)) for devices in sorts.values()]


def _by_colour(codes: Sequence[LaneCode], colours: dict[int, int]) -> list[Actor]:
    """An actor for the devices of a lane that have one colour."""
    found: list[Actor] = []
    for code in codes:
        alike_ones: dict[int, list[int]] = {}
        for device in code.lane.devices:
            alike_ones.setdefault(colours[device], []).append(device)
        found += [Actor(code, tuple(devices)) for devices in alike_ones.values()]
    return sorted(found, key=lambda actor: (actor.devices, actor.code.lane.name))


class _Builder:
    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        transfers: Transfers,
        exchanges: Exchanges,
        costs: StepCosts,
        machines: Sequence[Machine],
        actors: list[Actor],
    ) -> None:
        self.program, self.cluster, self.transfers, self.actors = program, cluster, transfers, actors
        self.exchanges, self.machines = exchanges, machines
        self.tasks = Tasks()
        self.joint: dict[int, list[tuple[int, int]]] = {}
        self.wire_bytes: dict[int, int] = {}
        self.partners: dict[object, int] = {}  # tasks that other actors may join
        self.lacking: dict[int, int] = {}  # by joint task, the devices that have not come yet
        self.everyone: dict[int, tuple[int, ...]] = {}  # by joint task
        self.place_of: dict[str, dict[int, int]] = {}  # by lane, then device
        self.places: dict[int, tuple[int, ...]] = {}  # by actor
        self.local = LocalTypes()
        self.costs = costs
        self.types = [self.local.of(actor.code, actor.devices[0]) for actor in actors]
        self.lanes = {actor.code.lane.name: actor.code.lane for actor in actors}
        host = cluster.host
        self.transfer_workers = self._transfer_workers if host is not None and host.transfers_use_cores else _nobody
        self.take_turns = host is not None and host.take_turns

    # ---- folding -----------------------------------------------------------------------------------------------------

    def folds(self) -> bool:
        """Whether one device can stand for each lane; see the module's text."""
        if self.cluster.host is not None and self.cluster.nodes > 1:
            return False
        bundles: dict[int, Bundle] = {}
        places = {(actor.code.lane.name, self._places(actor)) for actor in self.actors}
        checked: set[tuple[int, int]] = set()
        for number, (actor, types) in enumerate(zip(self.actors, self.types, strict=True)):
            if not self.local.is_even(actor.code):
                return False
            for position in actor.code.joints:
                step = actor.code.jobs[position].step
                if isinstance(step, Collective):
                    party = self.transfers.party(step.result.layout.mesh, step.axes, actor.devices)
                    if (number, id(party)) not in checked and not self._whole(party.groups):
                        return False
                    checked.add((number, id(party)))
                    bundle = self._collective(step, party, types)
                    bundles[id(bundle)] = bundle
                elif isinstance(step, Exchange):
                    parts = self.exchanges.parts(step.label, actor.devices)
                    if not self._whole([part.devices for part in parts], ordered=False):
                        return False
                    bundle = self.transfers.exchange(parts)
                    bundles[id(bundle)] = bundle
                elif isinstance(step, Send) and step.to in self.lanes:
                    if (step.to, self._places(actor)) not in places:
                        return False
                    bundle = self._send(step, actor, types)
                    bundles[id(bundle)] = bundle
        return alike(list(bundles.values()), self.transfers.topology.wires)

    def _whole(self, groups: Sequence[tuple[int, ...]], ordered: bool = True) -> bool:
        """Whether groups are made of whole actors, and each has as many devices of each, in the same places if
        `ordered`.
        """
        present = {device for group in groups for device in group}
        members = [other for other in self.actors if not present.isdisjoint(other.devices)]
        if sum(len(other.devices) for other in members) != len(present):
            return False
        if len(members) == 1:
            return ordered or len({len(group) for group in groups}) == 1
        owner = {device: number for number, other in enumerate(members) for device in other.devices}
        shapes = [[owner[device] for device in group] for group in groups]
        return len({tuple(shape if ordered else sorted(shape)) for shape in shapes}) == 1

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def build(self) -> Built:
        task_of: list[NDArray[np.int64]] = []
        for number, (actor, types) in enumerate(zip(self.actors, self.types, strict=True)):
            code = actor.code
            seconds = self.costs.of(code, types, self.machines[actor.devices[0]])
            first = self.tasks.add_computes(seconds, self._workers(actor.devices))
            row = np.empty(len(code.jobs), dtype=np.int64)
            row[code.compute_array] = np.arange(first, first + len(seconds))
            counts: dict[object, int] = {}
            for position in code.joints:
                row[position] = self._joint(number, position, code.jobs[position], counts)
            task_of.append(row)
        self._check_partners()
        for actor, row in zip(self.actors, task_of, strict=True):
            self.tasks.before += row[actor.code.waits_before].tolist()
            self.tasks.after += row[actor.code.waits_after].tolist()
        if self.take_turns:
            self._set_turns(task_of)
        return Built(
            tuple(self.actors),
            self.tasks,
            task_of,
            self.joint,
            self.wire_bytes,
            self.types,
            self.costs,
            self.machines,
        )

    def _set_turns(self, task_of: list[NDArray[np.int64]]) -> None:
        """Of the transfers between ranks: which can hold each other up."""
        connections: dict[tuple[int, int], int] = {}
        for task, members in self.joint.items():
            (sender, sent), (receiver, received) = members[0], members[-1]
            code = self.actors[receiver].code
            step = code.jobs[received].step
            pair = len(members) == 2 and isinstance(step, Exchange) and step.source is None  # an exchange of two ranks
            if not (pair or isinstance(step, Receive)) or not self.tasks.load[task]:
                continue
            ends = (min(sender, receiver), max(sender, receiver))
            self.tasks.turns[task] = Turn(
                connections.setdefault(ends, len(connections)),
                sender < receiver,
                tuple(task_of[receiver][list(code.jobs[received].waits)].tolist()),
                sent,
                received,
            )

    def _check_partners(self) -> None:
        for task in self.lacking:
            number, position = self.joint[task][0]
            actor = self.actors[number]
            here = {device for member, _ in self.joint[task] for device in self.actors[member].devices}
            absent = ", ".join(str(device) for device in sorted(set(self.everyone[task]) - here))
            raise ProgramError(
                f"'{actor.code.jobs[position].name}' waits for device {absent}, which has no such step",
                where=f"program {self.program.name!r}, lane {actor.code.lane.name!r}",
                fix="give each send its receive, and each device of a group the same collectives in the same order",
            )

    def _joint(self, number: int, position: int, job: Job, counts: dict[object, int]) -> int:
        """The task of a collective or a transfer: made by the first who comes, joined by the others."""
        actor = self.actors[number]
        lane = actor.code.lane
        step = job.step
        bundle: Bundle | None = None
        channel: tuple[object, ...]
        match step:
            case Collective():
                party = self.transfers.party(step.result.layout.mesh, step.axes, actor.devices)
                channel, everyone = (id(party), job.stream), party.devices
                bundle = self._collective(step, party, self.types[number])
            case Exchange(label=label):
                parts = self.exchanges.parts(label, actor.devices)
                channel = ("exchange", label, parts[0].devices)
                everyone = tuple([device for part in parts for device in part.devices])
                bundle = self.transfers.exchange(parts)
            case Send(to=to):
                bundle = self._send(step, actor, self.types[number])
                places = self._places(actor)
                channel = (lane.name, to, places)
                everyone = (*actor.devices, *(self.lanes[to].devices[place] for place in places))
            case Receive(origin=origin):
                places = self._places(actor)
                channel = (origin, lane.name, places)
                other = self.program.lane(origin).devices
                everyone = (*(other[place] for place in places if place < len(other)), *actor.devices)
            case _:
                raise AssertionError(f"{step} is no joint step")
        count = counts.get(channel, 0)
        counts[channel] = count + 1
        task = self.partners.get((channel, count))
        if task is None:
            task = self.partners[channel, count] = self.tasks.add(0.0, 0.0)
            self.joint[task], self.wire_bytes[task] = [], 0
            self.lacking[task], self.everyone[task] = len(everyone), everyone
        self._enter(task, number, position, step)
        if bundle is not None:
            self._set(task, bundle, everyone)
        return task

    def _enter(self, task: int, number: int, position: int, step: object) -> None:
        members = self.joint[task]
        if isinstance(step, Send) or (isinstance(step, Exchange) and step.result is None):
            members.insert(0, (number, position))  # a sender stands before its receiver
        else:
            members.append((number, position))
        if isinstance(step, Collective) and len(members) > 1:
            other = self.actors[members[0][0]].code.jobs[members[0][1]].step
            if isinstance(other, Collective) and other.kind is not step.kind:
                raise ProgramError(
                    f"devices {list(self.everyone[task])} meet in {other.kind.value} and in {step.kind.value}",
                    where=f"program {self.program.name!r}, lane {self.actors[number].code.lane.name!r}",
                    fix="give every device of the group the same collectives in the same order",
                )
        left = self.lacking[task] - len(self.actors[number].devices)
        if left:
            self.lacking[task] = left
        else:
            del self.lacking[task]

    def _set(self, task: int, bundle: Bundle, devices: tuple[int, ...]) -> None:
        tasks = self.tasks
        if bundle.latency + bundle.drain < tasks.latency[task] + tasks.drain[task]:
            return  # pieces are uneven: the largest decides
        tasks.latency[task], tasks.drain[task] = bundle.latency, bundle.drain
        if bundle.drain:
            tasks.unit[task], tasks.load[task] = bundle.unit, bundle.load
            tasks.workers[task] = self.transfer_workers(devices)
        self.wire_bytes[task] = bundle.wire_bytes

    def _places(self, actor: Actor) -> tuple[int, ...]:
        """Which of its lane's devices an actor stands for."""
        if id(actor) not in self.places:
            lane = actor.code.lane
            if lane.name not in self.place_of:
                self.place_of[lane.name] = {device: place for place, device in enumerate(lane.devices)}
            self.places[id(actor)] = tuple([self.place_of[lane.name][device] for device in actor.devices])
        return self.places[id(actor)]

    def _workers(self, devices: Sequence[int]) -> Workers:
        if self.cluster.host is None:
            return ()
        counts: dict[int, int] = {}
        for device in devices:
            node = self.cluster.node_of(device)
            counts[node] = counts.get(node, 0) + 1
        return tuple(counts.items())

    def _transfer_workers(self, devices: Sequence[int]) -> Workers:
        """What a transfer keeps busy, in parts of a core that add up exactly."""
        assert self.cluster.host is not None
        figure = self.cluster.host.transfer_cores
        part = ceil(min(1.0, figure.value) * 1024) / 1024 if figure is not None else 1
        return tuple([(node, number * part) for node, number in self._workers(devices)])

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def _collective(self, step: Collective, party: Party, types: Types) -> Bundle:
        is_input = step.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
        return self.transfers.collective(step.kind, party, types[step.source if is_input else step.result.name])

    def _send(self, step: Send, actor: Actor, types: Types) -> Bundle:
        lane, other = actor.code.lane, self.program.lane(step.to)
        if len(lane.devices) != len(other.devices):
            raise ProgramError(
                f"lane {lane.name!r} has {len(lane.devices)} devices and sends to lane {other.name!r}, which has "
                f"{len(other.devices)}",
                where=f"program {self.program.name!r}",
                fix="give both lanes the same number of devices: the i-th sends to the i-th",
            )
        pairs = tuple([(lane.devices[place], other.devices[place]) for place in self._places(actor)])
        return self.transfers.pairs(pairs, types[step.source].bytes)


def _nobody(devices: Sequence[int]) -> Workers:
    return ()
