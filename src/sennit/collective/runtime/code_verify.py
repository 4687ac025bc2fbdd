"""The verifier of `Code`: what it does, proved on the tables that a machine is handed, for every size.

One symbolic run, in any order that the waits allow, shows six things; `CollectiveError` is raised at the first that
fails:

1. **Form** (`code_check.py`).
2. **End.** The run reaches its end. A step that may run stays so until it has run, so every other order reaches it too.
3. **No race.** Block b has a *clock*: for each block the number of its steps that are known to be done. A signal
   carries the sender's clock, a wait
   takes the larger of both. Any two steps that touch the same chunk, one of them to write, are ordered by clocks.
4. **Gates.** A block touches the memory of another rank only after that rank's gate let it in, and before that rank has
   left.
5. **The result**, as sums of contributions: nothing unwritten is read, nothing is counted twice, and the outputs hold
   what is asked.
6. **Lengths.** Where no chunk count divides the size, chunk i of a part is no longer than chunk j <= i. So a place
   keeps a value of index j whole if it
   is scratch or has an index <= j in its part; and a sum needs terms of one index. Then every size runs as a divisible one does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sennit.collective.postcondition import check_outputs
from sennit.collective.runtime.code import FIRST_SCRATCH, INPUT, OUTPUT, Code, Instruction, Op, Operand
from sennit.collective.runtime.code_check import CheckedCode, Home, check_code
from sennit.errors import CollectiveError
from sennit.ir.collective import Value, add_values

__all__ = ["read_by_the_end", "verify_code"]

Clock = NDArray[np.int64]  # by block


def verify_code(code: Code) -> None:
    """Raise `CollectiveError` for the first thing that cannot be shown."""
    run = _Run(check_code(code))
    run.to_the_end()
    run.check_exits()
    check_outputs(code.collective, run.held, code.name)


def read_by_the_end(code: Code) -> bool:
    """Of a code that was verified: whether a rank whose blocks, all but its gate, are at their ends knows that its
    peers have read its input.
    """
    run = _Run(check_code(code))
    run.to_the_end()
    return all(
        any(int(run.clocks[own][block]) >= last for own in run.blocks_of(rank) if own != run.number[rank, 0])
        for (rank, block), last in run.inputs_read.items()
    )


@dataclass(slots=True)
class _Cell:
    """One chunk: what it holds, and who touched it, as (block, number of its step)."""

    value: Value | None = None
    writer: tuple[int, int] | None = None
    readers: list[tuple[int, int]] = field(default_factory=list)


class _Run:
    def __init__(self, checked: CheckedCode) -> None:
        self.checked, self.code = checked, checked.code
        self.names = list(checked.steps)
        self.number = {home: block for block, home in enumerate(self.names)}
        self.steps = list(checked.steps.values())
        self.at = [0] * len(self.names)
        self.clocks: list[Clock] = [np.zeros(len(self.names), dtype=np.int64) for _ in self.names]
        self.signals: defaultdict[tuple[int, int], list[Clock]] = defaultdict(list)  # by rank and flag
        self.cells: defaultdict[tuple[int, int, int], _Cell] = defaultdict(_Cell)
        self.touched: dict[tuple[int, int], int] = {}  # rank, block of another rank: the number of its last step there
        self.inputs_read: dict[tuple[int, int], int] = {}  # the same of its input alone
        for rank in range(self.code.ranks):
            for chunk in range(self.code.buffer_chunks(rank, INPUT)):
                place = checked.cell(Operand(rank, INPUT, chunk))
                self.cells[place].value = self.code.collective.before(rank, chunk)

    def to_the_end(self) -> None:
        todo = list(range(len(self.names)))
        while todo:
            block = todo.pop()
            rank = self.names[block][0]
            while self.at[block] < len(self.steps[block]):
                step = self.steps[block][self.at[block]]
                if step.op is Op.WAIT:
                    carried = self.signals[rank, step.argument]
                    if len(carried) < step.count:
                        break
                    np.maximum(self.clocks[block], carried[step.count - 1], out=self.clocks[block])
                self.at[block] += 1
                self.clocks[block][block] = self.at[block]
                if step.op is Op.SIGNAL:
                    self.signals[step.peer, step.argument].append(self.clocks[block].copy())
                    waiter = self.checked.waiters.get((step.peer, step.argument))
                    todo += [] if waiter is None else [self.number[waiter]]
                elif step.op.moves_data:
                    self.move(step, block)
        for block, number in enumerate(self.at):
            if number < len(self.steps[block]):
                raise self.fault("it waits for a signal that never comes", block)

    def move(self, step: Instruction, block: int) -> None:
        rank, now = self.names[block][0], (block, self.at[block])
        sources, targets = self.checked.ends(rank, step)
        adds = step.op in (Op.REDUCE, Op.READ_REDUCE) or (step.op is Op.MULTI_REDUCE and not step.overwrites)
        for there in {place.rank for place in (*sources, *targets)} - {rank}:
            if self.clocks[block][self.number[there, 0]] < 1:
                raise self.fault(f"{step.op.name} does not wait for the gate of rank {there}", block)
            self.touched[there, block] = now[1]
        for place in sources:
            if place.buffer == INPUT and place.rank != rank:
                self.inputs_read[place.rank, block] = now[1]
        for skip in range(step.count):
            reads, writes = (
                [(place._replace(chunk=place.chunk + skip)) for place in places] for places in (sources, targets)
            )
            read_cells, written = (
                [self.cells[self.checked.cell(place)] for place in places] for places in (reads, writes)
            )
            for cell in read_cells:
                self.order(cell.writer, now, step)
            for cell in written:
                for earlier in (cell.writer, *cell.readers):
                    self.order(earlier, now, step)
            value = self.total([*written, *read_cells] if adds else read_cells, step, block)
            for cell in read_cells:
                cell.readers.append(now)
            for place, cell in zip(writes, written, strict=True):
                self.check_length(place, value, step, block)
                cell.value, cell.writer, cell.readers = value, now, []

    def total(self, cells: list[_Cell], step: Instruction, block: int) -> Value:
        total = cells[0].value
        for cell in cells[1:]:
            total = None if total is None or cell.value is None else add_values(total, cell.value)
        if total is None:
            raise self.fault(f"{step.op.name} reads what nobody wrote, or counts a contribution twice", block)
        if len({index % self.code.chunks for index, _ in total}) > 1:
            raise self.fault(f"{step.op.name} adds chunks of different indices of a part", block)
        return total

    def check_length(self, place: Operand, value: Value, step: Instruction, block: int) -> None:
        index = value[0][0] % self.code.chunks
        if place.buffer < FIRST_SCRATCH and place.chunk % self.code.chunks > index:
            raise self.fault(f"{step.op.name} puts chunk {index} of a part into {place}, which may be shorter", block)

    def order(self, earlier: tuple[int, int] | None, now: tuple[int, int], step: Instruction) -> None:
        if earlier is not None and earlier[0] != now[0] and self.clocks[now[0]][earlier[0]] < earlier[1]:
            other = self.steps[earlier[0]][earlier[1] - 1]
            raise self.fault(f"{step.op.name} races with {other.op.name} of {_where(self.names[earlier[0]])}", now[0])

    def check_exits(self) -> None:
        """A rank has left when all of its blocks are at their ends."""
        for (rank, block), last in self.touched.items():
            if max(int(self.clocks[own][block]) for own in self.blocks_of(rank)) < last:
                raise self.fault(f"rank {rank} may leave before this block has", block)

    def blocks_of(self, rank: int) -> list[int]:
        return [number for home, number in self.number.items() if home[0] == rank]

    def held(self, rank: int) -> list[tuple[int, int, Value | None]]:
        """What `check_outputs` asks for: segments of one chunk, values relative to it."""
        result: list[tuple[int, int, Value | None]] = []
        for chunk in range(self.code.buffer_chunks(rank, OUTPUT)):
            value = self.cells[self.checked.cell(Operand(rank, OUTPUT, chunk))].value
            result.append((chunk, chunk + 1, value and tuple((index - chunk, ranks) for index, ranks in value)))
        return result

    def fault(self, what: str, block: int) -> CollectiveError:
        return self.checked.fault(what, self.names[block], self.at[block])


def _where(home: Home) -> str:
    return f"rank {home[0]}, block {home[1]}"
