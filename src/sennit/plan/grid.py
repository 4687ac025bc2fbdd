"""When the tasks of a pattern run: one recurrence, and what it says of bubbles and memory.

A task t is (work, stage, micro-batch). With d(t) its seconds, lanes(t) the rows that have it, and

    needs(F of stage s) = F of the stages that s reads from
    needs(B of stage s) = F of s, and B of the stages that read from s and have a B
    needs(W of stage s) = B of s

(all of the same micro-batch), a task starts when its lanes are free and what it needs has arrived:

    start(t) = max(   stop(u)                  for u just before t in a row of lanes(t)
                      stop(u) + transfer(u, t) for u in needs(t) )
    stop(t)  = start(t) + d(t)

A task that several rows have (a stage on all devices) starts at once in all of them: a collective inside joins them. B
takes the time of W too where the pattern has no W of its stage. Transfers take time and no lane: they run on other
streams.

`times` computes this and is the oracle for everything that estimates a schedule: `Grid.span`, `Grid.bubble`,
`Grid.peaks`. `draw` prints a grid as text, `report/schedule_svg.py` as a picture.

**Bubble** is the part of (lanes x span) in which no task runs. **Memory**: a stage holds `activations` of a micro-batch
from the start of F to the stop of B; where it has W, `for_weights` of it is held until the stop of W. A stage without B
holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sennit.errors import PlanError
from sennit.plan.pattern import Pattern, Task, Work

__all__ = ["Durations", "Edges", "Grid", "Held", "chain", "draw", "times"]

Edges = tuple[tuple[int, int], ...]  # (stage, stage that reads from it)


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of one stage on one micro-batch."""

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0

    def of(self, work: Work, *, split: bool) -> float:
        """`split` says whether the pattern has W tasks of the stage."""
        match work:
            case Work.FORWARD:
                return self.forward
            case Work.BACKWARD:
                return self.backward if split else self.backward + self.weights
            case Work.WEIGHTS:
                return self.weights


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that one micro-batch takes on each device of a stage, in any unit."""

    activations: float = 1.0
    for_weights: float = 1.0


@dataclass(frozen=True, slots=True)
class Grid:
    """`start` and `stop` of each task, as the rows of the pattern have them."""

    pattern: Pattern
    start: tuple[tuple[float, ...], ...]
    stop: tuple[tuple[float, ...], ...]

    @property
    def span(self) -> float:
        """From the first start to the last stop."""
        return max(row[-1] for row in self.stop) - min(row[0] for row in self.start)

    def busy(self, lane: int) -> float:
        return sum(stop - start for start, stop in zip(self.start[lane], self.stop[lane], strict=True))

    def idle(self, lane: int) -> float:
        """Seconds without a task between the first and the last task of a lane."""
        return self.stop[lane][-1] - self.start[lane][0] - self.busy(lane)

    @property
    def bubble(self) -> float:
        lanes = len(self.start)
        return 1.0 - sum(self.busy(lane) for lane in range(lanes)) / (lanes * self.span)

    def peaks(self, held: Sequence[Held]) -> tuple[float, ...]:
        """The most that each lane holds at once; `held` by stage."""
        return tuple(self._peak(lane, held) for lane in range(len(self.start)))

    def _peak(self, lane: int, held: Sequence[Held]) -> float:
        split = {task.stage for task in self.pattern.rows[lane] if task.work is Work.WEIGHTS}
        trained = {task.stage for task in self.pattern.rows[lane] if task.work is Work.BACKWARD}
        live = peak = 0.0
        for task in self.pattern.rows[lane]:  # tasks of a lane do not overlap: their order is enough
            of = held[task.stage]
            match task.work:
                case Work.FORWARD if task.stage in trained:
                    live += of.activations
                    peak = max(peak, live)
                case Work.FORWARD:
                    peak = max(peak, live + of.activations)
                case Work.BACKWARD:
                    live -= of.activations - (of.for_weights if task.stage in split else 0.0)
                case Work.WEIGHTS:
                    live -= of.for_weights
        return peak


def chain(stages: int) -> Edges:
    """Each stage reads from the one before it."""
    return tuple((stage, stage + 1) for stage in range(stages - 1))


def times(
    pattern: Pattern,
    durations: Sequence[Durations],
    edges: Edges | None = None,
    transfer: Mapping[tuple[int, int], float] | float = 0.0,
) -> Grid:
    """The recurrence of the module's text.

    `durations` by stage; `edges` are a chain where none are given; `transfer` is in seconds, for all edges or by edge.
    """
    edges = chain(len(durations)) if edges is None else edges
    stages = {task.stage for row in pattern.rows for task in row}
    if max(stages, default=-1) >= len(durations):
        raise PlanError(f"durations of {len(durations)} stages for a pattern with stage {max(stages)}")
    return _Clock(pattern, durations, edges, transfer).run()


class _Clock:
    """Tasks go by a number: (stage, micro-batch, work) in one index, for speed."""

    def __init__(
        self,
        pattern: Pattern,
        durations: Sequence[Durations],
        edges: Edges,
        transfer: Mapping[tuple[int, int], float] | float,
    ) -> None:
        self.pattern, self.count = pattern, pattern.microbatches
        kinds = {stage: pattern.work(stage) for row in pattern.stages for stage in row}
        number = {Work.FORWARD: 0, Work.BACKWARD: 1, Work.WEIGHTS: 2}
        self.rows = [
            [(task.stage * self.count + task.microbatch) * 3 + number[task.work] for task in row]
            for row in pattern.rows
        ]
        self.lanes: dict[int, list[int]] = {}
        for lane, row in enumerate(self.rows):
            for task in row:
                self.lanes.setdefault(task, []).append(lane)
        self.seconds = {
            (stage, number[work]): durations[stage].of(work, split=Work.WEIGHTS in works)
            for stage, works in kinds.items()
            for work in works
        }
        # what a task waits for: (stage, work, seconds of the way), by stage and work
        self.needs: dict[tuple[int, int], list[tuple[int, int, float]]] = {key: [] for key in self.seconds}
        for giver, reader in edges:
            way = transfer if isinstance(transfer, (int, float)) else transfer.get((giver, reader), 0.0)
            if giver in kinds and reader in kinds:
                self.needs[reader, 0].append((giver, 0, way))
                if Work.BACKWARD in kinds[giver] and Work.BACKWARD in kinds[reader]:
                    self.needs[giver, 1].append((reader, 1, way))
        for stage, works in kinds.items():
            if Work.BACKWARD in works:
                self.needs[stage, 1].append((stage, 0, 0.0))
            if Work.WEIGHTS in works:
                self.needs[stage, 2].append((stage, 1, 0.0))

    def run(self) -> Grid:
        head = [0] * len(self.rows)
        free = [0.0] * len(self.rows)
        stop: dict[int, float] = {}
        begin: dict[int, float] = {}
        moved = True
        while moved:
            moved = False
            for lane, row in enumerate(self.rows):
                while head[lane] < len(row):
                    task = row[head[lane]]
                    ready = self._ready(task, stop)
                    lanes = self.lanes[task]
                    if ready is None or any(
                        head[other] >= len(self.rows[other]) or self.rows[other][head[other]] != task for other in lanes
                    ):
                        break
                    start = max(ready, *(free[other] for other in lanes), 0.0)
                    begin[task] = start
                    stop[task] = start + self.seconds[task // 3 // self.count, task % 3]
                    for other in lanes:
                        free[other] = stop[task]
                        head[other] += 1
                    moved = True
        if any(head[lane] < len(row) for lane, row in enumerate(self.rows)):
            raise self._deadlock(head)
        return Grid(
            self.pattern,
            tuple(tuple(begin[task] for task in row) for row in self.rows),
            tuple(tuple(stop[task] for task in row) for row in self.rows),
        )

    def _ready(self, task: int, stop: dict[int, float]) -> float | None:
        """When all that a task needs has arrived; None while something has not run."""
        place, work = divmod(task, 3)
        stage, microbatch = divmod(place, self.count)
        ready = 0.0
        for giver, kind, way in self.needs[stage, work]:
            end = stop.get((giver * self.count + microbatch) * 3 + kind)
            if end is None:
                return None
            ready = max(ready, end + way)
        return ready

    def _deadlock(self, head: list[int]) -> PlanError:
        waiting = [
            f"lane {lane} at {self.pattern.rows[lane][head[lane]]}"
            for lane, row in enumerate(self.rows)
            if head[lane] < len(row)
        ]
        return PlanError(
            f"the lanes wait for each other: {', '.join(waiting[:6])}",
            fix="order the pattern so that what a task needs runs before it",
        )


def draw(grid: Grid, columns: int = 120) -> str:
    """A line per lane; time runs to the right, one cell for each unit, as many units as fit in `columns`.

    A task's name stands where it starts, `-` where it goes on, `.` where the lane is idle.
    """
    plain = all(stages == (lane,) for lane, stages in enumerate(grid.pattern.stages))

    def name(task: Task) -> str:
        return f"{task.work.value}{task.microbatch}" if plain else str(task)

    width = 1 + max(len(name(task)) for row in grid.pattern.rows for task in row)
    lengths = [
        stop - start
        for starts, stops in zip(grid.start, grid.stop, strict=True)
        for start, stop in zip(starts, stops, strict=True)
        if stop > start
    ]
    unit = max(min(lengths, default=1.0), grid.span / max(1, columns // width))
    begin = min(row[0] for row in grid.start)
    cells = round(grid.span / unit + 0.499)
    label = len(f"lane {len(grid.start) - 1} ")
    lines = []
    for lane, row in enumerate(grid.pattern.rows):
        line = ["."] * cells
        for task, start, stop in zip(row, grid.start[lane], grid.stop[lane], strict=True):
            first = round((start - begin) / unit)
            for cell in range(first, max(first + 1, round((stop - begin) / unit))):
                if cell < cells:
                    line[cell] = name(task) if cell == first else "-"
        lines.append(f"lane {lane} ".ljust(label) + "".join(cell.ljust(width) for cell in line).rstrip())
    return "\n".join(lines) + "\n"
