"""The lowering for shared memory: an `Algorithm` to `Code` in which ranks only read each other.

On one host the user's arrays are private memory; what a peer touches must be copied through the shared segment. If
every move is done by the rank that it writes to, nobody writes to another: outputs stay where the user wants them, and
only what others read (inputs, scratch) is shared. That saves one of three passes over memory, against putting into the
output of a peer and copying it out from there.

1. **Order.** Each rank runs its moves in the order of the algorithm, in one block: one thread runs them, so more blocks
   would only wait for each
   other. Every wait points backwards in that order, so nothing can deadlock.
2. **Runs.** A copy and the reduces after it into the same target are one MULTI_REDUCE, in the order of the algorithm.
3. **Signals.** As in `compile_one_sided.py`: where a move waits for one of another rank, that rank signals after it,
   unless an earlier signal
   will do.
4. **Gates.** As in `ir/one_sided.py`: wait for a peer's gate before its memory is touched first, signal it at the end.

`verify_code` proves the result.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sennit.collective.compile_chunks import ChunkDag, chunk_dag
from sennit.collective.runtime.code import Code, Op, Operand
from sennit.collective.runtime.encode_writer import Home, Writer
from sennit.ir.collective import Algorithm, Chunks, Move, MoveKind
from sennit.ir.schedule import Place

__all__ = ["encode_pull"]


def encode_pull(algorithm: Algorithm) -> Code:
    writer = Writer(algorithm.collective)
    writer.add_scratch(algorithm.scratch)
    dag = chunk_dag(algorithm)
    runs = _runs(dag)
    signals = _signals(dag, runs)
    ranks = range(algorithm.collective.ranks)
    guests: list[list[Home]] = [[] for _ in ranks]
    for run in runs:
        for peer in run.peers(dag):
            if (home := (run.rank, 1)) not in guests[peer]:
                guests[peer].append(home)
    for rank in ranks:
        writer.blocks[rank, 0], writer.blocks[rank, 1] = [], []
        for guest in guests[rank]:
            writer.signal((rank, 0), guest)
    met: set[tuple[int, int]] = set()  # rank, peer: the gate was waited for
    for number, run in enumerate(runs):
        home = run.rank, 1
        for peer in run.peers(dag):
            if (run.rank, peer) not in met:
                met.add((run.rank, peer))
                writer.wait(home, (peer, 0), 1)
        for peer, count in signals.before[number]:
            writer.wait(home, (peer, 1), count)
        _write(writer, dag, run)
        for peer in signals.after[number]:
            writer.signal(home, (peer, 1))
    for rank in ranks:
        for peer in ranks:
            if (rank, 1) in guests[peer]:
                writer.signal((rank, 1), (peer, 0))
        for guest in guests[rank]:
            writer.wait((rank, 0), guest, 1)
    return writer.code(algorithm.name)


@dataclass(frozen=True, slots=True)
class _Run:
    """Moves that are one instruction: one of any kind, or a first one and reduces into the same target."""

    rank: int
    moves: tuple[int, ...]

    def peers(self, dag: ChunkDag) -> list[int]:
        """The ranks that it reads, in order, without its own."""
        return list(dict.fromkeys(r for n in self.moves if (r := dag.moves[n].source.rank) != self.rank))


def _runs(dag: ChunkDag) -> list[_Run]:
    """In the order of their first moves.

    A rank's next move joins its last run if it is a reduce into the same target, and if no move in between waits for
    what the run has done so far.
    """
    runs: list[list[int]] = []
    last: dict[int, int] = {}  # by rank: its last run
    member: dict[int, int] = {}
    for number, move in enumerate(dag.moves):
        rank = move.target.rank
        needed = {member[other] for other in _earlier(dag, number)}
        for other in needed - {last.get(rank)}:
            if last.get(dag.moves[runs[other][0]].target.rank) == other:
                del last[dag.moves[runs[other][0]].target.rank]  # somebody waits for that run: it ends here
        open_run = last.get(rank)
        if (
            open_run is not None
            and move.kind is MoveKind.REDUCE
            and dag.moves[runs[open_run][0]].target == move.target
            and all(other <= open_run for other in needed)  # else it would wait for a run that comes after it
        ):
            runs[open_run].append(number)
        else:
            last[rank] = open_run = len(runs)
            runs.append([number])
        member[number] = open_run
    return [_Run(dag.moves[moves[0]].target.rank, tuple(moves)) for moves in runs]


def _earlier(dag: ChunkDag, number: int) -> set[int]:
    accesses = (*dag.before[2 * number], *dag.before[2 * number + 1])
    return {access // 2 for access in accesses} - {number}


@dataclass(frozen=True, slots=True)
class _Signals:
    before: list[list[tuple[int, int]]]  # by run: waits for a rank's so-many-th signal to this one
    after: list[list[int]]  # by run: the ranks that it signals


def _signals(dag: ChunkDag, runs: list[_Run]) -> _Signals:
    member = {number: place for place, run in enumerate(runs) for number in run.moves}
    wanted: list[dict[int, int]] = []  # by run: by rank, the last run there that it waits for
    reached: dict[tuple[int, int], int] = {}
    said: defaultdict[int, set[int]] = defaultdict(set)
    for place, run in enumerate(runs):
        latest: dict[int, int] = {}
        for other in {member[n] for number in run.moves for n in _earlier(dag, number)} - {place}:
            if runs[other].rank != run.rank:
                latest[runs[other].rank] = max(latest.get(runs[other].rank, -1), other)
        fresh = {peer: other for peer, other in latest.items() if other > reached.get((peer, run.rank), -1)}
        for peer, other in fresh.items():
            reached[peer, run.rank] = other
            said[other].add(run.rank)
        wanted.append(fresh)
    counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    ordinal: dict[tuple[int, int], int] = {}  # run, waiting rank
    for place, run in enumerate(runs):
        for waiter in sorted(said[place]):
            counts[run.rank, waiter] += 1
            ordinal[place, waiter] = counts[run.rank, waiter]
    before = [
        [(peer, ordinal[other, run.rank]) for peer, other in fresh.items()]
        for run, fresh in zip(runs, wanted, strict=True)
    ]
    return _Signals(before, [sorted(said[place]) for place in range(len(runs))])


def _write(writer: Writer, dag: ChunkDag, run: _Run) -> None:
    moves = [dag.moves[number] for number in run.moves]
    home, target = (run.rank, 1), _operand(writer, moves[0].target)
    if len(moves) > 1:
        sources = [_operand(writer, move.source) for move in moves]
        writer.reduce_many(home, sources, target, moves[0].target.count, moves[0].kind is MoveKind.COPY)
        return
    writer.transfer(home, _op(moves[0]), _operand(writer, moves[0].source), target, moves[0].target.count)


def _op(move: Move) -> Op:
    local = move.source.rank == move.target.rank
    match move.kind:
        case MoveKind.COPY:
            return Op.COPY if local else Op.GET
        case MoveKind.REDUCE:
            return Op.REDUCE if local else Op.READ_REDUCE


def _operand(writer: Writer, chunks: Chunks) -> Operand:
    return writer.operand(chunks.rank, Place(chunks.buffer, chunks.start, chunks.count))
