"""The values of the search: a config, its estimate, its shortage; and the schedules and cuts that they are made of."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from sennit.ir.graph import Phase
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
from sennit.plan.search.shallow import Item, Shallow
from sennit.plan.search.ways import Way

__all__ = [
    "INTERLACED_SPARE",
    "Breakdown",
    "Config",
    "Estimate",
    "Fixed",
    "Shortage",
    "Unit",
    "in_flight",
    "partition",
    "passes_of",
    "pattern_of",
    "shortened",
    "steady_interval",
    "units_of",
]

INTERLACED_SPARE = 4  # micro-batches that a lane of an interlaced plan may hold beyond one for each lane


@dataclass(frozen=True, slots=True)
class Unit:
    """One place in the deep model that a stage can begin or end at: an item, and the module of this copy of it (none
    outside of units).
    """

    item: int
    module: str | None


def units_of(model: Shallow) -> tuple[Unit, ...]:
    """The units of the deep model in the order of its data.

    A copy may be several units (a Swin's plain and shifted block): those take turns.
    """
    found: list[Unit] = []
    number = 0
    while number < len(model.items):
        item, end = model.items[number], number + 1
        while item.copies > 1 and end < len(model.items) and _takes_turns(item, model.items[end]):
            end += 1
        group = range(number, end)
        for copy in range(item.copies):
            for own in group:
                modules = model.items[own].modules
                found.append(Unit(own, modules[copy] if modules else None))
        number = end
    return tuple(found)


def passes_of(model: Shallow) -> int | None:
    """How often the units run, where only the last pass is trained: 1 in most models.

    None where one runs several times and all are trained: such units are in no pipeline.
    """
    inside = [op for op in model.graph.ops if op.phase is Phase.FORWARD and model.items[model.item_of[op.name]].modules]
    passes = 1 + max((op.call for op in inside), default=0)
    nodes = {op.seq for op in model.graph.ops if op.phase is Phase.BACKWARD and op.seq is not None}
    trained = {op.call for op in inside if op.seq in nodes}
    return passes if passes == 1 or trained <= {passes - 1} else None


def _takes_turns(item: Item, other: Item) -> bool:
    def parent(path: str) -> str:
        return path.rpartition(".")[0]

    return item.copies == other.copies and parent(item.modules[0]) == parent(other.modules[0])


@dataclass(frozen=True, slots=True)
class Config:
    """`lanes` are the replicas of each lane where they differ (`unequal.py`):

    `dp` is then 1, and `size` the samples of a micro-batch on all of a lane's replicas together.
    """

    way: Way
    pp: int
    dp: int
    size: int
    microbatches: int
    zero: int = 0
    lanes: tuple[int, ...] = ()

    def of_lane(self, lane: int) -> Config:
        """What one lane sees of it."""
        if not self.lanes:
            return self
        return replace(self, dp=self.lanes[lane], size=self.size // self.lanes[lane], lanes=())

    @property
    def replicas(self) -> str:
        return "+".join(map(str, self.lanes)) or str(self.dp)


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
    """Seconds that one more micro-batch adds to a schedule of `shortened` length: between the ends of B one round
    apart, before the end begins.
    """
    lanes = len(grid.start)
    last = grid.pattern.microbatches - 2 * lanes - 1
    stage = next(own for own in grid.pattern.stages[0] if Work.BACKWARD in grid.pattern.work(own))
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


@dataclass(frozen=True, slots=True)
class Fixed:
    """What is known of a cut into stages beforehand:

    `stages` are units (by position) and their stage, `begins` units that begin one.
    """

    stages: tuple[tuple[int, int], ...] = ()
    begins: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stages or self.begins)

    def partition(self, weights: list[float], parts: int) -> list[tuple[int, int]] | None:
        """As `partition`, among the cuts that keep what is fixed; None where there is none.

        least[s][e] = the least greatest sum of s + 1 runs of the first e units = min over b of max(least[s-1][b], sum
        of b..e)
        """
        if not self:
            return partition(weights, parts)
        sums = [0.0]
        for weight in weights:
            sums.append(sums[-1] + weight)
        count = len(weights)
        least: dict[int, tuple[float, list[tuple[int, int]]]] = {0: (0.0, [])}
        for stage in range(parts):
            row: dict[int, tuple[float, list[tuple[int, int]]]] = {}
            for begin, (worst, runs) in least.items():
                for end in range(begin + 1, count - (parts - stage - 1) + 1):
                    if self._allows(stage, begin, end):
                        most = max(worst, sums[end] - sums[begin])
                        if end not in row or most < row[end][0]:
                            row[end] = (most, [*runs, (begin, end)])
            least = row
        return least[count][1] if count in least else None

    def fits(self, units: int, parts: int) -> bool:
        return self.partition([1.0] * units, parts) is not None

    def of(self, positions: list[int]) -> Fixed:
        """The same for some of the units, by their new positions."""
        place = {position: number for number, position in enumerate(positions)}
        stages = tuple((place[position], stage) for position, stage in self.stages if position in place)
        return Fixed(stages, tuple(place[position] for position in self.begins if position in place))

    def _allows(self, stage: int, begin: int, end: int) -> bool:
        return all((own == stage) == (begin <= position < end) for position, own in self.stages) and not any(
            begin < position < end for position in self.begins
        )


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
