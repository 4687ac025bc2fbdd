"""The values of the search: a config, its estimate, its shortage; and the schedules and cuts that they are made of."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from sennit.plan.grid import Grid
from sennit.plan.pattern import Pattern, Work
from sennit.plan.schedules import (
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_h2,
)
from sennit.plan.search.choice import Kind, Part
from sennit.plan.search.ways import Way

__all__ = [
    "Breakdown",
    "Config",
    "Estimate",
    "Shortage",
    "in_flight",
    "partition",
    "pattern_of",
    "shortened",
    "steady_interval",
]


@dataclass(frozen=True, slots=True)
class Config:
    way: Way
    pp: int
    dp: int
    size: int
    microbatches: int
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the step of a lane goes, on average over lanes: they add up to the step."""

    compute: float
    recompute: float
    talk: float
    bubble: float
    sync: float
    optimizer: float


@dataclass(frozen=True, slots=True)
class Estimate:
    config: Config
    kind: Kind
    chunks: int
    stages: tuple[tuple[Part, ...], ...]
    step: float
    memory: tuple[int, ...]  # the most of each lane
    breakdown: Breakdown
    wire_bytes: int  # that a device sends in a step, on average over lanes
    grid: Grid


@dataclass(frozen=True, slots=True)
class Shortage:
    """A plan that does not fit: how many bytes the fullest device lacks with the leanest options."""

    config: Config
    kind: Kind
    lacking: int


_ROUNDS = (
    6  # of as many micro-batches as there are lanes: enough for a beginning, two rounds of steady state, and an end
)


def shortened(config: Config) -> int:
    """So many micro-batches that the steady state is reached, in whole groups of as many as there are lanes."""
    enough = _ROUNDS * config.pp
    if config.microbatches <= enough + config.pp:
        return config.microbatches
    return enough + config.microbatches % config.pp


def steady_interval(grid: Grid) -> float:
    """Seconds that one more micro-batch adds to a schedule of `shortened` length: between the ends of B one round apart, before the end begins."""
    lanes = len(grid.start)
    last = grid.pattern.microbatches - 2 * lanes - 1
    stage = grid.pattern.stages[0][0]
    stop = {
        task.microbatch: end
        for task, end in zip(grid.pattern.rows[0], grid.stop[0], strict=True)
        if task.work is Work.BACKWARD and task.stage == stage
    }
    return (stop[last] - stop[last - lanes]) / lanes


def pattern_of(kind: Kind, lanes: int, microbatches: int, chunks: int) -> Pattern | None:
    match kind:
        case Kind.ONE_F_ONE_B:
            return one_forward_one_backward(lanes, microbatches)
        case Kind.GPIPE:
            return gpipe(lanes, microbatches)
        case Kind.INTERLEAVED:
            return interleaved(lanes, microbatches, chunks) if microbatches % lanes == 0 else None
        case Kind.ZERO_BUBBLE_H1:
            return zero_bubble_h1(lanes, microbatches)
        case Kind.ZERO_BUBBLE_H2:
            return zero_bubble_h2(lanes, microbatches)
        case Kind.DUAL_PIPE_V:
            return dual_pipe_v(lanes, microbatches) if microbatches >= 2 * lanes else None
        case _:
            return None


def in_flight(pattern: Pattern) -> tuple[int, ...]:
    """The most micro-batches of each stage between F and the last work on it."""
    stages = 1 + max(stage for own in pattern.stages for stage in own)
    found = [0] * stages
    for row in pattern.rows:
        split = {task.stage for task in row if task.work is Work.WEIGHTS}
        live: dict[int, int] = {}
        for task in row:
            if task.work is Work.FORWARD:
                live[task.stage] = live.get(task.stage, 0) + 1
                found[task.stage] = max(found[task.stage], live[task.stage])
            elif (task.work is Work.WEIGHTS) == (task.stage in split):
                live[task.stage] -= 1
    return tuple(found)


def partition(weights: list[float], parts: int) -> list[tuple[int, int]]:
    """Cuts of a list into `parts` runs, none empty, with the least greatest sum."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    low, high = max(max(weights, default=0.0), sums[-1] / parts), sums[-1]
    for _ in range(50):
        middle = (low + high) / 2
        if len(_runs(sums, middle, parts)) <= parts:
            high = middle
        else:
            low = middle
    cuts = _runs(sums, high * (1 + 1e-12), parts)
    while len(cuts) < parts:  # fewer runs are enough: cut the longest that has several
        longest = max((cut for cut in cuts if cut[1] - cut[0] > 1), key=lambda cut: sums[cut[1]] - sums[cut[0]])
        place = cuts.index(longest)
        middle_of = (longest[0] + longest[1]) // 2
        cuts[place : place + 1] = [(longest[0], middle_of), (middle_of, longest[1])]
    return cuts


def _runs(sums: list[float], most: float, parts: int) -> list[tuple[int, int]]:
    """Runs from the left, each as long as `most` allows, with one unit left for each run that is still to come."""
    cuts: list[tuple[int, int]] = []
    begin, end = 0, len(sums) - 1
    while begin < end:
        stop = max(begin + 1, bisect_left(sums, sums[begin] + most * (1 + 1e-12), begin + 1) - 1)
        if sums[min(stop + 1, end)] - sums[begin] <= most * (1 + 1e-12):
            stop = min(stop + 1, end)
        stop = min(stop, max(begin + 1, end - (parts - len(cuts) - 1)))
        cuts.append((begin, stop))
        begin = stop
        if len(cuts) > parts:
            break
    return cuts
