"""Races: are any two steps that touch the same memory, one of them to write, ordered by happens-before?

**Which pairs.** Walk the steps of a rank along one linear extension of happens-before and keep, for every cell, its
last writer and the readers since. A read is compared with the last writer; a write with the last writer and those
readers. If all these pairs are ordered, then by transitivity every conflicting pair is; and each of these pairs
conflicts, so one that is not ordered is a race. Of two readers in one block the later one stands for both. Cells with
the same history share one entry (`_History`), so a step over many cells costs as many comparisons as there are
different histories among them.

**Ordered by the rank's own edges?** Most pairs are ordered by block order and waits alone. For each rank a vector clock
over its own blocks decides that.

**Ordered through other ranks?** A pair that is not goes through a message to another rank and back, or races. Clocks
over all blocks of all ranks would take steps x blocks entries, so only the blocks in question get a column, and columns
are taken in batches of bounded size; a batch is one sweep over the whole graph, a level at a time (`_sweep`).

Slots are no edges here: a runtime with more slots than the schedule asks for must stay correct.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.collective.step_graph import StepGraph
from sennit.errors import CollectiveError
from sennit.ir.cells import RankCells
from sennit.ir.schedule import Instruction, Opcode, Place

__all__ = ["check_races"]

Clocks = NDArray[np.int32]
BATCH_ENTRIES = 1 << 24  # of a sweep's clocks: 64 MiB


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two conflicting steps, the earlier one first, and a cell that both touch."""

    earlier: int
    later: int
    cell: int


@dataclass(frozen=True, slots=True)
class _History:
    """What happened to a cell: its last writer, and the last reader since in each block that has one."""

    writer: int | None
    readers: tuple[int, ...]

    def behind(self, block: list[int], node: int) -> _History:
        return _History(self.writer, (*(reader for reader in self.readers if block[reader] != block[node]), node))


def check_races(graph: StepGraph, order: list[int], cells: tuple[RankCells, ...]) -> int:
    """Raise on the first race; return the number of pairs that were shown to be ordered."""
    by_rank: list[list[int]] = [[] for _ in cells]
    for node in order:
        by_rank[graph.rank[node]].append(node)
    count = 0
    doubtful: list[_Pair] = []
    for rank, nodes in enumerate(by_rank):
        pairs = _conflicts(graph, nodes, cells[rank])
        count += len(pairs)
        doubtful += _not_ordered_locally(graph, nodes, pairs)
    for pair in _not_ordered_by_messages(graph, order, doubtful):
        here = cells[graph.rank[pair.later]].name(pair.cell)
        raise CollectiveError(
            f"race on {here} of rank {graph.rank[pair.later]}: two steps touch it, at least one writes it, and nothing "
            "orders them",
            where=f"{graph.describe(pair.earlier)}\n     and {graph.describe(pair.later)}",
            fix=f"let the later one wait: after {graph.block[pair.earlier]}.{graph.step[pair.earlier]}",
        )
    return count


# ---- which pairs conflict --------------------------------------------------------------------------------------------


def accesses(instruction: Instruction) -> tuple[tuple[Place, ...], Place | None]:
    """The places that an instruction reads and that it writes. What reads its target also writes it."""
    match instruction.opcode:
        case Opcode.COPY | Opcode.REDUCE:
            return instruction.sources, instruction.target
        case Opcode.SEND | Opcode.RECEIVE_REDUCE_SEND:
            return instruction.sources, None
        case _:
            return (), instruction.target


def _conflicts(graph: StepGraph, nodes: list[int], cells: RankCells) -> list[_Pair]:
    """The pairs to compare among the steps of one rank, each once."""
    history: list[_History] = [_History(None, ())] * cells.cells
    seen: dict[tuple[int, int], int] = {}
    for node in nodes:
        reads, written = accesses(graph.instructions[node])
        for read in reads:
            start, stop = _span(cells, read)
            next_of: dict[int, _History] = {}
            for cell, old in _distinct(history, start, stop):
                next_of[id(old)] = old.behind(graph.block, node)
                if old.writer is not None:
                    seen.setdefault((old.writer, node), cell)
            history[start:stop] = [next_of[id(old)] for old in history[start:stop]]
        if written is not None:
            start, stop = _span(cells, written)
            for cell, old in _distinct(history, start, stop):
                for other in (old.writer, *old.readers):
                    if other is not None and other != node:
                        seen.setdefault((other, node), cell)
            history[start:stop] = [_History(node, ())] * (stop - start)
    return [_Pair(earlier, later, cell) for (earlier, later), cell in seen.items()]


