"""Who reads what of code: by how many peers a buffer is read, and which part of an input nobody but its owner reads.

Staging goes by both (`shm_plan.py`): what many peers read lies in a ring, and what none reads is not staged.
"""

from __future__ import annotations

from sennit.collective.runtime.code import FIRST_SCRATCH, INPUT, OUTPUT, Code, Instruction, Op, Operand

__all__ = ["kept_chunk", "readers"]


def readers(code: Code, buffer: int) -> int:
    """By how many peers a chunk of the inputs, or of any scratch, is read: the mean over those that are."""
    chunks, reads = set[tuple[int, int, int]](), set[tuple[int, int, int, int]]()
    for rank in range(code.ranks):
        for block in range(code.rank_block_count(rank)):
            for step in code.block(rank, block):
                if step.op in (Op.GET, Op.READ_REDUCE):
                    sources = [Operand(step.peer, step.source_buffer, step.source_chunk)]
                elif step.op is Op.MULTI_REDUCE:
                    rows = code.operands[step.argument : step.argument + step.peer]
                    sources = [Operand(*map(int, row)) for row in rows]
                else:
                    continue
                for place in sources:
                    if place.rank != rank and min(place.buffer, FIRST_SCRATCH) == buffer:
                        for chunk in range(place.chunk, place.chunk + step.count):
                            chunks.add((place.rank, place.buffer, chunk))
                            reads.add((place.rank, place.buffer, chunk, rank))
    return len(reads) // len(chunks) if chunks else 0


def kept_chunk(code: Code, rank: int) -> int | None:
    """The chunk of a rank's input that need not be staged: no peer touches it, and the rank itself reads it alone and
    before it writes anything to its output, which may lie in the same place. None where there is not exactly one.
    """
    if code.collective.in_place:
        return None
    by_peers, own_reads = set[int](), list[range]()
    busy = [any(s.op.moves_data for s in code.block(rank, block)) for block in range(code.rank_block_count(rank))]
    if sum(busy) > 1:
        return None  # blocks take turns, so none is known to come before another
    for owner in range(code.ranks):
        written = False
        for block in range(code.rank_block_count(owner)):
            for step in code.block(owner, block):
                if not step.op.moves_data:
                    continue
                reads, writes_output = _input_reads(code, owner, step, rank)
                if owner != rank:
                    by_peers.update(*reads)
                    continue
                if reads and written:
                    return None
                own_reads += reads
                written |= writes_output
    alone = set(range(code.buffer_chunks(rank, INPUT))) - by_peers
    if len(alone) != 1:
        return None
    (kept,) = alone
    return kept if all(kept not in chunks or len(chunks) == 1 for chunks in own_reads) else None


def _input_reads(code: Code, owner: int, step: Instruction, rank: int) -> tuple[list[range], bool]:
    """The chunks of the input of `rank` that a step of `owner` touches, and whether it writes to its own output."""
    found: list[range] = []
    here = Operand(owner, step.target_buffer, step.target_chunk)
    source = Operand(
        owner if step.op in (Op.COPY, Op.PUT, Op.MULTICAST, Op.REDUCE) else step.peer,
        step.source_buffer,
        step.source_chunk,
    )
    if step.op.has_operands:
        rows = code.operands[step.argument : step.argument + step.peer]
        places = [Operand(*map(int, row)) for row in rows] + [source if step.op is Op.MULTICAST else here]
    else:
        places = [source, Operand(step.peer, *here[1:]) if step.op is Op.PUT else here]
    for place in places:
        if place.rank == rank and place.buffer == INPUT:
            found.append(range(place.chunk, place.chunk + step.count))
    return found, any(place.rank == owner and place.buffer == OUTPUT for place in places)
