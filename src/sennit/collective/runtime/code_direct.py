"""Which `Code` may read inputs where users have them, in the memory of other processes, and what is known of it.

**In place.** A user's output may lie over the input, which peers read there. Then a rank may write to a chunk only when
every peer that reads it has done so. That is what `verify_code` proves of the in-place form of the collective, where
the two are one memory: any two steps that touch a chunk, one of them to write, are ordered by signals. So a code may
run in place if the same tables are right as a code of that form. Of an all_reduce by slices: rank r writes slice p of
the sums to its array when p has signalled that its sums are in scratch, and p had read slice p of all inputs before
that; r's own slice it has read itself. In an all_gather the input lies in the output, where the rank would copy it to:
machines leave a copy of a place to itself out, and so does what is verified.

**By the end.** A rank may return, and its user change the input, when all peers have read it. Its gate waits for them.
Where the other blocks of the rank, at their ends, know as much already (`read_by_the_end`), the gate's waits may be put
off, as in calls that are staged.

A tile has elements of its own, in which no other tile reads or writes, so both hold for a call if they hold for a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from sennit.collective.runtime.code import INPUT, OUTPUT, Code, Instruction, Op, Operand
from sennit.collective.runtime.code_check import CheckedCode
from sennit.collective.runtime.code_verify import read_by_the_end, verify_code
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveSpec

__all__ = ["DirectFacts", "pulled_places"]

_REDUCTIONS = (Op.READ_REDUCE, Op.MULTI_REDUCE)


def pulled_places(code: Code, rank: int, step: Instruction) -> list[Operand]:
    """What a step of `rank` reads of the inputs of peers."""
    if step.op is not Op.GET and step.op not in _REDUCTIONS:
        return []
    sources, _ = CheckedCode(code).ends(rank, step)
    return [place for place in sources if place.buffer == INPUT and place.rank != rank]


def _without_own_copies(code: Code) -> Code:
    """Without the steps that copy a place to itself."""
    checked = CheckedCode(code)

    def moves(rank: int, step: Instruction) -> bool:
        if step.op is not Op.COPY:
            return True
        (source,), (target,) = checked.ends(rank, step)
        return checked.cell(source) != checked.cell(target)

    blocks = [
        [
            [step for step in code.block(rank, block) if moves(rank, step)]
            for block in range(code.rank_block_count(rank))
        ]
        for rank in range(code.ranks)
    ]
    operands = [Operand(*row) for row in code.operands.tolist()]
    return Code.of(code.name, code.collective, blocks, operands, code.flags.tolist(), code.scratch)


class DirectFacts:
    """Of a code. Each takes as long as a walk over all of its steps, so it is found out when it is first asked for."""

    def __init__(self, code: Code) -> None:
        self._code = code

    def _steps(self) -> Iterator[tuple[int, int, Instruction]]:
        """Rank, block, step: those that move data."""
        for rank in range(self._code.ranks):
            for block in range(self._code.rank_block_count(rank)):
                yield from ((rank, block, step) for step in self._code.block(rank, block) if step.op.moves_data)

    @cached_property
    def may(self) -> bool:
        """The form: peers read inputs and scratch, nobody writes to an input or to a peer.

        A reduction that is tried again goes on where it stopped, and a tile keeps one such place: so of a rank that
        reduces, one block moves data.
        """
        reader, busy, reduces = CheckedCode(self._code), set[tuple[int, int]](), False
        for rank, block, step in self._steps():
            sources, targets = reader.ends(rank, step)
            if step.op not in (Op.COPY, Op.REDUCE, Op.GET, *_REDUCTIONS):
                return False
            if any(place.buffer == OUTPUT for place in sources) or any(place.buffer == INPUT for place in targets):
                return False
            busy.add((rank, block))
            reduces |= step.op in _REDUCTIONS
        return not reduces or len(busy) == len({rank for rank, _ in busy})

    @cached_property
    def read_once(self) -> bool:
        """No part of an input is read by two peers."""
        read: set[tuple[int, int]] = set()
        for rank, _, step in self._steps():
            for place in pulled_places(self._code, rank, step):
                chunks = {(place.rank, place.chunk + k) for k in range(step.count)}
                if chunks & read:
                    return False
                read |= chunks
        return True

    @cached_property
    def operands(self) -> int:
        """How many inputs of peers one reduction reads, at most."""
        counts = (len(pulled_places(self._code, r, step)) for r, _, step in self._steps() if step.op in _REDUCTIONS)
        return max(counts, default=0)

    @cached_property
    def in_place(self) -> bool:
        """Each rank's output may lie over its input, where the in-place form of the collective has it."""
        collective = self._code.collective
        if not isinstance(collective, CollectiveSpec):
            return False
        try:
            verify_code(_without_own_copies(replace(self._code, collective=replace(collective, in_place=True))))
        except CollectiveError:  # that is the answer
            return False
        return True

    @cached_property
    def read_by_the_end(self) -> bool:
        return read_by_the_end(self._code)
