"""All-to-next: rank r's array to rank r + 1.

Inside a node that is one hop; between nodes one NIC would carry all of it while the others idle.

So the last rank of a node deals its array out to all ranks of the node, each sends its part by its own NIC, and the
first rank of the next node puts it together. With g NICs: n/g bytes a NIC instead of n, for 2 more steps inside the
nodes (GC3, arXiv 2201.11840, section 7).
"""

from __future__ import annotations

from sennit.collective.language import Builder, trace
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["direct_all_to_next", "spread_all_to_next"]


def direct_all_to_next(ranks: int, *, instances: int = 1) -> Algorithm:
    """Each rank sends to the next. One step, n bytes; between nodes, n bytes by one NIC."""

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks - 1):
                b.input(rank).copy(to=rank + 1, buffer="output")

    return trace(program, CollectiveSpec(CollectiveName.ALL_TO_NEXT, ranks, instances), "direct_all_to_next")


def spread_all_to_next(nodes: int, per_node: int, *, instances: int = 1) -> Algorithm:
    """As direct inside a node; between nodes by way of all ranks. 3 steps, n/g bytes a NIC; scratch of 2 n/g a rank."""
    if nodes < 1 or per_node < 1:
        raise CollectiveError(f"{nodes} nodes of {per_node} ranks", fix="use 1 or more of each")
    ranks = nodes * per_node

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks - 1):
                if (rank + 1) % per_node:
                    b.input(rank).copy(to=rank + 1, buffer="output")
                    continue
                for place, part in enumerate(b.input(rank).split(per_node)):
                    here, there = rank + 1 - per_node + place, rank + 1 + place
                    if here != rank:
                        b.scratch(here, "leaving", instances)
                        part = part.copy(to=here, buffer="leaving", index=0)
                    if place == 0:
                        part.copy(to=there, buffer="output", index=0)
                        continue
                    b.scratch(there, "arriving", instances)
                    part = part.copy(to=there, buffer="arriving", index=0)
                    part.copy(to=rank + 1, buffer="output", index=place * instances)

    spec = CollectiveSpec(CollectiveName.ALL_TO_NEXT, ranks, per_node * instances)
    return trace(program, spec, "spread_all_to_next")
