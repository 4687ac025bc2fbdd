"""Spanning trees packed into the links between devices: `share` trees from each root, no link used beyond its capacity.

A *batch* is a number of trees that are alike so far: they cover the set R of devices. All batches can be completed if
and only if for every set X of devices (Edmonds 1973, in the form of Bérczi and Frank, "Packing arborescences", for
trees that have begun)

    bandwidth into X   >=   p(X) := number of trees of batches whose R lies outside X.

So an open batch i grows by a link x > y, x in R and y not, in as many of its trees as that condition allows:

    min( capacity of x > y,  trees of i,  min over X with y in X, x and nothing else required, of
         bandwidth into X + trees of the batches j other than i with R_j meeting X - trees of all batches j other than i ).

The inner minimum is one maximum flow to y, from x and from a vertex for each batch j that feeds R_j. (A set X that
misses R_i does not limit anything: it gains as many trees as it loses links.) The trees that do not fit become a batch
of their own. There is always a link by which a batch can grow, so the packing ends with all trees complete: Tarjan
1974; section 5 of ForestColl (arXiv 2402.06787).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sennit.collective.synthesis_flow import Residual, add_edge, augment

__all__ = ["Tree", "pack_trees"]


@dataclass(frozen=True, slots=True)
class Tree:
    """`count` equal trees from `root`; `edges` from a device that has the data to one that has not, in an order that
    works.
    """

    root: int
    count: int
    edges: tuple[tuple[int, int], ...]

    @property
    def depth(self) -> int:
        """Hops to the device that is reached last."""
        return max(self.depths().values())

    def depths(self) -> dict[int, int]:
        depths = {self.root: 0}
        for tail, head in self.edges:
            depths[head] = depths[tail] + 1
        return depths


@dataclass(slots=True)
class _Batch:
    root: int
    count: int
    depths: dict[int, int]
    edges: list[tuple[int, int]]


def pack_trees(devices: int, capacities: dict[tuple[int, int], int], roots: Sequence[int], share: int) -> list[Tree]:
    """`share` trees from each root that span all devices, within `capacities`, which must allow it."""
    links: Residual = [{} for _ in range(devices)]
    for (tail, head), capacity in capacities.items():
        add_edge(links, tail, head, capacity)
    # the last is worked on: what a batch leaves over is finished before the next root begins, which keeps few begun
    open_batches = [_Batch(root, share, {root: 0}, []) for root in reversed(roots)]
    done: list[Tree] = []
    while open_batches:
        batch = open_batches.pop()
        while len(batch.edges) < devices - 1:
            (tail, head), count = _best_link(links, open_batches, batch)
            if count < batch.count:
                rest = _Batch(batch.root, batch.count - count, dict(batch.depths), list(batch.edges))
                open_batches.append(rest)
                batch.count = count
            links[tail][head] -= count
            batch.edges.append((tail, head))
            batch.depths[head] = batch.depths[tail] + 1
        done.append(Tree(batch.root, batch.count, tuple(batch.edges)))
    return done


def _best_link(links: Residual, others: list[_Batch], batch: _Batch) -> tuple[tuple[int, int], int]:
    """A link for all trees of the batch, or else the best of the first few that take some; near the root first."""
    best: tuple[tuple[int, int], int] | None = None
    for tries, (tail, head) in enumerate(_growth(links, batch)):
        if best is not None and tries >= 6:
            break
        count = _fitting(links, others, batch, tail, head)
        if count and (best is None or count > best[1]):
            best = ((tail, head), count)
        if count == batch.count:
            break
    assert best is not None, "there is always a link to grow by"
    return best


def _growth(links: Residual, batch: _Batch) -> Iterator[tuple[int, int]]:
    found = [
        (depth, -left, tail, head)
        for tail, depth in batch.depths.items()
        for head, left in links[tail].items()
        if left > 0 and head not in batch.depths
    ]
    for _, _, tail, head in sorted(found):
        yield tail, head


def _fitting(links: Residual, others: list[_Batch], batch: _Batch, tail: int, head: int) -> int:
    wanted = min(links[tail][head], batch.count)
    residual: Residual = [dict(edges) for edges in links]
    source = len(residual)
    residual.append({})
    needed = 0
    for other in others:
        if head in other.depths:
            continue
        needed += other.count
        if len(other.depths) == 1:
            add_edge(residual, source, other.root, other.count)
            continue
        feeder = len(residual)
        residual.append({})
        add_edge(residual, source, feeder, other.count)
        for covered in other.depths:
            add_edge(residual, feeder, covered, other.count)
    add_edge(residual, source, tail, needed + wanted)
    return max(0, augment(residual, source, head, needed + wanted) - needed)
