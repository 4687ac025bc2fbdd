"""In the switch (NVLink SHARP): it adds up and it multicasts, so that a rank sends and receives each byte about once.

With p ranks on one switch and n bytes:

| | steps | bytes up and down a rank's link |
|---|---|---|
| all-reduce | 2 a | (1 + 1/p) n each way |
| all-gather | a | n/p up, n down |
| reduce-scatter | a | n up, n/p down |

against 2 (p-1)/p n each way for any all-reduce whose sums are made at the ranks. In an all-reduce, rank i has the
switch add up part i of all and multicasts the sum. Summing fills the way up, multicasting the way down: several
`pieces` let the one run beside the other, on channels of their own.

On a topology without such a switch the same algorithms run as the copies and reduces that they stand for
(`ir/collective.py`).
"""

from __future__ import annotations

from sennit.collective.language import Builder, trace
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["nvls_all_gather", "nvls_all_reduce", "nvls_reduce_scatter"]

SUM, SPREAD = 0, 1  # channels


def nvls_all_reduce(ranks: int, *, pieces: int = 1, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Rank i reduces part i in the switch and multicasts it, `pieces` one after another."""

    def program(b: Builder) -> None:
        everyone = b.group(range(ranks))
        with b.instances(instances):
            for piece in range(pieces):
                for rank in everyone:
                    part = b.input(rank).split(ranks)[rank].split(pieces)[piece]
                    with b.channel(SUM):
                        total = part.reduce_in_switch(
                            everyone, into=b.chunk(rank, "output", part.place.start, part.place.count)
                        )
                    with b.channel(SPREAD if pieces > 1 else SUM):
                        total.multicast(everyone)

    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks * pieces * instances, None, in_place)
    return trace(program, spec, "nvls_all_reduce")


def nvls_all_gather(ranks: int, *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Every rank multicasts its shard."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                b.input(rank).multicast(range(ranks), buffer="output", index=rank * instances)

    spec = CollectiveSpec(CollectiveName.ALL_GATHER, ranks, instances, None, in_place)
    return trace(program, spec, "nvls_all_gather")


def nvls_reduce_scatter(ranks: int, *, instances: int = 1, in_place: bool = False) -> Algorithm:
    """Every rank reduces its part in the switch."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                b.input(rank).split(ranks)[rank].reduce_in_switch(range(ranks), into=b.output(rank))

    spec = CollectiveSpec(CollectiveName.REDUCE_SCATTER, ranks, instances, None, in_place)
    return trace(program, spec, "nvls_reduce_scatter")
