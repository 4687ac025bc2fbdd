"""The threads that move gradients run as soon as they have something to do, also where the model computes on the same core.

A gloo collective is a chain: a thread that waits for sockets wakes the thread that runs the collective, which adds and sends, which lets the other rank's go on. Each of them needs some microseconds of a core.
Linux lets a thread that computes finish its slice first, 1.4 to 3 ms of it, so on a core that computes all the time every link of the chain waits that long, and a small message takes several times as long as on an idle
core. The computing loses nothing by letting them go first: they sleep again at once.

`network_first` asks the kernel for that, by the first of these that it grants, for each thread that gloo made in this process:

| preference | needs | is |
|---|---|---|
| real time | CAP_SYS_NICE or a limit of `rtprio` | SCHED_FIFO at its lowest priority: before every ordinary thread |
| short slice | Linux 6.12 | an ordinary thread with a slice of 0.1 ms: it may interrupt one with a longer slice that has run for its share |
| none | | as before |

Other systems and kernels that know neither are left as they are. It is asked once for each group; threads keep it until they end, or until `ordinary` takes it back.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

__all__ = ["Preference", "gloo_threads", "network_first", "ordinary"]

_NAMES = frozenset({"gloo_tcp_loop", "pt_gloo_runloop"})
# sched_setattr and sched_getattr, which neither Python nor the C library has names for
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ATTRIBUTES = "=IIQiIQQQII"  # size, policy, flags, nice, priority, runtime, deadline, period, two limits of utilisation
_SLICE = 100_000  # nanoseconds, the least that Linux takes
_ORDINARY = 0  # SCHED_OTHER


class Preference(Enum):
    REAL_TIME = "real time"
    SHORT_SLICE = "short slice"
    NONE = "none"


def gloo_threads() -> tuple[int, ...]:
    """The threads of this process that gloo's devices and process groups made."""
    if not sys.platform.startswith("linux"):
        return ()
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:  # it ended meanwhile
            continue
        if name in _NAMES:
            found.append(int(task.name))
    return tuple(sorted(found))


def network_first(threads: Iterable[int] | None = None) -> Preference:
    """Ask for the threads of gloo, or for these; what was granted to all of them."""
    wanted = gloo_threads() if threads is None else tuple(threads)
    if not wanted:
        return Preference.NONE
    if all(_real_time(thread) for thread in wanted):
        return Preference.REAL_TIME
    return Preference.SHORT_SLICE if all(_short_slice(thread) for thread in wanted) else Preference.NONE


def ordinary(threads: Iterable[int] | None = None) -> None:
    """Take it back."""
    if sys.platform.startswith("linux"):
        for thread in gloo_threads() if threads is None else threads:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _real_time(thread: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # not permitted, or the thread has ended
        return False
    return True


def _short_slice(thread: int) -> bool:
    """A kernel before 6.12 takes the call and gives no slice, so it is read back."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not sys.platform.startswith("linux"):
        return False
    size = struct.calcsize(_ATTRIBUTES)
    wanted = struct.pack(_ATTRIBUTES, size, _ORDINARY, 0, 0, 0, _SLICE, 0, 0, 0, 0)
    given = ctypes.create_string_buffer(size)
    library = ctypes.CDLL(None)
    if library.syscall(calls[0], thread, wanted, 0) or library.syscall(calls[1], thread, given, size, 0):
        return False
    return bool(struct.unpack(_ATTRIBUTES, given.raw)[5] == _SLICE)
