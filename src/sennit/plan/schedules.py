"""The schedules that people know, as patterns: which lane runs which task of which stage when.

S lanes, M micro-batches. F, B, W take f, b, w seconds on a lane, and B is b + w where W is not apart.

| schedule | stages on lane i | bubble on the way, seconds | micro-batches held, lane 0 |
|---|---|---|---|
| GPipe | i | (S-1) (f+b+w) | M |
| 1F1B (Narayanan et al., 2019) | i | (S-1) (f+b+w) | S |
| interleaved 1F1B, v stages a lane (Narayanan et al., 2021) | i, i+S, ... | (S-1) (f+b+w) / v | S + (S-1)/v |
| Chimera (Li and Hoefler, 2021), S stages on S/2 lanes of two devices | i, S-1-i | (S/2-1) (f+b+w) / 2 for f = b+w, M = S/2 | S/2 + 1 at most |
| zero bubble H1 (Qi et al., 2023) | i | (S-1) (f+b-w) | S |
| zero bubble H2 | i | 0 | 2S-1 |
| DualPipeV (DeepSeek-AI, 2025) | i, 2S-1-i | (S-1) (f+b-w) / 2 | S + 1/2 |
| 3F1B (SuperScaler): p passes, the last one trained | i, i+S, i+2S | 0 in the steady state | |
| interlaced (SuperScaler): first and last stage on all lanes | 0, i+1, S+1 | 0 in the steady state | |

For stages of v times less work, f, b, w are those of all stages of a lane. A lane's bubble is its idle time between its
own first and last task for the zero-bubble kinds (H2 shifts the lanes against each other, and needs an optimizer step
that waits for none), and that of the whole step for the others. Property tests hold each figure of the table against
the recurrence of `plan/grid.py`.

Stages may be unequal: `plan/modulo.py` finds a schedule for any set of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from sennit.errors import PlanError
from sennit.plan.grid import Durations, Held, chain
from sennit.plan.modulo import Problem, schedule
from sennit.plan.pattern import Pattern, Task, Work, one_forward_one_backward

__all__ = [
    "chimera",
    "dual_pipe_v",
    "gpipe",
    "interlaced",
    "interleaved",
    "one_forward_one_backward",
    "pass_after_pass",
    "several_forward_one_backward",
    "zero_bubble_h1",
    "zero_bubble_h2",
]

F, B, W = Work.FORWARD, Work.BACKWARD, Work.WEIGHTS


def gpipe(stages: int, microbatches: int) -> Pattern:
    """All forward, then all backward, last micro-batch first."""
    _check(stages, microbatches)
    return Pattern(
        tuple(
            (
                *(Task(F, number, stage) for number in range(microbatches)),
                *(Task(B, number, stage) for number in reversed(range(microbatches))),
            )
            for stage in range(stages)
        )
    )


def interleaved(lanes: int, microbatches: int, chunks: int) -> Pattern:
    """Interleaved 1F1B: lane i has the stages i, i + S, ...; micro-batches go through a chunk in groups of S."""
    _check(lanes, microbatches)
    if microbatches % lanes:
        raise PlanError(
            f"{microbatches} micro-batches do not divide into groups of {lanes}",
            fix=f"use a multiple of {lanes} micro-batches, or plain 1F1B",
        )
    total = microbatches * chunks

    def forward(lane: int, count: int) -> Task:
        group, place = divmod(count, lanes * chunks)
        return Task(F, group * lanes + place % lanes, place // lanes * lanes + lane)

    def backward(lane: int, count: int) -> Task:
        group, place = divmod(count, lanes * chunks)
        return Task(B, group * lanes + place % lanes, (chunks - 1 - place // lanes) * lanes + lane)

    rows = []
    for lane in range(lanes):
        ahead = min(total, 2 * (lanes - lane - 1) + (chunks - 1) * lanes)
        row = [forward(lane, count) for count in range(ahead)]
        for count in range(total):
            if ahead + count < total:
                row.append(forward(lane, ahead + count))
            row.append(backward(lane, count))
        rows.append(tuple(row))
    return Pattern(tuple(rows))


def zero_bubble_h1(stages: int, microbatches: int) -> Pattern:
    """ZB-H1: as 1F1B, with W of stage s behind by s micro-batches, so that no lane holds more than 1F1B's first."""
    return _split_weights(stages, microbatches, lambda stage: (stages - stage - 1, stage))


def zero_bubble_h2(stages: int, microbatches: int) -> Pattern:
    """ZB-H2: more forward before the first backward, W filling every gap: no lane idles between its first and last
    task.
    """
    return _split_weights(stages, microbatches, lambda stage: (2 * (stages - stage - 1), 2 * stage))


