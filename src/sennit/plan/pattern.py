"""When each lane runs which micro-batch of which stage: a pattern over (lane, stage, micro-batch, kind of work).

    pattern := row ("\\n" row)*
    row     := task (" " task)*
    task    := STAGE? ("F" | "B" | "W") MICROBATCH

One row per lane, tasks in the order in which the lane runs them. The stage is left out where row number r runs stage r
and nothing else:

    F0 F1 B0 F2 B1 F3 B2 B3
    F0 B0 F1 B1 F2 B2 F3 B3

Two lanes with two stages each, in the form of a V:

    0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1
    ...

F is the forward work of a stage on a micro-batch, B the backward work. Where a pattern has W tasks of a stage, B is
only what other stages wait for, and W the rest: the gradients of parameters. A stage without B has no backward work.

A pattern is complete if every row of a stage runs the same tasks of it: each micro-batch F once, then B once where the
stage has B, then W once where it has W. Whether the lanes can follow it without waiting for each other forever is
decided when it is lowered, with the real dependencies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from sennit.errors import ParseError, PlanError

__all__ = ["Pattern", "Task", "Work", "one_forward_one_backward"]


class Work(Enum):
    """The kinds of work on a micro-batch, in the order in which they can come."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


@dataclass(frozen=True, slots=True)
class Task:
    work: Work
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Pattern:
    rows: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        kinds: dict[int, set[Work]] = {}  # of each stage, in the first row that has it
        for number, row in enumerate(self.rows):
            where = f"row {number}: {' '.join(map(str, row))}"
            position = {task: i for i, task in enumerate(row)}
            if len(position) != len(row):
                twice = next(task for i, task in enumerate(row) if position[task] != i)
                raise PlanError(f"{twice} runs twice", where=where, fix="run each task once")
            for stage in sorted({task.stage for task in row}):
                found = {task.work for task in row if task.stage == stage}
                if kinds.setdefault(stage, found) != found:
                    raise PlanError(f"stage {stage} has other work than in the rows above", where=where)
                _check_stage(position, stage, found, self.microbatches, where)

    @property
    def microbatches(self) -> int:
        return 1 + max((task.microbatch for row in self.rows for task in row), default=-1)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each row, ascending."""
        return tuple(tuple(sorted({task.stage for task in row})) for row in self.rows)

    def work(self, stage: int) -> frozenset[Work]:
        """The kinds of work that a stage is given."""
        return frozenset(task.work for row in self.rows for task in row if task.stage == stage)

    def __str__(self) -> str:
        plain = all(stages == (number,) for number, stages in enumerate(self.stages))
        return "\n".join(
            " ".join(f"{task.work.value}{task.microbatch}" if plain else str(task) for task in row) for row in self.rows
        )

    @classmethod
    def parse(cls, text: str) -> Pattern:
        rows: list[tuple[Task, ...]] = []
        for number, line in enumerate(text.strip().splitlines()):
            tasks: list[Task] = []
            for word in line.split():
                match = re.fullmatch(r"([0-9]*)([FBW])([0-9]+)", word)
                if match is None:
                    raise ParseError(
                        f"expected a task like F0, B3 or 2W1, not {word!r}",
                        where=f"row {number}",
                        fix="write the stage (where a lane has several), F, B or W, and the micro-batch",
                    )
                tasks.append(Task(Work(match[2]), int(match[3]), int(match[1]) if match[1] else number))
            rows.append(tuple(tasks))
        return cls(tuple(rows))


def _check_stage(position: dict[Task, int], stage: int, works: set[Work], microbatches: int, where: str) -> None:
    if Work.FORWARD not in works or (Work.WEIGHTS in works and Work.BACKWARD not in works):
        raise PlanError(
            f"stage {stage} has only {' and '.join(sorted(work.value for work in works))}",
            where=where,
            fix="run F of every stage, and B where there is W",
        )
    for microbatch in range(microbatches):
        before = -1
        for work in Work:
            if work not in works:
                continue
            task = Task(work, microbatch, stage)
            if task not in position:
                raise PlanError(
                    f"{task} is missing", where=where, fix=f"run each of {microbatches} micro-batches of the stage once"
                )
            if position[task] < before:
                raise PlanError(f"{task} runs too early", where=where, fix="run a micro-batch F, then B, then W")
            before = position[task]


def one_forward_one_backward(stages: int, microbatches: int) -> Pattern:
    """1F1B: stage s of S first runs S - s - 1 micro-batches forward, then one forward and one backward in turn, so that
    it never holds the activations of more than S - s micro-batches.
    """
    rows: list[tuple[Task, ...]] = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        row = [Task(Work.FORWARD, microbatch, stage) for microbatch in range(ahead)]
        for microbatch in range(microbatches):
            if ahead + microbatch < microbatches:
                row.append(Task(Work.FORWARD, ahead + microbatch, stage))
            row.append(Task(Work.BACKWARD, microbatch, stage))
        rows.append(tuple(row))
    return Pattern(tuple(rows))
