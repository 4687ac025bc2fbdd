"""What a collective must do, and a collective algorithm as a sequence of moves of chunks: the contract of
`collective/`.

    algorithm := "algorithm" STRING collective "{" scratch* move* "}"
    collective := known | custom
    known   := NAME "(" "ranks" "=" INT "," "chunks" "=" INT ("," "root" "=" INT)? ("," "in_place")? ")"
    custom  := "custom" STRING "{" rank* "}"
    rank    := "rank" INT "input" "=" INT ("at" "=" INT)? "wants" "[" ((value | "any") ("," (value | "any"))*)? "]"
    value   := INT "@" "{" RANGES "}" ("+" INT "@" "{" RANGES "}")*       chunk index, then the ranks that contributed it
    scratch := "scratch" "r" INT NAME INT                         rank, name, chunks
    move    := ("copy" | "reduce") chunks "to" chunks ("channel" INT)? ("instance" INT)? ("switch" INT)? STRING?    the user's line last
    chunks  := "r" INT "." BUFFER "[" START ":" STOP "]"          BUFFER: "input" | "output" | a scratch name

**Values.** What a chunk holds is a sum of contributions: chunk i of the input of rank r, each at most once. It is
written as pairs (i, set of ranks), the set as the bits of an integer, so that union and overlap are single operations
at 1024 ranks. `reduce` of two values with a contribution in common would count it twice: an error.

**Collectives** are conditions: `before` says what each rank's input holds, `after` what each rank's output must hold. A
value that `after` leaves None may be anything. `chunks` is the number of chunks that one rank's part is cut into; the
sizes of the buffers follow:

| collective | input chunks | output chunks | after: output chunk j of rank r |
|---|---|---|---|
| all_reduce | n | n | sum over all ranks of chunk j |
| all_gather | n | ranks * n | chunk j % n of rank j // n |
| reduce_scatter | ranks * n | n | sum over all ranks of chunk r * n + j |
| all_to_all | ranks * n | ranks * n | chunk r * n + j % n of rank j // n |
| broadcast | n | n | chunk j of the root |
| reduce | n | n | at the root: sum over all ranks of chunk j |
| gather | n | ranks * n | at the root: chunk j % n of rank j // n |
| scatter | ranks * n | n | chunk r * n + j of the root |
| all_to_next | n | n | chunk j of rank r - 1; rank 0: anything |

**In place** the input of a rank is a part of its output, or the other way round: chunk i of the smaller buffer is chunk
`alias_offset(rank) + i` of the larger one. A custom collective gives the offset of every rank after "at".

**Meaning.** The moves run one after another, in order: `copy` overwrites its target, `reduce` adds to it. That is the
sequential meaning that every compiled form must keep; `collective/` may run moves in any order and place that keeps it.

**In the switch.** Moves one after another with the same number after "switch" may be done at once by a switch that
joins their ranks. They are either a *multicast*, copies of one source to the same place of different ranks, or a
*reduction*: the same place of different ranks summed into one target, by a copy and then reduces; or by reduces alone,
where the target is that place itself. A compiled form that has no such step does the moves one by one: the meaning is
the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sennit.errors import CollectiveError
from sennit.ir.mesh import print_ranges, read_ranges
from sennit.ir.text import Scanner, quote

__all__ = [
    "Algorithm",
    "Chunks",
    "CollectiveName",
    "CollectiveSpec",
    "CustomCollective",
    "Move",
    "MoveKind",
    "Scratch",
    "Value",
    "add_values",
    "describe_value",
    "everyone",
    "print_value",
    "read_collective",
    "single",
]

Value = tuple[tuple[int, int], ...]  # (chunk index, bits of the ranks that contributed it), ascending


def single(rank: int, index: int) -> Value:
    """Chunk `index` of the input of `rank`."""
    return ((index, 1 << rank),)


def everyone(ranks: int, index: int) -> Value:
    """The sum over all ranks of chunk `index`."""
    return ((index, (1 << ranks) - 1),)


def add_values(left: Value, right: Value) -> Value | None:
    """The sum of two values, or None where a contribution would be counted twice."""
    if len(left) == len(right) == 1 and left[0][0] == right[0][0]:  # the common case: parts of one sum
        return None if left[0][1] & right[0][1] else ((left[0][0], left[0][1] | right[0][1]),)
    total = dict(left)
    for index, ranks in right:
        if total.get(index, 0) & ranks:
            return None
        total[index] = total.get(index, 0) | ranks
    return tuple(sorted(total.items()))


def contributors(ranks: int) -> tuple[int, ...]:
    """The ranks whose bits are set, ascending."""
    return tuple(rank for rank, bit in enumerate(reversed(bin(ranks)[2:])) if bit == "1")


def print_value(value: Value) -> str:
    return " + ".join(f"{index}@{{{print_ranges(contributors(ranks))}}}" for index, ranks in value)


def describe_value(value: Value | None) -> str:
    """For messages: "chunk 0 of ranks 0-3 + chunk 1 of rank 0"."""
    if value is None:
        return "nothing that was written"
    return " + ".join(
        f"chunk {index} of rank{'s' if ranks & (ranks - 1) else ''} {print_ranges(contributors(ranks))}"
        for index, ranks in value
    )


class CollectiveName(Enum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_NEXT = "all_to_next"


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """One of the known collectives. `root` is for broadcast, reduce, gather and scatter."""

    name: CollectiveName
    ranks: int
    chunks: int
    root: int | None = None
    in_place: bool = False

    def __post_init__(self) -> None:
        rooted = self.name in (
            CollectiveName.BROADCAST,
            CollectiveName.REDUCE,
            CollectiveName.GATHER,
            CollectiveName.SCATTER,
        )
        if self.ranks < 1 or self.chunks < 1:
            raise CollectiveError(
                f"{self.name.value} over {self.ranks} ranks in {self.chunks} chunks", fix="use 1 or more"
            )
        if rooted != (self.root is not None) or (self.root is not None and not 0 <= self.root < self.ranks):
            raise CollectiveError(
                f"{self.name.value} over {self.ranks} ranks has root {self.root}",
                fix=f"name a root of 0 to {self.ranks - 1}" if rooted else "leave the root out",
            )

    def input_chunks(self, rank: int) -> int:
        wide = (CollectiveName.REDUCE_SCATTER, CollectiveName.ALL_TO_ALL, CollectiveName.SCATTER)
        return self.chunks * (self.ranks if self.name in wide else 1)

    def output_chunks(self, rank: int) -> int:
        wide = (CollectiveName.ALL_GATHER, CollectiveName.ALL_TO_ALL, CollectiveName.GATHER)
        return self.chunks * (self.ranks if self.name in wide else 1)

    def alias_offset(self, rank: int) -> int:
        """In place: where the smaller of input and output begins in the larger one."""
        return 0 if self.input_chunks(rank) == self.output_chunks(rank) else rank * self.chunks

    def before(self, rank: int, index: int) -> Value:
        """What chunk `index` of the input of `rank` holds at the start."""
        return single(rank, index)

    def after(self, rank: int, index: int) -> Value | None:
        """What chunk `index` of the output of `rank` must hold at the end; None where it does not matter."""
        part, offset = divmod(index, self.chunks)
        match self.name:
            case CollectiveName.ALL_REDUCE:
                return everyone(self.ranks, index)
            case CollectiveName.ALL_GATHER:
                return single(part, offset)
            case CollectiveName.REDUCE_SCATTER:
                return everyone(self.ranks, rank * self.chunks + index)
            case CollectiveName.ALL_TO_ALL:
                return single(part, rank * self.chunks + offset)
            case CollectiveName.BROADCAST:
                assert self.root is not None
                return single(self.root, index)
            case CollectiveName.REDUCE:
                return everyone(self.ranks, index) if rank == self.root else None
            case CollectiveName.GATHER:
                return single(part, offset) if rank == self.root else None
            case CollectiveName.SCATTER:
                assert self.root is not None
                return single(self.root, rank * self.chunks + index)
            case CollectiveName.ALL_TO_NEXT:
                return single(rank - 1, index) if rank else None

    def __str__(self) -> str:
        root = f", root={self.root}" if self.root is not None else ""
        return (
            f"{self.name.value}(ranks={self.ranks}, chunks={self.chunks}{root}{', in_place' if self.in_place else ''})"
        )

    @classmethod
    def read(cls, scanner: Scanner) -> CollectiveSpec:
        for name in CollectiveName:
            if scanner.accept_word(name.value):
                break
        else:
            raise scanner.expected("one of custom, " + ", ".join(name.value for name in CollectiveName))
        scanner.expect("(")
        ranks = _read_setting(scanner, "ranks")
        scanner.expect(",")
        chunks = _read_setting(scanner, "chunks")
        root, in_place = None, False
        while scanner.accept(","):
            if scanner.accept_word("in_place"):
                in_place = True
                break
            root = _read_setting(scanner, "root")
        scanner.expect(")")
        return cls(name, ranks, chunks, root, in_place)


@dataclass(frozen=True, slots=True)
class CustomCollective:
    """A collective given as a condition: sizes and wanted values by rank. `alltoallv` is one."""

    title: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    wanted: tuple[tuple[Value | None, ...], ...]  # by rank, by output chunk
    aliases: tuple[int, ...] | None = None  # in place: the alias offset of each rank

    def __post_init__(self) -> None:
        if not self.inputs or not len(self.inputs) == len(self.outputs) == len(self.wanted):
            raise self._error(
                f"sizes for {len(self.inputs)} inputs and {len(self.outputs)} outputs, wanted values for "
                f"{len(self.wanted)} ranks",
                fix="give one of each for every rank, and one rank at least",
            )
        for rank, values in enumerate(self.wanted):
            if self.inputs[rank] < 0 or len(values) != self.outputs[rank]:
                raise self._error(
                    f"rank {rank} has {self.inputs[rank]} input chunks, {self.outputs[rank]} output chunks and wants "
                    f"{len(values)} values",
                    fix="give one wanted value for every output chunk",
                )
            for index, value in enumerate(values):
                if value is not None and not self._can_be_held(value):
                    raise self._error(
                        f"output chunk {index} of rank {rank} is to hold {describe_value(value) or 'a sum of nothing'}",
                        fix="name chunks that the inputs have, each index once and ascending",
                    )
        if self.aliases is not None:
            self._check_aliases(self.aliases)

    def _can_be_held(self, value: Value) -> bool:
        indices = [index for index, _ in value]
        return (
            len(indices) > 0
            and indices == sorted(set(indices))
            and all(
                index >= 0 and ranks > 0 and all(r < self.ranks and index < self.inputs[r] for r in contributors(ranks))
                for index, ranks in value
            )
        )

    def _check_aliases(self, aliases: tuple[int, ...]) -> None:
        if len(aliases) != self.ranks:
            raise self._error(f"{len(aliases)} alias offsets for {self.ranks} ranks", fix="give one for each rank")
        for rank, offset in enumerate(aliases):
            room = abs(self.inputs[rank] - self.outputs[rank])
            if not 0 <= offset <= room:
                raise self._error(
                    f"rank {rank} has alias offset {offset}, with {self.inputs[rank]} input and {self.outputs[rank]} "
                    "output chunks",
                    fix=f"use 0 to {room}: the smaller buffer lies inside the larger one",
                )

    def _error(self, what: str, *, fix: str) -> CollectiveError:
        return CollectiveError(what, where=f"collective {self.title!r}", fix=fix)

    @property
    def ranks(self) -> int:
        return len(self.inputs)

    @property
    def in_place(self) -> bool:
        return self.aliases is not None

    def input_chunks(self, rank: int) -> int:
        return self.inputs[rank]

    def output_chunks(self, rank: int) -> int:
        return self.outputs[rank]

    def alias_offset(self, rank: int) -> int:
        return 0 if self.aliases is None else self.aliases[rank]

    def before(self, rank: int, index: int) -> Value:
        return single(rank, index)

    def after(self, rank: int, index: int) -> Value | None:
        return self.wanted[rank][index]

    def __str__(self) -> str:
        lines = [f"custom {quote(self.title)} {{"]
        for rank, values in enumerate(self.wanted):
            alias = f" at={self.aliases[rank]}" if self.aliases is not None else ""
            wants = ", ".join("any" if value is None else print_value(value) for value in values)
            lines.append(f"  rank {rank} input={self.inputs[rank]}{alias} wants [{wants}]")
        return "\n".join([*lines, "}"])

    @classmethod
    def read(cls, scanner: Scanner) -> CustomCollective:
        scanner.expect("custom")
        title = scanner.string()
        inputs: list[int] = []
        aliases: list[int] = []
        wanted: list[tuple[Value | None, ...]] = []
        scanner.expect("{")
        while not scanner.accept("}"):
            scanner.expect("rank")
            if scanner.integer() != len(inputs):
                raise scanner.expected(f"rank {len(inputs)} before this, in order")
            inputs.append(_read_setting(scanner, "input"))
            if scanner.peek("at"):
                aliases.append(_read_setting(scanner, "at"))
            scanner.expect("wants")
            wanted.append(tuple(scanner.bracketed("[", "]", lambda: _read_value(scanner))))
        sizes = tuple(len(values) for values in wanted)
        return cls(title, tuple(inputs), sizes, tuple(wanted), tuple(aliases) if aliases else None)


def _read_setting(scanner: Scanner, name: str) -> int:
    scanner.expect(name)
    scanner.expect("=")
    return scanner.integer()


def _read_value(scanner: Scanner) -> Value | None:
    if scanner.accept_word("any"):
        return None
    terms: list[tuple[int, int]] = []
    while True:
        index = scanner.integer()
        scanner.expect("@")
        scanner.expect("{")
        ranks = set(read_ranges(scanner))
        if min(ranks) < 0:
            raise scanner.expected("ranks of 0 and more before this")
        terms.append((index, sum(1 << rank for rank in ranks)))
        scanner.expect("}")
        if not scanner.accept("+"):
            return tuple(terms)


def read_collective(scanner: Scanner) -> CollectiveSpec | CustomCollective:
    return CustomCollective.read(scanner) if scanner.peek("custom") else CollectiveSpec.read(scanner)


class MoveKind(Enum):
    COPY = "copy"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks `start` to `start + count` of a buffer of a rank."""

    rank: int
    buffer: str
    start: int
    count: int

    def __str__(self) -> str:
        return f"r{self.rank}.{self.buffer}[{self.start}:{self.start + self.count}]"

    @classmethod
    def read(cls, scanner: Scanner) -> Chunks:
        word = scanner.word("a place such as r0.input[0:1]")
        rank, dot, buffer = word.partition(".")
        if not dot or not rank[1:].isdecimal() or not rank.startswith("r"):
            raise scanner.expected(f"a place such as r0.input[0:1] instead of {word!r}")
        scanner.expect("[")
        start = scanner.integer()
        scanner.expect(":")
        stop = scanner.integer()
        scanner.expect("]")
        return cls(int(rank[1:]), buffer, start, stop - start)


