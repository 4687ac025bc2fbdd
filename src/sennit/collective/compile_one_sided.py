"""The second lowering: an `Algorithm` to a `OneSided` program on symmetric buffers.

It starts from the chunk DAG (pass 1 of `compile.py`). There is no receive here to be joined with a send: each move is one operation of one rank
that touches the memory of the other. A copy is *put* by the source, since writing to another's memory costs one way; a reduce is
done by the target, which must read its own chunk anyway.

1. **Order.** A move waits for the moves whose accesses stand before its own. Moves are taken by depth, then by number.
2. **Blocks.** The operations of a rank that touch the same peer on the same lane (see `compile_operations.py`) form a block; those that stay in the
   rank form one for each lane. Each runs in the order of 1.
3. **Signals.** Where a move waits for one of another block, be it of the same rank or not, the other block signals after it and this one waits before.
   A signal that an earlier wait of the block implies is left out. A block's k-th signal to another is the one that a wait for k means.
4. **Gates.** See `ir/one_sided.py`: a block that touches a peer's memory begins by waiting for its gate, and ends by signalling it.

Every wait points backwards in one order, and a put needs no slot; so nothing can deadlock.
"""

from __future__ import annotations

from collections import defaultdict

from sennit.collective.collector import collector_paused
from sennit.collective.compile_chunks import ChunkDag, chunk_dag
from sennit.ir.collective import Algorithm, Chunks, Move, MoveKind, Scratch
from sennit.ir.one_sided import Await, LocalCopy, LocalReduce, OneSided, OneSidedRank, Put, ReadReduce, Signal, Step
from sennit.ir.schedule import Place

__all__ = ["compile_one_sided"]

_Home = tuple[int, int]  # rank, block


@collector_paused()
def compile_one_sided(algorithm: Algorithm) -> OneSided:
    chunks = chunk_dag(algorithm)
    waits, order = _order(chunks)
    home, peers = _blocks(chunks, order)
    signals, awaits = _signals(waits, order, home)
    blocks: dict[_Home, list[Step]] = {}
    for block, peer in peers.items():
        blocks[block] = [] if peer is None else [Await(peer, 0, 1)]
    for number in order:
        steps = blocks[home[number]]
        steps += awaits.get(number, ())
        steps.append(_step(chunks.moves[number]))
        steps += signals.get(number, ())
    for block, peer in peers.items():
        if peer is not None:
            blocks[block].append(Signal(peer, 0))
    return OneSided(algorithm.name, algorithm.collective, _ranks(algorithm, blocks, peers))


def _order(chunks: ChunkDag) -> tuple[list[tuple[int, ...]], list[int]]:
    """By move: the moves that it waits for. And all moves by depth."""
    waits: list[tuple[int, ...]] = []
    depth: list[int] = []
    for number in range(len(chunks.moves)):
        earlier = {access // 2 for access in (*chunks.before[2 * number], *chunks.before[2 * number + 1])} - {number}
        waits.append(tuple(sorted(earlier)))
        depth.append(1 + max((depth[other] for other in earlier), default=0))
    return waits, sorted(range(len(depth)), key=depth.__getitem__)


def _blocks(chunks: ChunkDag, order: list[int]) -> tuple[list[_Home], dict[_Home, int | None]]:
    """By move: its block. And by block: the peer whose memory it touches. Block 0 is left to the gate."""
    instances = 1 + max((move.instance for move in chunks.moves), default=0)
    home: list[_Home] = [(0, 0)] * len(order)
    found: dict[tuple[int, int, int | None], _Home] = {}
    peers: dict[_Home, int | None] = {}
    count: defaultdict[int, int] = defaultdict(int)
    for number in order:
        move = chunks.moves[number]
        source, target = move.source.rank, move.target.rank
        here, other = (source, target) if move.kind is MoveKind.COPY else (target, source)
        key = here, (move.channel or 0) * instances + move.instance, None if here == other else other
        if key not in found:
            count[here] += 1
            found[key] = here, count[here]
            peers[found[key]] = key[2]
        home[number] = found[key]
    return home, peers


def _signals(
    waits: list[tuple[int, ...]], order: list[int], home: list[_Home]
) -> tuple[dict[int, list[Signal]], dict[int, list[Await]]]:
    """By move: the signals that follow it, and the waits that precede it."""
    position = {number: place for place, number in enumerate(order)}
    signals: defaultdict[int, list[Signal]] = defaultdict(list)
    awaits: defaultdict[int, list[Await]] = defaultdict(list)
    seen: dict[tuple[_Home, _Home], tuple[int, int]] = {}  # from, to: how far in the order, and after how many signals
    for number in order:
        here = home[number]
        latest: dict[_Home, int] = {}
        for other in waits[number]:
            if home[other] != here:
                latest[home[other]] = max(latest.get(home[other], -1), position[other])
        for block, place in latest.items():
            reached, count = seen.get((block, here), (-1, 0))
            if place > reached:
                seen[block, here] = place, count + 1
                signals[order[place]].append(Signal(*here))
                awaits[number].append(Await(*block, count + 1))
    return signals, awaits


def _step(move: Move) -> Step:
    source, target = _place(move.source), _place(move.target)
    here, there = move.source.rank, move.target.rank
    match move.kind:
        case MoveKind.COPY:
            return LocalCopy(source, target) if here == there else Put(source, there, target)
        case MoveKind.REDUCE:
            return LocalReduce(source, target) if here == there else ReadReduce(here, source, target)


def _place(chunks: Chunks) -> Place:
    return Place(chunks.buffer, chunks.start, chunks.count)


def _ranks(
    algorithm: Algorithm, blocks: dict[_Home, list[Step]], peers: dict[_Home, int | None]
) -> tuple[OneSidedRank, ...]:
    ranks = range(algorithm.collective.ranks)
    guests: list[list[_Home]] = [[] for _ in ranks]  # the blocks of others that touch a rank's memory
    own: list[list[tuple[Step, ...]]] = [[] for _ in ranks]
    scratch: list[list[Scratch]] = [[] for _ in ranks]
    for block in sorted(blocks):
        own[block[0]].append(tuple(blocks[block]))
        if (peer := peers[block]) is not None:
            guests[peer].append(block)
    for piece in algorithm.scratch:
        scratch[piece.rank].append(piece)
    gates: list[tuple[Step, ...]] = [
        (*(Signal(*guest) for guest in met), *(Await(*guest, 1) for guest in met)) for met in guests
    ]
    return tuple(OneSidedRank(rank, (gates[rank], *own[rank]), tuple(scratch[rank])) for rank in ranks)
