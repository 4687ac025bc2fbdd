"""Where a buffer really lies: in place, input and output of a rank are one memory.

`Memories` numbers the memories of all ranks and says for each (rank, buffer) which memory it is, where it begins in it,
and how many chunks it has. Two places are the same place if they agree there, whatever their names.
"""

from __future__ import annotations

from collections.abc import Iterable

from sennit.errors import CollectiveError
from sennit.ir.collective import Chunks, CollectiveSpec, CustomCollective, Scratch

__all__ = ["Memories"]


class Memories:
    """Grows by `add_scratch` while a program is traced; otherwise fixed."""

    __slots__ = ("_collective", "_places", "sizes")

    def __init__(self, collective: CollectiveSpec | CustomCollective, scratch: Iterable[Scratch] = ()) -> None:
        self._collective = collective
        self.sizes: list[int] = []  # chunks of each memory
        self._places: dict[tuple[int, str], tuple[int, int, int]] = {}  # memory, offset, chunks
        for rank in range(collective.ranks):
            inputs, outputs = collective.input_chunks(rank), collective.output_chunks(rank)
            if not collective.in_place:
                self._places[rank, "input"] = (self._new(inputs), 0, inputs)
                self._places[rank, "output"] = (self._new(outputs), 0, outputs)
                continue
            memory, offset = self._new(max(inputs, outputs)), collective.alias_offset(rank)
            self._places[rank, "input"] = (memory, offset if inputs < outputs else 0, inputs)
            self._places[rank, "output"] = (memory, offset if outputs < inputs else 0, outputs)
        for piece in scratch:
            self.add_scratch(piece)

    def _new(self, chunks: int) -> int:
        self.sizes.append(chunks)
        return len(self.sizes) - 1

    def add_scratch(self, piece: Scratch, *, where: str | None = None) -> None:
        self._check_rank(piece.rank, where)
        if (piece.rank, piece.name) in self._places:
            raise CollectiveError(
                f"rank {piece.rank} already has a buffer {piece.name!r}", where=where, fix="choose another name"
            )
        if piece.chunks < 1:
            raise CollectiveError(f"scratch {piece.name!r} of {piece.chunks} chunks", where=where, fix="use 1 or more")
        self._places[piece.rank, piece.name] = (self._new(piece.chunks), 0, piece.chunks)

    def find(self, rank: int, buffer: str) -> tuple[int, int, int]:
        """The memory, the offset in it, and the size of a buffer. Raises KeyError where there is none."""
        return self._places[rank, buffer]

    def locate(self, place: Chunks, *, where: str | None = None) -> tuple[int, int]:
        """The memory that the chunks lie in, and where they begin in it. Raises where they are not all there."""
        found = self._places.get((place.rank, place.buffer))
        if found is None:
            self._check_rank(place.rank, where)
            names = sorted(name for rank, name in self._places if rank == place.rank)
            raise CollectiveError(
                f"rank {place.rank} has no buffer {place.buffer!r}",
                where=where,
                fix=f"use one of {', '.join(names)}, or make a scratch buffer of that name first",
            )
        memory, offset, chunks = found
        if place.start < 0 or place.count < 1 or place.start + place.count > chunks:
            raise CollectiveError(
                f"{place} is out of range: {place.buffer} of rank {place.rank} has {chunks} chunks",
                where=where,
                fix=f"stay within [0:{chunks}], with a count of 1 or more",
            )
        return memory, offset + place.start

    def _check_rank(self, rank: int, where: str | None) -> None:
        if not 0 <= rank < self._collective.ranks:
            raise CollectiveError(
                f"there is no rank {rank}: the collective has {self._collective.ranks}",
                where=where,
                fix=f"use ranks 0 to {self._collective.ranks - 1}",
            )
