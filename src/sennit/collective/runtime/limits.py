"""Limits of the system that setting up a group may meet: their numbers, and what to change.

limit_behind   the numbers behind an error, in words
remedy_for     what to change
explained      an error of the system as one that users see
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

from sennit.errors import RunError

__all__ = ["SHARED_FILES", "explained", "limit_behind", "remedy_for"]

SHARED_FILES = Path("/dev/shm")


def limit_behind(number: int | None) -> str:
    """As an addition to the text of an error; empty where there is nothing to say."""
    match number:
        case errno.EFBIG:
            return f" (a file may have {_limit(resource.RLIMIT_FSIZE)} bytes)"
        case errno.EMFILE:
            return f" (a process may have {_limit(resource.RLIMIT_NOFILE)} files open)"
        case errno.ENOMEM:
            return f" (a process may have {_limit(resource.RLIMIT_AS)} bytes of addresses)"
        case errno.ENOSPC:
            with suppress(OSError):
                found = os.statvfs(SHARED_FILES)
                sizes = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
                return f" ({sizes[0]} of {sizes[1]} bytes are free in {SHARED_FILES})"
    return ""


def _limit(kind: int) -> str:
    limit = resource.getrlimit(kind)[0]
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


def remedy_for(number: int | None) -> str | None:
    match number:
        case errno.EFBIG:
            return "raise the limit: ulimit -f unlimited"
        case errno.EMFILE:
            return "raise the limit: ulimit -n 4096"
        case errno.ENFILE:
            return "raise the limit of the system: sysctl fs.file-max"
        case errno.ENOSPC:
            return (
                "free memory, or make /dev/shm larger: mount -o remount,size=1G /dev/shm, or docker run --shm-size=1g"
            )
        case errno.ENOMEM:
            return "free memory, or raise the limit: ulimit -v unlimited"
    return None


def explained(error: OSError, did: str, where: str) -> RunError:
    file = "" if error.filename is None else f" {error.filename}:"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return RunError(
        f"{did}:{file} {reason}{limit_behind(error.errno)}",
        where=where,
        fix=remedy_for(error.errno) or "see what the system says of it",
    )
