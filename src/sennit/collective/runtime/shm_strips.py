"""Strips: a large call is cut into ranges of elements, one for each core that a rank has to itself (`shm_strips.h`).

    strip_ranges   the elements of a part, cut
    strips_for     into how many a call is cut
    threads_for    how many threads each rank may have
    cpu_quota      cores that the system lets the processes of this container use at a time
    Strips         of one rank: the groups in which its strips run, and the threads that help

**How many.** With S strips, S cores of each rank move bytes at once. One core of a server moves 5 to 10 GB/s of what
lies in the caches of others, a small part of what they can send; so S cores take little more than one S-th of the time
as long as they are real ones. A strip costs its own waits, a microsecond or two, so each has `_LEAST` bytes at least.

**Whose cores.** A rank has its share of the cores that it and those which share them may run on. Threads of the program
that want a core get it: a helper that waits for one is not waited for, unless it has begun.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path

from sennit.collective.runtime.shm_abi import GroupRecord, StripRecord
from sennit.collective.runtime.shm_cores import neighbours

__all__ = ["ROUSE_FROM", "Strips", "cpu_quota", "strip_ranges", "strips_for", "threads_for"]

_MOST = 4
_LEAST = 128 << 10  # bytes of a strip: of the input of a rank, or of its output if that is larger
ROUSE_FROM = 2 << 20  # bytes of a call for which helpers that sleep are woken


def strip_ranges(elements: int, strips: int, alignment: int) -> tuple[tuple[int, int], ...]:
    """`(first, stop)` of each, as even as whole lines of `alignment` elements allow; those at the end may be empty."""
    lines = -(-elements // alignment)
    cuts = [min(elements, lines * strip // strips * alignment) for strip in range(strips)]
    return tuple(zip(cuts, [*cuts[1:], elements], strict=True))


def strips_for(array_bytes: int, threads: int, least: int | None = None) -> int:
    """Of a call whose largest array has so many bytes. `least` stands in for the bytes of a strip."""
    return max(1, min(threads, array_bytes // (_LEAST if least is None else max(1, least))))


def threads_for(cores: Sequence[Set[int]], quota: float | None = None, sharers: int = 1) -> int:
    """Of each rank: what the rank with the fewest has. `cores`: by rank, those that it may run on.

    `sharers`: processes of this host, in the group or not. Those which are not are taken to share the cores if all that
    are do; ranks that are bound to shares have theirs to themselves.
    """
    sharers, fewest = max(sharers, len(cores)), _MOST
    for rank, own in enumerate(cores):
        together = neighbours(rank, cores)
        all_cores = len(set[int]().union(*(cores[member] for member in together)))
        claims = sharers if len(together) == len(cores) else len(together)
        fewest = min(fewest, len(own), all_cores // claims)
    if quota is not None:
        fewest = min(fewest, int(quota / sharers))
    return max(1, fewest)


def cpu_quota(mounts: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """None where there is no limit, or the system does not say. Version 2 of control groups: the least of the limits of
    this process's group and of those around it.
    """
    place = ""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                place = path.strip("/")
    limits: list[float] = []
    folder = mounts / place
    while True:
        with suppress(OSError, ValueError):
            allowed, period = (folder / "cpu.max").read_text().split()
            if allowed != "max":
                limits.append(int(allowed) / int(period))
        if folder == mounts or mounts not in folder.parents:
            return min(limits, default=None)
        folder = folder.parent


class Strips:
    """`groups` are those of the strips after the first; they are kept as long as this."""

    __slots__ = ("__weakref__", "_records", "_stop", "groups")

    def __init__(self, core: ctypes.CDLL, groups: Sequence[GroupRecord]) -> None:
        self.groups = tuple(groups)
        self._records = (StripRecord * len(self.groups))()
        for record, group in zip(self._records, self.groups, strict=True):
            record.group = ctypes.addressof(group)
        core.sennit_help(self.address, len(self.groups))
        self._stop = weakref.finalize(self, _dismiss, core, self._records, self.groups, os.getpid())

    @property
    def address(self) -> int:
        return ctypes.addressof(self._records)

    def close(self) -> None:
        """End the threads; no call may be under way, nor come after."""
        self._stop()


def _dismiss(
    core: ctypes.CDLL, records: ctypes.Array[StripRecord], groups: tuple[GroupRecord, ...], process: int
) -> None:
    """`groups` are held until the threads have ended. A forked child has no such threads."""
    if os.getpid() == process:
        core.sennit_dismiss(ctypes.addressof(records), len(groups))
