"""Copies put off until their target is added to: so that copy and sum become one pass over memory.

Out of place, a ring begins by copying the whole input to the output, and then adds to the output chunk by chunk. That
reads and writes the array once more than needed: `t = a` early and `t = t + b` later is `t = a + b` later.
`delay_copies` cuts local copies into chunks and moves each one down to the step of its block that next touches its
target, if that step adds to just this chunk. What may go wrong is that another rank reads or overwrites the chunk
between the two places. Whether it does is a matter of the whole program, so the whole program is proved again
(`verify_one_sided`): where the proof fails, it stays as it was.
"""

from __future__ import annotations

from collections import defaultdict

from sennit.collective.verify_one_sided import verify_one_sided
from sennit.errors import CollectiveError
from sennit.ir.one_sided import (
    Await,
    LocalCopy,
    LocalReduce,
    MultiReduce,
    OneSided,
    OneSidedRank,
    ReadReduce,
    Signal,
    Step,
    accesses,
)
from sennit.ir.schedule import Place

__all__ = ["delay_copies"]

_Chunk = tuple[str, int]  # of this rank: buffer, index


def delay_copies(program: OneSided) -> OneSided:
    if program.collective.in_place:
        return program  # input and output are one: there is nothing to copy
    ranks = tuple(
        OneSidedRank(ranked.rank, tuple(_delayed(ranked.rank, steps) for steps in ranked.blocks), ranked.scratch)
        for ranked in program.ranks
    )
    delayed = OneSided(program.name, program.collective, ranks)
    if delayed == program:
        return program
    try:
        verify_one_sided(delayed)
    except CollectiveError:
        return program  # another rank needs a copy where it was
    return delayed


def _delayed(rank: int, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    touched: defaultdict[_Chunk, list[int]] = defaultdict(list)  # by chunk: the steps of this block that touch it
    for position, step in enumerate(steps):
        for chunk in _touched(rank, step):
            if not touched[chunk] or touched[chunk][-1] != position:
                touched[chunk].append(position)
    before: defaultdict[int, list[Step]] = defaultdict(list)  # by step: the copies that come just before it
    kept: list[list[Step]] = []  # by step: what stays in its place
    for position, step in enumerate(steps):
        stays: list[Step] = [step]
        if isinstance(step, LocalCopy):
            stays = []
            for skip in range(step.source.count):
                source, target = _part(step.source, skip), _part(step.target, skip)
                later = [at for at in touched[target.buffer, target.start] if at > position]
                if (
                    later
                    and _adds_to(steps[later[0]], target)
                    and not _written(rank, steps, position, later[0], source)
                ):
                    before[later[0]].append(LocalCopy(source, target))
                else:
                    _append(stays, LocalCopy(source, target))
        kept.append(stays)
    return tuple(step for position, stays in enumerate(kept) for step in (*before[position], *stays))


def _touched(rank: int, step: Step) -> list[_Chunk]:
    if isinstance(step, Signal | Await):
        return []
    found = accesses(step, rank)
    places = [place for there, place in (*found.reads, *found.writes) if there == rank]
    return [(place.buffer, place.start + i) for place in places for i in range(place.count)]


def _part(place: Place, index: int) -> Place:
    return Place(place.buffer, place.start + index, 1)


def _adds_to(step: Step, target: Place) -> bool:
    return isinstance(step, LocalReduce | ReadReduce | MultiReduce) and step.target == target


def _written(rank: int, steps: tuple[Step, ...], first: int, last: int, source: Place) -> bool:
    """Whether this block writes the source of a copy between two of its steps."""
    for step in steps[first + 1 : last]:
        if not isinstance(step, Signal | Await):
            for there, place in accesses(step, rank).writes:
                inside = place.start <= source.start < place.start + place.count
                if there == rank and place.buffer == source.buffer and inside:
                    return True
    return False


def _append(stays: list[Step], copy: LocalCopy) -> None:
    """Chunks that stay side by side are one copy again."""
    if stays and isinstance(last := stays[-1], LocalCopy):
        ends = last.source.start + last.source.count, last.target.start + last.target.count
        if ends == (copy.source.start, copy.target.start):
            count = last.source.count + 1
            stays[-1] = LocalCopy(
                Place(last.source.buffer, last.source.start, count), Place(last.target.buffer, last.target.start, count)
            )
            return
    stays.append(copy)
