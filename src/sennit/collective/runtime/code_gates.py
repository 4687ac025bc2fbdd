"""Gates that a block waits for itself, for machines on which a rank's input and output lie elsewhere in every call.

A compiler may leave out a wait for the gate of a peer that other waits imply. The order is the same without it; but in
shared memory the gate's flag also says where the peer's input and output lie. `with_direct_gates` adds a signal of the
peer's gate, and a wait at the beginning of the block, where a block touches these and has no such wait. Gates signal
before they wait, so nothing can deadlock by it.
"""

from __future__ import annotations

from sennit.collective.runtime.code import FIRST_SCRATCH, Code, Instruction, Op, Operand

__all__ = ["touched_places", "with_direct_gates"]


def touched_places(code: Code, rank: int, step: Instruction) -> list[tuple[int, int]]:
    """The (rank, buffer) pairs that a step touches, scratch left out."""
    here = [(rank, step.target_buffer)]
    match step.op:
        case Op.SIGNAL | Op.WAIT:
            return []
        case Op.MULTI_REDUCE | Op.SWITCH_REDUCE:
            found = [(o.rank, o.buffer) for o in code.operands_of(step)] + here
        case Op.MULTICAST:
            found = [(o.rank, o.buffer) for o in code.operands_of(step)] + [(rank, step.source_buffer)]
        case Op.PUT:
            found = [(rank, step.source_buffer), (step.peer, step.target_buffer)]
        case _:
            found = [(step.peer, step.source_buffer), *here]
    return [place for place in found if place[1] < FIRST_SCRATCH]


def with_direct_gates(code: Code) -> Code:
    """The same code, where nothing is missing."""
    blocks = [[list(code.block(r, b)) for b in range(code.rank_block_count(r))] for r in range(code.ranks)]
    missing = [
        (rank, number, peer)
        for rank, ranked in enumerate(blocks)
        for number, steps in enumerate(ranked)
        for peer in _without_gate(code, rank, steps)
    ]
    if not missing:
        return code
    flags = code.flags.tolist()
    for rank, number, peer in missing:
        flag = flags[rank]
        flags[rank] += 1
        blocks[peer][0].insert(0, Instruction(Op.SIGNAL, rank, count=1, argument=flag))
        blocks[rank][number].insert(0, Instruction(Op.WAIT, peer, 1, count=1, argument=flag))
    operands = [Operand(*row) for row in code.operands.tolist()]
    return Code.of(code.name, code.collective, blocks, operands, flags, code.scratch)


def _without_gate(code: Code, rank: int, steps: list[Instruction]) -> list[int]:
    """The peers whose input or output a block touches before it has waited for their gates."""
    met, found = {rank}, dict[int, None]()
    for step in steps:
        if step.op is Op.WAIT and step.source_buffer == 1:
            met.add(step.peer)
        found |= dict.fromkeys(peer for peer, _ in touched_places(code, rank, step) if peer not in met)
    return list(found)
