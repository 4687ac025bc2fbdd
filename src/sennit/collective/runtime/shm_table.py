"""Which code for which collective and size, in shared memory.

A row serves parts of `from_bytes` and more, up to the next row of its collective. Codes are made when they are first
asked for, verified, and kept.

**Direct or by slices.** Of an all_reduce of n bytes over p ranks, the direct one reads p n bytes and waits once; by
slices it is 2 n bytes and two waits. So slices win where (p - 2) n bytes take longer to read than one wait lasts:

    n > wait * rate / (p - 2)

With a core for each rank a wait is about 1.5 us; with fewer, ranks wait for each other's turns and it is about 10 us
for each rank of a core, but then reading takes as many times longer too, which cancels out. A core adds up about 10
bytes a nanosecond. These are rough figures, measured on one machine; `benchmarks/collective/shm_core.py --limits` times
both for yours, and a table of your own may replace this one.

**A broadcast by slices** is for many ranks that may read each other's memory: then nobody copies the whole array for
others. With 8 ranks on 16 cores it took 2095 microseconds instead of 2470 at 16 MiB and 624 instead of 678 at 4 MiB,
but 100 instead of 74 at 512 KiB; with 4 ranks as long, or longer. In the other one the root may go on before the others
have read, which pays at 4 MiB if it has other work between its calls, such as torch's part of them.
`benchmarks/collective/shm_variants.py` times both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sennit.collective.runtime.code import Code
from sennit.collective.runtime.code_verify import verify_code
from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.shm_algorithms import build
from sennit.collective.selection import SelectionTable
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName

__all__ = ["CodeRow", "CodeTable", "default_table", "slices_from", "tuned_table"]

Make = Callable[[int | None], Algorithm]  # for a root


@dataclass(frozen=True, slots=True)
class CodeRow:
    collective: CollectiveName
    from_bytes: int
    name: str
    make: Make


@dataclass(slots=True)
class CodeTable:
    rows: tuple[CodeRow, ...]
    _codes: dict[tuple[str, int | None], Code] = field(default_factory=dict)

    def code(self, collective: CollectiveName, nbytes: int, root: int | None = None) -> Code:
        row = self.choose(collective, nbytes)
        found = self._codes.get((row.name, root))
        if found is None:
            found = encode_pull(row.make(root))
            verify_code(found)
            self._codes[row.name, root] = found
        return found

    def choose(self, collective: CollectiveName, nbytes: int) -> CodeRow:
        best: CodeRow | None = None
        for row in self.rows:
            if (
                row.collective is collective
                and row.from_bytes <= nbytes
                and (best is None or row.from_bytes >= best.from_bytes)
            ):
                best = row
        if best is None:
            raise CollectiveError(f"no code for {collective.value} of {nbytes} bytes", fix="add a row from 0 bytes on")
        return best


_RATE = 10.0  # bytes a nanosecond
_WAIT, _WAIT_FOR_A_TURN = 1500.0, 10_000.0  # nanoseconds


def slices_from(ranks: int, cores: int) -> int | None:
    """The bytes from which slices win; None where they never do."""
    if ranks <= 2:
        return None
    return int((_WAIT if ranks <= cores else _WAIT_FOR_A_TURN) * _RATE / (ranks - 2))


_SPREAD_FROM, _SPREAD_RANKS = 8 << 20, 8  # bytes, ranks


def default_table(ranks: int, cores: int, may_read: bool = False) -> CodeTable:
    """`may_read`: ranks may read each other's memory, and do (`SharedCache.keeps`)."""

    def row(collective: CollectiveName, from_bytes: int, name: str) -> CodeRow:
        return CodeRow(collective, from_bytes, name, lambda root: build(name, ranks, root))

    limit = slices_from(ranks, cores)
    sliced = (
        (
            row(CollectiveName.ALL_REDUCE, limit, "all_reduce slices"),
            row(CollectiveName.REDUCE, 4 * limit, "reduce slices"),
        )
        if limit is not None
        else ()
    )
    spreads = may_read and ranks >= _SPREAD_RANKS
    spread = (row(CollectiveName.BROADCAST, _SPREAD_FROM, "broadcast slices"),) if spreads else ()
    return CodeTable(
        (
            row(CollectiveName.ALL_REDUCE, 0, "all_reduce direct"),
            row(CollectiveName.REDUCE, 0, "reduce direct"),
            *sliced,
            *spread,
            *(
                row(name, 0, name.value)
                for name in (
                    CollectiveName.REDUCE_SCATTER,
                    CollectiveName.ALL_GATHER,
                    CollectiveName.ALL_TO_ALL,
                    CollectiveName.BROADCAST,
                    CollectiveName.GATHER,
                    CollectiveName.SCATTER,
                )
            ),
        )
    )


def tuned_table(table: SelectionTable, rest: CodeTable) -> CodeTable:
    """The rows of a selection table, lowered for shared memory, in place of those that `rest` has for the same
    collectives.
    """
    rows: list[CodeRow] = []
    for row in table.row:

        def make(root: int | None, row=row) -> Algorithm:  # type: ignore[no-untyped-def]
            return table.build(row.collective, row.from_bytes)

        rows.append(CodeRow(row.collective, row.from_bytes, f"{row.algorithm}{row.options}", make))
    served = {row.collective for row in rows}
    return CodeTable((*rows, *(row for row in rest.rows if row.collective not in served)))
