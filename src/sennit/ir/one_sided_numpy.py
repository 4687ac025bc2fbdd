"""The reference interpreter of a one-sided program: all blocks of all ranks in one process, on numpy arrays.

Which block goes on is drawn from a seeded generator. A step that moves data takes two turns: it reads its operands, then it writes its
result, and others may come between. So a program that lacks a signal gives another result under some seed. A block whose counter is
too low is parked until it is signalled; if only parked blocks are left, the program deadlocks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from sennit.errors import CollectiveError
from sennit.ir.algorithm_numpy import allocate_buffers
from sennit.ir.layout_numpy import Array
from sennit.ir.one_sided import Await, LocalCopy, LocalReduce, OneSided, Put, ReadReduce, Signal
from sennit.ir.schedule import Place

__all__ = ["run_one_sided"]

End = tuple[int, int]  # rank, block


def run_one_sided(program: OneSided, inputs: Sequence[Array], *, seed: int = 0) -> list[Array]:
    """The output of every rank, of shape (chunks, elements). Raises `CollectiveError` on a deadlock."""
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
            case Put() | LocalCopy() | ReadReduce() | LocalReduce():
                source = view(step.rank if isinstance(step, ReadReduce) else rank, step.source)
                target = view(step.rank if isinstance(step, Put) else rank, step.target)
                if here not in held:
                    adds = isinstance(step, ReadReduce | LocalReduce)
                    held[here] = target + source if adds else source.copy()
                    ready.append(here)
                    continue
                target[...] = held.pop(here)
        at[here] += 1
        if at[here] < len(program.ranks[rank].blocks[block]):
            ready.append(here)
    if parked:
        stuck = ", ".join(f"rank {rank} block {block} at step {at[rank, block]}" for rank, block in parked.values())
        raise CollectiveError(f"one-sided program {program.name!r} deadlocks", where=stuck)
    return [by_name["output"].copy() for by_name in buffers]
