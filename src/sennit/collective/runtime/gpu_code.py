"""Code as the GPU kernel walks it: four kinds of step, in pages.

    MOVE      every target = the sources combined, in the order of the list
    PAIRS     every target = its own source
    SIGNAL    a flag of another rank
    WAIT      for a flag of this one

All that an instruction of `Code` does to data is a MOVE: a copy has one source, a reduction has its target as the first
source, a multicast has many targets. So moves can be *joined*, each join saving a pass over memory:

    t = a; t = t + b            becomes   t = a + b             (the total stays in registers)
    t = a + b; u = t; v = t     becomes   t, u, v = a + b       (it is read once and written many times)
    u = a; v = a                becomes   u, v = a
    u = a; v = b                becomes   u, v = a, b           (pairs: both loads are on their way at once)

The second move of a pair may be done at the place of the first if no wait lies between: signals between the two then
come a little later, which orders more and not less. The kernel gives each thread the same elements of every place and
reads all sources before it writes, so a target may be a source, but not overlap one otherwise. Both moves must be as
long: see `clip`.

`walk_of` lays steps out in pages of at most 32 steps and 128 places (`gpu_kernel.cu` says what the kernel does with
them). Blocks that move data come first, each a team; those that only signal and wait follow. `Walk.link` puts in the
addresses of buffers and flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sennit.collective.runtime.code import FIRST_SCRATCH, INPUT, OUTPUT, Code, Geometry, Instruction, Op, Operand, Table
from sennit.errors import CollectiveError

__all__ = [
    "PAGE_PLACES",
    "PAGE_STEPS",
    "Flag",
    "Home",
    "Item",
    "Longs",
    "Transfer",
    "Walk",
    "block_items",
    "join_transfers",
    "walk_blocks",
    "walk_of",
]

PAGE_STEPS, PAGE_PLACES = 32, 128  # as in gpu_kernel.cu
_MOVE, _SIGNAL, _WAIT, _PAIRS = range(4)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Each of `targets` = the reduction of `sources`, or with `pairs` its own source, over `count` chunks.

    `clip`: one more than the largest chunk that it names in a part, 0 for scratch only; transfers of the same clip and
    count are as long, whatever the number of elements.
    """

    sources: tuple[Operand, ...]
    targets: tuple[Operand, ...]
    count: int
    clip: int
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class Flag:
    """A signal to a flag of `rank`, or a wait for one of this rank."""

    waits: bool
    rank: int
    flag: int
    value: int


Item = Transfer | Flag
Home = tuple[int, int]  # rank, block
Longs = NDArray[np.int64]


def block_items(code: Code, rank: int, block: int) -> list[Item]:
    return [_item(code, rank, instruction) for instruction in code.block(rank, block)]


def _item(code: Code, rank: int, i: Instruction) -> Item:
    source = Operand(rank, i.source_buffer, i.source_chunk)
    target = Operand(rank, i.target_buffer, i.target_chunk)
    there = source._replace(rank=i.peer)
    ends: tuple[tuple[Operand, ...], tuple[Operand, ...]]
    match i.op:
        case Op.SIGNAL | Op.WAIT:
            return Flag(i.op is Op.WAIT, i.peer, i.argument, i.count)
        case Op.COPY:
            ends = (source,), (target,)
        case Op.PUT:
            ends = (source,), (target._replace(rank=i.peer),)
        case Op.GET:
            ends = (there,), (target,)
        case Op.REDUCE | Op.READ_REDUCE:
            ends = (target, there), (target,)
        case Op.MULTI_REDUCE:
            operands = tuple(code.operands_of(i))
            ends = operands if i.overwrites else (target, *operands), (target,)
        case Op.SWITCH_REDUCE:
            ends = tuple(code.operands_of(i)), (target,)
        case Op.MULTICAST:
            ends = (source,), tuple(code.operands_of(i))
    sources, targets = ends
    return Transfer(sources, targets, i.count, _clip(code, (*sources, *targets)))


def _clip(code: Code, places: Sequence[Operand]) -> int:
    return max((1 + place.chunk % code.chunks for place in places if place.buffer < FIRST_SCRATCH), default=0)


# ---- joining ---------------------------------------------------------------------------------------------------------


def join_transfers(code: Code, items: Sequence[Item]) -> list[Item]:
    """The items of a block, fewer. Pairs come last: a copy is better joined with the sum that it begins."""
    return _joining(code, _joining(code, items, _joined), _paired)


