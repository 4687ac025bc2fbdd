"""The checker of an algorithm's form: every place exists. What its moves compute, `collective/verify.py` says.

| rule | says |
|---|---|
| scratch | a scratch buffer belongs to a rank, has a name of its own there and one chunk at least |
| places | the rank exists, the buffer exists there, the range of chunks lies within it |
| sizes | source and target have as many chunks |
| overlap | source and target are apart, or a copy onto itself |
| hints | channel and instance are not negative |
| switch | the moves of one number stand together and are a multicast or a reduction of `ir/collective.py`, on one lane |
"""

from __future__ import annotations

from itertools import groupby

from sennit.errors import CollectiveError
from sennit.ir.cells import RankCells, lay_out_cells
from sennit.ir.collective import Algorithm, Chunks, Move, MoveKind

__all__ = ["check_algorithm", "describe_move"]


def check_algorithm(algorithm: Algorithm) -> tuple[RankCells, ...]:
    """Raise `CollectiveError` for the first rule that the algorithm breaks; return where its buffers lie."""
    cells = lay_out_cells(algorithm.collective, algorithm.scratch, f"algorithm {algorithm.name!r}")
    for index, move in enumerate(algorithm.moves):
        source, target = (_find(algorithm, cells, index, place) for place in (move.source, move.target))
        if fault := _fault(move, source, target):
            what, fix = fault
            raise CollectiveError(what, where=describe_move(algorithm, index), fix=fix)
    _check_switch(algorithm, cells)
    return cells


def _check_switch(algorithm: Algorithm, cells: tuple[RankCells, ...]) -> None:
    seen: set[int] = set()
    first = 0
    for number, group in groupby(algorithm.moves, key=lambda move: move.switch):
        moves = list(group)
        if number is not None:
            fault = "its moves do not stand together" if number in seen else _switch_fault(moves, cells)
            if fault:
                raise CollectiveError(
                    f"switch {number}: {fault}",
                    where=describe_move(algorithm, first),
                    fix="copy one source to the same place of different ranks, or add up the same place of different ranks",
                )
            seen.add(number)
        first += len(moves)


def _switch_fault(moves: list[Move], cells: tuple[RankCells, ...]) -> str:
    head = moves[0]
    if len({(move.channel, move.instance) for move in moves}) > 1:
        return "its moves have different channels or instances"
    one_source, one_target = len({move.source for move in moves}) == 1, len({move.target for move in moves}) == 1
    if all(move.kind is MoveKind.COPY for move in moves):
        same_place = len({(move.target.buffer, move.target.start) for move in moves}) == 1
        ranks = {move.target.rank for move in moves}
        return "" if one_source and same_place and len(ranks) == len(moves) else "it copies, but is no multicast"
    sources = {move.source.rank for move in moves}
    same_place = len({(move.source.buffer, move.source.start) for move in moves}) == 1
    if not one_target or not same_place or len(sources) < len(moves):
        return "it adds, but not the same place of different ranks into one target"
    if any(move.kind is MoveKind.COPY for move in moves[1:]):
        return "a copy stands behind a reduce"
    if head.kind is MoveKind.REDUCE:
        own = cells[head.target.rank].find(head.source.buffer, head.source.start, head.source.count)
        held = cells[head.target.rank].find(head.target.buffer, head.target.start, head.target.count)
        if own != held or head.target.rank in sources:
            return "it begins with a reduce, and its target is not the place that is added up"
    return ""


def describe_move(algorithm: Algorithm, index: int) -> str:
    move = algorithm.moves[index]
    line = f"{move.line}: " if move.line else ""
    return f"{line}algorithm {algorithm.name!r}, move {index}: {move.kind.value} {move.source} to {move.target}"


def _find(algorithm: Algorithm, cells: tuple[RankCells, ...], index: int, place: Chunks) -> tuple[int, int]:
    if not 0 <= place.rank < len(cells):
        where = describe_move(algorithm, index)
        raise CollectiveError(f"there is no rank {place.rank}", where=where, fix=f"use 0 to {len(cells) - 1}")
    held = cells[place.rank]
    found = held.find(place.buffer, place.start, place.count)
    if found is None:
        raise held.missing(place.buffer, place.start, place.count, describe_move(algorithm, index))
    return found


def _fault(move: Move, source: tuple[int, int], target: tuple[int, int]) -> tuple[str, str] | None:
    """What is wrong, and what to do."""
    if move.source.count != move.target.count:
        return f"{move.source.count} chunks move to {move.target.count}", "name as many on both sides"
    if move.source.rank == move.target.rank and source[0] < target[1] and target[0] < source[1]:
        if source != target:
            return f"{move.source} and {move.target} overlap", "move through scratch, or chunk by chunk"
        if move.kind is MoveKind.REDUCE:
            return f"{move.source} is added to itself", "a contribution counts once: reduce another value"
    if move.instance < 0 or (move.channel is not None and move.channel < 0):
        return f"channel {move.channel}, instance {move.instance}", "use 0 or more for both"
    return None
