"""The language of collective algorithms: a Python function over chunks, traced to an `Algorithm`.

    def all_gather(group, data):                                   # a sub-program: a plain function over a group of ranks
        for i, part in enumerate(data.split(len(group))):
            for hop in range(i, i + len(group) - 1):
                part.on(group.at(hop)).copy(to=group.at(hop + 1))

    def program(b):
        all_gather(b.group(range(b.ranks)), b.chunk(0, "output", 0, b.ranks))

    trace(program, CollectiveSpec(CollectiveName.ALL_GATHER, ranks=8, chunks=1, in_place=True), "ring")

- `b.chunk(rank, buffer, index, count)` names chunks; `b.scratch(rank, name, chunks)` makes a buffer and names all of
  it.
- `chunk.copy(to=rank)` and `chunk.reduce(into=chunk)` move data; both return what they wrote. `chunk.on(rank)` is the
  same place on
  another rank, `chunk.split(n)` its n parts.
- `chunk.multicast(group)` copies to the same place of all ranks of a group, `chunk.reduce_in_switch(group, into=chunk)`
  sums the same
  place of all of them: one step each where a switch joins the ranks, else the copies and reduces that they stand for.
- `with b.channel(c):` asks for channel c. `with b.instances(k):` moves every chunk range of the part as k smaller ones,
  each on a channel
  of its own, so that k pipelines run side by side.

The lines run in order and that order is the meaning, so a program has no races. While it runs, an interval map for each
memory keeps the value of every chunk (`ir/collective.py`), and a fault is an error at the user's line: a chunk that
nobody wrote is read, a contribution is added twice, a rank, buffer or index does not exist. At the end the outputs are
compared with what the collective asks for.

**Relative values.** A segment of the interval map stands for many chunks: chunk i of it holds the sum of the
contributions (i + d, ranks) over the pairs (d, ranks) of its value. A whole input is one segment with the pair (0, its
rank); moving chunks by k places adds -k to each d. So a move of a thousand chunks costs as much as one of a single
chunk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import PurePath
from types import CodeType, FrameType

from sennit.collective.buffers import Memories
from sennit.collective.collector import collector_paused
from sennit.collective.interval_map import IntervalMap
from sennit.collective.postcondition import check_outputs
from sennit.errors import CollectiveError
from sennit.ir.collective import (
    Algorithm,
    Chunks,
    CollectiveSpec,
    CustomCollective,
    Move,
    MoveKind,
    Scratch,
    Value,
    add_values,
)

__all__ = ["Builder", "Chunk", "Group", "trace"]


def trace(
    build: Callable[[Builder], None], collective: CollectiveSpec | CustomCollective, name: str, *, check: bool = True
) -> Algorithm:
    """Run the user's program once and keep its moves.

    `check=False` leaves out the comparison of the outputs at the end.
    """
    with collector_paused():
        builder = Builder(collective)
        build(builder)
        if check:
            check_outputs(collective, builder.held, name)
    return Algorithm(name, collective, tuple(builder.moves), tuple(builder.scratches))


class Group(Sequence[int]):
    """Some ranks in an order. `group.at(i)` counts on round the end, as rings do."""

    __slots__ = ("ranks",)

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def at(self, index: int) -> int:
        return self.ranks[index % len(self.ranks)]

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # as a tuple's: an int or a slice
        return self.ranks[index]

    def __repr__(self) -> str:
        return f"Group{self.ranks}"


class Chunk:
    """A reference to chunks of a buffer of a rank: a name, not the data. It stays valid when the data changes."""

    __slots__ = ("_builder", "memory", "offset", "place")

    def __init__(self, builder: Builder, place: Chunks, memory: int, offset: int) -> None:
        self._builder = builder
        self.place = place
        self.memory, self.offset = memory, offset  # where it really lies, names apart

    @property
    def rank(self) -> int:
        return self.place.rank

    def on(self, rank: int) -> Chunk:
        """The same place on another rank."""
        place = self.place
        return self._builder.chunk(rank, place.buffer, place.start, place.count)

    def split(self, parts: int) -> tuple[Chunk, ...]:
        """The chunks in `parts` adjacent parts, whose sizes differ by at most one."""
        place, builder = self.place, self._builder
        if not 1 <= parts <= place.count:
            raise CollectiveError(
                f"{place} has {place.count} chunks and is split in {parts} parts",
                where=builder.here(),
                fix=f"use {parts} chunks or more, or fewer parts",
            )
        return builder.parts(self, parts)

    def copy(self, to: int, buffer: str | None = None, index: int | None = None) -> Chunk:
        """Copy to rank `to`; the buffer and the index there are the same as here unless named."""
        place, builder = self.place, self._builder
        target = builder.chunk(
            to, place.buffer if buffer is None else buffer, place.start if index is None else index, place.count
        )
        builder.move(MoveKind.COPY, self, target)
        return target

    def reduce(self, into: Chunk) -> Chunk:
        """Add to the chunks `into`."""
        self._builder.move(MoveKind.REDUCE, self, into)
        return into

    def multicast(self, group: Iterable[int], buffer: str | None = None, index: int | None = None) -> None:
        """Copy to the same place of every rank of the group, in the switch that joins them; to this place unless named."""
        place, builder = self.place, self._builder
        name, start = place.buffer if buffer is None else buffer, place.start if index is None else index
        targets = [builder.chunk(rank, name, start, place.count) for rank in builder.group(group)]
        builder.in_switch([(MoveKind.COPY, self, target) for target in targets])

    def reduce_in_switch(self, group: Iterable[int], into: Chunk) -> Chunk:
        """`into` = the sum of this place over the ranks of the group, in the switch that joins them."""
        builder = self._builder
        sources = [self.on(rank) for rank in builder.group(group)]
        own = [source for source in sources if source.rank == into.rank]
        others = [source for source in sources if source.rank != into.rank]
        if own and (own[0].memory, own[0].offset) == (into.memory, into.offset):
            moves = [(MoveKind.REDUCE, source, into) for source in others]
        else:
            first, *rest = own + others
            moves = [(MoveKind.COPY, first, into), *((MoveKind.REDUCE, source, into) for source in rest)]
        builder.in_switch(moves)
        return into

    def __repr__(self) -> str:
        return f"Chunk({self.place})"


class Builder:
    """What a user's program is handed: names chunks, and records their moves."""

    def __init__(self, collective: CollectiveSpec | CustomCollective) -> None:
        self.collective = collective
        self.ranks = collective.ranks
        self.moves: list[Move] = []
        self.scratches: list[Scratch] = []
        self._memories = Memories(collective)
        self._held: list[IntervalMap[Value | None]] = [IntervalMap(size, None) for size in self._memories.sizes]
        for rank in range(collective.ranks):
            memory, offset, chunks = self._memories.find(rank, "input")
            if chunks:
                self._held[memory].write(offset, offset + chunks, ((-offset, 1 << rank),))
        self._named: dict[tuple[int, str, int, int], Chunk] = {}
        self._channel: int | None = None
        self._instances = 1
        self._switches = 0  # multicasts and reductions of a switch so far
        self._lines: dict[tuple[int, int], tuple[str, CodeType]] = {}

    def chunk(self, rank: int, buffer: str, index: int, count: int = 1) -> Chunk:
        key = rank, buffer, index, count
        if (found := self._named.get(key)) is not None:
            return found
        place = Chunks(*key)
        try:
            memory, offset = self._memories.locate(place)
        except CollectiveError as error:
            raise CollectiveError(error.what, where=self.here(), fix=error.fix) from None
        chunk = self._named[key] = Chunk(self, place, memory, offset)
        return chunk

    def parts(self, chunk: Chunk, count: int) -> tuple[Chunk, ...]:
        """`chunk.split` without its check."""
        place = chunk.place
        edges = [place.start + place.count * i // count for i in range(count + 1)]
        return tuple(self.chunk(place.rank, place.buffer, low, high - low) for low, high in pairwise(edges))

    def input(self, rank: int) -> Chunk:
        """The whole input of a rank."""
        return self.chunk(rank, "input", 0, self.collective.input_chunks(rank) if 0 <= rank < self.ranks else 1)

    def output(self, rank: int) -> Chunk:
        """The whole output of a rank."""
        return self.chunk(rank, "output", 0, self.collective.output_chunks(rank) if 0 <= rank < self.ranks else 1)

    def scratch(self, rank: int, name: str, chunks: int) -> Chunk:
        """Make a buffer of a rank, which nobody has written yet."""
        piece = Scratch(rank, name, chunks)
        self._memories.add_scratch(piece, where=self.here())
        self._held.append(IntervalMap(chunks, None))
        self.scratches.append(piece)
        return self.chunk(rank, name, 0, chunks)

    def group(self, ranks: Iterable[int]) -> Group:
        members = tuple(ranks)
        wrong = [rank for rank in members if not 0 <= rank < self.ranks]
        if wrong or not members or len(set(members)) < len(members):
            what = f"there is no rank {wrong[0]}" if wrong else "it repeats a rank" if members else "it is empty"
            raise CollectiveError(
                f"a group of ranks {members}: {what}",
                where=self.here(),
                fix=f"name different ranks of 0 to {self.ranks - 1}",
            )
        return Group(members)

    @contextmanager
    def channel(self, channel: int) -> Iterator[None]:
        """Ask for a channel for the moves of this part."""
        if channel < 0:
            raise CollectiveError(f"channel {channel}", where=self.here(), fix="use 0 or more")
        before, self._channel = self._channel, channel
        yield
        self._channel = before

    @contextmanager
    def instances(self, count: int) -> Iterator[None]:
        """Run this part as `count` instances, each on its share of every chunk range that is moved."""
        if count < 1:
            raise CollectiveError(f"{count} instances", where=self.here(), fix="use 1 or more")
        before, self._instances = self._instances, self._instances * count
        yield
        self._instances = before

    def move(self, kind: MoveKind, source: Chunk, target: Chunk) -> None:
        """Record one move, as many as there are instances, and carry its values.

        `Chunk.copy` and `Chunk.reduce` call it.
        """
        if not self._follow(kind, source, target):
            return
        if self._instances == 1:  # nearly always
            line = self._line(_user_frame())
            self.moves.append(Move(kind, source.place, target.place, self._channel, 0, line))
        else:
            self._record([(kind, source, target)], switch=False)

    def in_switch(self, moves: Sequence[tuple[MoveKind, Chunk, Chunk]]) -> None:
        """Record moves that a switch does at once.

        A copy onto itself is one of them: a multicast writes on its own rank too.
        """
        for kind, source, target in moves:
            self._follow(kind, source, target)
        self._record(moves, switch=len(moves) > 1 or moves[0][0] is MoveKind.REDUCE)

    def _follow(self, kind: MoveKind, source: Chunk, target: Chunk) -> bool:
        """Check a move and carry its values. False where it does nothing: a copy onto itself."""
        if source.place.count != target.place.count:
            raise CollectiveError(
                f"{kind.value} of {source.place} to {target.place}: the counts differ",
                where=self.here(),
                fix="name as many chunks on both sides",
            )
        if source.memory == target.memory and abs(source.offset - target.offset) < source.place.count:
            if source.offset == target.offset and kind is MoveKind.COPY:
                return False  # in place, a copy may have nothing to do
            raise CollectiveError(
                f"{kind.value} of {source.place} to {target.place}: they overlap",
                where=self.here(),
                fix="go through a scratch buffer, or in two moves",
            )
        try:
            self._carry(kind, source, target)
        except CollectiveError as error:
            raise CollectiveError(error.what, where=self.here(), fix=error.fix) from None
        return True

    def _record(self, moves: Sequence[tuple[MoveKind, Chunk, Chunk]], switch: bool) -> None:
        """As many times as there are instances, on the parts of each."""
        line, count, place = self._line(_user_frame()), self._instances, moves[0][1].place
        if place.count < count:
            raise CollectiveError(
                f"{place} has {place.count} chunks for {count} instances",
                where=self.here(),
                fix=f"move {count} chunks or more at a time: cut the data finer",
            )
        cut = [(kind, self.parts(source, count), self.parts(target, count)) for kind, source, target in moves]
        for instance in range(count):
            number = self._switches if switch else None
            self._switches += switch
            for kind, sources, targets in cut:
                ends = sources[instance].place, targets[instance].place
                self.moves.append(Move(kind, *ends, self._channel, instance, line, number))

    def _carry(self, kind: MoveKind, source: Chunk, target: Chunk) -> None:
        """Follow the values of one move."""
        start, goal, count = source.offset, target.offset, source.place.count
        shift, held = start - goal, self._held[target.memory]
        if not shift and (value := self._held[source.memory].whole(start, start + count)) is not None:
            # by far the commonest: one segment, to the same place; and what is there has the same chunks of other ranks
            if kind is MoveKind.COPY:
                held.write(goal, goal + count, value)
                return
            present = held.whole(goal, goal + count)
            if present is not None and len(present) == len(value) == 1:
                ((delta, ranks),), ((other, more),) = present, value
                if delta == other and not ranks & more:
                    held.write(goal, goal + count, ((delta, ranks | more),))
                    return
        for first, last, value in self._held[source.memory].read(start, start + count):
            if value is None:
                raise _unwritten(source.place, first - start, last - start, "read")
            moved = tuple((delta + shift, ranks) for delta, ranks in value) if shift else value
            if kind is MoveKind.COPY:
                held.write(first - shift, last - shift, moved)
                continue
            for low, high, present in held.read(first - shift, last - shift):
                if present is None:
                    raise _unwritten(target.place, low - goal, high - goal, "added to")
                total = add_values(present, moved)
                if total is None:
                    raise _counted_twice(source.place, target.place, low - goal, low, present, moved)
                held.write(low, high, total)

    def held(self, rank: int) -> list[tuple[int, int, Value | None]]:
        """What the output of a rank holds: (first, last, relative value), in chunks of the output."""
        memory, offset, chunks = self._memories.find(rank, "output")
        segments = self._held[memory].read(offset, offset + chunks) if chunks else []
        if not offset:
            return segments
        return [
            (low - offset, high - offset, value and tuple((delta + offset, ranks) for delta, ranks in value))
            for low, high, value in segments
        ]

    def here(self) -> str:
        """The user's line that is running, and the lines that called it: for messages."""
        lines: list[str] = []
        frame: FrameType | None = _user_frame()
        while frame is not None and frame.f_code is not trace.__code__ and len(lines) < 4:
            if frame.f_code.co_filename != __file__:
                lines.append(f"{self._line(frame)}, in {frame.f_code.co_name}")
            frame = frame.f_back
        return ", called from ".join(lines)

    def _line(self, frame: FrameType) -> str:
        code = frame.f_code
        key = id(code), frame.f_lasti  # a code object hashes all of itself; the entry keeps it, so its identity holds
        if (found := self._lines.get(key)) is None:
            text = f"{PurePath(code.co_filename).name}:{frame.f_lineno}"
            found = self._lines[key] = text, code
        return found[0]


def _user_frame() -> FrameType:
    """The innermost frame that is not of this file."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _unwritten(place: Chunks, low: int, high: int, done: str) -> CollectiveError:
    piece = Chunks(place.rank, place.buffer, place.start + low, high - low)
    return CollectiveError(f"{piece} is {done}, and nobody wrote it", fix="copy something there first")


def _counted_twice(
    source: Chunks, target: Chunks, index: int, address: int, present: Value, moved: Value
) -> CollectiveError:
    """`index` is where in the target it happens, `address` the same in its memory."""
    held = dict(present)
    delta, common = next((delta, both) for delta, ranks in moved if (both := held.get(delta, 0) & ranks))
    rank = (common & -common).bit_length() - 1
    one = Chunks(target.rank, target.buffer, target.start + index, 1)
    return CollectiveError(
        f"reduce of {source} into {target} adds chunk {delta + address} of rank {rank} twice: {one} already holds it",
        fix="add each contribution once; use copy to overwrite",
    )