def _joining(
    code: Code, items: Sequence[Item], join: Callable[[Code, Transfer, Transfer], Transfer | None]
) -> list[Item]:
    """A transfer joins the latest one before it if no wait and no other transfer is between."""
    found: list[Item] = []
    latest: int | None = None
    for item in items:
        if isinstance(item, Flag):
            latest = None if item.waits else latest
            found.append(item)
            continue
        before = None if latest is None else found[latest]
        joined = join(code, before, item) if isinstance(before, Transfer) else None
        if joined is not None and latest is not None:
            found[latest] = joined
        else:
            latest = len(found)
            found.append(item)
    return found


def _paired(code: Code, first: Transfer, second: Transfer) -> Transfer | None:
    copies = all(item.pairs or len(item.sources) == len(item.targets) == 1 for item in (first, second))
    if not copies or (first.count, first.clip) != (second.count, second.clip):
        return None
    for goal in second.targets:
        if any(_overlap(code, place, goal, first.count) for place in (*first.sources, *first.targets)):
            return None
    for source in second.sources:
        if any(_overlap(code, source, goal, first.count) for goal in first.targets):
            return None
    sources, targets = (*first.sources, *second.sources), (*first.targets, *second.targets)
    if len(sources) + len(targets) > PAGE_PLACES:
        return None
    return replace(first, sources=sources, targets=targets, pairs=True)


def _joined(code: Code, first: Transfer, second: Transfer) -> Transfer | None:
    if (first.count, first.clip) != (second.count, second.clip):
        return None
    head, *more = second.sources
    adds = len(first.targets) == 1 and second.targets == first.targets == (head,) and more
    spreads = not more and (head in first.targets or (head,) == first.sources)
    if adds:
        joined = replace(first, sources=(*first.sources, *more))
        if any(_overlap(code, place, head, first.count) for place in more):
            return None
    elif spreads:
        joined = replace(first, targets=(*first.targets, *second.targets))
        known = (*first.sources, *first.targets)
        for goal in second.targets:
            if goal in first.targets or any(p != goal and _overlap(code, p, goal, first.count) for p in known):
                return None
    else:
        return None
    return joined if len(joined.sources) + len(joined.targets) <= PAGE_PLACES else None


def _overlap(code: Code, a: Operand, b: Operand, count: int) -> bool:
    (x, start), (y, other) = (_memory(code, place) for place in (a, b))
    return x == y and abs(start - other) < count


def _memory(code: Code, place: Operand) -> tuple[tuple[int, int], int]:
    """The memory that a place lies in, and its chunk there. In place, input and output are one."""
    rank, buffer, chunk = place
    if not code.collective.in_place or buffer >= FIRST_SCRATCH:
        return (rank, buffer), chunk
    small = INPUT if code.buffer_chunks(rank, INPUT) < code.buffer_chunks(rank, OUTPUT) else OUTPUT
    return (rank, INPUT), chunk + (code.collective.alias_offset(rank) if buffer == small else 0)


# ---- pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """What a launch does, with places by name. The first `wide` workers are teams."""

    code: Code
    workers: Table  # rank, block, first of the pages after the first, how many; and the first page
    pages: Table  # first step, steps, first place, places
    steps: Table  # 8 words each; the last two are free for an address
    places: Table  # rank, buffer, part, chunk
    flags: Table  # by step: rank and flag, or zeros
    wide: int

    @property
    def flagged(self) -> bool:
        return bool(np.isin(self.steps[:, 0], (_SIGNAL, _WAIT)).any())

    def blocks(self, team: int) -> int:
        """Thread blocks of a launch."""
        return self.wide * team + len(self.workers) - self.wide

    def link(self, geometry: Geometry, itemsize: int, buffers: Longs, flags: Longs, most: int) -> tuple[Table, Longs]:
        """Steps and places with the addresses in:

        `buffers` by rank and buffer, `flags` by rank, `most` words for each flag.
        """
        rank, buffer, part, chunk = self.places.astype(np.int64).T
        places = buffers[rank, buffer] + (part * geometry.elements + chunk * geometry.stride) * itemsize
        steps = self.steps.copy()
        rank, flag = self.flags.astype(np.int64).T
        steps[:, 6:8] = (flags[rank] + flag * most * 8)[:, None].view(np.int32)
        return steps, places


