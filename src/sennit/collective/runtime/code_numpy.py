"""The reference interpreter of `Code`: all blocks of all ranks in one process, on flat numpy arrays of any number of
elements.

As in `ir/one_sided_numpy.py` a seeded generator draws which block goes on, and a step that moves data takes two turns:
it reads, then it writes. So code that lacks a signal gives another result under some seed. `combine` is the reduction
of two arrays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sennit.collective.runtime.code import INPUT, OUTPUT, STRIDE, Code, Geometry, Instruction, Op
from sennit.errors import CollectiveError
from sennit.ir.layout_numpy import Array

__all__ = ["allocate", "run_code"]

Combine = Callable[[Array, Array], Array]


def run_code(
    code: Code,
    inputs: Sequence[Array],
    elements: int,
    *,
    combine: Combine = np.add,
    alignment: int = 1,
    seed: int = 0,
    epoch: int = 1,
) -> list[Array]:
    """The output of every rank, flat.

    `inputs` are flat, of as many parts of `elements` as the collective has. Raises on a deadlock.
    """
    machine = _Machine(
        code, Geometry.of(code, elements, alignment), combine, epoch, allocate(code, inputs, elements, alignment)
    )
    return machine.run(random.Random(seed))


def allocate(code: Code, inputs: Sequence[Array], elements: int, alignment: int) -> list[list[Array]]:
    """By rank, by number: the buffers. What nobody wrote holds the byte 255."""
    geometry = Geometry.of(code, elements, alignment)
    held: list[list[Array]] = []
    for rank, array in enumerate(inputs):
        sizes = [code.parts(rank, buffer) * elements for buffer in (INPUT, OUTPUT)]
        if array.shape != (sizes[INPUT],):
            raise CollectiveError(
                f"the input of rank {rank} has shape {array.shape}",
                where=f"code {code.name!r}",
                fix=f"pass {code.parts(rank, INPUT)} parts of {elements} elements, flat",
            )
        if code.collective.in_place:
            whole = _unwritten(max(sizes), array.dtype)
            small = OUTPUT if sizes[OUTPUT] < sizes[INPUT] else INPUT
            first = geometry.span(1 - small, code.collective.alias_offset(rank))[0]
            pair = [whole, whole]
            pair[small] = whole[first : first + sizes[small]]
        else:
            pair = [_unwritten(size, array.dtype) for size in sizes]
        pair[INPUT][...] = array
        held.append(pair + [_unwritten(chunks * geometry.stride, array.dtype) for chunks in code.scratch])
    return held


def _unwritten(elements: int, dtype: np.dtype[np.generic]) -> Array:
    return np.full(elements * dtype.itemsize, 255, dtype=np.uint8).view(dtype)


@dataclass(slots=True)
class _Machine:
    code: Code
    geometry: Geometry
    combine: Combine
    epoch: int
    buffers: list[list[Array]]

    def run(self, draw: random.Random) -> list[Array]:
        code = self.code
        flags = [[0] * int(count) for count in code.flags]
        lists = {(r, b): list(code.block(r, b)) for r in range(code.ranks) for b in range(code.rank_block_count(r))}
        at = dict.fromkeys(lists, 0)
        held: dict[tuple[int, int], list[tuple[Array, Array]]] = {}
        parked: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, flag): the block that waits for it
        ready = [home for home, steps in lists.items() if steps]
        while ready:
            position = draw.randrange(len(ready))
            ready[position], ready[-1] = ready[-1], ready[position]
            home = rank, _ = ready.pop()
            step = lists[home][at[home]]
            value = self.epoch * STRIDE + step.count
            match step.op:
                case Op.SIGNAL:
                    flags[step.peer][step.argument] = value
                    ready += [parked.pop((step.peer, step.argument))] if (step.peer, step.argument) in parked else []
                case Op.WAIT if flags[rank][step.argument] < value:
                    parked[rank, step.argument] = home
                    continue
                case op if op.moves_data and home not in held:
                    held[home] = self.results(rank, step)
                    ready.append(home)
                    continue
                case _:
                    for target, result in held.pop(home, []):
                        target[...] = result
            at[home] += 1
            if at[home] < len(lists[home]):
                ready.append(home)
        if parked:
            stuck = ", ".join(f"rank {rank} block {block} at {at[rank, block]}" for rank, block in parked.values())
            raise CollectiveError(f"code {code.name!r} deadlocks", where=stuck)
        return [buffers[OUTPUT].copy() for buffers in self.buffers]

    def view(self, rank: int, buffer: int, chunk: int, count: int) -> Array:
        start, stop = self.geometry.span(buffer, chunk, count)
        return self.buffers[rank][buffer][start:stop]

    def results(self, rank: int, step: Instruction) -> list[tuple[Array, Array]]:
        """Where a step writes, and what. Transfers are as long as the shorter end."""

        def source(owner: int) -> Array:
            return self.view(owner, step.source_buffer, step.source_chunk, step.count)

        def clipped(target: Array, array: Array, combine: Combine | None = None) -> tuple[Array, Array]:
            length = min(len(target), len(array))
            target, array = target[:length], array[:length]
            return target, array.copy() if combine is None else combine(target, array)

        many = (
            [self.view(*operand, step.count) for operand in self.code.operands_of(step)] if step.op.has_operands else []
        )
        target = self.view(step.peer if step.op is Op.PUT else rank, step.target_buffer, step.target_chunk, step.count)
        match step.op:
            case Op.COPY | Op.PUT:
                return [clipped(target, source(rank))]
            case Op.GET:
                return [clipped(target, source(step.peer))]
            case Op.REDUCE | Op.READ_REDUCE:
                return [clipped(target, source(step.peer), self.combine)]
            case Op.MULTICAST:
                return [clipped(goal, source(rank)) for goal in many]
            case Op.MULTI_REDUCE | Op.SWITCH_REDUCE:
                overwrites = step.op is Op.SWITCH_REDUCE or step.overwrites
                terms = many if overwrites else [target, *many]
                length = min(len(target), *(len(term) for term in terms))
                total = terms[0][:length].copy()
                for term in terms[1:]:
                    total = self.combine(total, term[:length])
                return [(target[:length], total)]
        raise AssertionError(step.op)
