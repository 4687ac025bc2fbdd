"""A hierarchical AllReduce: sum inside each node, then across nodes over all of a node's links at once, then spread
inside.

Run: python examples/collective_hierarchical.py
"""

from sennit.collective import Builder, Chunk, Group, compile_algorithm, trace
from sennit.collective.verify import verify_schedule
from sennit.ir.collective import CollectiveName, CollectiveSpec


def reduce_scatter(group: Group, data: Chunk) -> None:
    """Part i of the data, summed over the group, ends at member i."""
    for i, part in enumerate(data.split(len(group))):
        for hop in range(i + 1, i + len(group)):
            part.on(group.at(hop)).reduce(into=part.on(group.at(hop + 1)))


def all_gather(group: Group, data: Chunk) -> None:
    """Part i of the data goes from member i to all the others."""
    for i, part in enumerate(data.split(len(group))):
        for hop in range(i, i + len(group) - 1):
            part.on(group.at(hop)).copy(to=group.at(hop + 1))


def hierarchical(b: Builder) -> None:
    nodes = [b.group(range(first, first + 8)) for first in range(0, b.ranks, 8)]
    data = b.output(0)
    for node in nodes:
        reduce_scatter(node, data)
    for i, part in enumerate(data.split(8)):
        across = b.group(node.at(i) for node in nodes)
        reduce_scatter(across, part)
        all_gather(across, part)
    for node in nodes:
        all_gather(node, data)


if __name__ == "__main__":
    all_reduce = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks=32, chunks=32, in_place=True)
    algorithm = trace(hierarchical, all_reduce, "hierarchical")
    schedule = compile_algorithm(algorithm)
    print(f"{algorithm.collective}: {len(algorithm.moves)} moves")
    print(verify_schedule(schedule))