def walk_of(code: Code, ranks: Sequence[int] | None = None, *, join: bool = True) -> Walk:
    """For a launch that serves `ranks` (all, if None)."""
    blocks: dict[Home, list[Item]] = {}
    for rank in range(code.ranks) if ranks is None else ranks:
        for block in range(code.rank_block_count(rank)):
            items = block_items(code, rank, block)
            blocks[rank, block] = join_transfers(code, items) if join else items
    return walk_blocks(code, blocks)


def walk_blocks(code: Code, blocks: Mapping[Home, Sequence[Item]]) -> Walk:
    """Given items by rank and block."""
    wide: list[tuple[int, int, list[Item]]] = []
    narrow: list[tuple[int, int, list[Item]]] = []
    for (rank, block), given in blocks.items():
        items = _last_signals(given)
        if items:
            moves = any(isinstance(item, Transfer) for item in items)
            (wide if moves else narrow).append((rank, block, items))
    writer = _Writer(code)
    workers = []
    for rank, block, items in (*wide, *narrow):
        first = len(writer.pages)
        writer.block(rank, items)
        workers.append((rank, block, first + 1, len(writer.pages) - first - 1, *writer.pages[first]))
    return Walk(
        code,
        _table(workers, 8),
        _table(writer.pages, 4),
        _table(writer.steps, 8),
        _table(writer.places, 4),
        _table(writer.flags, 2),
        len(wide),
    )


def _last_signals(items: Sequence[Item]) -> list[Item]:
    """Without signals that another one to the same flag follows at once: the threads that send a run take no turns."""
    found: list[Item] = []
    later: set[tuple[int, int]] = set()
    for item in reversed(items):
        if not isinstance(item, Flag) or item.waits:
            later = set()
        elif (item.rank, item.flag) in later:
            continue
        else:
            later.add((item.rank, item.flag))
        found.append(item)
    return found[::-1]


class _Writer:
    def __init__(self, code: Code) -> None:
        self.code = code
        self.pages: list[tuple[int, int, int, int]] = []
        self.steps: list[tuple[int, ...]] = []
        self.places: list[tuple[int, int, int, int]] = []
        self.flags: list[tuple[int, int]] = []

    def block(self, rank: int, items: Sequence[Item]) -> None:
        page: list[Item] = []
        places = 0
        for item in items:
            more = len(item.sources) + len(item.targets) if isinstance(item, Transfer) else 0
            if more > PAGE_PLACES:
                raise CollectiveError(
                    f"a step with {more} places", where=f"code {self.code.name!r}", fix=f"use {PAGE_PLACES} at most"
                )
            if page and (len(page) == PAGE_STEPS or places + more > PAGE_PLACES):
                self.page(rank, page)
                page, places = [], 0
            page.append(item)
            places += more
        self.page(rank, page)

    def page(self, here: int, items: Sequence[Item]) -> None:
        first_step, first_place = len(self.steps), len(self.places)
        for position, item in enumerate(items):
            match item:
                case Transfer(sources, targets, count, clip, pairs):
                    first = len(self.places) - first_place
                    self.steps.append(
                        (_PAIRS if pairs else _MOVE, len(sources), len(targets), first, count, clip, 0, 0)
                    )
                    self.places += [self.place(operand) for operand in (*sources, *targets)]
                    self.flags.append((0, 0))
                case Flag(waits, rank, flag, value):
                    kind = _WAIT if waits else _SIGNAL
                    self.steps.append((kind, value, _run(items, position), flag, 0, 0, 0, 0))
                    self.flags.append((here if waits else rank, flag))
        self.pages.append((first_step, len(items), first_place, len(self.places) - first_place))

    def place(self, operand: Operand) -> tuple[int, int, int, int]:
        rank, buffer, chunk = operand
        part, inside = divmod(chunk, self.code.chunks) if buffer < FIRST_SCRATCH else (0, chunk)
        return rank, buffer, part, inside


def _run(items: Sequence[Item], first: int) -> int:
    """How many flags of the same kind stand here one after another."""
    kind = items[first]
    assert isinstance(kind, Flag)
    last = first
    while last < len(items) and isinstance(item := items[last], Flag) and item.waits is kind.waits:
        last += 1
    return last - first


def _table(rows: Sequence[Sequence[int]], width: int) -> Table:
    table = np.ascontiguousarray(np.array(rows, dtype=np.int32).reshape(-1, width))
    table.setflags(write=False)
    return table