@dataclass(frozen=True, slots=True)
class Move:
    """`copy`: target = source.

    `reduce`: target += source. `channel` and `instance` are hints of the user; `line` is where the user wrote it, for
    messages; `switch` numbers the multicast or reduction of a switch that the move is a part of.
    """

    kind: MoveKind
    source: Chunks
    target: Chunks
    channel: int | None = None
    instance: int = 0
    line: str = ""
    switch: int | None = None

    def __str__(self) -> str:
        text = f"{self.kind.value} {self.source} to {self.target}"
        text += f" channel {self.channel}" if self.channel is not None else ""
        text += f" instance {self.instance}" if self.instance else ""
        text += f" switch {self.switch}" if self.switch is not None else ""
        return text + (f" {quote(self.line)}" if self.line else "")

    @classmethod
    def read(cls, scanner: Scanner) -> Move:
        kind = MoveKind.COPY if scanner.accept_word("copy") else MoveKind.REDUCE
        if kind is MoveKind.REDUCE and not scanner.accept_word("reduce"):
            raise scanner.expected("copy, reduce or '}'")
        source = Chunks.read(scanner)
        scanner.expect("to")
        target = Chunks.read(scanner)
        channel = scanner.integer() if scanner.accept_word("channel") else None
        instance = scanner.integer() if scanner.accept_word("instance") else 0
        switch = scanner.integer() if scanner.accept_word("switch") else None
        line = scanner.string() if scanner.peek('"') else ""
        return cls(kind, source, target, channel, instance, line, switch)


