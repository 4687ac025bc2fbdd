"""One block a rank: the form of a one-sided program that suits a GPU.

`compile_one_sided` gives each peer a block of its own, since on separate devices each link wants its own hands. Where
the blocks of a rank share one memory, that leaves most of them waiting while one works. A GPU does better with one
block a rank that many thread blocks carry out together, each on its slice of every chunk (`gpu_code.py`).

`join_blocks` puts all steps of a rank into block 1, in one order of all steps that the waits allow: so each wait still
points backwards in that order, and nothing can deadlock that could not before. Signals inside a rank go: the order
replaces them. Those between two ranks keep their places and are numbered anew; a wait that an earlier one implies goes,
and so does a signal that nobody waits for. Gates are made anew. `verify_one_sided` proves the result like any other
program.

`without_gates` leaves the gates out: for a launch that serves all ranks, whose start and end are gate enough.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

from sennit.errors import CollectiveError
from sennit.ir.one_sided import Await, OneSided, OneSidedRank, Signal, Step, accesses

__all__ = ["join_blocks", "without_gates"]

_Home = tuple[int, int]  # rank, block
_Sent = tuple[_Home, _Home, int]  # from, to: which of their signals


def join_blocks(program: OneSided) -> OneSided:
    by_rank: list[list[tuple[_Home, Step]]] = [[] for _ in program.ranks]
    for home, step in _order(program):
        by_rank[home[0]].append((home, step))
    numbers = _number(by_rank)
    joined = [_renumbered(rank, steps, numbers) for rank, steps in enumerate(by_rank)]
    peers = [_peers(rank, steps) for rank, steps in enumerate(joined)]
    ranks = []
    for ranked in program.ranks:
        rank = ranked.rank
        guests = [other for other, met in enumerate(peers) if rank in met]
        gate: list[Step] = [*(Signal(guest, 1) for guest in guests), *(Await(guest, 1, 1) for guest in guests)]
        enter, leave = (Await(peer, 0, 1) for peer in peers[rank]), (Signal(peer, 0) for peer in peers[rank])
        ranks.append(OneSidedRank(rank, (tuple(gate), (*enter, *joined[rank], *leave)), ranked.scratch))
    return OneSided(program.name, program.collective, tuple(ranks))


def without_gates(program: OneSided) -> OneSided:
    ranks = []
    for ranked in program.ranks:
        blocks = [
            tuple(step for step in steps if not (isinstance(step, Signal | Await) and step.block == 0))
            for steps in ranked.blocks[1:]
        ]
        ranks.append(OneSidedRank(ranked.rank, ((), *blocks), ranked.scratch))
    return OneSided(program.name, program.collective, tuple(ranks))


@dataclass(slots=True)
class _Block:
    steps: tuple[Step, ...]
    at: int = 0
    depth: int = 0  # of moves, one needing another

    @property
    def turn(self) -> int:
        """The least goes first. A signal is sent as soon as it may be: others wait for it."""
        return -1 if isinstance(self.steps[self.at], Signal) else self.depth


def _order(program: OneSided) -> list[tuple[_Home, Step]]:
    """All steps but those of gates, one after another as the waits allow, those that could run early first."""
    blocks = {
        (ranked.rank, number): _Block(tuple(step for step in steps if not _is_of_gate(step)))
        for ranked in program.ranks
        for number, steps in enumerate(ranked.blocks)
        if number
    }
    sent: defaultdict[tuple[_Home, _Home], list[int]] = defaultdict(list)  # from, to: the depth of each signal
    parked: dict[tuple[_Home, _Home], _Home] = {}
    order: list[tuple[_Home, Step]] = []
    heap = [(block.turn, *home) for home, block in blocks.items() if block.steps]
    heapq.heapify(heap)
    while heap:
        _, *where = heapq.heappop(heap)
        home: _Home = where[0], where[1]
        block = blocks[home]
        step, depth = block.steps[block.at], block.depth
        match step:
            case Await():
                pair = (step.rank, step.block), home
                if len(sent[pair]) < step.count:
                    parked[pair] = home
                    continue
                depth = max(depth, sent[pair][step.count - 1])
            case Signal():
                pair = home, (step.rank, step.block)
                sent[pair].append(depth)
                if pair in parked:
                    waiting = parked.pop(pair)
                    heapq.heappush(heap, (blocks[waiting].turn, *waiting))
            case _:
                depth += 1
        order.append((home, step))
        block.at, block.depth = block.at + 1, depth
        if block.at < len(block.steps):
            heapq.heappush(heap, (block.turn, *home))
    if parked:
        stuck = ", ".join(f"rank {rank} block {block}" for rank, block in parked.values())
        raise CollectiveError(f"one-sided program {program.name!r} deadlocks", where=stuck)
    return order


def _is_of_gate(step: Step) -> bool:
    return isinstance(step, Signal | Await) and step.block == 0


def _number(by_rank: list[list[tuple[_Home, Step]]]) -> dict[_Sent, int]:
    """Which of the signals from its rank to the other a signal becomes, for those that a rank must wait for."""
    place: dict[_Sent, int] = {}
    for steps in by_rank:
        counts: defaultdict[tuple[_Home, _Home], int] = defaultdict(int)
        for position, (home, step) in enumerate(steps):
            if isinstance(step, Signal) and step.rank != home[0]:
                pair = home, (step.rank, step.block)
                counts[pair] += 1
                place[*pair, counts[pair]] = position
    needed: defaultdict[tuple[int, int], list[_Sent]] = defaultdict(list)
    for rank, steps in enumerate(by_rank):
        reached: dict[int, int] = {}
        for home, step in steps:
            if isinstance(step, Await) and step.rank != rank:
                signal = (step.rank, step.block), home, step.count
                if place[signal] > reached.get(step.rank, -1):
                    reached[step.rank] = place[signal]
                    needed[step.rank, rank].append(signal)
    return {signal: number for signals in needed.values() for number, signal in enumerate(signals, start=1)}


def _renumbered(rank: int, steps: list[tuple[_Home, Step]], numbers: dict[_Sent, int]) -> list[Step]:
    counts: defaultdict[tuple[_Home, _Home], int] = defaultdict(int)
    found: list[Step] = []
    for home, step in steps:
        match step:
            case Signal():
                pair = home, (step.rank, step.block)
                counts[pair] += 1
                if (*pair, counts[pair]) in numbers:
                    found.append(Signal(step.rank, 1))
            case Await():
                number = numbers.get(((step.rank, step.block), home, step.count))
                if number is not None:
                    found.append(Await(step.rank, 1, number))
            case _:
                found.append(step)
    return found


def _peers(rank: int, steps: list[Step]) -> list[int]:
    met: set[int] = set()
    for step in steps:
        if not isinstance(step, Signal | Await):
            touched = accesses(step, rank)
            met |= {there for there, _ in (*touched.reads, *touched.writes)}
    return sorted(met - {rank})
