"""Strips: a large call is cut into ranges of elements, one for each core that a rank has to itself (`shm_strips.h`).

    strip_ranges   the elements of a part, cut
    strips_for     into how many a call is cut
    threads_for    how many threads each rank may have
    cpu_quota      cores that the system lets the processes of this container use at a time
    Strips         of one rank: the groups in which its strips run, and the threads that help

**How many.** With S strips, S cores of each rank move bytes at once. One core of a server moves 5 to 10 GB/s of what
lies in the caches of others, a small part of what they can send; so S cores take little more than one S-th of the time
as long as they are real ones. A strip costs its own waits, a microsecond or two, so each has `_LEAST` bytes at least.

**Whose cores.** A rank has its share of the cores that it and those which share them may run on, less those that it
computes with: DDP with 4 ranks of 4 threads on 16 cores took 31 ms a step in place of 25 when helpers ran there too, and
FSDP2 56 to 80 in place of 36; with one thread 29 in place of 36 (`ddp_steps.py`). Other threads that want a core get it:
a helper that waits for one is not waited for, unless it has begun.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path

from sennit.collective.runtime.shm_abi import GroupRecord, StripRecord, StripsRecord
from sennit.collective.runtime.shm_cores import neighbours

__all__ = ["ROUSE_FROM", "Strips", "cpu_quota", "strip_ranges", "strips_for", "threads_for"]

_MOST = 4
# Bytes of a strip: of the input of a rank, or of its output if that is larger. An all-to-all is one copy where it is not
# cut, and none of it is read twice: with 8 ranks on 16 cores two strips took as long for 1 MiB (`shm_variants.py`).
_LEAST, _LEAST_EXCHANGED = 128 << 10, 1 << 20
ROUSE_FROM = 2 << 20  # bytes of a call for which helpers that sleep are woken


def strip_ranges(elements: int, strips: int, alignment: int) -> tuple[tuple[int, int], ...]:
    """`(first, stop)` of each, as even as whole lines of `alignment` elements allow; those at the end may be empty."""
    lines = -(-elements // alignment)
    cuts = [min(elements, lines * strip // strips * alignment) for strip in range(strips)]
    return tuple(zip(cuts, [*cuts[1:], elements], strict=True))


def strips_for(array_bytes: int, threads: int, *, exchanged: bool, least: int | None = None) -> int:
    """Of a call whose largest array has so many bytes. `exchanged`: of an all-to-all. `least` stands in for the bytes of
    a strip.
    """
    if least is None:
        least = _LEAST_EXCHANGED if exchanged else _LEAST
    return max(1, min(threads, array_bytes // max(1, least)))


def threads_for(
    cores: Sequence[Set[int]], quota: float | None = None, sharers: int = 1, busy: int = 1, most: int = _MOST
) -> int:
    """Of each rank: what the rank with the fewest has. `cores`: by rank, those that it may run on.

    `sharers`: processes of this host, in the group or not. Those which are not are taken to share the cores if all that
    are do; ranks that are bound to shares have theirs to themselves. `busy`: threads that a rank computes with.
    """
    sharers = max(sharers, len(cores))
    shares: list[int] = []
    for rank, own in enumerate(cores):
        together = neighbours(rank, cores)
        all_cores = len(set[int]().union(*(cores[member] for member in together)))
        claims = sharers if len(together) == len(cores) else len(together)
        shares.append(min(len(own), all_cores // claims))
    if quota is not None:
        shares.append(int(quota / sharers))
    return max(1, min(most, min(shares) - (busy - 1)))


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

    __slots__ = ("__weakref__", "_record", "_stop", "groups")

    def __init__(self, core: ctypes.CDLL, groups: Sequence[GroupRecord]) -> None:
        self.groups = tuple(groups)
        records = (StripRecord * len(self.groups))()
        for record, group in zip(records, self.groups, strict=True):
            record.group = ctypes.addressof(group)
        self._record = StripsRecord(strips=records)
        core.sennit_help(ctypes.addressof(records), len(self.groups))
        self._stop = weakref.finalize(self, _dismiss, core, records, self.groups, os.getpid())

    @property
    def address(self) -> int:
        return ctypes.addressof(self._record)

    def close(self) -> None:
        """End the threads; no call may be under way."""
        self._stop()


def _dismiss(
    core: ctypes.CDLL, records: ctypes.Array[StripRecord], groups: tuple[GroupRecord, ...], process: int
) -> None:
    """`groups` are held until the threads have ended. A forked child has no such threads."""
    if os.getpid() == process:
        core.sennit_dismiss(ctypes.addressof(records), len(groups))
