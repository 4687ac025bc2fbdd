"""The verifier of one-sided programs: what they do, proved without running them on data.

One symbolic run, in any order that the waits allow, shows five things; `CollectiveError` is raised at the first that
fails:

1. **Form.** Every rank, block and place exists, and all places of a step have as many chunks (`ir/one_sided_check.py`).
2. **No deadlock.** The run reaches its end. A step that may run stays so until it has run, so every other order reaches
   it too.
3. **No race.** Block b has a *clock*: for each block the number of its steps that are known to be done. The k-th signal
   from one block to another
   carries the sender's clock, and a wait for k takes the larger of both. Any two steps that touch the same chunk, one of them to write, are ordered by
   clocks: the earlier one's number is within the later one's clock. So all orders give each step the same operands.
   A `multi_reduce` or `switch_reduce` reads on every rank that it names, a `multicast` writes on every one.
4. **Gates.** A block touches the memory of another rank only after that rank's gate let it in, and before the gate is
   at its end.
5. **The result**, as sums of contributions: nothing unwritten is read, nothing is counted twice, and the outputs hold
   what is asked.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sennit.collective.buffers import Memories
from sennit.collective.postcondition import check_outputs
from sennit.errors import CollectiveError
from sennit.ir.collective import Chunks, Value, add_values
from sennit.ir.one_sided import Await, DataStep, OneSided, Signal, Step, accesses
from sennit.ir.one_sided_check import check_one_sided
from sennit.ir.schedule import Place

__all__ = ["OneSidedProof", "verify_one_sided"]

Clock = NDArray[np.int64]  # by block
Pair = tuple[int, int]  # from block, to block


@dataclass(frozen=True, slots=True)
class OneSidedProof:
    """What was shown, in numbers."""

    name: str
    steps: int
    signals: int
    ordered_pairs: int
    output_chunks: int


def verify_one_sided(program: OneSided, *, values: bool = True) -> OneSidedProof:
    """Raise `CollectiveError` where the program is wrong.

    `values=False` leaves 5 out: what it computes may be anything.
    """
    check_one_sided(program)
    run = _Run(program, values)
    run.to_the_end()
    run.check_gates()
    collective = program.collective
    if values:
        check_outputs(collective, run.held, program.name)
    return OneSidedProof(
        program.name,
        sum(len(steps) for steps in run.steps),
        sum(len(clocks) for clocks in run.signals.values()),
        run.ordered,
        sum(collective.output_chunks(rank) for rank in range(collective.ranks)),
    )


@dataclass(slots=True)
class _Cell:
    """One chunk: what it holds, and who touched it, as (block, number of its step)."""

    value: Value | None = None
    writer: tuple[int, int] | None = None
    readers: list[tuple[int, int]] = field(default_factory=list)


def _total(values: list[Value | None]) -> Value | None:
    """The sum, or None where one was never written or a contribution is in two of them."""
    total = values[0]
    for value in values[1:]:
        total = None if total is None or value is None else add_values(total, value)
    return total


class _Run:
    def __init__(self, program: OneSided, values: bool) -> None:
        self.program, self.values = program, values
        scratch = [piece for ranked in program.ranks for piece in ranked.scratch]
        self.memories = Memories(program.collective, scratch)
        self.names = [(ranked.rank, n) for ranked in program.ranks for n in range(len(ranked.blocks))]
        self.number = {name: block for block, name in enumerate(self.names)}
        self.steps: list[tuple[Step, ...]] = [steps for ranked in program.ranks for steps in ranked.blocks]
        self.at = [0] * len(self.names)
        self.clocks: list[Clock] = [np.zeros(len(self.names), dtype=np.int64) for _ in self.names]
        self.signals: defaultdict[Pair, list[Clock]] = defaultdict(list)
        self.cells: defaultdict[tuple[int, int], _Cell] = defaultdict(_Cell)
        self.touched: dict[tuple[int, int], int] = {}  # rank, block of another rank: the number of its last step there
        self.ordered = 0
        for rank in range(program.collective.ranks):
            memory, offset, chunks = self.memories.find(rank, "input")
            for index in range(chunks):
                self.cells[memory, offset + index].value = program.collective.before(rank, index)

    def to_the_end(self) -> None:
        todo = list(range(len(self.names)))
        parked: dict[Pair, int] = {}
        while todo:
            block = todo.pop()
            while self.at[block] < len(self.steps[block]):
                step = self.steps[block][self.at[block]]
                if isinstance(step, Await):
                    pair = self.number[step.rank, step.block], block
                    if len(self.signals[pair]) < step.count:
                        parked[pair] = block
                        break
                    np.maximum(self.clocks[block], self.signals[pair][step.count - 1], out=self.clocks[block])
                self.at[block] += 1
                self.clocks[block][block] = self.at[block]
                if isinstance(step, Signal):
                    pair = block, self.number[step.rank, step.block]
                    self.signals[pair].append(self.clocks[block].copy())
                    if pair in parked:
                        todo.append(parked.pop(pair))
                elif not isinstance(step, Await):
                    self.move(step, block)
        if parked:
            stuck = "; ".join(f"{self.where(block)}: {self.steps[block][self.at[block]]}" for block in parked.values())
            raise CollectiveError(f"one-sided program {self.program.name!r} deadlocks", where=stuck)

    def move(self, step: DataStep, block: int) -> None:
        """`at` has passed the step already: it is the step's number, counted from 1."""
        rank, now = self.names[block][0], (block, self.at[block])
        touched = accesses(step, rank)
        for there in {there for there, _ in (*touched.reads, *touched.writes)} - {rank}:
            if self.clocks[block][self.number[there, 0]] < 1:
                raise CollectiveError(f"{step} does not wait for the gate of rank {there}", where=self.where(block))
            self.touched[there, block] = now[1]
        reads, writes = ([self.locate(*place) for place in places] for places in (touched.reads, touched.writes))
        for i in range(touched.reads[0][1].count):
            sources = [self.cells[memory, start + i] for memory, start in reads]
            targets = [self.cells[memory, start + i] for memory, start in writes]
            for source in sources:
                self.order(source.writer, now, step)
            for target in targets:
                for earlier in (target.writer, *target.readers):
                    self.order(earlier, now, step)
            value = _total([cell.value for cell in (*targets[: touched.adds], *sources)])
            if value is None and self.values:
                raise CollectiveError(
                    f"{step} reads what nobody wrote, or counts a contribution twice", where=self.where(block)
                )
            for source in sources:
                source.readers.append(now)
            for target in targets:
                target.value, target.writer, target.readers = value, now, []

    def locate(self, rank: int, place: Place) -> tuple[int, int]:
        return self.memories.locate(Chunks(rank, place.buffer, place.start, place.count))

    def order(self, earlier: tuple[int, int] | None, now: tuple[int, int], step: Step) -> None:
        if earlier is None or earlier[0] == now[0]:
            return
        self.ordered += 1
        if self.clocks[now[0]][earlier[0]] < earlier[1]:
            other = self.steps[earlier[0]][earlier[1] - 1]
            raise CollectiveError(
                f"{step} races with {other}",
                where=f"{self.where(now[0])} and {self.where(earlier[0])}",
                fix="a signal after the one and a wait before the other are missing",
            )

    def check_gates(self) -> None:
        for (rank, block), last in self.touched.items():
            if self.clocks[self.number[rank, 0]][block] < last:
                raise CollectiveError(f"the gate of rank {rank} does not wait for {self.where(block)}")

    def held(self, rank: int) -> list[tuple[int, int, Value | None]]:
        """What `check_outputs` asks for: segments of one chunk."""
        memory, offset, chunks = self.memories.find(rank, "output")
        values = [self.cells[memory, offset + index].value for index in range(chunks)]
        return [
            (i, i + 1, value and tuple((index - i, ranks) for index, ranks in value)) for i, value in enumerate(values)
        ]

    def where(self, block: int) -> str:
        rank, number = self.names[block]
        return f"rank {rank}, block {number}, step {self.at[block]}"
