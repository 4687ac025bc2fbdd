"""Direct: a rank adds up the others' parts where they lie.

For memory that every rank can read: one host, one GPU, GPUs with peer access.

Where all-pairs sends each part to scratch of its owner and adds there, here the owner reads: each element is read once
by the rank that adds it, and the sum is written once to each rank that wants it. With p ranks and n bytes each, in all:

| | bytes read | bytes written |
|---|---|---|
| all-reduce | p n, and n again unless the sum is kept in registers | p n |
| reduce-scatter | p n | n |
| broadcast | n | p n |

That is the least that any algorithm can do with p arrays in memory. Between devices the same bytes cross their links,
without scratch.
"""

from __future__ import annotations

from sennit.collective.language import Builder, Chunk, trace
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["direct_all_reduce", "direct_broadcast", "direct_reduce_scatter"]


def _others(rank: int, ranks: int) -> list[int]:
    """Begun at another place for each rank, so that not all read from the same one first."""
    return [(rank + turn) % ranks for turn in range(1, ranks)]


def _add_up(b: Builder, rank: int) -> Chunk:
    """Part `rank` of every input, added into the output of `rank`."""
    total = b.input(rank).split(b.ranks)[rank].copy(to=rank, buffer="output")
    for peer in _others(rank, b.ranks):
        b.input(peer).split(b.ranks)[rank].reduce(into=total)
    return total


def direct_all_reduce(ranks: int, *, instances: int = 1) -> Algorithm:
    """Rank i adds up part i of all, where they lie, and writes the sum to all."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            totals = [_add_up(b, rank) for rank in range(ranks)]
            for rank, total in enumerate(totals):
                for peer in _others(rank, ranks):
                    total.copy(to=peer)

    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks * instances)
    return trace(program, spec, "direct_all_reduce")


def direct_reduce_scatter(ranks: int, *, instances: int = 1) -> Algorithm:
    """Rank i adds up part i of all, where they lie."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                total = b.input(rank).split(ranks)[rank].copy(to=rank, buffer="output", index=0)
                for peer in _others(rank, ranks):
                    b.input(peer).split(ranks)[rank].reduce(into=total)

    spec = CollectiveSpec(CollectiveName.REDUCE_SCATTER, ranks, instances)
    return trace(program, spec, "direct_reduce_scatter")


def direct_broadcast(ranks: int, *, root: int = 0, instances: int = 1) -> Algorithm:
    """The root writes to all."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            for peer in [root, *_others(root, ranks)]:
                b.input(root).copy(to=peer, buffer="output", index=0)

    spec = CollectiveSpec(CollectiveName.BROADCAST, ranks, instances, root)
    return trace(program, spec, "direct_broadcast")
