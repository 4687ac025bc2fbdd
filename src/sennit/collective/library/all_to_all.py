"""All-to-all across nodes: the same bytes in fewer, larger messages, for a network that charges by the message.

With m nodes of g ranks and n bytes a rank; c = n / (g m) is what one rank has for another:

| | messages between nodes, of a rank | their size | bytes inside the node, of a rank |
|---|---|---|---|
| direct | (m-1) g | c | (g-1) c |
| two steps | m-1 | g c | (g-1)/g n |
| three steps | (m-1)/g on average | g² c | about 2 (g-1)/g n |

Two steps: chunks for rank j of any node first gather at rank j of the own node, and cross together. Three steps: all
that a node has for another gathers at one rank, crosses in one message, and is dealt out there. The bytes between nodes
are those of the direct one, so these win only where messages cost (GC3, arXiv 2201.11840, section 7). In two steps
every rank begins with the node after its own, so that not all send to the same one first and all ranks do alike.
"""

from __future__ import annotations

from sennit.collective.language import Builder, trace
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["three_step_all_to_all", "two_step_all_to_all"]


def two_step_all_to_all(nodes: int, per_node: int, *, instances: int = 1) -> Algorithm:
    """Inside the node to the rank with the target's place, then across in one message a node."""
    ranks = _check(nodes, per_node)

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):  # what other ranks of the node leave here, by node that it is for
                b.scratch(rank, "collected", ranks * instances)
            for source in range(ranks):
                node, place = divmod(source, per_node)
                for turn in range(ranks):
                    far, far_place = (node + turn // per_node) % nodes, (place + turn) % per_node
                    target = far * per_node + far_place
                    chunk = b.chunk(source, "input", target * instances, instances)
                    if far == node:
                        chunk.copy(to=target, buffer="output", index=source * instances)
                    else:
                        index = (far * per_node + place) * instances
                        chunk.copy(to=node * per_node + far_place, buffer="collected", index=index)
            for rank in range(ranks):
                node, place = divmod(rank, per_node)
                for far in ((node + turn) % nodes for turn in range(1, nodes)):
                    block = b.chunk(rank, "collected", far * per_node * instances, per_node * instances)
                    target = far * per_node + place
                    block.copy(to=target, buffer="output", index=node * per_node * instances)

    return trace(program, CollectiveSpec(CollectiveName.ALL_TO_ALL, ranks, instances), "two_step_all_to_all")


def three_step_all_to_all(nodes: int, per_node: int, *, instances: int = 1) -> Algorithm:
    """To the rank of the node that speaks with the target's node, across in one message a pair of nodes, and to the
    target. Rank `other % per_node` of a node speaks with node `other`.
    """
    ranks = _check(nodes, per_node)
    block = per_node * per_node * instances

    def program(b: Builder) -> None:
        with b.instances(instances):
            for rank in range(ranks):
                b.scratch(rank, "leaving", nodes * block)
                b.scratch(rank, "arriving", nodes * block)
            for source in range(ranks):
                node, place = divmod(source, per_node)
                for far in range(nodes):
                    chunks = b.chunk(source, "input", far * per_node * instances, per_node * instances)
                    if far == node:
                        for target, chunk in enumerate(chunks.split(per_node)):
                            chunk.copy(to=far * per_node + target, buffer="output", index=source * instances)
                    else:
                        speaker = node * per_node + far % per_node
                        chunks.copy(to=speaker, buffer="leaving", index=far * block + place * per_node * instances)
            for node, far in ((a, c) for a in range(nodes) for c in range(nodes) if a != c):
                message = b.chunk(node * per_node + far % per_node, "leaving", far * block, block)
                listener = far * per_node + node % per_node
                arrived = message.copy(to=listener, buffer="arriving", index=node * block)
                for number, chunk in enumerate(arrived.split(per_node * per_node)):
                    place, target = divmod(number, per_node)
                    index = (node * per_node + place) * instances
                    chunk.copy(to=far * per_node + target, buffer="output", index=index)

    return trace(program, CollectiveSpec(CollectiveName.ALL_TO_ALL, ranks, instances), "three_step_all_to_all")


def _check(nodes: int, per_node: int) -> int:
    if nodes < 1 or per_node < 1:
        raise CollectiveError(f"{nodes} nodes of {per_node} ranks", fix="use 1 or more of each")
    return nodes * per_node
