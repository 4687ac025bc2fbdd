"""A step's memory stays with the process.

A step allocates its activations and frees them, and the next one does so again. glibc gives memory at the end of its
heap back to the kernel where more than a threshold of it is free, and maps large blocks one by one; a page that comes
back is filled with zeros at its first touch. Whether that happens depends on what else lies in the heap, so the same
step takes one time in one run and another in the next: a small convolutional net of 136 ms had 11,128 such page faults
a step, 22 ms of them in the kernel, or none.

`keep_memory` tells glibc to give back less than `KEPT` bytes never, for all of the process. The memory of a training
step is needed again in the next, so nothing is lost by it but what was allocated once at the start.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["KEPT", "keep_memory"]

KEPT = 1 << 30
_MAPPED_BEFORE = 32 << 20  # the most that glibc takes before 2.35
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_memory() -> bool:
    """Whether it was granted: there is glibc on Linux only."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    is_mapped = bool(library.mallopt(_MMAP_THRESHOLD, KEPT)) or bool(library.mallopt(_MMAP_THRESHOLD, _MAPPED_BEFORE))
    return bool(library.mallopt(_TRIM_THRESHOLD, KEPT)) and is_mapped
