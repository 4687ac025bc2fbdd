"""A program on a cluster, timed: what runs when on which device, and what memory is live.

    program --compile_lane--> jobs --build--> tasks --run--> times --> Timeline

A device has one compute stream and the streams that `ir.program.stream_of` names. A step starts when the step before it on its
stream and the steps that make what it reads have ended; a collective when that holds on all devices of its group; a transfer
when sender and receiver are both there. Costs are those of `sennit.cost`, contention and shared cores those of `sim/engine.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

import numpy as np

from sennit.cluster import Cluster, Topology
from sennit.errors import ProgramError
from sennit.ir.program import Program
from sennit.ir.timeline import Category, Event, Memory, Origin, Timeline
from sennit.sim.build import Built, build
from sennit.sim.engine import Run, run
from sennit.sim.memory import Ledger, ledger, live_memory

__all__ = ["simulate"]


def simulate(program: Program, cluster: Cluster, name: str | None = None, *, fold: bool = True) -> Timeline:
    """The simulated timeline. `fold` lets one device stand for all of its lane where that is exact."""
    cluster.require(max(program.devices, default=-1) + 1, f"program {program.name!r}")
    with _collector_paused():
        return _simulate(program, cluster, name or program.name, fold)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Nothing here is cyclic, and the cyclic collector would walk all events so far again and again: a third of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _simulate(program: Program, cluster: Cluster, name: str, fold: bool) -> Timeline:
    topology = Topology.of(cluster)
    built = build(program, cluster, topology, fold=fold)
    cores = [cluster.host.cores.value] * cluster.nodes if cluster.host is not None else []
    times = run(built.tasks, [wire.bandwidth for wire in topology.wires], cores)
    if times.stuck:
        raise _deadlock(program, built, times)
    return Timeline(name, Origin.SIMULATED, _events(built, times), _memory(built, times))


def _deadlock(program: Program, built: Built, times: Run) -> ProgramError:
    number, position = built.members[times.stuck[0]][0]
    actor = built.actors[number]
    return ProgramError(
        f"the program deadlocks: {len(times.stuck)} of {len(built.tasks)} steps never start, "
        f"the first is '{actor.code.jobs[position].name}' on device {actor.devices[0]}",
        where=f"program {program.name!r}, lane {actor.code.lane.name!r}",
        fix="order the collectives and transfers of each stream alike on all their devices",
    )


def _memory(built: Built, times: Run) -> tuple[Memory, ...]:
    start, stop = np.array(times.start), np.array(times.stop)
    books: dict[tuple[int, int], Ledger] = {}
    samples: list[Memory] = []
    for actor, types, row in zip(built.actors, built.types, built.task_of, strict=True):
        key = (id(actor.code), id(types))  # devices of an even lane share both
        if key not in books:
            books[key] = ledger(actor.code, types)
        samples += live_memory(books[key], np.array(row, dtype=np.int64), start, stop, actor.devices)
    samples.sort(key=attrgetter("time", "device"))
    return tuple(samples)


def _events(built: Built, times: Run) -> tuple[Event, ...]:
    """In order of start, then of device. `after` is an event of the task that let this one start: on the same device
    where there is one, else on the device of the same place in its lane."""
    actors, members = built.actors, built.members
    devices = [
        tuple(device for number, _ in group for device in actors[number].devices)
        if len(group) > 1
        else actors[group[0][0]].devices
        for group in members
    ]
    order = sorted(range(len(members)), key=lambda task: (times.start[task], times.stop[task], devices[task], task))
    # a task of no length may sort before the one that it waits for: numbers are given first, events made after
    first = [0] * len(members)
    total = 0
    for task in order:
        first[task] = total
        total += len(devices[task])
    events: list[Event] = []
    start, stop, cause, wire_bytes = times.start, times.stop, times.cause, built.wire_bytes
    for task in order:
        before = cause[task]
        theirs = devices[before] if before >= 0 else ()
        index = 0
        for number, position in members[task]:
            actor = actors[number]
            job = actor.code.jobs[position]
            size = 0 if job.category is Category.RECEIVE else wire_bytes[task]
            for place, device in enumerate(actor.devices):
                after: int | None = None
                if before >= 0:
                    after = first[before] + _place(device, index, place, devices[task], theirs)
                events.append(Event(device, job.stream, job.category, job.name, start[task], stop[task], size, after))
                index += 1
    return tuple(events)


def _place(device: int, index: int, place: int, mine: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    if len(theirs) == 1:
        return 0
    if mine is theirs:
        return index
    if device in theirs:
        return theirs.index(device)
    return place % len(theirs)
