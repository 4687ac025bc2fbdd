"""Trees turned into moves of chunks.

Chunks of a root's shard are dealt out to its trees in order, `count` to each. Moves go level by level over all trees,
so that in the order of the algorithm no rank waits for a deep tree while a shallow one could go on.

Spreading: a device sends what lies in its output; the root sends from its input. Collecting: a device that adds up
others' chunks does so in an *accumulator* that begins with its own: in the output where the output has a place for it,
else in scratch of just the needed size. A leaf sends from its input. Inputs are never written, unless in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sennit.collective.synthesis_pack import Tree
from sennit.ir.collective import Chunks, CollectiveName, CollectiveSpec, Move, MoveKind, Scratch

__all__ = ["all_gather_moves", "all_reduce_moves", "reduce_scatter_moves"]

Moves = tuple[tuple[Move, ...], tuple[Scratch, ...]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A tree and the chunks of its root's shard that go over it."""

    tree: Tree
    start: int
    count: int
    line: str


def _parts(trees: Iterable[Tree], share: int) -> list[_Part]:
    """`share` chunks of each root, dealt out to its trees; `share` is a multiple of the number of trees from a root."""
    by_root: dict[int, list[Tree]] = {}
    for tree in trees:
        by_root.setdefault(tree.root, []).append(tree)
    parts: list[_Part] = []
    for root, own in by_root.items():
        each = share // sum(tree.count for tree in own)
        start = 0
        for number, tree in enumerate(own):
            parts.append(_Part(tree, start, tree.count * each, f"tree {number} of device {root}"))
            start += tree.count * each
    return parts


def _levels(parts: Sequence[_Part]) -> list[tuple[_Part, int, int]]:
    """(part, tail, head) of all trees, near the roots first."""
    edges: list[tuple[int, int, int, int]] = []
    for place, part in enumerate(parts):
        depths = part.tree.depths()
        edges += [(depths[head], place, tail, head) for tail, head in part.tree.edges]
    return [(parts[place], tail, head) for _, place, tail, head in sorted(edges)]


def all_gather_moves(spec: CollectiveSpec, trees: Iterable[Tree]) -> Moves:
    """For all_gather and broadcast."""
    wide = spec.name is CollectiveName.ALL_GATHER
    parts = _parts(trees, spec.chunks)
    moves: list[Move] = []
    if not spec.in_place:
        for root in dict.fromkeys(part.tree.root for part in parts):
            own = Chunks(root, "output", root * spec.chunks if wide else 0, spec.chunks)
            moves.append(Move(MoveKind.COPY, Chunks(root, "input", 0, spec.chunks), own, line="own shard"))
    for part, tail, head in _levels(parts):
        place = part.start + (part.tree.root * spec.chunks if wide else 0)
        source = Chunks(tail, "output", place, part.count)
        if tail == part.tree.root:
            source = Chunks(tail, "input", part.start, part.count)
        moves.append(Move(MoveKind.COPY, source, Chunks(head, "output", place, part.count), line=part.line))
    return tuple(moves), ()


def reduce_scatter_moves(spec: CollectiveSpec, trees: Iterable[Tree]) -> Moves:
    """For reduce_scatter and reduce; `trees` are of the reversed network."""
    wide = spec.name is CollectiveName.REDUCE_SCATTER
    parts = _parts(trees, spec.chunks)
    used = [0] * spec.ranks
    places: dict[tuple[int, int], Chunks] = {}  # by (part, device): its accumulator
    moves: list[Move] = []

    def own(part: _Part, device: int) -> Chunks:
        return Chunks(device, "input", part.start + (part.tree.root * spec.chunks if wide else 0), part.count)

    for part in parts:
        for device in dict.fromkeys(tail for tail, _ in part.tree.edges):
            if device == part.tree.root:
                place = Chunks(device, "output", part.start, part.count)
            else:
                place = Chunks(device, "sums", used[device], part.count)
                used[device] += part.count
            places[id(part), device] = place
            if device != part.tree.root or not spec.in_place:
                moves.append(Move(MoveKind.COPY, own(part, device), place, line=part.line))
    for part, parent, child in reversed(_levels(parts)):
        source = places.get((id(part), child), own(part, child))
        moves.append(Move(MoveKind.REDUCE, source, places[id(part), parent], line=part.line))
    scratch = tuple(Scratch(rank, "sums", count) for rank, count in enumerate(used) if count)
    return tuple(moves), scratch


def all_reduce_moves(spec: CollectiveSpec, up: Iterable[Tree], down: Iterable[Tree]) -> Moves:
    """A reduce-scatter and an all-gather in the output, which has a place for every chunk."""
    share = spec.chunks // spec.ranks
    moves: list[Move] = []
    parts = _parts(up, share)
    adding = {id(part): {tail for tail, _ in part.tree.edges} for part in parts}

    def place(part: _Part, device: int, buffer: str = "output") -> Chunks:
        return Chunks(device, buffer, part.tree.root * share + part.start, part.count)

    if not spec.in_place:
        for part in parts:
            for device in sorted(adding[id(part)]):
                moves.append(Move(MoveKind.COPY, place(part, device, "input"), place(part, device), line=part.line))
    for part, parent, child in reversed(_levels(parts)):
        source = place(part, child, "output" if child in adding[id(part)] else "input")
        moves.append(Move(MoveKind.REDUCE, source, place(part, parent), line=part.line))
    for part, parent, child in _levels(_parts(down, share)):
        moves.append(Move(MoveKind.COPY, place(part, parent), place(part, child), line=part.line))
    return tuple(moves), ()
