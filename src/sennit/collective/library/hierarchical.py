"""Hierarchical algorithms: the many fast links inside a node do most of the work, the few slow ones between nodes carry
least.

A hierarchy is given by the sizes of its levels, innermost first: `(8, 4)` is four nodes of eight, `(8, 4, 2)` two racks
of those. Ranks count inside a node first. For levels g and m, n bytes:

| all-reduce | steps | bytes sent by a rank |
|---|---|---|
| inside, first and last | 2 (g-1) a | 2 (g-1)/g n |
| across | 2 (m-1) a' | 2 (m-1)/m n/g: each rank, by its own NIC, its g-th part |

A flat ring takes 2 (g m - 1) steps, and every g-th of its hops waits for the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from sennit.collective.language import Builder, Chunk, trace
from sennit.collective.library.rings import own_to_output, ring_gather, ring_reduce
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["hierarchical_all_gather", "hierarchical_all_reduce", "level_all_reduce"]


def level_all_reduce(ranks: Sequence[int], levels: Sequence[int], data: Chunk) -> None:
    """Reduce-scatter in each group of the innermost level, all-reduce of each part across groups, all-gather."""
    size = levels[0]
    groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    parts = data.split(size)
    for group in groups:
        ring_reduce(group, parts)
    if len(groups) > 1:
        for place, part in enumerate(parts):
            level_all_reduce([group[place] for group in groups], levels[1:], part)
    for group in groups:
        ring_gather(group, parts)


def hierarchical_all_reduce(
    levels: Sequence[int], *, channels: int = 1, instances: int = 1, in_place: bool = False
) -> Algorithm:
    """Rings in every level, each rank responsible for its part across the level above. Two levels, three, or more."""
    ranks = _ranks(levels)

    def program(b: Builder) -> None:
        own_to_output(b)
        with b.instances(instances):
            for channel, data in enumerate(b.output(0).split(channels)):
                with b.channel(channel):
                    level_all_reduce(range(ranks), levels, data)

    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks * channels * instances, None, in_place)
    return trace(program, spec, "hierarchical_all_reduce")


def hierarchical_all_gather(levels: Sequence[int], *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """First across the outermost level, where each rank fetches the shards of its counterparts by its own NIC, then
    inwards, where the whole is shared. (m-1) a' + (g-1) a; (m-1)/(g m) n bytes between nodes.
    """
    ranks = _ranks(levels)

    def program(b: Builder) -> None:
        own_to_output(b)
        with b.instances(instances):
            for level in reversed(range(len(levels))):
                stride, size = prod(levels[:level]), levels[level]
                for first in (rank for rank in range(ranks) if rank // stride % size == 0):
                    group = [first + place * stride for place in range(size)]
                    outer = range(
                        first % (stride * size), ranks, stride * size
                    )  # counterparts whose shards are here already
                    for block in outer:
                        shards = [
                            b.chunk(rank, "output", (block + i * stride) * instances, instances)
                            for i, rank in enumerate(group)
                        ]
                        ring_gather(group, shards)

    spec = CollectiveSpec(CollectiveName.ALL_GATHER, ranks, instances, None, in_place)
    return trace(program, spec, "hierarchical_all_gather")


def _ranks(levels: Sequence[int]) -> int:
    if not levels or min(levels) < 1:
        raise CollectiveError(f"levels {tuple(levels)}", fix="give sizes of 1 or more, innermost first, such as (8, 4)")
    return prod(levels)
