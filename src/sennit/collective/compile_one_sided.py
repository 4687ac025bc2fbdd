"""The second lowering: an `Algorithm` to a `OneSided` program on symmetric buffers.

It starts from the chunk DAG (pass 1 of `compile.py`). There is no receive here to be joined with a send: each move is done by one rank that touches
the memory of the other. A copy is *put* by the source, since writing to another's memory costs one way; a reduce is done by the
target, which must read its own chunk anyway.

1. **Operations** (`compile_one_sided_operations.py`). A move is one; reduces one after another into the same chunks are one together.
2. **Order.** An operation waits for those whose accesses stand before its own. Operations are taken by depth, then by number.
3. **Blocks.** The operations of a rank that touch the same peers on the same lane (see `compile_operations.py`) form a block; those that stay in the
   rank form one for each lane. Each runs in the order of 2.
4. **Signals** (`compile_one_sided_signals.py`). Where an operation waits for one of another block, be it of the same rank or not, the other block
   signals after it and this one waits before. A wait that others imply is left out.
5. **Gates.** See `ir/one_sided.py`: a block that touches the memory of peers begins by waiting for their gates, and ends by signalling them.

Every wait points backwards in one order, and a put needs no slot; so nothing can deadlock.
"""

from __future__ import annotations

from collections import defaultdict

from sennit.collective.collector import collector_paused
from sennit.collective.compile_chunks import chunk_dag
from sennit.collective.compile_one_sided_operations import Operation, OperationGraph, operation_graph
from sennit.collective.compile_one_sided_signals import Home, place_signals
from sennit.ir.collective import Algorithm, Scratch
from sennit.ir.one_sided import Await, OneSided, OneSidedRank, Signal, Step

__all__ = ["compile_one_sided"]


@collector_paused()
def compile_one_sided(algorithm: Algorithm) -> OneSided:
    graph = operation_graph(chunk_dag(algorithm))
    order = _order(graph)
    home, peers = _blocks(graph.operations, order)
    signals, awaits = place_signals(graph.waits, order, home)
    blocks: dict[Home, list[Step]] = {block: [Await(peer, 0, 1) for peer in met] for block, met in peers.items()}
    for number in order:
        steps = blocks[home[number]]
        steps += awaits.get(number, ())
        steps.append(graph.operations[number].step)
        steps += signals.get(number, ())
    for block, met in peers.items():
        blocks[block] += [Signal(peer, 0) for peer in met]
    return OneSided(algorithm.name, algorithm.collective, _ranks(algorithm, blocks, peers))


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


def _ranks(
    algorithm: Algorithm, blocks: dict[Home, list[Step]], peers: dict[Home, tuple[int, ...]]
) -> tuple[OneSidedRank, ...]:
    ranks = range(algorithm.collective.ranks)
    guests: list[list[Home]] = [[] for _ in ranks]  # the blocks of others that touch a rank's memory
    own: list[list[tuple[Step, ...]]] = [[] for _ in ranks]
    scratch: list[list[Scratch]] = [[] for _ in ranks]
    for block in sorted(blocks):
        own[block[0]].append(tuple(blocks[block]))
        for peer in peers[block]:
            guests[peer].append(block)
    for piece in algorithm.scratch:
        scratch[piece.rank].append(piece)
    gates: list[tuple[Step, ...]] = [
        (*(Signal(*guest) for guest in met), *(Await(*guest, 1) for guest in met)) for met in guests
    ]
    return tuple(OneSidedRank(rank, (gates[rank], *own[rank]), tuple(scratch[rank])) for rank in ranks)
