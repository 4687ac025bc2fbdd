"""Modulo scheduling: one micro-batch's tasks, repeated at a fixed interval, under memory caps.

Every micro-batch runs the same tasks. Give each task t an offset s(t), and start it for micro-batch m at

    s(t) + m * I            I: the interval, seconds from one micro-batch to the next

- **dependencies**: s(t) >= s(u) + d(u) + transfer(u, t) for u in needs(t) (`plan/grid.py`);
- **lanes**: on each lane the intervals [s(t), s(t) + d(t)) are disjoint modulo I;
- **memory**: on each lane, at each time, the micro-batches in flight hold no more than its cap.

After warm-up a lane is idle for I - (its work) of every interval. No interval is below

    resource bound   max over lanes of the work of one micro-batch
    memory bound     max over lanes of  sum over stages of held * life / cap

where life is the longest path from the start of F to the task that lets go: by Little's law a lane holds held * life /
I on average. So an interval equal to the bound has no bubble in the steady state, or none that the cap allows to
remove.

`schedule` tries intervals from the bound upward. List scheduling places tasks in the order of the data, each at the
first free place; F as early as it can, or as late as its readers allow, which holds less. Where `ortools` is installed
(the extra `search`), CP-SAT searches the same model where lists end above the bound (`plan/modulo_cpsat.py`).
`Modulo.pattern` unrolls to M micro-batches, with warm-up and cool-down: tasks of a lane in the order of their starts,
which no one can deadlock on.

Any set of stages: several on one lane, one on all lanes, stages without backward, unequal times. Rau, "Iterative modulo
scheduling" (1994), has the classical form; pipelines of stages as a modulo schedule: the SuperScaler paper's section on
schedules.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil, inf

from sennit.errors import PlanError
from sennit.plan.grid import Durations, Edges, Held
from sennit.plan.pattern import Pattern, Task, Work

__all__ = ["Modulo", "Problem", "fits", "schedule"]

_TIGHT = 1e-9  # relative: rounding of sums of seconds
_log = logging.getLogger(__name__)
Key = tuple[Work, int]  # a task of one micro-batch: its work and stage


@dataclass(frozen=True, slots=True)
class Problem:
    """Stages in the order of the data.

    `lanes[s]` are the lanes of stage s; `trained[s]` says whether it has a backward; `split` schedules W apart from B;
    `caps` are by lane, in the unit of `held`.
    """

    lanes: tuple[tuple[int, ...], ...]
    durations: tuple[Durations, ...]
    edges: Edges
    trained: tuple[bool, ...]
    held: tuple[Held, ...]
    caps: tuple[float, ...]
    split: bool = False
    transfer: float = 0.0

    def __post_init__(self) -> None:
        counts = {len(self.lanes), len(self.durations), len(self.trained), len(self.held)}
        if len(counts) > 1 or any(lane >= len(self.caps) for lanes in self.lanes for lane in lanes):
            raise PlanError(
                f"{len(self.lanes)} stages with {len(self.durations)} durations, {len(self.trained)} marks, {len(self.held)} "
                f"memories, on {len(self.caps)} lanes",
                fix="give each stage its lanes, durations, mark and memory, and each lane its cap",
            )
        for lane, cap in enumerate(self.caps):
            one = sum(self.held[stage].activations for stage in self.on(lane) if self.trained[stage])
            if one > cap * (1 + _TIGHT):
                raise PlanError(
                    f"one micro-batch holds {one:g} on lane {lane}, and its cap is {cap:g}",
                    fix="raise the cap, cut smaller micro-batches, or recompute activations",
                )

    def on(self, lane: int) -> tuple[int, ...]:
        """The stages of a lane."""
        return tuple(stage for stage, lanes in enumerate(self.lanes) if lane in lanes)

    def tasks(self) -> tuple[Key, ...]:
        """The tasks, each behind what it needs."""
        stages = range(len(self.lanes))
        forward = [(Work.FORWARD, stage) for stage in stages]
        backward = [(Work.BACKWARD, stage) for stage in reversed(stages) if self.trained[stage]]
        weights = [(Work.WEIGHTS, stage) for _, stage in backward] if self.split else []
        return (*forward, *backward, *weights)

    def seconds(self, key: Key) -> float:
        return self.durations[key[1]].of(key[0], split=self.split)

    def needs(self) -> Mapping[Key, tuple[tuple[Key, float], ...]]:
        """What each task waits for, and the seconds of the way."""
        found: dict[Key, list[tuple[Key, float]]] = {key: [] for key in self.tasks()}
        for giver, reader in self.edges:
            found[Work.FORWARD, reader].append(((Work.FORWARD, giver), self.transfer))
            if self.trained[giver] and self.trained[reader]:
                found[Work.BACKWARD, giver].append(((Work.BACKWARD, reader), self.transfer))
        for work, stage in found:
            if work is Work.BACKWARD:
                found[work, stage].append(((Work.FORWARD, stage), 0.0))
            elif work is Work.WEIGHTS:
                found[work, stage].append(((Work.BACKWARD, stage), 0.0))
        return {key: tuple(items) for key, items in found.items()}

    def resource_bound(self) -> float:
        work = [0.0] * len(self.caps)
        for key in self.tasks():
            for lane in self.lanes[key[1]]:
                work[lane] += self.seconds(key)
        return max(work)

    def memory_bound(self) -> float:
        needs, bound = self.needs(), 0.0
        life = {stage: self._life(stage, needs) for stage, trained in enumerate(self.trained) if trained}
        for lane, cap in enumerate(self.caps):
            held = sum(_mean_held(self, stage, life[stage]) for stage in self.on(lane) if self.trained[stage])
            bound = max(bound, held / cap)
        return bound

    @property
    def bound(self) -> float:
        return max(self.resource_bound(), self.memory_bound())

    def _life(self, stage: int, needs: Mapping[Key, tuple[tuple[Key, float], ...]]) -> float:
        """The longest path from the start of F to the stop of B."""
        begin = (Work.FORWARD, stage)
        stop: dict[Key, float] = {begin: self.seconds(begin)}
        for key in self.tasks():
            ends = [stop[other] + way for other, way in needs[key] if other in stop]
            if key != begin and ends:
                stop[key] = max(ends) + self.seconds(key)
        return stop[Work.BACKWARD, stage]


def _mean_held(problem: Problem, stage: int, life: float) -> float:
    held, weights = problem.held[stage], problem.durations[stage].weights
    return held.activations * life + (held.for_weights * weights if problem.split else 0.0)


@dataclass(frozen=True, slots=True)
class Modulo:
    """A modulo schedule: `offsets` of the tasks of micro-batch 0, in the order of `Problem.tasks`."""

    problem: Problem
    interval: float
    offsets: tuple[float, ...]
    solver: str

    @property
    def gap(self) -> float:
        """How far the interval is above the bound, relative."""
        return self.interval / self.problem.bound - 1.0

    @property
    def bubble(self) -> float:
        """The idle part of an interval on the busiest lane."""
        return 1.0 - self.problem.resource_bound() / self.interval

    def pattern(self, microbatches: int) -> Pattern:
        """Unrolled: each lane's tasks in the order of their starts; of two at one time, the one that is first in the
        data.
        """
        rows: list[tuple[Task, ...]] = []
        keys = self.problem.tasks()
        for lane in range(len(self.problem.caps)):
            tasks = [
                (offset + number * self.interval, order, Task(key[0], number, key[1]))
                for order, (key, offset) in enumerate(zip(keys, self.offsets, strict=True))
                if lane in self.problem.lanes[key[1]]
                for number in range(microbatches)
            ]
            rows.append(tuple(task for *_, task in sorted(tasks, key=lambda item: item[:2])))
        return Pattern(tuple(rows))


def schedule(problem: Problem, *, seconds: float = 2.0, solver: bool | None = None) -> Modulo:
    """The schedule with the least interval found.

    `solver` says whether CP-SAT may be used: None where it is installed; `seconds` is its time limit for one interval.
    """
    bound = problem.bound
    best = _by_lists(problem, bound)
    if best.interval <= bound * (1 + 1e-6) or solver is False:
        return best
    if find_spec("ortools") is None:
        if solver:
            raise PlanError("CP-SAT is not installed", fix="pip install 'sennit[search]', or pass solver=None")
        _log.info("lists end %.1f %% above the bound; with ortools installed, CP-SAT would go on", 100 * best.gap)
        return best
    from sennit.plan.modulo_cpsat import improve

    return improve(best, seconds)


def _by_lists(problem: Problem, bound: float) -> Modulo:
    """The first interval of a rising sequence at which a list works.

    With one interval for the whole micro-batch one always does: nothing overlaps then.
    """
    serial = max(
        bound, sum(problem.seconds(key) for key in problem.tasks()) + 2 * len(problem.edges) * problem.transfer
    )
    interval = bound
    while True:
        found: list[tuple[float, Modulo]] = []
        for packed in (False, True):
            for late in (False, True):
                offsets = _place(problem, interval, packed, late)
                if offsets is not None and fits(problem, interval, offsets):
                    modulo = Modulo(problem, interval, tuple(offsets.values()), "lists")
                    found.append((max(offsets.values()), modulo))
        if found:
            return min(found, key=lambda item: item[0])[1]
        if interval >= serial:
            raise PlanError(
                f"no schedule found up to an interval of {interval:g} s",
                where=f"{len(problem.lanes)} stages with caps {list(problem.caps)}",
                fix="raise the caps",
            )
        interval = min(interval * 1.01, serial)


def _place(problem: Problem, interval: float, packed: bool, late: bool) -> dict[Key, float] | None:
    """Offsets in the order of the data, each at the first place that is free on all its lanes; None where one has no
    place.

    With `packed`, the free time of a lane stays one piece, so that everything always fits: what several lanes share is
    laid side by side first, and the rest at an end of what is free, at the one that comes sooner. With `late`, F of
    earlier stages is moved as late as what reads it allows.
    """
    needs = problem.needs()
    tables = [_Circle(interval) for _ in problem.caps]
    arcs = [_Arc(interval) for _ in problem.caps]
    shared = _share(problem, tables, arcs) if packed else {}
    offsets: dict[Key, float] = {}
    for key in problem.tasks():
        ready = max((offsets[other] + problem.seconds(other) + way for other, way in needs[key]), default=0.0)
        circles, seconds = [tables[lane] for lane in problem.lanes[key[1]]], problem.seconds(key)
        if key in shared:
            offsets[key] = ready + _turn(shared[key] - ready, interval)
            continue
        found = (
            arcs[problem.lanes[key[1]][0]].extend(ready, seconds) if packed else _first_free(circles, ready, seconds)
        )
        if found is None:
            return None
        offsets[key] = found
        for circle in circles:
            circle.take(found, seconds)
    return _later(problem, tables, offsets, needs) if late else offsets


def _share(problem: Problem, tables: list[_Circle], arcs: list[_Arc]) -> dict[Key, float]:
    """Places on the circle for the tasks of stages on several lanes, one behind the other, the same on all lanes."""
    places: dict[Key, float] = {}
    at = 0.0
    for key in problem.tasks():
        if len(problem.lanes[key[1]]) > 1:
            places[key] = at
            at += problem.seconds(key)
    for table, arc in zip(tables, arcs, strict=True) if at else ():
        table.take(0.0, at)
        arc.extend(0.0, at)
    return places


def _turn(seconds: float, interval: float) -> float:
    """The same place on the circle, not before now."""
    rest = seconds % interval
    return 0.0 if interval - rest <= interval * _TIGHT else rest


def _later(
    problem: Problem,
    tables: list[_Circle],
    offsets: dict[Key, float],
    needs: Mapping[Key, tuple[tuple[Key, float], ...]],
) -> dict[Key, float]:
    """Forward tasks of one lane moved to their last free place before their readers, deepest first."""
    readers: dict[Key, list[tuple[Key, float]]] = {}
    for key, items in needs.items():
        for giver, way in items:
            readers.setdefault(giver, []).append((key, way))
    for key in reversed([key for key in problem.tasks() if key[0] is Work.FORWARD and len(problem.lanes[key[1]]) == 1]):
        seconds = problem.seconds(key)
        last = min((offsets[other] - way for other, way in readers.get(key, ())), default=offsets[key]) - seconds
        circles = [tables[lane] for lane in problem.lanes[key[1]]]
        for circle in circles:
            circle.give(offsets[key])
        found = _last_free(circles, last, seconds)
        offsets[key] = found if found is not None and found > offsets[key] else offsets[key]
        for circle in circles:
            circle.take(offsets[key], seconds)
    return offsets


class _Arc:
    """What is taken of a circle, as one piece."""

    def __init__(self, interval: float) -> None:
        self.interval, self.begin, self.used = interval, 0.0, 0.0

    def extend(self, ready: float, seconds: float) -> float | None:
        """Take time at the sooner of the two ends, not before `ready`; None where too little is free."""
        if self.used + seconds > self.interval * (1 + _TIGHT):
            return None
        before = behind = ready
        if self.used:
            behind = ready + _turn(self.begin + self.used - ready, self.interval)
            before = ready + _turn(self.begin - seconds - ready, self.interval)
        if before < behind or not self.used:
            self.begin = before % self.interval
        self.used += seconds
        return min(before, behind)


class _Circle:
    """The time of one lane modulo the interval: what is taken, as (begin, seconds) with begin in [0, interval)."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.taken: list[tuple[float, float]] = []

    def take(self, start: float, seconds: float) -> None:
        self.taken.append((start % self.interval, seconds))

    def give(self, start: float) -> None:
        begin = start % self.interval
        self.taken.remove(min(self.taken, key=lambda item: abs(item[0] - begin)))

    def conflict(self, start: float, seconds: float) -> tuple[float, float] | None:
        """(seconds to go on to be behind it, seconds to go back to be before it) of something in the way."""
        slack = self.interval * _TIGHT
        begin = start % self.interval
        for other, length in self.taken:
            ahead = (other - begin) % self.interval  # from our begin to its begin
            if self.interval - ahead <= slack:
                ahead = 0.0
            behind = self.interval - ahead  # from its begin to our next begin
            if ahead < seconds - slack:
                return ahead + length, seconds - ahead
            if behind < length - slack:
                return length - behind, seconds + behind
        return None


