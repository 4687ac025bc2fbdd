"""The algorithms of shared memory: every rank reads what it needs straight from the others, in one step or two.

With p ranks and n bytes, all memory at the same distance:

| | steps | bytes read by a rank | by whom |
|---|---|---|---|
| all_reduce, direct | 1 | p n | everyone adds up everything: the least latency |
| all_reduce, by slices | 2 | 2 n | rank i adds up slice i of all, everyone collects the slices |
| reduce, direct | 1 | p n, of the root | |
| reduce, by slices | 2 | n, and n of the root | |
| broadcast, by slices | 2 | n | rank i reads slice i of the root, everyone collects the slices: the root, which copies alone in the other one, copies as little as all |
| all_gather, gather, all_to_all, scatter, broadcast, reduce_scatter | 1 | what it gets | |

Terms are always added in the order of ranks, 0 first. So the bits of a result depend neither on timing nor on the
number of bytes, nor on which of these algorithms was chosen, and all ranks get the same.
"""

from __future__ import annotations

from collections.abc import Callable

from sennit.collective.language import Builder, Chunk, trace
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec

__all__ = ["build", "names"]


def _turn(rank: int, ranks: int) -> list[int]:
    """All ranks, begun with the own one, so that not all read the same one first."""
    return [(rank + turn) % ranks for turn in range(ranks)]


def _sum(b: Builder, place: Chunk, to: int, buffer: str, index: int) -> None:
    """`place` of all ranks, added up in the order of ranks."""
    total = place.on(0).copy(to=to, buffer=buffer, index=index)
    for peer in range(1, b.ranks):
        place.on(peer).reduce(into=total)


def _all_reduce_direct(b: Builder) -> None:
    for rank in range(b.ranks):
        _sum(b, b.input(0), rank, "output", 0)


def _slices(b: Builder) -> None:
    """Slice i of the sum, at rank i."""
    for rank in range(b.ranks):
        b.scratch(rank, "sum", 1)
        _sum(b, b.chunk(0, "input", rank), rank, "sum", 0)


def _all_reduce_slices(b: Builder) -> None:
    _slices(b)
    for rank in range(b.ranks):
        for peer in _turn(rank, b.ranks):
            b.chunk(peer, "sum", 0).copy(to=rank, buffer="output", index=peer)


def _reduce_direct(b: Builder) -> None:
    _sum(b, b.input(0), _root(b), "output", 0)


def _reduce_slices(b: Builder) -> None:
    _slices(b)
    for peer in _turn(_root(b), b.ranks):
        b.chunk(peer, "sum", 0).copy(to=_root(b), buffer="output", index=peer)


def _reduce_scatter(b: Builder) -> None:
    for rank in range(b.ranks):
        _sum(b, b.chunk(0, "input", rank), rank, "output", 0)


def _all_gather(b: Builder) -> None:
    for rank in range(b.ranks):
        for peer in _turn(rank, b.ranks):
            b.input(peer).copy(to=rank, buffer="output", index=peer)


def _all_to_all(b: Builder) -> None:
    for rank in range(b.ranks):
        for peer in _turn(rank, b.ranks):
            b.chunk(peer, "input", rank).copy(to=rank, buffer="output", index=peer)


def _broadcast(b: Builder) -> None:
    for rank in range(b.ranks):
        b.input(_root(b)).copy(to=rank, buffer="output")


def _broadcast_slices(b: Builder) -> None:
    root = _root(b)
    for rank in range(b.ranks):
        b.scratch(rank, "slice", 1)
        b.chunk(root, "input", rank).copy(to=rank, buffer="slice", index=0)
    for rank in range(b.ranks):
        for peer in _turn(rank, b.ranks):
            place = b.chunk(root, "input", peer) if rank == root else b.chunk(peer, "slice", 0)
            place.copy(to=rank, buffer="output", index=peer)


def _gather(b: Builder) -> None:
    for peer in _turn(_root(b), b.ranks):
        b.input(peer).copy(to=_root(b), buffer="output", index=peer)


def _scatter(b: Builder) -> None:
    for rank in range(b.ranks):
        b.chunk(_root(b), "input", rank).copy(to=rank, buffer="output", index=0)


def _root(b: Builder) -> int:
    assert isinstance(b.collective, CollectiveSpec)
    assert b.collective.root is not None
    return b.collective.root


def _programs() -> dict[str, tuple[CollectiveName, Callable[[Builder], None]]]:
    return {
        "all_reduce direct": (CollectiveName.ALL_REDUCE, _all_reduce_direct),
        "all_reduce slices": (CollectiveName.ALL_REDUCE, _all_reduce_slices),
        "reduce direct": (CollectiveName.REDUCE, _reduce_direct),
        "reduce slices": (CollectiveName.REDUCE, _reduce_slices),
        "reduce_scatter": (CollectiveName.REDUCE_SCATTER, _reduce_scatter),
        "all_gather": (CollectiveName.ALL_GATHER, _all_gather),
        "all_to_all": (CollectiveName.ALL_TO_ALL, _all_to_all),
        "broadcast": (CollectiveName.BROADCAST, _broadcast),
        "broadcast slices": (CollectiveName.BROADCAST, _broadcast_slices),
        "gather": (CollectiveName.GATHER, _gather),
        "scatter": (CollectiveName.SCATTER, _scatter),
    }


def names() -> tuple[str, ...]:
    return tuple(_programs())


def build(name: str, ranks: int, root: int | None = None) -> Algorithm:
    if name not in _programs():
        raise CollectiveError(f"no shared-memory algorithm {name!r}", fix=f"there are {', '.join(names())}")
    collective, program = _programs()[name]
    chunks = ranks if name.endswith("slices") else 1
    return trace(program, CollectiveSpec(collective, ranks, chunks, root), name)
