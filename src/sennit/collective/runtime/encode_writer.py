"""What the encoders share: collects the tables of a `Code`, numbers its flags and buffers, and cuts transfers at the
edges of parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sennit.collective.runtime.code import FIRST_SCRATCH, INPUT, OUTPUT, Code, Instruction, Op, Operand
from sennit.ir.collective import CollectiveSpec, CustomCollective, Scratch
from sennit.ir.schedule import Place

__all__ = ["Home", "Writer"]

Home = tuple[int, int]  # rank, block


@dataclass(slots=True)
class Writer:
    """Collects the tables of a code."""

    collective: CollectiveSpec | CustomCollective
    scratch: dict[str, int] = field(default_factory=dict)  # chunks by name, in the order of their numbers
    blocks: dict[Home, list[Instruction]] = field(default_factory=dict)
    operands: list[Operand] = field(default_factory=list)
    flags: dict[tuple[Home, Home], int] = field(
        default_factory=dict
    )  # (signalling, waiting): number at the waiting rank
    flag_count: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    sent: defaultdict[tuple[Home, Home], int] = field(default_factory=lambda: defaultdict(int))

    def add_scratch(self, pieces: Iterable[Scratch]) -> None:
        for piece in pieces:
            self.scratch[piece.name] = max(self.scratch.get(piece.name, 0), piece.chunks)

    def operand(self, rank: int, place: Place) -> Operand:
        match place.buffer:
            case "input":
                return Operand(rank, INPUT, place.start)
            case "output":
                return Operand(rank, OUTPUT, place.start)
            case name:
                return Operand(rank, FIRST_SCRATCH + list(self.scratch).index(name), place.start)

    def transfer(self, home: Home, op: Op, source: Operand, target: Operand, count: int) -> None:
        """One COPY, REDUCE, PUT, GET or READ_REDUCE, cut at the edges of parts."""
        peer = target.rank if op is Op.PUT else source.rank
        for skip, chunks in self._cut((source, target), count):
            (_, buffer, chunk), (_, goal, place) = source, target
            self.blocks[home].append(Instruction(op, peer, buffer, chunk + skip, goal, place + skip, chunks))

    def reduce_many(self, home: Home, sources: Sequence[Operand], target: Operand, count: int, overwrite: bool) -> None:
        for skip, chunks in self._cut((*sources, target), count):
            first = self._add_operands(sources, skip)
            ends = int(overwrite), 0, target.buffer, target.chunk + skip
            self.blocks[home].append(Instruction(Op.MULTI_REDUCE, len(sources), *ends, chunks, first))

    def through_switch(self, home: Home, op: Op, many: Sequence[Operand], here: Operand, count: int) -> None:
        """MULTICAST from here to many, or SWITCH_REDUCE of many to here."""
        for skip, chunks in self._cut((*many, here), count):
            first, place = self._add_operands(many, skip), (here.buffer, here.chunk + skip)
            ends = (*place, 0, 0) if op is Op.MULTICAST else (0, 0, *place)
            self.blocks[home].append(Instruction(op, len(many), *ends, chunks, first))

    def _add_operands(self, operands: Sequence[Operand], skip: int) -> int:
        """The number of the first."""
        self.operands += [Operand(rank, buffer, chunk + skip) for rank, buffer, chunk in operands]
        return len(self.operands) - len(operands)

    def _cut(self, places: Sequence[Operand], count: int) -> Iterable[tuple[int, int]]:
        """The pieces of a transfer, each within one part at every end: how many chunks to skip, and how many it has."""
        width = self.collective.chunks if isinstance(self.collective, CollectiveSpec) else 1
        done = 0
        while done < count:
            rooms = [width - (place.chunk + done) % width for place in places if place.buffer < FIRST_SCRATCH]
            piece = min([count - done, *rooms])
            yield done, piece
            done += piece

    def signal(self, home: Home, waiting: Home) -> None:
        self.sent[home, waiting] += 1
        count = self.sent[home, waiting]
        self.blocks[home].append(
            Instruction(Op.SIGNAL, waiting[0], count=count, argument=self._flag(home, waiting)),
        )

    def wait(self, home: Home, signalling: Home, count: int) -> None:
        self.blocks[home].append(
            Instruction(
                Op.WAIT,
                signalling[0],
                int(signalling[1] == 0 and signalling[0] != home[0]),
                count=count,
                argument=self._flag(signalling, home),
            ),
        )

    def _flag(self, signalling: Home, waiting: Home) -> int:
        if (signalling, waiting) not in self.flags:
            self.flags[signalling, waiting] = self.flag_count[waiting[0]]
            self.flag_count[waiting[0]] += 1
        return self.flags[signalling, waiting]

    def code(self, name: str) -> Code:
        ranks = range(self.collective.ranks)
        by_rank: list[list[list[Instruction]]] = [[] for _ in ranks]
        for home in sorted(self.blocks):
            by_rank[home[0]].append(self.blocks[home])
        flags = [self.flag_count[rank] for rank in ranks]
        return Code.of(name, self.collective, by_rank, self.operands, flags, tuple(self.scratch.values()))
