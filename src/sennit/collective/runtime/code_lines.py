"""Signals on lines: a block has one word that says how far it is, in place of one flag for each block that waits for
it.

A `Code` gives each pair of a signalling and a waiting block a flag of its own, at the waiting rank. In the shared
memory of a host that is a store to as many cache lines as there are peers, each of which must be taken from the core
that looks at it. There a block rather writes one line of its own, which all who wait for it look at:

    the k-th SIGNAL of a block     raises the block's word to epoch * stride + k
    a WAIT for that signal         waits until the word of that block, at the signalling rank, is as high

The word is raised where the signal was, and a wait ends when that signal was made or a later one of the same block,
which comes after it: so everything that the code was proved to order stays ordered. Signals in a row are one store.
"""

from __future__ import annotations

from dataclasses import replace

from sennit.collective.runtime.code import Code, Instruction, Op, Operand

__all__ = ["with_lines"]


def with_lines(code: Code) -> Code:
    """The same code, in which `argument` of SIGNAL and WAIT is the number of the signalling block, `count` of both the
    number of the signal in its block, and the word is at the signalling rank.
    """
    blocks = [[list(code.block(r, b)) for b in range(code.rank_block_count(r))] for r in range(code.ranks)]
    made: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}  # by waiting rank and flag: by count, the signal
    for ranked in blocks:
        for number, steps in enumerate(ranked):
            signals = 0
            for at, step in enumerate(steps):
                if step.op is Op.SIGNAL:
                    signals += 1
                    made.setdefault((step.peer, step.argument), {})[step.count] = number, signals
                    steps[at] = replace(step, argument=number, count=signals)
    for rank, ranked in enumerate(blocks):
        for steps in ranked:
            steps[:] = [_on_line(step, made[rank, step.argument]) if step.op is Op.WAIT else step for step in steps]
    operands = [Operand(*row) for row in code.operands.tolist()]
    return Code.of(code.name, code.collective, blocks, operands, [len(ranked) for ranked in blocks], code.scratch)


def _on_line(wait: Instruction, made: dict[int, tuple[int, int]]) -> Instruction:
    """`made`: by count, the block and the number of a signal to this flag."""
    block, number = made[min(count for count in made if count >= wait.count)]
    return replace(wait, argument=block, count=number)
