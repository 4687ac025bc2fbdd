"""Small faults put into a one-sided program: each one must be refused by the verifier, or change nothing that can be
seen.

| kind | fault |
|---|---|
| signal gone | a block does not signal |
| wait gone | a block does not wait |
| wait for fewer | a block waits for one signal less |
| step gone | a step that moves data is gone |
| steps swapped | two neighbouring steps of a block change places |
| place shifted | a place begins one chunk earlier or later |
| buffer changed | a place lies in another buffer |
| rank changed | a step touches, signals or waits for another rank |
| operand gone | a step that names several ranks or operands lacks one |
| operand twice | a multi_reduce has an operand twice |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from sennit.ir.one_sided import (
    Await,
    LocalCopy,
    LocalReduce,
    Multicast,
    MultiReduce,
    OneSided,
    Put,
    ReadReduce,
    Signal,
    Step,
    SwitchReduce,
)
from sennit.ir.schedule import Place

__all__ = ["ONE_SIDED_KINDS", "mutate_one_sided"]

Steps = tuple[Step, ...]


def mutate_one_sided(program: OneSided, kind: str, draw: random.Random) -> OneSided | None:
    """A program with one fault of this kind, or None where there is no place for it."""
    sites = [
        (rank, block, step)
        for rank, ranked in enumerate(program.ranks)
        for block, steps in enumerate(ranked.blocks)
        for step in range(len(steps))
    ]
    draw.shuffle(sites)
    for rank, block, step in sites:
        ranked = program.ranks[rank]
        steps = ranked.blocks[block]
        changed = _changed(kind, program, steps, step, draw)
        if changed is not None and changed != steps:
            blocks = (*ranked.blocks[:block], changed, *ranked.blocks[block + 1 :])
            ranks = (*program.ranks[:rank], replace(ranked, blocks=blocks), *program.ranks[rank + 1 :])
            return replace(program, ranks=ranks)
    return None


def _changed(kind: str, program: OneSided, steps: Steps, number: int, draw: random.Random) -> Steps | None:
    step = steps[number]
    match kind:
        case "signal gone" | "wait gone" | "step gone":
            gone = {"signal gone": isinstance(step, Signal), "wait gone": isinstance(step, Await)}.get(
                kind, not isinstance(step, Signal | Await)
            )
            return (*steps[:number], *steps[number + 1 :]) if gone else None
        case "steps swapped":
            if number + 1 == len(steps):
                return None
            return (*steps[:number], steps[number + 1], step, *steps[number + 2 :])
        case _:
            other = STEP_FAULTS[kind](step, program, draw)
            return None if other is None else (*steps[:number], other, *steps[number + 1 :])


def _fewer(step: Step, program: OneSided, draw: random.Random) -> Step | None:
    return replace(step, count=step.count - 1) if isinstance(step, Await) and step.count > 1 else None


def _with_place(step: Step, draw: random.Random, change: Callable[[Place], Place]) -> Step | None:
    match step:
        case Signal() | Await():
            return None
        case MultiReduce():
            chosen = draw.randrange(len(step.sources) + 1)
            if chosen == len(step.sources):
                return replace(step, target=change(step.target))
            rank, place = step.sources[chosen]
            sources = (*step.sources[:chosen], (rank, change(place)), *step.sources[chosen + 1 :])
            return replace(step, sources=sources)
        case Put() | ReadReduce() | LocalCopy() | LocalReduce() | Multicast() | SwitchReduce():
            if draw.random() < 0.5:
                return replace(step, source=change(step.source))
            return replace(step, target=change(step.target))


def _shifted(step: Step, program: OneSided, draw: random.Random) -> Step | None:
    shift = draw.choice([-1, 1])
    return _with_place(step, draw, lambda place: replace(place, start=place.start + shift))


def _buffer(step: Step, program: OneSided, draw: random.Random) -> Step | None:
    names = ["input", "output", *{piece.name for ranked in program.ranks for piece in ranked.scratch}]
    return _with_place(step, draw, lambda place: replace(place, buffer=draw.choice(names)))


def _rank(step: Step, program: OneSided, draw: random.Random) -> Step | None:
    shift = draw.choice([-1, 1])
    match step:
        case Put() | ReadReduce() | Signal() | Await():
            return replace(step, rank=step.rank + shift)
        case MultiReduce():
            chosen = draw.randrange(len(step.sources))
            rank, place = step.sources[chosen]
            return replace(step, sources=(*step.sources[:chosen], (rank + shift, place), *step.sources[chosen + 1 :]))
        case Multicast() | SwitchReduce():
            others = sorted(set(range(len(program.ranks))) - set(step.ranks))
            if not others:
                return None
            kept = set(step.ranks) - {draw.choice(step.ranks)}
            return replace(step, ranks=tuple(sorted({*kept, draw.choice(others)})))
        case _:
            return None


def _operand_gone(step: Step, program: OneSided, draw: random.Random) -> Step | None:
    match step:
        case MultiReduce():
            gone = draw.randrange(len(step.sources))
            return replace(step, sources=(*step.sources[:gone], *step.sources[gone + 1 :]))
        case Multicast() | SwitchReduce():
            gone = draw.choice(step.ranks)
            return replace(step, ranks=tuple(rank for rank in step.ranks if rank != gone))
        case _:
            return None


def _operand_twice(step: Step, program: OneSided, draw: random.Random) -> Step | None:
    if isinstance(step, MultiReduce):
        return replace(step, sources=(*step.sources, draw.choice(step.sources)))
    return None


STEP_FAULTS: dict[str, Callable[[Step, OneSided, random.Random], Step | None]] = {
    "wait for fewer": _fewer,
    "place shifted": _shifted,
    "buffer changed": _buffer,
    "rank changed": _rank,
    "operand gone": _operand_gone,
    "operand twice": _operand_twice,
}

ONE_SIDED_KINDS = ("signal gone", "wait gone", "step gone", "steps swapped", *STEP_FAULTS)