@dataclass(frozen=True, slots=True)
class Scratch:
    rank: int
    name: str
    chunks: int


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A collective algorithm: its moves in the order that defines their meaning."""

    name: str
    collective: CollectiveSpec | CustomCollective
    moves: tuple[Move, ...]
    scratch: tuple[Scratch, ...] = ()

    def __str__(self) -> str:
        lines = [f"algorithm {quote(self.name)} {self.collective} {{"]
        lines += [f"  scratch r{piece.rank} {piece.name} {piece.chunks}" for piece in self.scratch]
        lines += [f"  {move}" for move in self.moves]
        return "\n".join([*lines, "}"]) + "\n"

    @classmethod
    def read(cls, scanner: Scanner) -> Algorithm:
        scanner.expect("algorithm")
        name = scanner.string()
        collective = read_collective(scanner)
        scratch: list[Scratch] = []
        moves: list[Move] = []
        scanner.expect("{")
        while scanner.accept_word("scratch"):
            scanner.expect("r")
            rank = scanner.integer()
            scratch.append(Scratch(rank, scanner.word("the name of a buffer"), scanner.integer()))
        while not scanner.accept("}"):
            moves.append(Move.read(scanner))
        return cls(name, collective, tuple(moves), tuple(scratch))

    @classmethod
    def parse(cls, text: str) -> Algorithm:
        """The algorithm that a text states. Whether its places exist, `check_algorithm` says."""
        return Scanner.whole(text, cls.read)
