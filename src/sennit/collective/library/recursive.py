"""Recursive halving and doubling: log2(p) exchanges, each with a partner half as far away.

| | steps | bytes sent by a rank |
|---|---|---|
| all-reduce, p a power of two | 2 log2(p) a | 2 (p-1)/p n |
| all-reduce, other p | (2 floor(log2 p) + 2) a | up to 2 n more, of the ranks that fold in |

The bytes of a ring at the latency of a tree. But the partners of the early exchanges are far apart and exchange the
most, so it suits a switch that serves all pairs alike. Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.collective.language import Builder, Chunk, trace
from sennit.collective.library.rings import own_to_output
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["halving_doubling_all_reduce", "recursive_doubling", "recursive_halving"]


def recursive_halving(b: Builder, group: Sequence[int], parts: Sequence[Chunk]) -> None:
    """Part i, added up over the group (a power of two), ends at member i."""
    distance = len(group) // 2
    while distance:
        for i, member in enumerate(group):
            partner = i ^ distance
            # the half that is the partner's: the parts whose bits from here up are the partner's
            kept = [j for j in range(len(parts)) if j // distance == partner // distance]
            _span(b, parts, kept, member).reduce(into=_span(b, parts, kept, group[partner]))
        distance //= 2


def recursive_doubling(b: Builder, group: Sequence[int], parts: Sequence[Chunk]) -> None:
    """Part i, which member i (of a power of two) holds, ends at every member."""
    distance = 1
    while distance < len(group):
        for i, member in enumerate(group):
            held = [j for j in range(len(parts)) if j // distance == i // distance]
            _span(b, parts, held, member).copy(to=group[i ^ distance])
        distance *= 2


def _span(b: Builder, parts: Sequence[Chunk], kept: Sequence[int], rank: int) -> Chunk:
    """Neighbouring parts as one reference."""
    first, last = parts[kept[0]].place, parts[kept[-1]].place
    return b.chunk(rank, first.buffer, first.start, last.start + last.count - first.start)


def halving_doubling_all_reduce(ranks: int, *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Reduce-scatter by halving, all-gather by doubling.

    The ranks beyond the last power of two first add theirs to a rank below, and get the result from it at the end.
    """
    core = 1 << (ranks.bit_length() - 1)

    def program(b: Builder) -> None:
        own_to_output(b)
        with b.instances(instances):
            for extra in range(core, ranks):
                b.output(extra).reduce(into=b.output(extra - core))
            parts = b.output(0).split(core)
            recursive_halving(b, range(core), parts)
            recursive_doubling(b, range(core), parts)
            for extra in range(core, ranks):
                b.output(extra - core).copy(to=extra)

    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, core * instances, None, in_place)
    return trace(program, spec, "halving_doubling_all_reduce")
