"""Where the buffers of a rank lie: the chunks of all its buffers as one row of cells, and the checks of places in it.

A buffer is an extent of the row: its first cell and its number of chunks. In place, input and output are extents that
overlap, so two places touch the same memory if and only if their cells overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveSpec, CustomCollective, Scratch

__all__ = ["Extent", "RankCells", "lay_out_cells"]


@dataclass(frozen=True, slots=True)
class Extent:
    first: int
    chunks: int


@dataclass(frozen=True, slots=True)
class RankCells:
    """The extents of the buffers of one rank by name, and the number of cells in all."""

    extents: dict[str, Extent]
    cells: int

    def find(self, buffer: str, start: int, count: int) -> tuple[int, int] | None:
        """The first cell of a place and the one behind its last, or None where there is no such place."""
        extent = self.extents.get(buffer)
        if extent is None or count < 1 or start < 0 or start + count > extent.chunks:
            return None
        return extent.first + start, extent.first + start + count

    def missing(self, buffer: str, start: int, count: int, where: str) -> CollectiveError:
        """Why there is no such place."""
        extent = self.extents.get(buffer)
        if extent is None:
            names = ", ".join(self.extents)
            return CollectiveError(f"there is no buffer {buffer!r}", where=where, fix=f"name one of {names}")
        return CollectiveError(
            f"{buffer}[{start}:{start + count}] is not a range of chunks of {buffer!r}, which has {extent.chunks}",
            where=where,
            fix=f"stay within [0:{extent.chunks}], and name one chunk at least",
        )

    def name(self, cell: int) -> str:
        """A cell in the words of a user: `output[3]`; in place by the name of the larger buffer."""
        holders = [
            (extent.chunks, f"{buffer}[{cell - extent.first}]")
            for buffer, extent in self.extents.items()
            if extent.first <= cell < extent.first + extent.chunks
        ]
        return max(holders)[1]


def lay_out_cells(
    collective: CollectiveSpec | CustomCollective, scratch: Iterable[Scratch], where: str
) -> tuple[RankCells, ...]:
    """The cells of every rank. Raises on a scratch buffer that cannot be."""
    extents: list[dict[str, Extent]] = []
    ends: list[int] = []
    for rank in range(collective.ranks):
        inputs, outputs = collective.input_chunks(rank), collective.output_chunks(rank)
        offset = collective.alias_offset(rank) if collective.in_place else inputs
        if collective.in_place and inputs < outputs:
            extents.append({"input": Extent(offset, inputs), "output": Extent(0, outputs)})
        else:
            extents.append({"input": Extent(0, inputs), "output": Extent(offset, outputs)})
        ends.append(max(inputs, outputs) if collective.in_place else inputs + outputs)
    for piece in scratch:
        fault, fix = _scratch_fault(piece, extents)
        if fault:
            raise CollectiveError(fault, where=where, fix=fix)
        extents[piece.rank][piece.name] = Extent(ends[piece.rank], piece.chunks)
        ends[piece.rank] += piece.chunks
    return tuple(RankCells(held, end) for held, end in zip(extents, ends, strict=True))


def _scratch_fault(piece: Scratch, extents: list[dict[str, Extent]]) -> tuple[str, str]:
    here = f"scratch {piece.name!r} of rank {piece.rank}"
    if not 0 <= piece.rank < len(extents):
        return f"{here}: there is no such rank", f"use 0 to {len(extents) - 1}"
    if not piece.name.isidentifier() or not piece.name.isascii():
        return f"{here}: the name is not one that the text form can hold", "use letters, digits and '_'"
    if piece.name in extents[piece.rank]:
        return f"{here}: the rank has a buffer of that name already", "give it another name"
    if piece.chunks < 1:
        return f"{here} has {piece.chunks} chunks", "use 1 or more, or leave it out"
    return "", ""
