"""A one-sided program: a collective on symmetric buffers, where a rank reads and writes the memory of others by itself.

    one_sided := "one_sided" STRING collective "{" rank* "}"
    rank      := "rank" INT ("scratch" NAME "=" INT)* "{" block* "}"
    block     := "block" INT "{" step* "}"
    step      := "put" place "to" "r" INT "." place                target on that rank = source here
               | "read_reduce" "r" INT "." place "into" place      target here += source on that rank
               | "copy" place "to" place                           both here
               | "reduce" place "into" place
               | "signal" "r" INT "." BLOCK                        one more signal from this block to that one
               | "wait" "r" INT "." BLOCK "=" INT                  until that block has sent this one as many signals
    place     := BUFFER "[" START ":" STOP "]"

**Machine.** Every rank has the same buffers as in a schedule and all ranks may touch all of them. A block runs its steps in order. A signal
counts: block b of rank r and this block share a counter that only they use, `signal` adds one after all steps before it are seen by the
other side, `wait` blocks until the counter has reached its number. There are no messages and no slots: a put never waits.

**Entry and exit.** Block 0 of each rank is its *gate*. It first signals every block of another rank that touches this rank's memory: the
buffers are there and may be used. Then it waits for a signal of each: nobody touches them any more. So a rank that has left the program may reuse its
buffers, and one that is late is not written to.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.ir.collective import CollectiveSpec, CustomCollective, Scratch
from sennit.ir.schedule import Place

__all__ = ["Await", "LocalCopy", "LocalReduce", "OneSided", "OneSidedRank", "Put", "ReadReduce", "Signal", "Step"]


@dataclass(frozen=True, slots=True)
class Put:
    source: Place
    rank: int
    target: Place

    def __str__(self) -> str:
        return f"put {self.source} to r{self.rank}.{self.target}"


@dataclass(frozen=True, slots=True)
class ReadReduce:
    rank: int
    source: Place
    target: Place

    def __str__(self) -> str:
        return f"read_reduce r{self.rank}.{self.source} into {self.target}"


@dataclass(frozen=True, slots=True)
class LocalCopy:
    source: Place
    target: Place

    def __str__(self) -> str:
        return f"copy {self.source} to {self.target}"


@dataclass(frozen=True, slots=True)
class LocalReduce:
    source: Place
    target: Place

    def __str__(self) -> str:
        return f"reduce {self.source} into {self.target}"


@dataclass(frozen=True, slots=True)
class Signal:
    rank: int
    block: int

    def __str__(self) -> str:
        return f"signal r{self.rank}.{self.block}"


@dataclass(frozen=True, slots=True)
class Await:
    rank: int
    block: int
    count: int

    def __str__(self) -> str:
        return f"wait r{self.rank}.{self.block}={self.count}"


Step = Put | ReadReduce | LocalCopy | LocalReduce | Signal | Await


@dataclass(frozen=True, slots=True)
class OneSidedRank:
    rank: int
    blocks: tuple[tuple[Step, ...], ...]  # block 0 is the gate
    scratch: tuple[Scratch, ...] = ()


@dataclass(frozen=True, slots=True)
class OneSided:
    name: str
    collective: CollectiveSpec | CustomCollective
    ranks: tuple[OneSidedRank, ...]

    def __str__(self) -> str:
        lines = [f'one_sided "{self.name}" {self.collective} {{']
        for ranked in self.ranks:
            scratch = "".join(f" scratch {piece.name}={piece.chunks}" for piece in ranked.scratch)
            lines.append(f"  rank {ranked.rank}{scratch} {{")
            for number, steps in enumerate(ranked.blocks):
                lines += [f"    block {number} {{", *(f"      {step}" for step in steps), "    }"]
            lines.append("  }")
        return "\n".join([*lines, "}"])
