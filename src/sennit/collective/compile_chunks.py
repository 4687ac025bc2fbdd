"""Pass 1, the chunk DAG: which access to a chunk must come before which.

A move m makes two *accesses*: 2m reads the source, 2m + 1 writes the target (and, in a reduce, reads it too). Accesses
to the same chunk keep their order unless both only read:

    read  after write     on the last write of the chunk
    write after read      on all reads since then
    write after write     on the last write, where nobody read it (else it follows from the two above)

**Cells.** All memories lie one after another in one space of addresses, and every start and stop of an access cuts it.
Between two cuts lies a *cell*: all its chunks have the same history, so a cell is treated as one thing and an access is
a range of cells. This is the interval map of `language.py` with all cuts known beforehand: O(E log E) for E accesses
and their cells, and no segment is split.

An access is dead (see `written_for_nothing`) if no read but those named meets what it wrote, and no output that is
asked for holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.collective.buffers import Memories
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, Chunks, Move, MoveKind

__all__ = ["ChunkDag", "chunk_dag"]


@dataclass(frozen=True, slots=True)
class ChunkDag:
    """`before`, `cells` and `readers` are by access; `last_writer` is by cell."""

    algorithm: Algorithm
    moves: tuple[Move, ...]  # without copies of a chunk onto itself, but for those of a switch
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
        first, last = self.cells[access]
        if access not in self.last_writer[first:last]:
            return True
        rank, collective = self.moves[access // 2].target.rank, self.algorithm.collective
        base = self.outputs[rank]
        for cell in range(first, last):
            if self.last_writer[cell] != access:
                continue
            for index in range(self.cuts[cell] - base, self.cuts[cell + 1] - base):
                if 0 <= index < collective.output_chunks(rank) and collective.after(rank, index) is not None:
                    return False
        return True


def chunk_dag(algorithm: Algorithm, *, switch: bool = False) -> ChunkDag:
    """`switch`: keep the copies onto themselves that are part of a multicast, which writes on its own rank too."""
    moves, lows, highs, outputs = _addresses(algorithm, switch)
    cuts = sorted({*lows, *highs})
    cell = {address: number for number, address in enumerate(cuts)}
    firsts, lasts = [cell[low] for low in lows], [cell[high] for high in highs]
    history = _History(len(cuts), len(lows))
    before: list[tuple[int, ...]] = []
    reading, writing, reduce = history.read, history.write, MoveKind.REDUCE
    for read, move in zip(range(0, len(lows), 2), moves, strict=True):
        write = read + 1
        before.append(reading(read, firsts[read], lasts[read]))
        before.append(writing(write, firsts[write], lasts[write], move.kind is reduce))
    return ChunkDag(
        algorithm,
        moves,
        tuple(before),
        tuple(zip(firsts, lasts, strict=True)),
        tuple(history.readers),
        tuple(history.writer),
        tuple(cuts),
        outputs,
    )


class _History:
    """Who wrote each cell last, and who read it since. Both methods return what the access waits for."""

    __slots__ = ("readers", "reading", "writer")

    def __init__(self, cells: int, accesses: int) -> None:
        self.writer: list[int | None] = [None] * cells
        self.reading: list[list[int]] = [[] for _ in range(cells)]
        self.readers = [0] * accesses

    def read(self, access: int, first: int, last: int) -> tuple[int, ...]:
        if last - first == 1:  # nearly always: no set
            self.reading[first].append(access)
            writer = self.writer[first]
            if writer is None:
                return ()
            self.readers[writer] += 1
            return (writer,)
        writers = {writer for writer in self.writer[first:last] if writer is not None}
        for writer in writers:
            self.readers[writer] += 1
        for reading in self.reading[first:last]:
            reading.append(access)
        return tuple(writers)

    def write(self, access: int, first: int, last: int, adds: bool) -> tuple[int, ...]:
        if last - first == 1:
            writer, reading = self.writer[first], self.reading[first]
            self.writer[first] = access
            if writer is not None and adds:
                self.readers[writer] += 1
            if reading:
                self.reading[first] = []
                return tuple(reading)
            return () if writer is None else (writer,)
        waits: set[int] = set()
        writers: set[int] = set()
        for cell in range(first, last):
            writer, reading = self.writer[cell], self.reading[cell]
            if reading:
                waits.update(reading)
                self.reading[cell] = []
            elif writer is not None:
                waits.add(writer)
            if writer is not None:
                writers.add(writer)
            self.writer[cell] = access
        if adds:
            for writer in writers:
                self.readers[writer] += 1
        return tuple(waits)


def _addresses(algorithm: Algorithm, switch: bool) -> tuple[tuple[Move, ...], list[int], list[int], tuple[int, ...]]:
    """The moves that do something, the first and last address of their accesses, and where the outputs begin."""
    memories = Memories(algorithm.collective, algorithm.scratch)
    bases, total = [], 0
    for size in memories.sizes:
        bases.append(total)
        total += size
    moves: list[Move] = []
    lows: list[int] = []
    highs: list[int] = []
    known: dict[int, int] = {}  # by identity: the moves of a traced program share their chunks

    def address(place: Chunks, move: Move) -> int:
        memory, start = memories.locate(place, where=move.line or None)
        found = known[id(place)] = bases[memory] + start
        return found

    for move in algorithm.moves:
        source, target, count = move.source, move.target, move.source.count
        if (low := known.get(id(source))) is None:
            low = address(source, move)
        if (goal := known.get(id(target))) is None:
            goal = address(target, move)
        if count != target.count:
            raise _refused(move, "the counts differ")
        if low - count < goal < low + count:  # addresses of different ranks are never near
            if low == goal and move.kind is MoveKind.COPY:
                if not switch or move.switch is None:
                    continue
            else:
                raise _refused(move, "they overlap")
        moves.append(move)
        lows += (low, goal)
        highs += (low + count, goal + count)
    outputs: list[int] = []
    for rank in range(algorithm.collective.ranks):
        memory, offset, _ = memories.find(rank, "output")
        outputs.append(bases[memory] + offset)
    return tuple(moves), lows, highs, tuple(outputs)


def _refused(move: Move, why: str) -> CollectiveError:
    return CollectiveError(
        f"{move.kind.value} of {move.source} to {move.target}: {why}",
        where=move.line or None,
        fix="use equal counts and separate chunks",
    )
