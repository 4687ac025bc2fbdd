"""Signals of the one-sided lowering: which waits are needed, and which follow from others.

An operation must come after the operations that it depends on. Those of its own block are done by the order of the
block; of each other block the latest is enough. These, and the operation before it in its block, are its
*predecessors*. A wait for a predecessor o is implied by the others, and left out, if o happens before one of them. What
is left is the transitive reduction: the same operations are ordered, and with any one wait less they would not be.

**Which are implied** (`_implied`). An operation has a *level*, one more than the largest of its predecessors. Only a
predecessor of a higher level than o can have o behind it, so most waits are seen to be needed at once. For the rest
vector clocks decide: for each operation and block, how many operations of that block happen before it. Only the blocks
in question get a column, in batches of bounded size; a batch is one sweep over all operations, a level at a time. So
time and memory do not grow with the number of blocks where nothing is in question.

A block's k-th signal to another is the one that a wait for k means.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from sennit.ir.one_sided import Await, Signal

__all__ = ["Home", "place_signals"]

Home = tuple[int, int]  # rank, block
BATCH_ENTRIES = 1 << 24  # of a sweep's clocks: 64 MiB


def place_signals(
    waits: tuple[tuple[int, ...], ...], order: list[int], home: list[Home]
) -> tuple[dict[int, list[Signal]], dict[int, list[Await]]]:
    """By operation: the signals that follow it, and the waits that precede it.

    `order` has every operation behind those it waits for.
    """
    place_in_block, before = _predecessors(waits, order, home)
    implied = _implied(order, home, place_in_block, before)
    signals: defaultdict[int, list[Signal]] = defaultdict(list)
    awaits: defaultdict[int, list[Await]] = defaultdict(list)
    sent: defaultdict[tuple[Home, Home], int] = defaultdict(int)
    for number in order:
        here = home[number]
        for other in before[number]:
            if home[other] != here and (number, other) not in implied:
                sent[home[other], here] += 1
                signals[other].append(Signal(*here))
                awaits[number].append(Await(*home[other], sent[home[other], here]))
    return signals, awaits


def _predecessors(
    waits: tuple[tuple[int, ...], ...], order: list[int], home: list[Home]
) -> tuple[list[int], list[list[int]]]:
    """By operation: its number in its block, counted from 1; and its predecessors."""
    place = [0] * len(order)
    before: list[list[int]] = [[] for _ in order]
    last: dict[Home, int] = {}
    for number in order:
        here = home[number]
        latest: dict[Home, int] = {here: last[here]} if here in last else {}
        for other in waits[number]:
            block = home[other]
            if block != here and (block not in latest or place[other] > place[latest[block]]):
                latest[block] = other
        before[number] = list(latest.values())
        place[number] = place[last[here]] + 1 if here in last else 1
        last[here] = number
    return place, before


def _implied(order: list[int], home: list[Home], place: list[int], before: list[list[int]]) -> set[tuple[int, int]]:
    """The waits (operation, predecessor) that others imply."""
    level = [0] * len(order)
    doubtful: defaultdict[Home, list[tuple[int, int]]] = defaultdict(list)
    for number in order:
        earlier = before[number]
        highest = max((level[other] for other in earlier), default=0)
        level[number] = highest + 1
        for other in earlier:
            if level[other] < highest and home[other] != home[number]:
                doubtful[home[other]].append((number, other))
    if not doubtful:
        return set()
    levels = _levels(order, level, before)
    asked = list(doubtful)
    width = max(1, BATCH_ENTRIES // len(order))
    found: set[tuple[int, int]] = set()
    for first in range(0, len(asked), width):
        columns = {block: column for column, block in enumerate(asked[first : first + width])}
        clocks = _sweep(levels, [(columns.get(block), number) for block, number in zip(home, place, strict=True)])
        for block, column in columns.items():
            for number, other in doubtful[block]:
                others = [known for known in before[number] if known != other]
                if max(clocks[others, column]) >= place[other]:
                    found.add((number, other))
    return found


def _levels(order: list[int], level: list[int], before: list[list[int]]) -> list[list[NDArray[np.int64]]]:
    """Per level, the operations on it, then for k = 0, 1, ... the pairs (operation, its k-th predecessor) as two rows."""
    by_level: defaultdict[int, list[int]] = defaultdict(list)
    for number in order:
        by_level[level[number]].append(number)
    found: list[list[NDArray[np.int64]]] = []
    for _, numbers in sorted(by_level.items()):
        most = max(len(before[number]) for number in numbers)
        edges = [[(number, before[number][k]) for number in numbers if k < len(before[number])] for k in range(most)]
        found.append([np.array(numbers), *(np.array(pairs).T for pairs in edges)])
    return found


def _sweep(levels: list[list[NDArray[np.int64]]], homes: list[tuple[int | None, int]]) -> NDArray[np.int32]:
    """Vector clocks of all operations over some blocks: how many operations of the block happen before this one, or are
    it. `homes` has the column of each operation's block, if it has one, and its number there.
    """
    width = 1 + max(column for column, _ in homes if column is not None)
    clocks = np.zeros((len(homes), width), dtype=np.int32)
    for numbers, *edges in levels:
        for later, earlier in edges:
            clocks[later] = np.maximum(clocks[later], clocks[earlier])
        for number in numbers.tolist():
            column, place = homes[number]
            if column is not None:
                clocks[number, column] = place
    return clocks
