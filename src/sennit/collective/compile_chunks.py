"""Pass 1, the chunk DAG: which access to a chunk must come before which.

A move m makes two *accesses*: 2m reads the source, 2m + 1 writes the target (and, in a reduce, reads it too). Accesses to the same
chunk keep their order unless both only read:

    read  after write     on the last write of the chunk
    write after read      on all reads since then
    write after write     on the last write, where nobody read it (else it follows from the two above)

**Cells.** All memories lie one after another in one space of addresses, and every start and stop of an access cuts it. Between two
cuts lies a *cell*: all its chunks have the same history, so a cell is treated as one thing and an access is a range of cells. This is the
interval map of `language.py` with all cuts known beforehand: O(E log E) for E accesses and their cells, and no segment is split.

An access is dead (see `written_for_nothing`) if no read but those named meets what it wrote, and no output that is asked for holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.collective.buffers import Memories
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, Move, MoveKind

__all__ = ["ChunkDag", "chunk_dag"]


@dataclass(frozen=True, slots=True)
class ChunkDag:
    """`before`, `cells` and `readers` are by access; `last_writer` is by cell."""

    algorithm: Algorithm
    moves: tuple[Move, ...]  # without copies of a chunk onto itself
    before: tuple[tuple[int, ...], ...]
    cells: tuple[tuple[int, int], ...]
    readers: tuple[int, ...]  # how many accesses read a part of what this one wrote
    last_writer: tuple[int | None, ...]
    cuts: tuple[int, ...]  # where each cell begins
    outputs: tuple[int, ...]  # where the output of each rank begins

    def written_for_nothing(self, access: int, readers: int) -> bool:
        """Nothing but `readers` accesses reads what `access` wrote, and the end does not ask for it."""
        if self.readers[access] > readers:
            return False
        rank, collective = self.moves[access // 2].target.rank, self.algorithm.collective
        base = self.outputs[rank]
        for cell in range(*self.cells[access]):
            if self.last_writer[cell] != access:
                continue
            for index in range(self.cuts[cell] - base, self.cuts[cell + 1] - base):
                if 0 <= index < collective.output_chunks(rank) and collective.after(rank, index) is not None:
                    return False
        return True


def chunk_dag(algorithm: Algorithm) -> ChunkDag:
    moves, lows, highs, outputs = _addresses(algorithm)
    cuts = sorted({*lows, *highs})
    cell = {address: number for number, address in enumerate(cuts)}
    firsts, lasts = [cell[low] for low in lows], [cell[high] for high in highs]
    writer: list[int | None] = [None] * len(cuts)
    reading: list[list[int]] = [[] for _ in cuts]  # accesses that read the cell since it was last written
    readers = [0] * len(lows)
    before: list[tuple[int, ...]] = []
    reduce = MoveKind.REDUCE
    for number, move in enumerate(moves):
        read, write = 2 * number, 2 * number + 1
        first, last = firsts[read], lasts[read]
        if last - first == 1:  # one cell, nearly always: no sets
            reading[first].append(read)
            if (earlier := writer[first]) is None:
                before.append(())
            else:
                before.append((earlier,))
                readers[earlier] += 1
        else:
            sources = {earlier for earlier in writer[first:last] if earlier is not None}
            for earlier in sources:
                readers[earlier] += 1
            for met in reading[first:last]:
                met.append(read)
            before.append(tuple(sources))

        first, last = firsts[write], lasts[write]
        waits: set[int] = set()
        sources = set()
        for place in range(first, last):
            earlier, met = writer[place], reading[place]
            if met:
                waits.update(met)
                reading[place] = []
            elif earlier is not None:
                waits.add(earlier)
            if earlier is not None:
                sources.add(earlier)
            writer[place] = write
        if move.kind is reduce:
            for earlier in sources:
                readers[earlier] += 1
        before.append(tuple(waits))
    return ChunkDag(
        algorithm,
        moves,
        tuple(before),
        tuple(zip(firsts, lasts, strict=True)),
        tuple(readers),
        tuple(writer),
        tuple(cuts),
        outputs,
    )


def _addresses(algorithm: Algorithm) -> tuple[tuple[Move, ...], list[int], list[int], tuple[int, ...]]:
    """The moves that do something, the first and last address of their accesses, and where the outputs begin."""
    memories = Memories(algorithm.collective, algorithm.scratch)
    bases, total = [], 0
    for size in memories.sizes:
        bases.append(total)
        total += size
    moves: list[Move] = []
    lows: list[int] = []
    highs: list[int] = []
    for move in algorithm.moves:
        source, target = move.source, move.target
        memory, start = memories.locate(source, where=move.line or None)
        low = bases[memory] + start
        memory, start = memories.locate(target, where=move.line or None)
        goal = bases[memory] + start
        count = source.count
        if source.rank == target.rank and abs(low - goal) < count and low == goal and move.kind is MoveKind.COPY:
            continue
        if count != target.count or (source.rank == target.rank and abs(low - goal) < count):
            raise CollectiveError(
                f"{move.kind.value} of {source} to {target}: "
                + ("the counts differ" if count != target.count else "they overlap"),
                where=move.line or None,
                fix="use equal counts and separate chunks",
            )
        moves.append(move)
        lows += (low, goal)
        highs += (low + count, goal + count)
    outputs = []
    for rank in range(algorithm.collective.ranks):
        memory, offset, _ = memories.find(rank, "output")
        outputs.append(bases[memory] + offset)
    return tuple(moves), lows, highs, tuple(outputs)
