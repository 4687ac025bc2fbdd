"""Memory for the user inside the segment: first fit over the free gaps, in whole cache lines."""

from __future__ import annotations

import threading

from sennit.collective.runtime.shm_abi import LINE
from sennit.errors import RunError

__all__ = ["Arena"]


class Arena:
    """Addresses `start` to `start + size`.

    Arrays are given back by the collector, maybe in another thread: hence the lock.
    """

    __slots__ = ("_lock", "_taken", "first", "last")

    def __init__(self, start: int, size: int) -> None:
        self.first, self.last = start, start + size
        self._taken: dict[int, int] = {}  # bytes by address, ascending
        self._lock = threading.RLock()  # the collector may run inside `take`

    def take(self, nbytes: int) -> int:
        wanted = max(1, -(-nbytes // LINE)) * LINE
        with self._lock:
            at = self.first
            for address, size in sorted(self._taken.items()):
                if address - at >= wanted:
                    break
                at = address + size
            if at + wanted > self.last:
                used = sum(self._taken.values())
                raise RunError(
                    f"{nbytes} bytes do not fit: {used} of {self.last - self.first} are in use",
                    where="the shared memory of this rank",
                    fix="let arrays go that are no longer needed, or make the group with a larger Capacity.arena",
                )
            self._taken[at] = wanted
            return at

    def give_back(self, address: int) -> None:
        with self._lock:
            self._taken.pop(address, None)
