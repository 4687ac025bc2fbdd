"""Which moves are done at once: reduces in one pass over memory, and the moves of a switch.

Reduces one after another into the same chunks must keep their order anyway, and each would read and write the target.
Joined they read every source and the target once and write once. A reduce joins those before it if

1. all write exactly the same chunks of the same rank, on the same lane;
2. nothing has touched these chunks in between: its write waits for the write of the last one and for nothing else;
3. no move outside waits for a part of them.

By 3 they can all stand where the last one stands: nothing in between needed the earlier ones. So if what is joined is
numbered by its last move, everything waits for smaller numbers only, and joining never makes a cycle. One pass over the
moves decides it: a group is closed as soon as a move that does not join it waits for it.

The moves of one multicast or reduction of a switch (`ir/collective.py`) stand together in the program, so nothing lies
between them.
"""

from __future__ import annotations

from sennit.collective.compile_chunks import ChunkDag
from sennit.ir.collective import MoveKind

__all__ = ["joined_moves", "moves_before"]


def moves_before(chunks: ChunkDag, move: int) -> set[int]:
    """The moves that a move waits for."""
    earlier = {access // 2 for access in (*chunks.before[2 * move], *chunks.before[2 * move + 1])}
    return earlier - {move}


def joined_moves(chunks: ChunkDag, *, local_only: bool) -> list[list[int]]:
    """All moves, in groups that are done at once, by the last move of each.

    `local_only`: a group stays within a rank, and there is no switch.
    """
    groups: list[list[int]] = []
    of: list[list[int]] = []  # by move
    open_groups: set[int] = set()  # by their first move
    for number, move in enumerate(chunks.moves):
        group = None
        joins = move.kind is MoveKind.REDUCE
        if local_only:
            joins = joins and move.source.rank == move.target.rank
        elif move.switch is not None:
            joins = False
            if number and chunks.moves[number - 1].switch == move.switch:
                group = of[number - 1]
        if joins:
            group = _group_to_join(chunks, number, of, open_groups)
        for other in moves_before(chunks, number):
            if of[other] is not group:
                open_groups.discard(of[other][0])
        if group is None:
            group = []
            groups.append(group)
            if joins:
                open_groups.add(number)
        group.append(number)
        of.append(group)
    return sorted(groups, key=lambda group: group[-1])


def _group_to_join(chunks: ChunkDag, number: int, of: list[list[int]], open_groups: set[int]) -> list[int] | None:
    before = chunks.before[2 * number + 1]
    if len(before) != 1 or not before[0] % 2:
        return None
    last, move = before[0] // 2, chunks.moves[number]
    other, group = chunks.moves[last], of[last]
    if group[0] not in open_groups or chunks.cells[before[0]] != chunks.cells[2 * number + 1]:
        return None
    if (other.channel, other.instance) != (move.channel, move.instance):
        return None
    # a source that was made from a part of the group cannot be read together with it
    return None if any(of[access // 2] is group for access in chunks.before[2 * number]) else group