def _distinct(history: list[_History], start: int, stop: int) -> list[tuple[int, _History]]:
    """The different histories of a range, each with one of its cells. Cells that share one share the object."""
    found: dict[int, tuple[int, _History]] = {}
    for cell, old in enumerate(history[start:stop], start):
        found.setdefault(id(old), (cell, old))
    return list(found.values())


def _span(cells: RankCells, place: Place) -> tuple[int, int]:
    found = cells.find(place.buffer, place.start, place.count)
    assert found is not None  # the checker has seen it
    return found


# ---- which of them are ordered ---------------------------------------------------------------------------------------


def _not_ordered_locally(graph: StepGraph, nodes: list[int], pairs: list[_Pair]) -> list[_Pair]:
    """The pairs that block order and waits of the rank leave open."""
    apart = [pair for pair in pairs if graph.block[pair.earlier] != graph.block[pair.later]]
    if not apart:
        return []
    rank = graph.rank[nodes[0]]
    row = {node: position for position, node in enumerate(nodes)}
    clocks: Clocks = np.zeros((len(nodes), len(graph.schedule.ranks[rank].blocks)), dtype=np.int32)
    for position, node in enumerate(nodes):
        for other in graph.before[node]:
            if other in row:
                np.maximum(clocks[position], clocks[row[other]], out=clocks[position])
        clocks[position, graph.block[node]] = graph.step[node] + 1
    return [pair for pair in apart if clocks[row[pair.later], graph.block[pair.earlier]] <= graph.step[pair.earlier]]


def _not_ordered_by_messages(graph: StepGraph, order: list[int], pairs: list[_Pair]) -> list[_Pair]:
    """The pairs that happens-before as a whole leaves open: the races."""
    if not pairs:
        return []
    by_block: dict[tuple[int, int], list[_Pair]] = defaultdict(list)
    for pair in pairs:
        by_block[graph.rank[pair.earlier], graph.block[pair.earlier]].append(pair)
    levels = _levels(graph, order)
    asked = list(by_block)
    width = max(1, BATCH_ENTRIES // len(order))
    races: list[_Pair] = []
    for first in range(0, len(asked), width):
        columns = {block: column for column, block in enumerate(asked[first : first + width])}
        clocks = _sweep(graph, levels, columns)
        for block, column in columns.items():
            races += [pair for pair in by_block[block] if clocks[pair.later, column] <= graph.step[pair.earlier]]
    return races


def _levels(graph: StepGraph, order: list[int]) -> list[list[NDArray[np.int64]]]:
    """Per level, the nodes on it, then for k = 0, 1, ... the pairs (node, its k-th predecessor) as two rows."""
    level = [0] * len(order)
    by_level: list[list[int]] = []
    for node in order:
        level[node] = max((level[other] + 1 for other in graph.before[node]), default=0)
        if level[node] == len(by_level):
            by_level.append([])
        by_level[level[node]].append(node)
    found: list[list[NDArray[np.int64]]] = []
    for nodes in by_level:
        most = max(len(graph.before[node]) for node in nodes)
        edges = [[(node, graph.before[node][k]) for node in nodes if k < len(graph.before[node])] for k in range(most)]
        found.append([np.array(nodes), *(np.array(pairs).T for pairs in edges)])
    return found


def _sweep(graph: StepGraph, levels: list[list[NDArray[np.int64]]], columns: dict[tuple[int, int], int]) -> Clocks:
    """Vector clocks of all nodes over some blocks: how many steps of the block happen before the node, or are it."""
    clocks: Clocks = np.zeros((len(graph.before), len(columns)), dtype=np.int32)
    for nodes, *edges in levels:
        for later, earlier in edges:
            clocks[later] = np.maximum(clocks[later], clocks[earlier])
        for node in nodes.tolist():
            column = columns.get((graph.rank[node], graph.block[node]))
            if column is not None:
                clocks[node, column] = graph.step[node] + 1
    return clocks
