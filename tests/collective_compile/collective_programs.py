"""Programs that the tests of the compiler share: rings, hierarchies, trees, all pairs, and random moves."""

from __future__ import annotations

import random

import numpy as np

from sennit.collective.buffers import Memories
from sennit.collective.language import Builder, Chunk, Group
from sennit.ir.collective import Algorithm, Chunks, CollectiveName, CollectiveSpec, Move, MoveKind, Scratch
from sennit.ir.layout_numpy import Array


def all_reduce(ranks: int, chunks: int, *, in_place: bool = True) -> CollectiveSpec:
    return CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, chunks, in_place=in_place)


def ring_reduce_scatter(group: Group, data: Chunk) -> None:
    for i, part in enumerate(data.split(len(group))):
        for hop in range(i + 1, i + len(group)):
            part.on(group.at(hop)).reduce(into=part.on(group.at(hop + 1)))


def ring_all_gather(group: Group, data: Chunk) -> None:
    for i, part in enumerate(data.split(len(group))):
        for hop in range(i, i + len(group) - 1):
            part.on(group.at(hop)).copy(to=group.at(hop + 1))


def ring(b: Builder) -> None:
    everyone = b.group(range(b.ranks))
    ring_reduce_scatter(everyone, b.output(0))
    ring_all_gather(everyone, b.output(0))


def ring_by_step(b: Builder) -> None:
    """The same ring, written step by step instead of chunk by chunk."""
    everyone = b.group(range(b.ranks))
    for step in range(2 * (b.ranks - 1)):
        for i in range(b.ranks):
            part = b.output(everyone.at(i + step + 1)).split(b.ranks)[i]
            goal = part.on(everyone.at(i + step + 2))
            if step < b.ranks - 1:
                part.reduce(into=goal)
            else:
                part.copy(to=goal.rank)


def all_pairs(b: Builder) -> None:
    """Everyone sends part i to rank i, which adds them up and sends the sum back."""
    parts = [b.output(rank).split(b.ranks) for rank in range(b.ranks)]
    for i in range(b.ranks):
        spare = b.scratch(i, "spare", b.ranks * parts[0][i].place.count)
        for other in range(b.ranks):
            if other != i:
                slot = other * parts[0][i].place.count
                parts[other][i].copy(to=i, buffer="spare", index=slot).reduce(into=parts[i][i])
        for other in range(b.ranks):
            if other != i:
                parts[i][i].copy(to=other)
        assert spare.rank == i


def tree(b: Builder) -> None:
    """Sum up a binary tree to rank 0, and spread down it again."""
    data = b.output(0)
    for rank in range(b.ranks - 1, 0, -1):
        data.on(rank).reduce(into=data.on((rank - 1) // 2))
    for rank in range(1, b.ranks):
        data.on((rank - 1) // 2).copy(to=rank)


def random_moves(seed: int, *, most: int = 40) -> Algorithm:
    """Any moves between any chunks: right or not, every one of them has a sequential meaning."""
    draw = random.Random(seed)
    name = draw.choice(
        [
            CollectiveName.ALL_REDUCE,
            CollectiveName.ALL_GATHER,
            CollectiveName.REDUCE_SCATTER,
            CollectiveName.ALL_TO_NEXT,
        ]
    )
    spec = CollectiveSpec(name, draw.randint(2, 5), draw.randint(1, 5), in_place=draw.random() < 0.4)
    scratch = tuple(Scratch(rank, "spare", draw.randint(1, 5)) for rank in range(spec.ranks) if draw.random() < 0.5)
    memories = Memories(spec, scratch)
    sizes = {(rank, "input"): spec.input_chunks(rank) for rank in range(spec.ranks)}
    sizes |= {(rank, "output"): spec.output_chunks(rank) for rank in range(spec.ranks)}
    sizes |= {(piece.rank, piece.name): piece.chunks for piece in scratch}
    moves: list[Move] = []
    for _ in range(draw.randint(1, most)):
        rank, buffer = draw.choice(list(sizes))
        count = draw.randint(1, min(4, sizes[rank, buffer]))
        source = Chunks(rank, buffer, draw.randint(0, sizes[rank, buffer] - count), count)
        if moves and draw.random() < 0.6:  # pass on what came lately: that is what is fused
            source = draw.choice(moves[-4:]).target
        goal, buffer = draw.choice(list(sizes))
        if draw.random() < 0.5:
            buffer = source.buffer
        if (room := sizes.get((goal, buffer), 0) - source.count) < 0:
            continue
        target = Chunks(
            goal, buffer, min(source.start, room) if draw.random() < 0.5 else draw.randint(0, room), source.count
        )
        (one, start), (other, place) = memories.locate(source), memories.locate(target)
        if one != other or abs(start - place) >= source.count:
            kind = draw.choice([MoveKind.COPY, MoveKind.REDUCE])
            moves.append(Move(kind, source, target, draw.choice([None, None, 1]), draw.choice([0, 0, 1])))
    return Algorithm(f"random {seed}", spec, tuple(moves), scratch)


def random_inputs(algorithm: Algorithm, seed: int = 0, elements: int = 2) -> list[Array]:
    """Large integers that wrap round: sums are exact in any order, and two different ones are hardly ever equal."""
    generator = np.random.default_rng(seed)
    spec = algorithm.collective
    return [
        generator.integers(0, 1 << 64, (spec.input_chunks(rank), elements), dtype=np.uint64)
        for rank in range(spec.ranks)
    ]


def same_where_asked(algorithm: Algorithm, results: list[Array], others: list[Array]) -> bool:
    spec = algorithm.collective
    return all(
        (one[index] == other[index]).all()
        for rank, (one, other) in enumerate(zip(results, others, strict=True))
        for index in range(len(one))
        if spec.after(rank, index) is not None
    )
