"""Trees: log2(p) steps down or up, and a pipeline of pieces that keeps every level busy.

With p ranks, n bytes in k pieces, a the latency of a hop and b the seconds a byte:

| | time | bytes sent by a rank, at most |
|---|---|---|
| broadcast down a chain | (p - 2 + k) (a + b n/k) | n |
| broadcast down a binary tree | (log2(p) + k) (a + 2 b n/k) | 2 n |
| all-reduce over two binary trees | 2 (log2(p) + k) (a + b n/k) | 2 n |

In a binary tree a leaf sends nothing and an inner rank sends everything twice. Of the two trees of
`double_tree_all_reduce` each carries half of the data, and a rank that is inner in one is a leaf in the other, so that
all links are used alike (Sanders, Speck and Träff 2009; NCCL's trees).
"""

from __future__ import annotations

from sennit.collective.language import Builder, Chunk, trace
from sennit.collective.library.rings import own_to_output
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = [
    "binary_tree",
    "chain_broadcast",
    "double_tree_all_reduce",
    "tree_broadcast",
    "tree_reduce",
    "tree_spread",
]

Parents = dict[int, int]  # by rank, without the root; a parent always comes before its children


def binary_tree(ranks: int) -> Parents:
    """Ranks in the order of their numbers, left to right: rank 0 on top with one child, and below it every rank with
    lowest set bit 2^i is the child of a rank with a higher one, so odd ranks are leaves.
    """
    parents: Parents = {}
    for rank in sorted(range(1, ranks), key=lambda r: -(r & -r)):
        bit = rank & -rank
        parent = (rank ^ bit) | (bit << 1)
        while parent >= ranks:  # where the tree is cut off, hang from the next ancestor that is there
            bit = parent & -parent
            parent = (parent ^ bit) | (bit << 1) if (parent ^ bit) else 0
        parents[rank] = parent
    return parents


def tree_reduce(parents: Parents, data: Chunk) -> None:
    """Add `data` up to the root; what the others hold is used up."""
    for rank in reversed(parents):
        data.on(rank).reduce(into=data.on(parents[rank]))


def tree_spread(parents: Parents, data: Chunk) -> None:
    """Copy `data` of the root to all."""
    for rank, parent in parents.items():
        data.on(parent).copy(to=rank)


def double_tree_all_reduce(ranks: int, *, pieces: int = 1, in_place: bool = False) -> Algorithm:
    """Up and down two trees that share no inner rank (one at most, for odd p), each with half of the data."""
    first = binary_tree(ranks)

    def other(rank: int) -> int:  # odd and even change places
        return ranks - 1 - rank if ranks % 2 == 0 else (rank + 1) % ranks

    second = {other(rank): other(parent) for rank, parent in first.items()}

    def program(b: Builder) -> None:
        own_to_output(b)
        for channel, (tree, half) in enumerate(zip((first, second), b.output(0).split(2), strict=True)):
            with b.channel(channel):
                for piece in half.split(pieces):
                    tree_reduce(tree, piece)
                    tree_spread(tree, piece)

    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, 2 * pieces, None, in_place)
    return trace(program, spec, "double_tree_all_reduce")


def tree_broadcast(ranks: int, *, root: int = 0, pieces: int = 1, in_place: bool = False) -> Algorithm:
    """Down a binary tree, piece by piece. ceil(log2 p) hops for the first piece; inner ranks send 2 n bytes."""
    tree = {(rank + root) % ranks: (parent + root) % ranks for rank, parent in binary_tree(ranks).items()}
    return _broadcast(tree, ranks, root, pieces, in_place, "tree_broadcast")


def chain_broadcast(ranks: int, *, root: int = 0, pieces: int = 8, in_place: bool = False) -> Algorithm:
    """Down a chain, piece by piece: every rank sends n bytes and no more, so with many pieces it nears the rate of one
    link.
    """
    chain = {(root + place) % ranks: (root + place - 1) % ranks for place in range(1, ranks)}
    return _broadcast(chain, ranks, root, pieces, in_place, "chain_broadcast")


def _broadcast(tree: Parents, ranks: int, root: int, pieces: int, in_place: bool, name: str) -> Algorithm:
    def program(b: Builder) -> None:
        b.input(root).copy(to=root, buffer="output")
        for piece in b.output(root).split(pieces):
            tree_spread(tree, piece)

    return trace(program, CollectiveSpec(CollectiveName.BROADCAST, ranks, pieces, root, in_place), name)