def _first_free(circles: list[_Circle], ready: float, seconds: float) -> float | None:
    """The first start from `ready` on at which all circles are free; None where there is none in an interval."""
    start, interval = ready, circles[0].interval
    while start < ready + interval * (1 + _TIGHT):
        hits = [hit for circle in circles if (hit := circle.conflict(start, seconds)) is not None]
        if not hits:
            return start if seconds <= interval * (1 + _TIGHT) else None
        start += max(hit[0] for hit in hits)
    return None


def _last_free(circles: list[_Circle], last: float, seconds: float) -> float | None:
    start, interval = last, circles[0].interval
    while start > last - interval * (1 + _TIGHT) and start >= 0:
        hits = [hit for circle in circles if (hit := circle.conflict(start, seconds)) is not None]
        if not hits:
            return start
        start -= max(hit[1] for hit in hits)
    return None


def fits(problem: Problem, interval: float, offsets: Mapping[Key, float]) -> bool:
    """Whether the steady state keeps to the caps. Memory grows only where an F starts, so those times are enough."""
    slack = interval * _TIGHT
    for lane, cap in enumerate(problem.caps):
        if cap == inf:
            continue
        holds: list[tuple[float, float, float]] = []  # from, until, how much
        for stage in problem.on(lane):
            held, begin = problem.held[stage], offsets[Work.FORWARD, stage]
            if not problem.trained[stage]:
                stop = begin + problem.seconds((Work.FORWARD, stage))
                holds.append((begin, stop, held.activations))
                continue
            stop = offsets[Work.BACKWARD, stage] + problem.seconds((Work.BACKWARD, stage))
            if problem.split:
                end = offsets[Work.WEIGHTS, stage] + problem.seconds((Work.WEIGHTS, stage))
                holds.append((begin, stop, held.activations - held.for_weights))
                holds.append((begin, end, held.for_weights))
            else:
                holds.append((begin, stop, held.activations))
        for at, _, _ in holds:
            live = sum(
                much * (ceil((until - at - slack) / interval) - ceil((begin - at - slack) / interval))
                for begin, until, much in holds
            )
            if live > cap * (1 + _TIGHT):
                return False
    return True
