"""A program on a cluster, timed: what runs when on which device, and what memory is live.

    program --compile_lane--> jobs --build--> tasks --run--> times --> Timeline

A device has one compute stream and the streams that `ir.program.stream_of` names. A step starts when the step before it
on its stream and the steps that make what it reads have ended; a collective when that holds on all devices of its
group; a transfer when sender and receiver are both there. Costs are those of `sennit.cost`, contention and shared cores
those of `sim/engine.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.cluster import Basis, Cluster, Topology
from sennit.cost import CollectiveTimes
from sennit.errors import ProgramError
from sennit.ir.event import Category
from sennit.ir.event_rows import EventRows, Label, MemoryRows, MemoryTrack
from sennit.ir.program import Compute, Program
from sennit.ir.timeline import Origin, Timeline
from sennit.sim.build import Built, build
from sennit.sim.engine import Run, run
from sennit.sim.local import OperatorTimes
from sennit.sim.memory import Ledger, ledger, live_memory, reserved_memory
from sennit.sim.optimizer import Optimizer
from sennit.sim.steady import Steady, steady_of, unrolled
from sennit.sim.what_if import WhatIf, faults_of, machines_of

__all__ = ["CostLine", "Simulation", "simulate", "simulate_fully"]


@dataclass(frozen=True, slots=True)
class CostLine:
    """Compute seconds of one device whose costs rest on the same: how many steps, and which operators."""

    basis: Basis
    source: str
    seconds: float
    steps: int
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """`costs` are by lane, of its first device; `folded` says whether one device stood for all of its lane.

    `reserved`, where it was asked for, is what a GPU's caching allocator takes for the step, by lane: the most of its
    devices.
    """

    timeline: Timeline
    costs: tuple[tuple[str, tuple[CostLine, ...]], ...]
    steady: Steady | None
    folded: bool
    reserved: tuple[tuple[str, int], ...] = ()


def simulate(program: Program, cluster: Cluster, name: str | None = None, *, fold: bool = True) -> Timeline:
    """The simulated timeline. `fold` lets one device stand for all of its lane where that is exact."""
    return simulate_fully(program, cluster, name, fold=fold).timeline


def simulate_fully(
    program: Program,
    cluster: Cluster,
    name: str | None = None,
    *,
    fold: bool = True,
    what_if: Sequence[WhatIf] = (),
    optimizer: Optimizer | None = None,
    collectives: CollectiveTimes | None = None,
    iterations: int = 1,
    reserved: bool = False,
    operators: OperatorTimes | None = None,
) -> Simulation:
    """The timeline of a step with what its costs rest on; of several `iterations`, how long a further one takes.

    `what_if` changes devices and links, `optimizer` adds its step and state, `collectives` gives the times of
    collectives that run by schedules of their own. With `reserved`, memory is also played to a GPU's caching allocator.
    `operators` gives times that go before those of the cluster's devices (`cost/measured_torch.py`).
    """
    cluster.require(max(program.devices, default=-1) + 1, f"program {program.name!r}")
    topology = Topology.of(cluster, faults_of(what_if))
    with _collector_paused():
        machines = machines_of(cluster, what_if)
        built = build(
            program,
            cluster,
            topology,
            fold=fold,
            machines=machines,
            collectives=collectives,
            optimizer=optimizer,
            operators=operators,
        )
        bandwidth = [wire.bandwidth for wire in topology.wires]
        cores = [cluster.host.cores.value] * cluster.nodes if cluster.host is not None else []
        burst = {number: wire.burst for number, wire in enumerate(topology.wires) if wire.burst}
        times = run(built.tasks, bandwidth, cores, burst)
        if times.stuck:
            raise _deadlock(program, built, times)
        steady = None
        if iterations > 1:
            steady = steady_of(
                run(unrolled(built, iterations), bandwidth, cores, burst).stop, iterations, max(times.stop, default=0.0)
            )
        memory, taken = _memory(built, times, optimizer, reserved)
        timeline = Timeline(name or program.name, Origin.SIMULATED, _events(built, times), memory)
        folded = any(len(actor.devices) > 1 for actor in built.actors)
        return Simulation(timeline, _costs(built), steady, folded, taken)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Nothing here is cyclic, and the cyclic collector would walk all events so far again and again: a third of the
    time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _costs(built: Built) -> tuple[tuple[str, tuple[CostLine, ...]], ...]:
    found: dict[str, tuple[CostLine, ...]] = {}
    for actor, types in zip(built.actors, built.types, strict=True):
        if actor.code.lane.name in found:
            continue
        spent: dict[tuple[Basis, str], tuple[float, int, dict[str, None]]] = {}
        costs = built.costs.costs(actor.code, types, built.machines[actor.devices[0]])
        for position, cost in zip(actor.code.computes, costs, strict=True):
            step = actor.code.jobs[position].step
            assert isinstance(step, Compute)
            seconds, steps, kinds = spent.get((cost.basis, cost.model), (0.0, 0, {}))
            spent[cost.basis, cost.model] = (seconds + cost.seconds, steps + 1, {**kinds, step.kind: None})
        lines = [CostLine(*key, seconds, steps, tuple(kinds)) for key, (seconds, steps, kinds) in spent.items()]
        found[actor.code.lane.name] = tuple(sorted(lines, key=lambda line: -line.seconds))
    return tuple(found.items())


def _deadlock(program: Program, built: Built, times: Run) -> ProgramError:
    number, position = built.member(times.stuck[0])
    actor = built.actors[number]
    return ProgramError(
        f"the program deadlocks: {len(times.stuck)} of {len(built.tasks)} steps never start, "
        f"the first is '{actor.code.jobs[position].name}' on device {actor.devices[0]}",
        where=f"program {program.name!r}, lane {actor.code.lane.name!r}",
        fix="order the collectives and transfers of each stream alike on all their devices",
    )


def _memory(
    built: Built, times: Run, optimizer: Optimizer | None, reserved: bool
) -> tuple[MemoryRows, tuple[tuple[str, int], ...]]:
    """What is live on the devices, and what is reserved for it."""
    start, stop = np.array(times.start), np.array(times.stop)
    books: dict[tuple[int, int, int], Ledger] = {}
    tracks: list[MemoryTrack] = []
    most: dict[str, int] = {}
    for actor, types, row in zip(built.actors, built.types, built.task_of, strict=True):
        machine = built.machines[actor.devices[0]]
        key = (id(actor.code), id(types), id(machine))  # devices of an even lane share the first two
        if key not in books:
            books[key] = ledger(actor.code, types, machine.device, optimizer)
        tracks.append(live_memory(books[key], row, start, stop, actor.devices))
        if reserved and machine.device.allocation is not None:
            lane = actor.code.lane.name
            most[lane] = max(most.get(lane, 0), reserved_memory(books[key], row, start, stop))
    return MemoryRows(tuple(tracks)), tuple(most.items())


def _events(built: Built, times: Run) -> EventRows:
    """A row for each job of each actor; tasks in order of start, then of stop, then of device, then as they were
    issued.

    Actors are in order of their devices.
    """
    actors = built.actors
    labels: dict[Label, int] = {}
    label_of: dict[int, NDArray[np.int64]] = {}  # by code, then job
    receives: dict[int, NDArray[np.bool_]] = {}
    columns: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]
    columns = []
    for number, (actor, row) in enumerate(zip(actors, built.task_of, strict=True)):
        key = id(actor.code)
        if key not in label_of:
            jobs = actor.code.jobs
            numbers = [labels.setdefault((job.stream, job.category, job.name), len(labels)) for job in jobs]
            label_of[key] = np.array(numbers, dtype=np.int64)
            receives[key] = np.array([job.category is Category.RECEIVE for job in jobs], dtype=np.bool_)
        whose = np.full(len(row), number, dtype=np.int64)
        columns.append((row, whose, np.arange(len(row), dtype=np.int64), label_of[key], receives[key]))
    task, actor_of, job, label, receive = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    start, stop, cause = np.array(times.start), np.array(times.stop), np.array(times.cause, dtype=np.int64)
    size = np.zeros(len(start), dtype=np.int64)
    size[list(built.wire_bytes)] = list(built.wire_bytes.values())
    # a task goes by its first member: a sender, or who comes first
    count = len(start)
    rank = np.lexsort((job, actor_of, receive))
    member = np.empty(count, dtype=np.int64)
    member[task[rank][::-1]] = rank[::-1]
    ranks = np.lexsort((job[member], actor_of[member], stop, start))
    place = np.empty(count, dtype=np.int64)
    place[ranks] = np.arange(count)
    order = np.lexsort((job, actor_of, receive, place[task]))
    task, size = task[order], np.where(receive[order], 0, size[task[order]])
    before = cause[task]
    cause_place = np.where(before >= 0, place[before], -1)
    return EventRows.of(
        (start[task], stop[task], label[order], size, actor_of[order], place[task], cause_place),
        tuple(labels),
        tuple(actor.devices for actor in actors),
    )
