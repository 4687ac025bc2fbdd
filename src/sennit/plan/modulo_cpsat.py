"""The model of `plan/modulo.py` for CP-SAT (ortools, the extra `search`).

With the interval I fixed, an offset is s = k * I + p with 0 <= p < I:

- lanes: intervals [p, p + d) and their copies [p + I, p + I + d) do not overlap: that is disjointness on the circle;
- dependencies are linear in k and p;
- memory: n >= (release - start) / I micro-batches of a stage are in flight; sum of held * n <= cap on each lane. On a
  lane with one stage
  this is exact, with several a little strict; `fits` has the exact count, and decides.

Times are integers: seconds in units of the bound / `_UNITS`, durations rounded up. The least interval is found by
bisection between the bound and what lists found.
"""

from __future__ import annotations

from math import ceil, inf
from typing import Any

from sennit.plan.modulo import Key, Modulo, Problem, fits
from sennit.plan.pattern import Work

__all__ = ["improve"]

_UNITS = 4096


def improve(found: Modulo, seconds: float) -> Modulo:
    """A schedule with a smaller interval, or `found` where there is none in the time."""
    problem, best = found.problem, found
    low, high = problem.bound, found.interval
    for _ in range(6):
        interval = low if best is found and low == problem.bound else (low + high) / 2
        offsets = _solve(problem, interval, seconds)
        if offsets is not None and fits(problem, interval, offsets):
            best = Modulo(problem, interval, tuple(offsets[key] for key in problem.tasks()), "cp-sat")
            high = interval
            if interval <= problem.bound * (1 + 1e-6):
                break
        else:
            low = interval + 1e-12 * interval
        if high - low < 0.002 * problem.bound:
            break
    return best


def _solve(problem: Problem, interval: float, seconds: float) -> dict[Key, float] | None:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    unit = _unit(problem, interval)
    size = round(interval / unit)
    rounds = 2 * len(problem.lanes) + 2
    keys, needs = problem.tasks(), problem.needs()
    length = {key: ceil(problem.seconds(key) / unit - 1e-6) for key in keys}
    place = {key: model.new_int_var(0, size - 1, "") for key in keys}
    turn = {key: model.new_int_var(0, rounds, "") for key in keys}

    def start(key: Key) -> Any:
        return turn[key] * size + place[key]

    for lane in range(len(problem.caps)):
        blocks = []
        for key in keys:
            if lane in problem.lanes[key[1]] and length[key]:
                blocks.append(model.new_fixed_size_interval_var(place[key], length[key], ""))
                blocks.append(model.new_fixed_size_interval_var(place[key] + size, length[key], ""))
        model.add_no_overlap(blocks)
    for key in keys:
        for other, way in needs[key]:
            model.add(start(key) >= start(other) + length[other] + ceil(way / unit - 1e-6))
    _limit_memory(model, problem, size, length, start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return {key: solver.value(start(key)) * interval / size for key in keys}


def _unit(problem: Problem, interval: float) -> float:
    """Whole seconds stay whole, so that a schedule of unit tasks is exact."""
    sizes = [interval, problem.transfer, *(problem.seconds(key) for key in problem.tasks())]
    return 1.0 if all(size == int(size) for size in sizes) and interval <= _UNITS else interval / _UNITS


def _limit_memory(model: Any, problem: Problem, size: int, length: dict[Key, int], start: Any) -> None:
    most = 2 * len(problem.lanes) + 4
    for lane, cap in enumerate(problem.caps):
        if cap == inf:
            continue
        parts = []
        for stage in problem.on(lane):
            held = problem.held[stage]
            if not problem.trained[stage]:
                continue
            ends = [(Work.BACKWARD, held.activations - (held.for_weights if problem.split else 0.0))]
            ends += [(Work.WEIGHTS, held.for_weights)] if problem.split else []
            for work, much in ends:
                if much > 0:
                    count = model.new_int_var(1, most, "")
                    stop = start((work, stage)) + length[work, stage]
                    model.add(count * size >= stop - start((Work.FORWARD, stage)))
                    parts.append((much, count))
        total = sum(round(much * 1000 / cap) * count for much, count in parts)
        model.add(total <= 1000 + len(parts))
