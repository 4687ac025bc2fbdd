"""Rings: every rank sends to the next and receives from the one before, and the whole ring is busy at every step.

With p ranks and n bytes (all-reduce: the array; gather and scatter: the whole array), a the latency of a hop:

| | steps | bytes sent by a rank |
|---|---|---|
| reduce-scatter, all-gather | (p-1) a | (p-1)/p n |
| all-reduce | 2 (p-1) a | 2 (p-1)/p n, the least there is |

`ring_reduce` and `ring_gather` are sub-programs over a group of ranks: the hierarchical algorithms are made of them.
Channels are rings side by side, each with its own part of the data; instances cut every transfer once more. With
`per_node` ranks a node, each channel goes through the nodes in another order (`node_ring`), so that as many channels as
NICs use all NICs; one ring alone would leave every node by the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.collective.language import Builder, Chunk, trace
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = [
    "node_ring",
    "own_to_output",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_gather",
    "ring_reduce",
    "ring_reduce_scatter",
]


def ring_reduce(group: Sequence[int], parts: Sequence[Chunk]) -> None:
    """Part i, added up over the group, ends at member i; what the others hold of it is used up."""
    members = len(group)
    for step in range(1, members):
        for i, part in enumerate(parts):
            source, target = group[(i + step) % members], group[(i + step + 1) % members]
            part.on(source).reduce(into=part.on(target))


def ring_gather(group: Sequence[int], parts: Sequence[Chunk]) -> None:
    """Part i, which member i holds, ends at every member."""
    members = len(group)
    for step in range(members - 1):
        for i, part in enumerate(parts):
            part.on(group[(i + step) % members]).copy(to=group[(i + step + 1) % members])


def node_ring(ranks: int, per_node: int, channel: int) -> list[int]:
    """A ring through all nodes.

    In every second node it goes round the other way, so that it leaves a node by a rank and enters the next by the rank
    of the same place, on the same rail; channel c enters the first node by rank c.
    """
    if per_node < 1 or ranks % per_node:
        raise CollectiveError(
            f"{ranks} ranks in nodes of {per_node}", fix="give the ranks of a node, which divide the ranks"
        )
    places = [(channel + step) % per_node for step in range(per_node)]
    nodes = range(ranks // per_node)
    return [n * per_node + place for n in nodes for place in (places if n % 2 == 0 else reversed(places))]


def own_to_output(b: Builder) -> None:
    """Each rank's input to its output, where they are not the same already."""
    for rank in range(b.ranks):
        b.input(rank).copy(to=rank, buffer="output", index=b.collective.alias_offset(rank))


def ring_all_reduce(
    ranks: int, *, channels: int = 1, instances: int = 1, per_node: int | None = None, in_place: bool = False
) -> Algorithm:
    """Reduce-scatter round the ring, then all-gather round it. 2 (p-1) steps, 2 (p-1)/p n bytes: the best there is for
    large arrays on a ring of equal links, and the worst in latency.
    """

    def program(b: Builder) -> None:
        own_to_output(b)
        with b.instances(instances):
            for channel, data in enumerate(b.output(0).split(channels)):
                ring = node_ring(ranks, per_node or ranks, channel)
                with b.channel(channel):
                    ring_reduce(ring, data.split(ranks))
                    ring_gather(ring, data.split(ranks))

    chunks = ranks * channels * instances
    return trace(program, CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, chunks, None, in_place), "ring_all_reduce")


def ring_all_gather(
    ranks: int, *, channels: int = 1, instances: int = 1, per_node: int | None = None, in_place: bool = False
) -> Algorithm:
    """Each rank's shard goes once round the ring. p-1 steps, (p-1)/p n bytes."""
    share = channels * instances

    def program(b: Builder) -> None:
        own_to_output(b)
        with b.instances(instances):
            for channel in range(channels):
                ring = node_ring(ranks, per_node or ranks, channel)
                first = channel * instances
                parts = [b.chunk(rank, "output", rank * share + first, instances) for rank in ring]
                with b.channel(channel):
                    ring_gather(ring, parts)

    return trace(program, CollectiveSpec(CollectiveName.ALL_GATHER, ranks, share, None, in_place), "ring_all_gather")


def ring_reduce_scatter(
    ranks: int, *, channels: int = 1, instances: int = 1, per_node: int | None = None, in_place: bool = False
) -> Algorithm:
    """Each part collects its sum on the way round the ring. p-1 steps, (p-1)/p n bytes.

    Sums under way lie in scratch of the input's size, so that the input stays as it was.
    """
    share = channels * instances

    def program(b: Builder) -> None:
        for rank in range(ranks):
            b.scratch(rank, "sums", ranks * share)
            b.input(rank).copy(to=rank, buffer="sums")
        with b.instances(instances):
            for channel in range(channels):
                ring = node_ring(ranks, per_node or ranks, channel)
                parts = [b.chunk(rank, "sums", rank * share + channel * instances, instances) for rank in ring]
                with b.channel(channel):
                    ring_reduce(ring, parts)
        for rank in range(ranks):
            b.chunk(rank, "sums", rank * share, share).copy(to=rank, buffer="output", index=0)

    spec = CollectiveSpec(CollectiveName.REDUCE_SCATTER, ranks, share, None, in_place)
    return trace(program, spec, "ring_reduce_scatter")
