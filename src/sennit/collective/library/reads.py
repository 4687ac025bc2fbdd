"""All pairs by reading: a rank adds up what lies in the memory of all others, in one pass and with no scratch.

Made for the one-sided form, where the reduces of a rank become one `multi_reduce` (`compile_joins.py`). With p ranks
and n bytes:

| | steps | bytes read by a rank | bytes written to others |
|---|---|---|---|
| one-shot all-reduce | 1 | (p-1) n | 0 |
| all-reduce | 2 | (p-1)/p n | (p-1)/p n |
| reduce-scatter | 1 | (p-1)/p n | 0 |

`all_pairs.py` moves the same bytes and lets all of them arrive in scratch first, which suits messages. As schedules the
algorithms here are right and slow: a rank takes in one message after the other.
"""

from __future__ import annotations

from sennit.collective.language import Builder, Chunk, trace
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["one_shot_all_reduce", "read_all_reduce", "read_reduce_scatter"]


def _add_all(b: Builder, place: Chunk, target: Chunk) -> Chunk:
    """The place of every other rank, added to `target`; each rank begins with the one after it."""
    for turn in range(1, b.ranks):
        place.on((target.rank + turn) % b.ranks).reduce(into=target)
    return target


def one_shot_all_reduce(ranks: int, *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Every rank adds up everything: one step, for the smallest arrays.

    In place the inputs are first copied to scratch.
    """

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                if in_place:
                    b.scratch(rank, "own", instances)
                    b.input(rank).copy(to=rank, buffer="own")
                else:
                    b.input(rank).copy(to=rank, buffer="output")
            for rank in range(ranks):
                _add_all(b, b.chunk(rank, "own" if in_place else "input", 0, instances), b.output(rank))

    return trace(
        program, CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, instances, None, in_place), "one_shot_all_reduce"
    )


def read_all_reduce(ranks: int, *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Rank i reads part i of all, adds it up, and writes the sum to all."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                part = b.input(rank).split(ranks)[rank]
                _add_all(b, part, part.copy(to=rank, buffer="output"))
            for rank in range(ranks):
                total = b.output(rank).split(ranks)[rank]
                for turn in range(1, ranks):
                    total.copy(to=(rank + turn) % ranks)

    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks * instances, None, in_place)
    return trace(program, spec, "read_all_reduce")


def read_reduce_scatter(ranks: int, *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Rank i reads part i of all and adds it up."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                part = b.input(rank).split(ranks)[rank]
                _add_all(b, part, part.copy(to=rank, buffer="output", index=0))

    spec = CollectiveSpec(CollectiveName.REDUCE_SCATTER, ranks, instances, None, in_place)
    return trace(program, spec, "read_reduce_scatter")
