"""The reference interpreter of a one-sided program: all blocks of all ranks in one process, on numpy arrays.

Which block goes on is drawn from a seeded generator. A step that moves data takes two turns: it reads its operands,
then it writes its result, and others may come between. So a program that lacks a signal gives another result under some
seed. A block whose counter is too low is parked until it is signalled; if only parked blocks are left, the program
deadlocks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from sennit.errors import CollectiveError
from sennit.ir.algorithm_numpy import allocate_buffers
from sennit.ir.layout_numpy import Array
from sennit.ir.one_sided import Await, DataStep, OneSided, Signal, accesses
from sennit.ir.one_sided_check import check_one_sided
from sennit.ir.schedule import Place

__all__ = ["run_one_sided"]

End = tuple[int, int]  # rank, block


def run_one_sided(program: OneSided, inputs: Sequence[Array], *, seed: int = 0) -> list[Array]:
    """The output of every rank, of shape (chunks, elements). Raises `CollectiveError` on a wrong form or a deadlock."""
    check_one_sided(program)
    scratch = [piece for ranked in program.ranks for piece in ranked.scratch]
    buffers = allocate_buffers(program.collective, scratch, inputs)
    counters: defaultdict[tuple[End, End], int] = defaultdict(int)  # signals from one block to another
    parked: dict[tuple[End, End], End] = {}
    held: dict[End, Array] = {}  # what a block has read and not yet written
    at: dict[End, int] = {}
    for ranked in program.ranks:
        at |= {(ranked.rank, number): 0 for number, steps in enumerate(ranked.blocks) if steps}
    ready, draw = list(at), random.Random(seed)

    def view(rank: int, place: Place) -> Array:
        return buffers[rank][place.buffer][place.start : place.start + place.count]

    def result(step: DataStep, rank: int) -> Array:
        touched = accesses(step, rank)
        operands = [view(*place) for place in (*touched.writes[: touched.adds], *touched.reads)]
        total = operands[0].copy()
        for operand in operands[1:]:
            total += operand
        return total

    while ready:
        position = draw.randrange(len(ready))
        ready[position], ready[-1] = ready[-1], ready[position]
        here = rank, block = ready.pop()
        step = program.ranks[rank].blocks[block][at[here]]
        match step:
            case Signal():
                pair = here, (step.rank, step.block)
                counters[pair] += 1
                if pair in parked:
                    ready.append(parked.pop(pair))
            case Await():
                pair = (step.rank, step.block), here
                if counters[pair] < step.count:
                    parked[pair] = here
                    continue
            case _:
                if here not in held:
                    held[here] = result(step, rank)
                    ready.append(here)
                    continue
                value = held.pop(here)
                for goal, place in accesses(step, rank).writes:
                    view(goal, place)[...] = value
        at[here] += 1
        if at[here] < len(program.ranks[rank].blocks[block]):
            ready.append(here)
    if parked:
        stuck = ", ".join(f"rank {rank} block {block} at step {at[rank, block]}" for rank, block in parked.values())
        raise CollectiveError(f"one-sided program {program.name!r} deadlocks", where=stuck)
    return [by_name["output"].copy() for by_name in buffers]
