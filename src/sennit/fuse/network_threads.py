"""The threads that move gradients run as soon as they have something to do, also where the model computes on the same
core.

A gloo collective is a chain: a thread that waits for sockets wakes the thread that runs the collective, which adds and
sends, which lets the other rank's go on. Each of them needs some microseconds of a core. Linux lets a thread that
computes finish its slice first, 1.4 to 3 ms of it, so on a core that computes all the time every link of the chain
waits that long, and a small message takes several times as long as on an idle core. The computing loses nothing by
letting them go first: they sleep again at once.

`network_first` asks the kernel for that, by the first of these that it grants, for each thread that gloo made in this
process:

| preference | needs | is |
|---|---|---|
| real time | CAP_SYS_NICE or a limit of `rtprio` | SCHED_FIFO at its lowest priority: before every ordinary thread |
| nice and short | CAP_SYS_NICE or a limit of `nice`; Linux 6.12 | a greater share, and a slice of 0.1 ms: it may interrupt one with a longer slice |
| short slice | Linux 6.12 | the slice alone |
| none | | as before |

**All or none.** The thread that waits for sockets and the one that runs the collective wait for each other by yielding,
not by sleeping. Where one of them has a real-time priority and the other does not, or another one, the first yields to
nobody and takes the core until the kernel throttles it: an all-reduce of 8 MB took 1,020 ms so and 69 ms with both or
neither (two hosts, 1 Gbit/s, nothing computing). So all of gloo's threads get the same, and a thread that has no name
yet must not be missed: ask after the first collective of each group, and again where a group was made later.

Some containers permit the second and not the first. Other systems and kernels that know none of them are left as they
are. It is asked once for each group; threads keep it until they end, or until `ordinary` takes it back.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
import time
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

__all__ = ["Preference", "gloo_threads", "is_granted", "network_first", "ordinary"]

_TASKS = Path("/proc/self/task")
_NAMES = frozenset({"gloo_tcp_loop", "pt_gloo_runloop"})
_LOOKS = 20  # a thread that waits for sockets is seen running now and then
# sched_setattr and sched_getattr, which neither Python nor the C library has names for
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ATTRIBUTES = "=IIQiIQQQII"  # size, policy, flags, nice, priority, runtime, deadline, period, two limits of utilisation
_SLICE = 100_000  # nanoseconds, the least that Linux takes
_NICE = -15
_ORDINARY = 0  # SCHED_OTHER


class Preference(Enum):
    """In the order in which they are asked for."""

    REAL_TIME = "real time"
    NICE_AND_SHORT = "nice and short"
    SHORT_SLICE = "short slice"
    NONE = "none"


def gloo_threads() -> tuple[int, ...]:
    """The threads of this process that gloo's devices and process groups made.

    By name; the one that waits for sockets has none before torch 2.13, so a thread counts too that is not Python's,
    bears the name of the process and waits for sockets.
    """
    if not sys.platform.startswith("linux"):
        return ()
    names = {int(task.name): _read(task / "comm") for task in _TASKS.iterdir()}
    found = {thread for thread, name in names.items() if name in _NAMES}
    if found and "gloo_tcp_loop" not in names.values():
        pythons = {thread.native_id for thread in threading.enumerate()}
        unnamed = {thread for thread, name in names.items() if name == names.get(os.getpid()) and thread not in pythons}
        for _ in range(_LOOKS):
            found |= {
                thread
                for thread in unnamed
                if "epoll" in (where := _read(_TASKS / str(thread) / "wchan")) or "ep_poll" in where
            }
            time.sleep(1e-3)
    return tuple(sorted(found))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the thread ended meanwhile
        return ""


def network_first(threads: Iterable[int] | None = None) -> Preference:
    """Ask for the threads of gloo, or for these; what was granted to all of them."""
    wanted = gloo_threads() if threads is None else tuple(threads)
    if not wanted:
        return Preference.NONE
    return next(preference for preference in Preference if all(is_granted(thread, preference) for thread in wanted))


def is_granted(thread: int, preference: Preference) -> bool:
    """Ask for one thread; whether it has it now."""
    match preference:
        case Preference.REAL_TIME:
            return _real_time(thread)
        case Preference.NICE_AND_SHORT:
            return _sliced(thread, _NICE)
        case Preference.SHORT_SLICE:
            return _sliced(thread, _own_nice())
        case Preference.NONE:
            return True


def ordinary(threads: Iterable[int] | None = None) -> None:
    """Take it back."""
    if sys.platform.startswith("linux"):
        for thread in gloo_threads() if threads is None else threads:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, _own_nice())
            _set(thread, _own_nice(), 0)


def _own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def _real_time(thread: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # not permitted, or the thread has ended
        return False
    return True


def _sliced(thread: int, nice: int) -> bool:
    """A kernel before 6.12 takes the call and gives no slice, so it is read back."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not _set(thread, nice, _SLICE):
        return False
    given = ctypes.create_string_buffer(struct.calcsize(_ATTRIBUTES))
    if ctypes.CDLL(None).syscall(calls[1], thread, given, len(given), 0):
        return False
    fields = struct.unpack(_ATTRIBUTES, given.raw)
    return bool(fields[3] == nice and fields[5] == _SLICE)


def _set(thread: int, nice: int, length: int) -> bool:
    """An ordinary thread, this nice, with a slice of so many nanoseconds; 0 for the kernel's own."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not sys.platform.startswith("linux"):
        return False
    size = struct.calcsize(_ATTRIBUTES)
    wanted = struct.pack(_ATTRIBUTES, size, _ORDINARY, 0, nice, 0, length, 0, 0, 0, 0)
    return bool(ctypes.CDLL(None).syscall(calls[0], thread, wanted, 0) == 0)