def _split_weights(stages: int, microbatches: int, shape: Callable[[int], tuple[int, int]]) -> Pattern:
    """`shape` gives, by stage, how many F run ahead, and by how many micro-batches W follows B."""
    _check(stages, microbatches)
    rows = []
    for stage in range(stages):
        ahead, behind = shape(stage)
        ahead = min(ahead, microbatches)
        row = [Task(F, number, stage) for number in range(ahead)]
        for number in range(microbatches):
            if ahead + number < microbatches:
                row.append(Task(F, ahead + number, stage))
            row.append(Task(B, number, stage))
            if number >= behind:
                row.append(Task(W, number - behind, stage))
        row += [Task(W, number, stage) for number in range(max(0, microbatches - behind), microbatches)]
        rows.append(tuple(row))
    return Pattern(tuple(rows))


def chimera(stages: int, microbatches: int) -> Pattern:
    """Two pipelines through the same devices, down and up.

    Stage i lies on devices i and S-1-i, each for one half of every micro-batch, so both do the same at the same time:
    lane i runs the stages i and S-1-i. Units of S/2 micro-batches follow each other.
    """
    _check(stages, microbatches)
    if stages % 2:
        raise PlanError(f"Chimera with {stages} stages", fix="use an even number of stages")
    lanes = [(lane, stages - 1 - lane) for lane in range(stages // 2)]
    return _greedy(lanes, microbatches, in_flight=stages // 2)


def _greedy(lanes: Sequence[tuple[int, ...]], microbatches: int, in_flight: int) -> Pattern:
    """Lanes take the first task that is ready, backward before forward, deep stages before early ones, with F and B of
    one second each; no more than `in_flight` micro-batches between the first F and the last B of a lane's first stage.
    """
    stages = 1 + max(stage for own in lanes for stage in own)
    stop: dict[Task, int] = {}
    rows: list[list[Task]] = [[] for _ in lanes]
    now = 0
    left = 2 * stages * microbatches

    def ready(task: Task) -> bool:
        before = _before(task, stages)
        return task not in stop and all(other in stop and stop[other] <= now for other in before)

    following = {(stage, work): 0 for stage in range(stages) for work in (F, B)}
    while left:
        for lane, own in enumerate(lanes):
            choices = [Task(B, following[stage, B], stage) for stage in sorted(own)]
            choices += [
                Task(F, following[stage, F], stage)
                for stage in sorted(own, reverse=True)
                if stage != own[0] or following[stage, F] - following[stage, B] < in_flight
            ]
            for task in choices:
                if task.microbatch < microbatches and ready(task):
                    stop[task] = now + 1
                    rows[lane].append(task)
                    following[task.stage, task.work] += 1
                    left -= 1
                    break
        now += 1
    return Pattern(tuple(map(tuple, rows)))


def _before(task: Task, stages: int) -> tuple[Task, ...]:
    """What a task of a chain waits for."""
    if task.work is F:
        return (Task(F, task.microbatch, task.stage - 1),) if task.stage else ()
    after = (Task(B, task.microbatch, task.stage + 1),) if task.stage + 1 < stages else ()
    return (Task(F, task.microbatch, task.stage), *after)


def dual_pipe_v(lanes: int, microbatches: int) -> Pattern:
    """DualPipeV: lane i has stages i and 2S-1-i, so data goes down and comes back; B of one stage runs beside F of the
    other, and W fills the ends. Eight phases, as DeepSeek-AI published them; at least 2 S micro-batches.
    """
    _check(lanes, microbatches)
    if microbatches < 2 * lanes:
        raise PlanError(
            f"DualPipeV with {microbatches} micro-batches on {lanes} lanes", fix=f"use at least {2 * lanes}"
        )
    return Pattern(tuple(_DualLane(lanes, microbatches, lane).row() for lane in range(lanes)))


class _DualLane:
    """One row of DualPipeV, phase by phase. `near` is the stage on the way down, `far` the one on the way back."""

    def __init__(self, lanes: int, microbatches: int, lane: int) -> None:
        self.lanes, self.microbatches, self.lane = lanes, microbatches, lane
        self.near, self.far = lane, 2 * lanes - 1 - lane
        self.tasks: list[Task] = []
        self.waiting: list[Task] = []  # weight gradients put off
        self.count = {(stage, work): 0 for stage in (self.near, self.far) for work in (F, B)}

    def run(self, work: Work, stage: int, *, put_off: bool = False) -> None:
        """The next micro-batch. W follows its B at once, unless it is put off."""
        number = self.count[stage, work]
        self.count[stage, work] += 1
        self.tasks.append(Task(work, number, stage))
        if work is B and put_off:
            self.waiting.append(Task(W, number, stage))
        elif work is B:
            self.tasks.append(Task(W, number, stage))

    def fill(self) -> None:
        self.tasks.append(self.waiting.pop(0))

    def row(self) -> tuple[Task, ...]:
        rest = self.lanes - self.lane - 1
        for _ in range(2 * rest):
            self.run(F, self.near)
        for _ in range(self.lane + 1):
            self.run(F, self.near)
            self.run(F, self.far)
        for _ in range(rest):
            self.run(B, self.far, put_off=True)
            self.fill()
            self.run(F, self.far)
        for _ in range(self.microbatches - 2 * self.lanes + self.lane + 1):
            self.run(F, self.near)
            self.run(B, self.far)
            self.run(F, self.far)
            self.run(B, self.near)
        for _ in range(rest):
            self.run(B, self.far)
            self.run(F, self.far)
            self.run(B, self.near)
        half = (self.lane + 1) // 2
        late = False
        for number in range(self.lane + 1):
            late = late or (number == half and self.lane % 2 == 1)
            self.run(B, self.far, put_off=late)
            late = late or (number == half and self.lane % 2 == 0)
            self.run(B, self.near, put_off=late)
        for _ in range(rest):
            self.fill()
            self.run(B, self.near, put_off=True)
        for _ in range(self.lane + 1):
            self.fill()
        return tuple(self.tasks)


def several_forward_one_backward(lanes: int, microbatches: int, passes: int = 3) -> Pattern:
    """3F1B: the blocks run `passes` times, each pass on the result of the one before, and only the last is
    differentiated: pass r of block i is stage r S + i on lane i. Each lane runs `passes` F and one B for every
    micro-batch, of different micro-batches.
    """
    _check(lanes, microbatches)
    stages = passes * lanes
    problem = Problem(
        lanes=tuple((stage % lanes,) for stage in range(stages)),
        durations=(Durations(),) * stages,
        edges=chain(stages),
        trained=tuple(stage >= stages - lanes for stage in range(stages)),
        held=(Held(),) * stages,
        caps=(inf,) * lanes,
    )
    return schedule(problem, solver=False).pattern(microbatches)


def pass_after_pass(
    lanes: int, microbatches: int, passes: int = 3, *, trained: Sequence[bool] | None = None
) -> Pattern:
    """Stages as in 3F1B, for a runner that knows one forward pass: all micro-batches through each pass without
    gradients, and then 1F1B. `trained` says which stages have a B; of those of earlier passes (an embedding that they
    begin with) it follows that of the last pass on the same lane.
    """
    _check(lanes, microbatches)
    early, rows = (passes - 1) * lanes, []
    more = [stage for stage in range(early) if trained is not None and trained[stage]]
    for lane, row in enumerate(one_forward_one_backward(lanes, microbatches).rows):
        tasks = [Task(F, number, turn * lanes + lane) for turn in range(passes - 1) for number in range(microbatches)]
        own = [stage for stage in reversed(more) if stage % lanes == lane]
        for task in row:
            tasks.append(Task(task.work, task.microbatch, early + task.stage))
            tasks += [Task(B, task.microbatch, stage) for stage in own if task.work is B]
        rows.append(tuple(tasks))
    return Pattern(tuple(rows))


def interlaced(
    lanes: int, microbatches: int, *, in_flight: float = inf, durations: tuple[Durations, ...] | None = None
) -> Pattern:
    """The first and the last stage (an embedding, a head) on all lanes, S stages of layers between them, one a lane;
    `in_flight` caps the micro-batches of layers that a lane holds. Layers of three seconds and shared work of one and
    two, unless `durations` are given.
    """
    _check(lanes, microbatches)
    everywhere = tuple(range(lanes))
    layers = (Durations(2.0, 2.0, 2.0),) * lanes
    problem = Problem(
        lanes=(everywhere, *((lane,) for lane in range(lanes)), everywhere),
        durations=durations or (Durations(1.0, 1.0, 0.0), *layers, Durations(1.0, 2.0, 0.0)),
        edges=chain(lanes + 2),
        trained=(True,) * (lanes + 2),
        held=(Held(0.0, 0.0), *(Held(),) * lanes, Held(0.0, 0.0)),
        caps=(in_flight,) * lanes,
    )
    return schedule(problem, solver=False).pattern(microbatches)  # every rank must find the same


def _check(lanes: int, microbatches: int) -> None:
    if lanes < 1 or microbatches < 1:
        raise PlanError(f"{lanes} stages and {microbatches} micro-batches", fix="use at least one of each")
