"""The second lowering: an `Algorithm` to a `OneSided` program on symmetric buffers.

It starts from the chunk DAG (pass 1 of `compile.py`). There is no receive here to be joined with a send: each move is
done by one rank that touches the memory of the other. A copy is *put* by the source, since writing to another's memory
costs one way; a reduce is done by the target, which must read its own chunk anyway.

1. **Operations** (`compile_one_sided_operations.py`). A move is one; reduces one after another into the same chunks are
   one
   together.
2. **Order.** An operation waits for those whose accesses stand before its own. Operations are taken by depth, then by
   number.
3. **Blocks.** The operations of a rank that touch the same peers on the same lane (see `compile_operations.py`) form a
   block;
   those that stay in the rank form one for each lane. Each runs in the order of 2.
4. **Gates.** See `ir/one_sided.py`. A rank's gate has two operations that move nothing, its *entry* and its *exit*. The
   first
   operation of a block waits for the entries of the peers that the block touches; their exits wait for its last.
5. **Signals** (`compile_one_sided_signals.py`). Where an operation waits for one of another block, be it of the same
   rank or not,
   the other block signals after it and this one waits before. A wait that others imply is left out, be it for a gate or not.

Every wait points backwards in one order, and a put needs no slot; so nothing can deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from sennit.collective.collector import collector_paused
from sennit.collective.compile_chunks import chunk_dag
from sennit.collective.compile_one_sided_operations import Operation, OperationGraph, operation_graph
from sennit.collective.compile_one_sided_signals import Home, place_signals
from sennit.ir.collective import Algorithm, Scratch
from sennit.ir.one_sided import OneSided, OneSidedRank, Step

__all__ = ["compile_one_sided"]


@collector_paused()
def compile_one_sided(algorithm: Algorithm, *, switch: bool = True) -> OneSided:
    """`switch=False` does the moves of a switch one by one, for machines without one."""
    if not switch:
        moves = tuple(replace(move, switch=None) if move.switch is not None else move for move in algorithm.moves)
        algorithm = replace(algorithm, moves=moves)
    graph = operation_graph(chunk_dag(algorithm, switch=switch))
    order = _order(graph)
    home, peers = _blocks(graph.operations, order)
    waits, order, home = _with_gates(graph.waits, order, home, peers, algorithm.collective.ranks)
    signals, awaits = place_signals(waits, order, home)
    blocks: dict[Home, list[Step]] = {block: [] for block in sorted(set(home))}
    for number in order:
        steps = blocks[home[number]]
        steps += awaits.get(number, ())
        if number < len(graph.operations):
            steps.append(graph.operations[number].step)
        steps += signals.get(number, ())
    return OneSided(algorithm.name, algorithm.collective, _ranks(algorithm, blocks))


def _order(graph: OperationGraph) -> list[int]:
    """All operations by depth; of the same depth as they come."""
    depth: list[int] = []
    for earlier in graph.waits:
        depth.append(1 + max((depth[other] for other in earlier), default=0))
    return sorted(range(len(depth)), key=depth.__getitem__)


def _blocks(operations: tuple[Operation, ...], order: list[int]) -> tuple[list[Home], dict[Home, tuple[int, ...]]]:
    """By operation: its block. And by block: the peers whose memory it touches. Block 0 is left to the gate."""
    home: list[Home] = [(0, 0)] * len(order)
    found: dict[tuple[int, int, tuple[int, ...]], Home] = {}
    peers: dict[Home, tuple[int, ...]] = {}
    count: defaultdict[int, int] = defaultdict(int)
    for number in order:
        operation = operations[number]
        key = operation.rank, operation.lane, operation.peers
        if key not in found:
            count[operation.rank] += 1
            found[key] = operation.rank, count[operation.rank]
            peers[found[key]] = operation.peers
        home[number] = found[key]
    return home, peers


def _with_gates(
    waits: tuple[tuple[int, ...], ...],
    order: list[int],
    home: list[Home],
    peers: dict[Home, tuple[int, ...]],
    ranks: int,
) -> tuple[tuple[tuple[int, ...], ...], list[int], list[Home]]:
    """The same with two operations more for each rank, which move nothing: its entry and its exit, in block 0."""
    first: dict[Home, int] = {}
    last: dict[Home, int] = {}
    for number in order:
        first.setdefault(home[number], number)
        last[home[number]] = number
    entry, leave = len(order), len(order) + ranks
    more = [list(earlier) for earlier in waits] + [[] for _ in range(2 * ranks)]
    for block, met in peers.items():
        more[first[block]][:0] = [entry + peer for peer in met]
        for peer in met:
            more[leave + peer].append(last[block])
    return (
        tuple(map(tuple, more)),
        [*range(entry, leave), *order, *range(leave, leave + ranks)],
        [*home, *((rank, 0) for rank in range(ranks)), *((rank, 0) for rank in range(ranks))],
    )


def _ranks(algorithm: Algorithm, blocks: dict[Home, list[Step]]) -> tuple[OneSidedRank, ...]:
    ranks = range(algorithm.collective.ranks)
    own: list[list[tuple[Step, ...]]] = [[] for _ in ranks]
    scratch: list[list[Scratch]] = [[] for _ in ranks]
    for (rank, _), steps in blocks.items():  # sorted: the gate first
        own[rank].append(tuple(steps))
    for piece in algorithm.scratch:
        scratch[piece.rank].append(piece)
    return tuple(OneSidedRank(rank, tuple(own[rank]), tuple(scratch[rank])) for rank in ranks)
