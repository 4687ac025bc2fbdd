"""From a one-sided program to `Code`.

The steps are kept one for one, with two exceptions:

- a transfer that crosses the edge of a part is cut there (see `code.py`);
- a run of reductions into one target becomes one MULTI_REDUCE, one pass over memory instead of one for each operand.
  The waits between them
  come first then. That delays no signal, since there is none between them, so what the waits wait for cannot depend on it. A copy into
  the target just before becomes the first operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sennit.collective.runtime.code import Code, Op
from sennit.collective.runtime.encode_writer import Home, Writer
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

__all__ = ["encode"]


def encode(program: OneSided, *, join: bool = True) -> Code:
    """`join=False` keeps every reduction an instruction of its own."""
    writer = Writer(program.collective)
    for ranked in program.ranks:
        writer.add_scratch(ranked.scratch)
    for ranked in program.ranks:
        for number, steps in enumerate(ranked.blocks):
            home = ranked.rank, number
            writer.blocks[home] = []
            at = 0
            while at < len(steps):
                run = _run_of_reductions(ranked.rank, steps[at:]) if join else None
                if run is None:
                    _write_step(writer, home, steps[at])
                    at += 1
                else:
                    _write_run(writer, home, run)
                    at += run.steps
    return writer.code(program.name)


@dataclass(frozen=True, slots=True)
class _Run:
    """Reductions into one target, and a copy into it before them."""

    steps: int
    awaits: tuple[Await, ...]
    sources: tuple[tuple[int, Place], ...]
    target: Place
    overwrites: bool


def _run_of_reductions(rank: int, steps: Sequence[Step]) -> _Run | None:
    """The run that begins here, where it has two operands at least."""
    awaits: list[Await] = []
    between: list[Await] = []  # since the last operand: not of the run unless another operand follows
    sources: list[tuple[int, Place]] = []
    target: Place | None = None
    overwrites, length = False, 0
    for position, step in enumerate(steps):
        match step:
            case Await() if sources:
                between.append(step)
                continue
            case LocalCopy() if not sources:
                overwrites, target = True, step.target
                sources.append((rank, step.source))
            case LocalReduce() if target in (None, step.target):
                target = step.target
                sources.append((rank, step.source))
            case ReadReduce() if target in (None, step.target):
                target = step.target
                sources.append((step.rank, step.source))
            case MultiReduce() if target in (None, step.target):
                target = step.target
                sources += step.sources
            case _:
                break
        awaits += between
        between = []
        length = position + 1
    if target is None or len(sources) < 2:
        return None
    return _Run(length, tuple(awaits), tuple(sources), target, overwrites)


def _write_run(writer: Writer, home: Home, run: _Run) -> None:
    for step in run.awaits:
        writer.wait(home, (step.rank, step.block), step.count)
    sources = [writer.operand(rank, place) for rank, place in run.sources]
    writer.reduce_many(home, sources, writer.operand(home[0], run.target), run.target.count, run.overwrites)


def _write_step(writer: Writer, home: Home, step: Step) -> None:
    rank = home[0]
    match step:
        case LocalCopy(source, target):
            writer.transfer(home, Op.COPY, writer.operand(rank, source), writer.operand(rank, target), source.count)
        case LocalReduce(source, target):
            writer.transfer(home, Op.REDUCE, writer.operand(rank, source), writer.operand(rank, target), source.count)
        case Put(source, peer, target):
            writer.transfer(home, Op.PUT, writer.operand(rank, source), writer.operand(peer, target), source.count)
        case ReadReduce(peer, source, target):
            writer.transfer(
                home, Op.READ_REDUCE, writer.operand(peer, source), writer.operand(rank, target), source.count
            )
        case MultiReduce(sources, target):
            many = [writer.operand(peer, place) for peer, place in sources]
            writer.reduce_many(home, many, writer.operand(rank, target), target.count, overwrite=False)
        case Multicast(source, ranks, target):
            many = [writer.operand(peer, target) for peer in ranks]
            writer.through_switch(home, Op.MULTICAST, many, writer.operand(rank, source), source.count)
        case SwitchReduce(ranks, source, target):
            many = [writer.operand(peer, source) for peer in ranks]
            writer.through_switch(home, Op.SWITCH_REDUCE, many, writer.operand(rank, target), target.count)
        case Signal(peer, block):
            writer.signal(home, (peer, block))
        case Await(peer, block, count):
            writer.wait(home, (peer, block), count)
