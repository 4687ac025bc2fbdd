"""Iteration after iteration: how long a step takes once the first is behind.

A step's first iteration starts on devices that are all idle; in a pipeline the later ones do not: a stage begins its
next step while others still finish this one. So the program is played several times in a row. On each device, an
iteration's first steps wait for all streams of the iteration before (parameters must be updated before they are read);
devices wait for each other only through collectives and transfers.

    period := end of an iteration less the end of the one before, where it no longer changes
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sennit.sim.build import Built
from sennit.sim.engine import Tasks

__all__ = ["Steady", "steady_of", "unrolled"]


@dataclass(frozen=True, slots=True)
class Steady:
    """`first` is the span of one iteration alone, `period` that of one more.

    `settled` is the iteration from which on the period changes by less than a thousandth, None where it still did at
    the end.
    """

    first: float
    period: float
    iterations: int
    settled: int | None


def unrolled(built: Built, iterations: int) -> Tasks:
    """The tasks of several iterations; those of iteration i are numbered from i * len(built.tasks) on."""
    one = built.tasks
    count = len(one)
    before, after = np.array(one.before, dtype=np.int64), np.array(one.after, dtype=np.int64)
    leave: list[int] = []
    enter: list[int] = []
    for row, actor in zip(built.task_of, built.actors, strict=True):
        code = actor.code
        waiting = np.zeros(len(row), dtype=np.bool_)
        waiting[code.waits_after] = True
        waited = np.zeros(len(row), dtype=np.bool_)
        waited[code.waits_before] = True
        for last in row[~waited].tolist():
            for first in row[~waiting].tolist():
                leave.append(last)
                enter.append(first)
    tasks = Tasks(
        one.latency * iterations,
        one.drain * iterations,
        one.unit * iterations,
        one.load * iterations,
        one.workers * iterations,
    )
    for iteration in range(iterations):
        tasks.before += (before + iteration * count).tolist()
        tasks.after += (after + iteration * count).tolist()
        tasks.turns.update(
            (
                task + iteration * count,
                replace(turn, receiver_waits=tuple(i + iteration * count for i in turn.receiver_waits)),
            )
            for task, turn in one.turns.items()
        )
        if iteration:
            tasks.before += [task + (iteration - 1) * count for task in leave]
            tasks.after += [task + iteration * count for task in enter]
    return tasks


def steady_of(stop: list[float], iterations: int, first: float) -> Steady:
    """From the ends of the tasks of all iterations, and the span of one alone."""
    ends = np.array(stop).reshape(iterations, -1).max(axis=1, initial=0.0)
    periods = np.diff(ends)
    period = float(periods[-1])
    same = np.abs(periods - period) <= 1e-3 * period
    settled = int(np.flatnonzero(~same)[-1]) + 2 if not same.all() else 1
    return Steady(first, period, iterations, settled if settled < iterations - 1 or same.all() else None)
