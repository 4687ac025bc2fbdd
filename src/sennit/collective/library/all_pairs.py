"""All pairs: every rank talks to every other at once. Few steps, so the least latency where each pair has its own way.

With p ranks and n bytes, a the latency of a hop:

| | steps | bytes sent by a rank |
|---|---|---|
| all-gather, reduce-scatter, all-to-all | a | (p-1)/p n |
| all-reduce | 2 a | 2 (p-1)/p n |

All p-1 messages of a rank share its links, so per-message costs count p-1 times: best for small arrays, and for nodes
whose devices are joined each to each.
"""

from __future__ import annotations

from sennit.collective.language import Builder, Chunk, trace
from sennit.collective.library.rings import own_to_output
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["all_pairs_all_gather", "all_pairs_all_reduce", "all_pairs_reduce_scatter", "direct_all_to_all"]


def _others(rank: int, ranks: int) -> list[int]:
    """The other ranks, each rank's list begun at another place so that not all write to the same one first."""
    return [(rank + turn) % ranks for turn in range(1, ranks)]


def _sum_to(b: Builder, rank: int, source: Chunk, target: Chunk) -> None:
    """`source` of every other rank, added to `target` of this one: all arrive in scratch at once, and are then added in
    order.
    """
    others = _others(rank, b.ranks)
    arrived = b.scratch(rank, "arrived", len(others) * source.place.count) if others else target
    slots = arrived.split(len(others)) if others else ()
    for peer, slot in zip(others, slots, strict=True):
        source.on(peer).copy(to=rank, buffer="arrived", index=slot.place.start)
    for slot in slots:
        slot.reduce(into=target)


def all_pairs_all_reduce(ranks: int, *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Rank i gets part i of all, adds it up, and sends the sum to all. 2 steps, 2 (p-1)/p n bytes; scratch of (p-1)/p
    n.
    """

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                part = b.input(rank).split(ranks)[rank]
                total = part.copy(to=rank, buffer="output")
                _sum_to(b, rank, part, total)
            for rank in range(ranks):
                for peer in _others(rank, ranks):
                    b.output(rank).split(ranks)[rank].copy(to=peer)

    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks * instances, None, in_place)
    return trace(program, spec, "all_pairs_all_reduce")


def all_pairs_all_gather(ranks: int, *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Every rank sends its shard to every other. One step, (p-1)/p n bytes."""

    def program(b: Builder) -> None:
        own_to_output(b)
        with b.instances(instances):
            for rank in range(ranks):
                for peer in _others(rank, ranks):
                    b.input(rank).copy(to=peer, buffer="output", index=rank * instances)

    spec = CollectiveSpec(CollectiveName.ALL_GATHER, ranks, instances, None, in_place)
    return trace(program, spec, "all_pairs_all_gather")


def all_pairs_reduce_scatter(ranks: int, *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Every rank gets its part of all others and adds it up. One step, (p-1)/p n bytes; scratch of (p-1)/p n."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                part = b.input(rank).split(ranks)[rank]
                _sum_to(b, rank, part, part.copy(to=rank, buffer="output", index=0))

    spec = CollectiveSpec(CollectiveName.REDUCE_SCATTER, ranks, instances, None, in_place)
    return trace(program, spec, "all_pairs_reduce_scatter")


def direct_all_to_all(ranks: int, *, instances: int = 1) -> Algorithm:
    """Every rank sends every other its part. One step, (p-1)/p n bytes in p-1 messages."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                for peer in [rank, *_others(rank, ranks)]:
                    b.input(rank).split(ranks)[peer].copy(to=peer, buffer="output", index=rank * instances)

    return trace(program, CollectiveSpec(CollectiveName.ALL_TO_ALL, ranks, instances), "direct_all_to_all")
