"""The checker of a one-sided program's form: every rank, block and place that it names exists and fits its step.

| rule | says |
|---|---|
| ranks | one entry for each rank of the collective, in order |
| scratch | a scratch buffer is its rank's, has a name of its own there and one chunk at least |
| places | the rank and the place that a step reads or writes exist |
| sizes | all places of a step have as many chunks |
| operands | a `multi_reduce` has two operands at least; the ranks of a `multicast` or `switch_reduce` are two at least, ascending |
| overlap | what a step reads is apart from what it writes, or exactly that; a reduce never adds a chunk to itself |
| signals | a signal or a wait names a block that exists, and a wait counts from 1 |

What the program does (deadlock, races, gates, the result) is a matter of `collective/verify_one_sided.py`.
"""

from __future__ import annotations

from sennit.errors import CollectiveError
from sennit.ir.cells import RankCells, lay_out_cells
from sennit.ir.one_sided import (
    Accesses,
    Await,
    DataStep,
    Multicast,
    MultiReduce,
    OneSided,
    Signal,
    Step,
    SwitchReduce,
    accesses,
)

__all__ = ["check_one_sided"]


def check_one_sided(program: OneSided) -> tuple[RankCells, ...]:
    """Raise `CollectiveError` for the first rule that the program breaks; return where its buffers lie."""
    here = f"one-sided program {program.name!r}"
    listed = [ranked.rank for ranked in program.ranks]
    if listed != list(range(program.collective.ranks)):
        raise CollectiveError(
            f"the ranks listed are {listed[:8]}{'...' if len(listed) > 8 else ''}, {len(listed)} in all",
            where=here,
            fix=f"list ranks 0 to {program.collective.ranks - 1}, once each and in order",
        )
    for ranked in program.ranks:
        for piece in ranked.scratch:
            if piece.rank != ranked.rank:
                raise CollectiveError(
                    f"scratch {piece.name!r} of rank {piece.rank} stands under rank {ranked.rank}",
                    where=here,
                    fix=f"move it to rank {piece.rank}",
                )
    cells = lay_out_cells(program.collective, (piece for ranked in program.ranks for piece in ranked.scratch), here)
    blocks = [len(ranked.blocks) for ranked in program.ranks]
    for ranked in program.ranks:
        for block, steps in enumerate(ranked.blocks):
            for number, step in enumerate(steps):
                if fault := _fault(step, ranked.rank, cells, blocks):
                    what, fix = fault
                    where = f"{here}, rank {ranked.rank}, block {block}, step {number}: {step}"
                    raise CollectiveError(what, where=where, fix=fix)
    return cells


def _fault(step: Step, here: int, cells: tuple[RankCells, ...], blocks: list[int]) -> tuple[str, str] | None:
    """What is wrong, and what to do."""
    match step:
        case Signal() | Await():
            if not 0 <= step.rank < len(blocks) or not 0 <= step.block < blocks[step.rank]:
                return f"there is no block {step.block} of rank {step.rank}", "name one that the program has"
            if isinstance(step, Await) and step.count < 1:
                return f"it waits for {step.count} signals", "wait for 1 or more, or leave it out"
            return None
        case _:
            return _operand_fault(step) or _place_fault(accesses(step, here), cells)


def _operand_fault(step: DataStep) -> tuple[str, str] | None:
    match step:
        case MultiReduce():
            if len(step.sources) < 2:
                return f"{len(step.sources)} operand", "a single one is a reduce or a read_reduce"
        case Multicast() | SwitchReduce():
            if len(step.ranks) < 2 or list(step.ranks) != sorted(set(step.ranks)):
                return f"the ranks are {list(step.ranks)}", "name two ranks at least, each once and ascending"
        case _:
            pass
    return None


def _place_fault(touched: Accesses, cells: tuple[RankCells, ...]) -> tuple[str, str] | None:
    counts: set[int] = set()
    spans: list[tuple[int, int, int]] = []
    for rank, place in (*touched.reads, *touched.writes):
        if not 0 <= rank < len(cells):
            return f"there is no rank {rank}", f"use 0 to {len(cells) - 1}"
        found = cells[rank].find(place.buffer, place.start, place.count)
        if found is None:
            error = cells[rank].missing(place.buffer, place.start, place.count, "")
            return f"on rank {rank}, {error.what}", error.fix or "name a place that exists"
        counts.add(place.count)
        spans.append((rank, *found))
    if len(counts) > 1:
        return f"its places have {', '.join(map(str, sorted(counts)))} chunks", "name as many everywhere"
    for rank, a, b in spans[: len(touched.reads)]:
        for other, c, d in spans[len(touched.reads) :]:
            if rank == other and a < d and c < b and (touched.adds or a != c):
                what = "adds a chunk to itself" if a == c else "reads and writes places that overlap"
                return f"the step {what}", "go through scratch, or chunk by chunk"
    return None
