"""Memory of a rank's own, through which passes what it reads in other processes to add it up (`shm_pull.h`).

Nobody else reads it, so it is private, and the same from call to call, so that it stays in the core's cache.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

__all__ = ["Workspace"]

_HUGE_PAGE = 2 << 20  # bytes


class Workspace:
    __slots__ = ("_space",)

    def __init__(self) -> None:
        self._space: mmap.mmap | None = None

    def at_least(self, size: int) -> int:
        """Its address, when it has so many bytes. It may move; no call may be under way."""
        space, whole = self._space, (-(-size // _HUGE_PAGE) + 1) * _HUGE_PAGE  # wherever it begins, huge pages fit in
        if space is None or len(space) < whole:
            self._space = space = mmap.mmap(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # where there are no huge pages, small ones serve
                space.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(space))
        return -(-first // _HUGE_PAGE) * _HUGE_PAGE
