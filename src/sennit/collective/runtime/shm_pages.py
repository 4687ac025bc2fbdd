"""Which pages large arrays of this process lie in (`shm_pages.h`).

PageMap      the kernel's account of this process's pages, open as long as it is used
huge_pages   whether large arrays lie in huge pages, whoever made them: for kernels before 6.7, which do not say it of an array
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["PageMap", "huge_pages"]


class PageMap:
    """`descriptor` is -1 where there is none: then the core takes the word of `huge_pages`."""

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        self.descriptor = -1
        with suppress(OSError):  # a container may hide it
            self.descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def huge_pages() -> bool:
    """Where the kernel gives them only to who asks, some arrays have them (numpy's from 4 MiB on) and others do not
    (torch's).
    """
    with suppress(OSError):
        return "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    return False
