"""What a collective must do, and a collective algorithm as a sequence of moves of chunks: the contract of `collective/`.

    algorithm := "algorithm" STRING collective "{" scratch* move* "}"
    collective := NAME "(" "ranks" "=" INT "," "chunks" "=" INT ("," "root" "=" INT)? ("," "in_place")? ")"
    scratch := "scratch" "r" INT NAME INT                         rank, name, chunks
    move    := ("copy" | "reduce") chunks "to" chunks ("channel" INT)? ("instance" INT)? STRING?      the user's line last
    chunks  := "r" INT "." BUFFER "[" START ":" STOP "]"          BUFFER: "input" | "output" | a scratch name

**Values.** What a chunk holds is a sum of contributions: chunk i of the input of rank r, each at most once. It is written as
pairs (i, set of ranks), the set as the bits of an integer, so that union and overlap are single operations at 1024 ranks.
`reduce` of two values with a contribution in common would count it twice: an error.

**Collectives** are conditions: `before` says what each rank's input holds, `after` what each rank's output must hold. A value that
`after` leaves None may be anything. `chunks` is the number of chunks that one rank's part is cut into; the sizes of the
buffers follow:

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
`alias_offset(rank) + i` of the larger one.

**Meaning.** The moves run one after another, in order: `copy` overwrites its target, `reduce` adds to it. That is the sequential
meaning that every compiled form must keep; `collective/` may run moves in any order and place that keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sennit.errors import CollectiveError

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
    "everyone",
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
    total = dict(left)
    for index, ranks in right:
        if total.get(index, 0) & ranks:
            return None
        total[index] = total.get(index, 0) | ranks
    return tuple(sorted(total.items()))


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


@dataclass(frozen=True, slots=True)
class CustomCollective:
    """A collective given as a condition: sizes and wanted values by rank. `alltoallv` is one."""

    title: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    wanted: tuple[tuple[Value | None, ...], ...]  # by rank, by output chunk

    @property
    def ranks(self) -> int:
        return len(self.inputs)

    @property
    def in_place(self) -> bool:
        return False

    def input_chunks(self, rank: int) -> int:
        return self.inputs[rank]

    def output_chunks(self, rank: int) -> int:
        return self.outputs[rank]

    def alias_offset(self, rank: int) -> int:
        return 0

    def before(self, rank: int, index: int) -> Value:
        return single(rank, index)

    def after(self, rank: int, index: int) -> Value | None:
        return self.wanted[rank][index]


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


@dataclass(frozen=True, slots=True)
class Move:
    """`copy`: target = source. `reduce`: target += source. `channel` and `instance` are hints of the user; `line` is where
    the user wrote it, for messages."""

    kind: MoveKind
    source: Chunks
    target: Chunks
    channel: int | None = None
    instance: int = 0
    line: str = ""


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
