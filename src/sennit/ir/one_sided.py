"""A one-sided program: a collective on symmetric buffers, where a rank reads and writes the memory of others by itself.

    one_sided := "one_sided" STRING collective "{" rank* "}"
    rank      := "rank" INT ("scratch" NAME "=" INT)* "{" block* "}"
    block     := "block" INT "{" step* "}"
    step      := "put" place "to" "rank" INT place                 target on that rank = source here
               | "read_reduce" "rank" INT place "into" place       target here += source on that rank
               | "copy" place "to" place                           both here
               | "reduce" place "into" place
               | "multi_reduce" operand ("," operand)* "into" place           target here += every operand, in this order
               | "multicast" place "to" "ranks" "{" RANGES "}" place          that place of each of the ranks = source here
               | "switch_reduce" "ranks" "{" RANGES "}" place "into" place    target here = that place summed over the ranks
               | "signal" "rank" INT "block" INT                   one more signal from this block to that one
               | "wait" "rank" INT "block" INT "for" INT           until that block has sent this one as many signals
    operand   := "rank" INT place
    place     := BUFFER "[" START ":" STOP "]"

**Machine.** Every rank has the same buffers as in a schedule and all ranks may touch all of them. A block runs its
steps in order. A signal counts: block b of rank r and this block share a counter that only they use, `signal` adds one
after all steps before it are seen by the other side, `wait` blocks until the counter has reached its number. There are
no messages and no slots: a put never waits.

A step reads all that it reads, then writes. `multi_reduce` is one pass over memory where single reduces would read and
write the target once for each operand. `multicast` and `switch_reduce` are done by a switch that all the ranks named
hang on (NVLink SHARP): the data crosses this rank's link once, whatever the number of ranks. The order in which a
switch adds is its own.

**Entry and exit.** Block 0 of each rank is its *gate*. It first signals: the buffers of this rank are there and may be
used. Every step that touches them from another rank comes after that signal, directly or through others. Then the gate
waits, until nobody touches them any more. So a rank that has left the program may reuse its buffers, and one that is
late is not written to.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.errors import ParseError
from sennit.ir.collective import CollectiveSpec, CustomCollective, Scratch, read_collective
from sennit.ir.mesh import print_ranges, read_ranges
from sennit.ir.schedule import Place
from sennit.ir.text import Scanner, quote

__all__ = [
    "Accesses",
    "Await",
    "DataStep",
    "LocalCopy",
    "LocalReduce",
    "MultiReduce",
    "Multicast",
    "OneSided",
    "OneSidedRank",
    "Put",
    "ReadReduce",
    "Signal",
    "Step",
    "SwitchReduce",
    "accesses",
]


@dataclass(frozen=True, slots=True)
class Put:
    source: Place
    rank: int
    target: Place

    def __str__(self) -> str:
        return f"put {self.source} to rank {self.rank} {self.target}"


@dataclass(frozen=True, slots=True)
class ReadReduce:
    rank: int
    source: Place
    target: Place

    def __str__(self) -> str:
        return f"read_reduce rank {self.rank} {self.source} into {self.target}"


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
class MultiReduce:
    sources: tuple[tuple[int, Place], ...]  # rank and place; the rank may be this one
    target: Place

    def __str__(self) -> str:
        operands = ", ".join(f"rank {rank} {place}" for rank, place in self.sources)
        return f"multi_reduce {operands} into {self.target}"


@dataclass(frozen=True, slots=True)
class Multicast:
    source: Place
    ranks: tuple[int, ...]  # ascending; this rank among them or not
    target: Place

    def __str__(self) -> str:
        return f"multicast {self.source} to ranks {{{print_ranges(self.ranks)}}} {self.target}"


@dataclass(frozen=True, slots=True)
class SwitchReduce:
    ranks: tuple[int, ...]  # ascending; this rank among them or not
    source: Place
    target: Place

    def __str__(self) -> str:
        return f"switch_reduce ranks {{{print_ranges(self.ranks)}}} {self.source} into {self.target}"


@dataclass(frozen=True, slots=True)
class Signal:
    rank: int
    block: int

    def __str__(self) -> str:
        return f"signal rank {self.rank} block {self.block}"


@dataclass(frozen=True, slots=True)
class Await:
    rank: int
    block: int
    count: int

    def __str__(self) -> str:
        return f"wait rank {self.rank} block {self.block} for {self.count}"


DataStep = Put | ReadReduce | LocalCopy | LocalReduce | MultiReduce | Multicast | SwitchReduce
Step = DataStep | Signal | Await


@dataclass(frozen=True, slots=True)
class Accesses:
    """What a step does to memory: each of `writes` = the sum of `reads`, in their order; and of what it held, first, if
    `adds`.
    """

    reads: tuple[tuple[int, Place], ...]
    writes: tuple[tuple[int, Place], ...]
    adds: bool


def accesses(step: DataStep, here: int) -> Accesses:
    """The memory that a step of rank `here` touches: the one place that knows, for the checker, interpreter and
    verifier.
    """
    match step:
        case Put():
            return Accesses(((here, step.source),), ((step.rank, step.target),), adds=False)
        case ReadReduce():
            return Accesses(((step.rank, step.source),), ((here, step.target),), adds=True)
        case LocalCopy():
            return Accesses(((here, step.source),), ((here, step.target),), adds=False)
        case LocalReduce():
            return Accesses(((here, step.source),), ((here, step.target),), adds=True)
        case MultiReduce():
            return Accesses(step.sources, ((here, step.target),), adds=True)
        case Multicast():
            return Accesses(((here, step.source),), tuple((rank, step.target) for rank in step.ranks), adds=False)
        case SwitchReduce():
            return Accesses(tuple((rank, step.source) for rank in step.ranks), ((here, step.target),), adds=False)


def read_step(scanner: Scanner) -> Step:
    match scanner.word("a step"):
        case "put":
            source = Place.read(scanner)
            return Put(source, _number(scanner, "to", "rank"), Place.read(scanner))
        case "read_reduce":
            return ReadReduce(_number(scanner, "rank"), Place.read(scanner), _place(scanner, "into"))
        case "copy":
            return LocalCopy(Place.read(scanner), _place(scanner, "to"))
        case "reduce":
            return LocalReduce(Place.read(scanner), _place(scanner, "into"))
        case "multi_reduce":
            operands = [(_number(scanner, "rank"), Place.read(scanner))]
            while scanner.accept(","):
                operands.append((_number(scanner, "rank"), Place.read(scanner)))
            return MultiReduce(tuple(operands), _place(scanner, "into"))
        case "multicast":
            source = Place.read(scanner)
            scanner.expect("to")
            return Multicast(source, _ranks(scanner), Place.read(scanner))
        case "switch_reduce":
            return SwitchReduce(_ranks(scanner), Place.read(scanner), _place(scanner, "into"))
        case "signal":
            return Signal(_number(scanner, "rank"), _number(scanner, "block"))
        case "wait":
            return Await(_number(scanner, "rank"), _number(scanner, "block"), _number(scanner, "for"))
        case other:
            raise ParseError(f"there is no step {other!r}", where=f"before {scanner.here()}", fix="see ir/one_sided.py")


def _number(scanner: Scanner, *words: str) -> int:
    for word in words:
        scanner.expect(word)
    return scanner.integer()


def _place(scanner: Scanner, word: str) -> Place:
    scanner.expect(word)
    return Place.read(scanner)


def _ranks(scanner: Scanner) -> tuple[int, ...]:
    scanner.expect("ranks")
    scanner.expect("{")
    found = tuple(read_ranges(scanner))
    scanner.expect("}")
    return found


@dataclass(frozen=True, slots=True)
class OneSidedRank:
    rank: int
    blocks: tuple[tuple[Step, ...], ...]  # block 0 is the gate
    scratch: tuple[Scratch, ...] = ()

    @classmethod
    def read(cls, scanner: Scanner) -> OneSidedRank:
        rank = _number(scanner, "rank")
        scratch: list[Scratch] = []
        while scanner.accept_word("scratch"):
            name = scanner.word("the name of a buffer")
            scratch.append(Scratch(rank, name, _number(scanner, "=")))
        scanner.expect("{")
        blocks: list[tuple[Step, ...]] = []
        while not scanner.accept("}"):
            if _number(scanner, "block") != len(blocks):
                raise scanner.expected(f"block {len(blocks)} of rank {rank} before this")
            scanner.expect("{")
            steps: list[Step] = []
            while not scanner.accept("}"):
                steps.append(read_step(scanner))
            blocks.append(tuple(steps))
        return cls(rank, tuple(blocks), tuple(scratch))


@dataclass(frozen=True, slots=True)
class OneSided:
    name: str
    collective: CollectiveSpec | CustomCollective
    ranks: tuple[OneSidedRank, ...]

    def __str__(self) -> str:
        lines = [f"one_sided {quote(self.name)} {self.collective} {{"]
        for ranked in self.ranks:
            scratch = "".join(f" scratch {piece.name}={piece.chunks}" for piece in ranked.scratch)
            lines.append(f"  rank {ranked.rank}{scratch} {{")
            for number, steps in enumerate(ranked.blocks):
                lines += [f"    block {number} {{", *(f"      {step}" for step in steps), "    }"]
            lines.append("  }")
        return "\n".join([*lines, "}"])

    @classmethod
    def read(cls, scanner: Scanner) -> OneSided:
        scanner.expect("one_sided")
        name, collective = scanner.string(), read_collective(scanner)
        scanner.expect("{")
        ranks: list[OneSidedRank] = []
        while not scanner.accept("}"):
            ranks.append(OneSidedRank.read(scanner))
        return cls(name, collective, tuple(ranks))

    @classmethod
    def parse(cls, text: str) -> OneSided:
        return Scanner.whole(text, cls.read)
