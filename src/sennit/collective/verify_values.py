"""What every chunk of every rank holds, as a sum of contributions: the memory of a symbolic run, and the check of its
end.

A run is a sequence of steps, numbered; `describe` puts a number into words for messages. A step must not read what
nobody wrote, nor add two values that share a contribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sennit.errors import CollectiveError
from sennit.ir.cells import RankCells
from sennit.ir.collective import Chunks, CollectiveSpec, CustomCollective, Value, add_values, describe_value
from sennit.ir.schedule import Place

__all__ = ["SymbolicMemory"]


@dataclass(frozen=True, slots=True, eq=False)
class SymbolicMemory:
    collective: CollectiveSpec | CustomCollective
    cells: tuple[RankCells, ...]
    describe: Callable[[int], str]
    values: list[list[Value | None]]  # by rank and cell; None: nobody wrote it
    writers: list[list[int | None]]  # the step that wrote it

    @classmethod
    def start(
        cls,
        collective: CollectiveSpec | CustomCollective,
        cells: tuple[RankCells, ...],
        describe: Callable[[int], str],
    ) -> SymbolicMemory:
        """The memory before the first step: the inputs, and nothing else."""
        values: list[list[Value | None]] = []
        for rank, held in enumerate(cells):
            row: list[Value | None] = [None] * held.cells
            first, chunks = held.extents["input"].first, held.extents["input"].chunks
            row[first : first + chunks] = [collective.before(rank, index) for index in range(chunks)]
            values.append(row)
        return cls(collective, cells, describe, values, [[None] * held.cells for held in cells])

    def read(self, step: int, rank: int, place: Place | Chunks) -> list[Value]:
        start, stop = self._span(rank, place)
        found = self.values[rank][start:stop]
        if None in found:
            raise CollectiveError(
                f"{self.cells[rank].name(start + found.index(None))} of rank {rank} is read before anything is written "
                "there",
                where=self.describe(step),
                fix="write it first, or read another chunk",
            )
        return [value for value in found if value is not None]

    def add(self, step: int, rank: int, place: Place | Chunks, added: list[Value]) -> list[Value]:
        """What the place holds, plus `added`."""
        return self.total(step, rank, place, self.read(step, rank, place), added)

    def total(self, step: int, rank: int, place: Place | Chunks, held: list[Value], added: list[Value]) -> list[Value]:
        """`held`, which the place is to hold, plus `added`."""
        total: list[Value] = []
        for offset, (old, new) in enumerate(zip(held, added, strict=True)):
            both = add_values(old, new)
            if both is None:
                raise CollectiveError(
                    f"a contribution is counted twice: {place.buffer}[{place.start + offset}] of rank {rank} holds "
                    f"{describe_value(old)}, and {describe_value(new)} is added",
                    where=self.describe(step),
                    fix="add each contribution once",
                )
            total.append(both)
        return total

    def write(self, step: int, rank: int, place: Place | Chunks, values: list[Value]) -> None:
        start, stop = self._span(rank, place)
        self.values[rank][start:stop] = values
        self.writers[rank][start:stop] = [step] * (stop - start)

    def _span(self, rank: int, place: Place | Chunks) -> tuple[int, int]:
        found = self.cells[rank].find(place.buffer, place.start, place.count)
        assert found is not None  # the checker has seen it
        return found

    def check_outputs(self, where: str) -> int:
        """Raise unless every output chunk holds what the collective asks for; return how many it asks for."""
        asked = 0
        for rank, held in enumerate(self.cells):
            output = held.extents["output"]
            for index in range(output.chunks):
                wanted, cell = self.collective.after(rank, index), output.first + index
                asked += wanted is not None
                if wanted is not None and self.values[rank][cell] != wanted:
                    writer = self.writers[rank][cell]
                    last = "no step writes it" if writer is None else f"last written by {self.describe(writer)}"
                    raise CollectiveError(
                        f"output[{index}] of rank {rank} holds {describe_value(self.values[rank][cell])} at the end, and "
                        f"should hold {describe_value(wanted)}",
                        where=f"{where}; {last}",
                        fix="add what is missing, or remove what is too much",
                    )
        return asked
