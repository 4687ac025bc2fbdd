"""May a rank that waits spin? Only if nobody whom it waits for needs its core.

Ranks may be bound to sets of cores: to one each, to shares, to all of them, or by mistake several to one. A rank has a *core of its own* if all ranks that share cores with it,
directly or through others, can run at the same time, each on another core:

    there is a matching of these ranks with cores, in which every one of them has one that it may run on

Counting is not enough: of three ranks on one core and one rank on fifteen there are more cores than ranks, and three of them take turns. Nor is the own set alone: a rank that is bound to
one core of sixteen may have it to itself.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

__all__ = ["has_own_core"]


def has_own_core(rank: int, cores: Sequence[Set[int]]) -> bool:
    """`cores`: by rank, those that it may run on."""
    together = _neighbours(rank, cores)
    taken: dict[int, int] = {}  # by core: who runs there
    return all(_settle(member, cores, taken, set()) for member in together)


def _neighbours(rank: int, cores: Sequence[Set[int]]) -> set[int]:
    """The ranks that share cores with this one, directly or through others; and itself."""
    found, reached = {rank}, set(cores[rank])
    while fresh := {other for other, own in enumerate(cores) if other not in found and own & reached}:
        found |= fresh
        reached = reached.union(*(cores[other] for other in fresh))
    return found


def _settle(rank: int, cores: Sequence[Set[int]], taken: dict[int, int], tried: set[int]) -> bool:
    """Find a core for a rank; those who have one may move to another."""
    for core in cores[rank]:
        if core not in tried:
            tried.add(core)
            if core not in taken or _settle(taken[core], cores, taken, tried):
                taken[core] = rank
                return True
    return False
