"""Which ranks are alive: by pidfd, which tells the end of a process also while nobody has reaped it, and never means
another one.

Where the kernel has no pidfd the state and the start time in `/proc` tell the same, a little later.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Identity", "Liveness", "own_identity"]


@dataclass(frozen=True, slots=True)
class Identity:
    """A process of a host, for good: numbers are used again, numbers with a start time are not."""

    host: str
    pid: int
    started: int


def own_identity() -> Identity:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    space = os.readlink("/proc/self/ns/pid")  # in another namespace the number means another process
    return Identity(f"{boot} {space}", os.getpid(), _started(os.getpid()) or 0)


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks; None where it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


class Liveness:
    """Watches processes; `close` gives their descriptors back."""

    __slots__ = ("_descriptors", "_identities", "_poll")

    def __init__(self, identities: Iterable[Identity]) -> None:
        self._identities = tuple(identities)
        self._descriptors: dict[int, int] = {}  # by pid
        self._poll = select.poll()
        for pid in {identity.pid for identity in self._identities} - {os.getpid()}:
            try:
                self._descriptors[pid] = os.pidfd_open(pid)
            except (OSError, AttributeError):
                continue  # `/proc` tells
            self._poll.register(self._descriptors[pid], select.POLLIN)

    def dead(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of the ranks whose process has ended."""
        ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        found: list[int] = []
        for rank in ranks:
            identity = self._identities[rank]
            descriptor = self._descriptors.get(identity.pid)
            if descriptor in ended or (descriptor is None and _started(identity.pid) != identity.started):
                found.append(rank)
        return tuple(found)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._poll = select.poll()
