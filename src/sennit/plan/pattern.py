"""When each stage runs which micro-batch: a pattern over (stage, micro-batch, phase).

    pattern := stage ("\\n" stage)*
    stage   := task (" " task)*
    task    := ("F" | "B") MICROBATCH

One line per stage, tasks in the order in which the stage runs them:

    F0 F1 B0 F2 B1 F3 B2 B3
    F0 B0 F1 B1 F2 B2 F3 B3

A pattern is complete if every stage runs every micro-batch forward and backward once, forward first. Whether the stages
can follow it without waiting for each other forever is decided when it is lowered, with the real dependencies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sennit.errors import ParseError, PlanError
from sennit.ir.graph import Phase

__all__ = ["Pattern", "Task", "one_forward_one_backward"]


@dataclass(frozen=True, slots=True)
class Task:
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{'F' if self.phase is Phase.FORWARD else 'B'}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Pattern:
    stages: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        for stage, tasks in enumerate(self.stages):
            want = {Task(phase, microbatch) for phase in Phase for microbatch in range(self.microbatches)}
            if len(tasks) != len(want) or set(tasks) != want:
                raise PlanError(
                    f"stage {stage} runs {' '.join(map(str, tasks))}",
                    fix=f"run each of {self.microbatches} micro-batches forward and backward once",
                )
            for task in tasks:
                forward = Task(Phase.FORWARD, task.microbatch)
                if tasks.index(forward) > tasks.index(task):
                    raise PlanError(
                        f"stage {stage} runs {task} before {forward}", fix="run a micro-batch forward first"
                    )

    @property
    def microbatches(self) -> int:
        return len(self.stages[0]) // 2

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, tasks)) for tasks in self.stages)

    @classmethod
    def parse(cls, text: str) -> Pattern:
        stages: list[tuple[Task, ...]] = []
        for number, line in enumerate(text.strip().splitlines(), start=1):
            tasks: list[Task] = []
            for word in line.split():
                match = re.fullmatch(r"([FB])([0-9]+)", word)
                if match is None:
                    raise ParseError(f"expected a task like F0 or B3, not {word!r}", where=f"line {number}")
                tasks.append(Task(Phase.FORWARD if match[1] == "F" else Phase.BACKWARD, int(match[2])))
            stages.append(tuple(tasks))
        return cls(tuple(stages))


def one_forward_one_backward(stages: int, microbatches: int) -> Pattern:
    """1F1B: stage s of S first runs S - s - 1 micro-batches forward, then one forward and one backward in turn, so that it
    never holds the activations of more than S - s micro-batches."""
    rows: list[tuple[Task, ...]] = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        row = [Task(Phase.FORWARD, microbatch) for microbatch in range(ahead)]
        for microbatch in range(microbatches):
            if ahead + microbatch < microbatches:
                row.append(Task(Phase.FORWARD, ahead + microbatch))
            row.append(Task(Phase.BACKWARD, microbatch))
        rows.append(tuple(row))
    return Pattern(tuple(rows))
