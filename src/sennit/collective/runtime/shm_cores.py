"""How does a rank wait? It may spin only if nobody whom it waits for needs its core.

Ranks may be bound to sets of cores: to one each, to shares, to all of them, or by mistake several to one. A rank has a
*core of its own* if all ranks that share cores with it, directly or through others, can run at the same time, each on
another core:

    there is a matching of these ranks with cores, in which every one of them has one that it may run on

Counting is not enough: of three ranks on one core and one rank on fifteen there are more cores than ranks, and three of
them take turns. Nor is the own set alone: a rank that is bound to one core of sixteen may have it to itself.

Ranks that take turns yield, unless all on their core wait for ranks of others (`all_await_others` in `shm_core.c`). On
a virtual machine it takes long to wake one that sleeps, so none does before the others of its core may have had their
turns (`Waiting`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

__all__ = ["Waiting", "has_own_core", "neighbours"]

_SPINS = 2_000  # rounds, some 50 microseconds
_YIELDS = 100  # a few rounds of the ranks that share a core
_LINGER = 2_000_000  # nanoseconds: longer than any system takes to wake a rank
# Nanoseconds for each rank of a core. With 8 ranks on 2 cores that slept after 100 yields an all_reduce of 4 MiB took
# 2.0 ms in place of 1.5 (benchmarks/collective/data/awake_2_cores.txt).
_TURN = 400_000


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank spins, then yields, then sleeps; it stays awake for `linger` nanoseconds at least, unless others crowd a
    core that it had for itself.
    """

    spins: int
    yields: int
    linger: int

    @classmethod
    def of(cls, rank: int, cores: Sequence[Set[int]]) -> Waiting:
        """`cores`: by rank, those that it may run on.

        Where there are enough for all and ranks are bound so that some take turns, these sleep soon: others may have
        their cores for long.
        """
        if has_own_core(rank, cores):
            return cls(_SPINS, _YIELDS, _LINGER)
        ranks, all_cores = len(cores), len(set[int]().union(*cores))
        return cls(0, _YIELDS, _TURN * -(-ranks // all_cores) if all_cores < ranks else 0)


def has_own_core(rank: int, cores: Sequence[Set[int]]) -> bool:
    """`cores`: by rank, those that it may run on."""
    together = neighbours(rank, cores)
    taken: dict[int, int] = {}  # by core: who runs there
    return all(_settle(member, cores, taken, set()) for member in together)


def neighbours(rank: int, cores: Sequence[Set[int]]) -> set[int]:
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
