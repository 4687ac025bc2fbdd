"""Random legal programs: algorithms whose every move reads what is defined and counts nothing twice.

2 to 8 ranks, buffers of random sizes, scratch, in place or not, up to 60 moves of random ranges. The collective is
whatever the program computes; some output chunks are left open ("any"), so that a compiler may drop what only they
need. To make programs that a compiler can fuse, a move often goes on from where the last one ended, and few pairs of
ranks talk in one program. Sometimes a reduce is followed by others into the same chunks, so that it can be joined with
them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sennit.ir.cells import RankCells, lay_out_cells
from sennit.ir.collective import Algorithm, Chunks, CustomCollective, Move, MoveKind, Scratch, Value, add_values

__all__ = ["Draft", "finish", "random_program", "start"]

MOST_MOVES = 60
ATTEMPTS = 20  # to find one more move


@dataclass
class Draft:
    draw: random.Random
    collective: CustomCollective
    scratch: tuple[Scratch, ...]
    cells: tuple[RankCells, ...]
    values: list[list[Value | None]]
    roads: dict[int, list[int]]  # by rank, where it sends to
    widest: int
    moves: list[Move] = field(default_factory=list)

    def span(self, place: Chunks) -> tuple[int, int]:
        found = self.cells[place.rank].find(place.buffer, place.start, place.count)
        assert found is not None
        return found

    def place(self, rank: int, count: int | None = None) -> Chunks | None:
        """A random range of a random buffer, of `count` chunks if given."""
        buffer = self.draw.choice(list(self.cells[rank].extents))
        size = self.cells[rank].extents[buffer].chunks
        count = count or self.draw.randint(1, self.widest)
        return None if count > size else Chunks(rank, buffer, self.draw.randint(0, size - count), count)

    def try_move(self) -> bool:
        draw = self.draw
        source: Chunks | None
        if self.moves and draw.random() < 0.5:
            source = draw.choice(self.moves[-3:]).target
        else:
            source = self.place(draw.randrange(len(self.cells)))
        if source is None:
            return False
        target = self.place(draw.choice(self.roads[source.rank]), source.count)
        if target is not None and draw.random() < 0.4:  # the same range there, as in most collectives
            found = self.cells[target.rank].find(source.buffer, source.start, source.count)
            target = Chunks(target.rank, source.buffer, source.start, source.count) if found else target
        chained = bool(self.moves) and self.moves[-1].kind is MoveKind.REDUCE and draw.random() < 0.3
        if chained:
            target = self.moves[-1].target
            near = draw.random() < 0.6
            source = self.place(target.rank if near else draw.randrange(len(self.cells)), target.count)
        if source is None or target is None:
            return False
        (a, b), (c, d) = self.span(source), self.span(target)
        if source.rank == target.rank and a < d and c < b:
            return False
        moved, old = self.values[source.rank][a:b], self.values[target.rank][c:d]
        sums = [None if x is None or y is None else add_values(x, y) for x, y in zip(moved, old, strict=True)]
        if any(value is None for value in moved):
            return False
        if chained and None in sums:
            return False
        reduce = chained or (None not in sums and draw.random() < 0.6)
        self.values[target.rank][c:d] = sums if reduce else moved
        channel = draw.randrange(3) if draw.random() < 0.1 else None
        kind = MoveKind.REDUCE if reduce else MoveKind.COPY
        self.moves.append(Move(kind, source, target, channel, int(draw.random() < 0.05), f"move {len(self.moves)}"))
        return True


def random_program(seed: int) -> Algorithm:
    draft = start(seed)
    wanted_moves = draft.draw.randint(1, MOST_MOVES)
    for _ in range(wanted_moves * ATTEMPTS):
        if len(draft.moves) == wanted_moves:
            break
        draft.try_move()
    return finish(draft)


def start(seed: int) -> Draft:
    """Buffers of random sizes that hold their inputs."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 8)
    most = draw.choice([2, 4, 8])
    inputs = tuple(draw.randint(1, most) for _ in range(ranks))
    outputs = tuple(draw.randint(1, most) for _ in range(ranks))
    aliases = tuple(draw.randint(0, abs(i - o)) for i, o in zip(inputs, outputs, strict=True))
    in_place = draw.random() < 0.4
    scratch = tuple(
        Scratch(rank, f"tmp{i}", draw.randint(1, most))
        for rank in range(ranks)
        for i in range(draw.choice([0, 0, 1, 2]))
    )
    empty = CustomCollective(
        f"random{seed}", inputs, outputs, tuple((None,) * size for size in outputs), aliases if in_place else None
    )
    cells = lay_out_cells(empty, scratch, empty.title)
    values: list[list[Value | None]] = [[None] * held.cells for held in cells]
    for rank, held in enumerate(cells):
        for index in range(inputs[rank]):
            values[rank][held.extents["input"].first + index] = empty.before(rank, index)
    roads = {rank: draw.sample(range(ranks), draw.randint(1, min(3, ranks))) for rank in range(ranks)}
    return Draft(draw, empty, scratch, cells, values, roads, draw.randint(1, most))


def finish(draft: Draft) -> Algorithm:
    """The program with a collective that asks for what it computes, or for a part of that."""
    draw, empty = draft.draw, draft.collective
    open_share = draw.choice([0.0, 0.0, 0.3])
    wanted = tuple(
        tuple(
            None if draw.random() < open_share else draft.values[rank][held.extents["output"].first + index]
            for index in range(empty.outputs[rank])
        )
        for rank, held in enumerate(draft.cells)
    )
    collective = CustomCollective(empty.title, empty.inputs, empty.outputs, wanted, empty.aliases)
    return Algorithm(empty.title, collective, tuple(draft.moves), draft.scratch)
