"""Passes 2 and 3: the instruction DAG, and its fusion.

**Instructions** (`instruction_dag`). An *operation* is named by the access that it begins with. A move m between ranks
becomes two operations, a send (access 2m) and a receive or receive_reduce (access 2m + 1), joined by a message. A move
within a rank becomes one, named 2m + 1, which also owns access 2m. An operation waits for the owners of the accesses
that stand before its own.

**Joined reduces.** Reduces within a rank that `compile_joins.py` joins are one operation, named as the last of them,
which owns the accesses of all.

**Fusion** (`fuse`). A receive r and a send s of the same rank become one operation, named as r, if

1. both are of exactly the same chunks, and s waits for r alone: what it sends is what r received;
2. neither is fused already;
3. both are of the same *lane*, that is, of the same channel hint and instance;
4. on this rank and lane, the peer of r is joined with no other send peer, nor the peer of s with another receive peer.
   A thread block has one
   peer on either side; so this rule, which takes the commonest pairs first, is what keeps a program on few channels.

No fusion makes a cycle: contracting the edge from r to s would need a second path from r to s, and by 1 nothing else
leads to s.

A receive_reduce that sends on is receive_reduce_copy_send. It becomes receive_reduce_send, which leaves its chunks
alone, if all of them are dead: overwritten before anything else reads them, and not asked for at the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from sennit.collective.compile_chunks import ChunkDag
from sennit.collective.compile_joins import joined_moves
from sennit.ir.collective import MoveKind
from sennit.ir.schedule import Opcode

__all__ = ["OperationDag", "fuse", "instruction_dag"]


@dataclass(frozen=True, slots=True)
class OperationDag:
    """All by access. `opcode` is None where the access does not begin an operation."""

    chunks: ChunkDag
    opcode: tuple[Opcode | None, ...]
    owner: tuple[int, ...]  # the operation that an access is part of
    before: tuple[tuple[int, ...], ...]  # accesses; of operations only
    sent: tuple[int | None, ...]  # the move that the operation sends
    received: tuple[int | None, ...]
    rank: tuple[int, ...]
    lane: tuple[int, ...]  # by move
    lanes: int
    connection: tuple[int, ...]  # by move: a number for sender, receiver and lane
    joined: dict[int, tuple[int, ...]]  # operations that are several reduces: their moves, in order


def instruction_dag(chunks: ChunkDag) -> OperationDag:
    ranks = chunks.algorithm.collective.ranks
    instances = 1 + max([move.instance for move in chunks.moves], default=0)
    lanes = instances * (1 + max([move.channel or 0 for move in chunks.moves], default=0))
    opcode: list[Opcode | None] = []
    sent: list[int | None] = []
    received: list[int | None] = []
    rank: list[int] = []
    lane: list[int] = []
    connection: list[int] = []
    owner = list(range(2 * len(chunks.moves)))
    before = list(chunks.before)
    send, receive, receive_reduce, copy = Opcode.SEND, Opcode.RECEIVE, Opcode.RECEIVE_REDUCE, MoveKind.COPY
    for number, move in enumerate(chunks.moves):
        here, there = move.source.rank, move.target.rank
        own = (move.channel or 0) * instances + move.instance
        lane.append(own)
        connection.append((here * ranks + there) * lanes + own)
        rank += (here, there)
        if here != there:
            opcode += (send, receive if move.kind is copy else receive_reduce)
            sent += (number, None)
            received += (None, number)
        else:
            opcode += (None, Opcode.COPY if move.kind is copy else Opcode.REDUCE)
            sent += (None, None)
            received += (None, None)
            read, write = 2 * number, 2 * number + 1
            owner[read] = write
            before[read], before[write] = (), tuple({*before[read], *before[write]})
    joined: dict[int, tuple[int, ...]] = {}
    for group in joined_moves(chunks, local_only=True) if opcode.count(Opcode.REDUCE) > 1 else ():
        if len(group) > 1:
            op = 2 * group[-1] + 1
            waits = {access for number in group for access in before[2 * number + 1]}
            for number in group[:-1]:
                owner[2 * number] = owner[2 * number + 1] = op
                opcode[2 * number + 1], before[2 * number + 1] = None, ()
            owner[op - 1] = op
            before[op] = tuple(access for access in waits if owner[access] != op)
            joined[op] = tuple(group)
    return OperationDag(
        chunks,
        tuple(opcode),
        tuple(owner),
        tuple(before),
        tuple(sent),
        tuple(received),
        tuple(rank),
        tuple(lane),
        lanes,
        tuple(connection),
        joined,
    )


def fuse(dag: OperationDag) -> OperationDag:
    """Join receives with the sends that pass on what they received."""
    opcode, owner, before, sent = list(dag.opcode), list(dag.owner), list(dag.before), list(dag.sent)
    pairs = _pairs(dag)
    joined = _joined_ends(pairs)
    for receive, send, ends in pairs:
        if sent[receive] is not None or ends not in joined:
            continue
        fused = Opcode.RECEIVE_COPY_SEND
        if opcode[receive] is Opcode.RECEIVE_REDUCE:
            dead = dag.chunks.written_for_nothing(receive, readers=1)
            fused = Opcode.RECEIVE_REDUCE_SEND if dead else Opcode.RECEIVE_REDUCE_COPY_SEND
        opcode[receive], opcode[send] = fused, None
        sent[receive], sent[send] = send // 2, None
        owner[send] = receive
        before[send] = ()
    return replace(dag, opcode=tuple(opcode), owner=tuple(owner), before=tuple(before), sent=tuple(sent))


def _pairs(dag: OperationDag) -> list[tuple[int, int, tuple[int, int]]]:
    """The receives and sends that may be joined by rules 1 and 3, in the order of the sends; with their connections."""
    sent, received, cells, lane, connection = dag.sent, dag.received, dag.chunks.cells, dag.lane, dag.connection
    pairs: list[tuple[int, int, tuple[int, int]]] = []
    for move, waits in enumerate(dag.before[::2]):
        send = 2 * move
        if len(waits) != 1 or sent[send] is None:
            continue
        (receive,) = waits
        source = received[receive]
        if source is not None and cells[receive] == cells[send] and lane[source] == lane[move]:
            pairs.append((receive, send, (connection[source], connection[move])))
    return pairs


def _joined_ends(pairs: list[tuple[int, int, tuple[int, int]]]) -> set[tuple[int, int]]:
    """Rule 4: a matching of connections that a rank receives from with those that it sends to, the commonest first."""
    counts = Counter([ends for _, _, ends in pairs])
    receiving: set[int] = set()
    sending: set[int] = set()
    joined: set[tuple[int, int]] = set()
    for ends, _ in counts.most_common():  # among equals the first seen
        inward, outward = ends
        if inward not in receiving and outward not in sending:
            receiving.add(inward)
            sending.add(outward)
            joined.add(ends)
    return joined
