"""How the ranks of a group find each other: all-gathers of bytes through the c10d store, who shares a host, and by
which address others reach it.

Keys live under the group's own prefix and are deleted by the last rank that has read them, so that a long-lived store
does not grow with the number of groups. A rank that does not come is named, and one that cannot go on tells the others,
which wait for its next word: it says why in its place.

**A host** is what ranks share memory and see each other's processes on: the same machine since the same boot, the same
network, process and `/dev/shm` namespace. Two containers of one machine are two hosts.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from sennit.collective.runtime.private_torch import Store, store_host
from sennit.errors import PeerError, RunError, SennitError

__all__ = ["Rendezvous", "group_by_host", "host_identity", "own_address"]

_SORRY = b"\0sennit cannot go on\0"  # begins the word of a rank that says what went wrong
_FAREWELL = 2.0  # seconds that such a rank stays for the others to read it


class Rendezvous:
    """All-gathers of bytes between the ranks of a group; each call is one, in the same order on all ranks."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.calls = 0
        self.over = False  # whether all ranks know that nothing comes of the group

    def __call__(self, data: bytes) -> list[bytes]:
        keys = self._say(data)
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError as error:  # DistStoreError or, of a file store, a plain RuntimeError
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if not missing:
                raise
            self.over = True
            raise PeerError(
                f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.size} did not join the group "
                f"within {self.timeout:.1f} s",
                where=f"rank {self.rank}, setting up a sennit group",
                fix="look at the output of that rank: it failed before, or waits somewhere else",
            ) from error
        answers = [bytes(self.store.get(key)) for key in keys]
        for rank, answer in enumerate(answers):
            if answer.startswith(_SORRY):
                self.over = True
                with suppress(RuntimeError):  # that rank may be gone, and the store with it
                    self._have_read(keys)
                what, fix = json.loads(answer.removeprefix(_SORRY))
                raise PeerError(
                    f"rank {rank} of {self.size} could not set up the group: {what}",
                    where=f"rank {self.rank}, setting up a sennit group",
                    fix=fix,
                )
        self._have_read(keys)
        return answers

    def give_up(self, error: BaseException) -> None:
        """Tell the others, which wait for this rank or will, what went wrong here."""
        if self.over:
            return
        self.over = True
        what = error.what if isinstance(error, SennitError) else f"{type(error).__name__}: {error}"
        fix = error.fix if isinstance(error, SennitError) else None
        with suppress(RuntimeError, OSError):  # a store that is gone: so are the others
            keys = self._say(_SORRY + json.dumps([what, fix or "look at the output of that rank"]).encode())
            counter = self._have_read(keys)
            until = time.monotonic() + _FAREWELL
            while self.store.check([counter]) and time.monotonic() < until:
                time.sleep(0.01)  # the store may end with this process

    def _say(self, data: bytes) -> list[str]:
        """This rank's word in the next all-gather; the keys of all."""
        self.calls += 1
        keys = [f"sennit/{self.calls}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], data)  # type: ignore[arg-type]  # bytes are taken as they are
        return keys

    def _have_read(self, keys: Sequence[str]) -> str:
        """The last rank deletes them. Returns the key of the counter, which goes last."""
        counter = f"sennit/{self.calls}/read"
        if self.store.add(counter, 1) == self.size:
            for key in (*keys, counter):
                self.store.delete_key(key)
        return counter


def host_identity() -> str:
    """Equal on two ranks if and only if they are on one host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "pid", "user")]
    return "/".join((socket.gethostname(), boot, *spaces, str(os.stat("/dev/shm").st_dev)))


def group_by_host(identities: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host; hosts in the order of their first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(identities):
        hosts.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def own_address(store: Store, interface: str | None) -> str:
    """The IPv4 address of this host for the others: of the named interface, or of the one that leads to the store."""
    if interface is not None:
        return _interface_address(interface)
    there = store_host(store)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        try:
            probe.connect((there if there is not None else socket.gethostname(), 9))
        except OSError:
            return "127.0.0.1"  # a host without a network: all ranks are on it
        return str(probe.getsockname()[0])


def _interface_address(interface: str) -> str:
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise RunError(
                f"the network interface {interface!r} has no IPv4 address ({error.strerror})",
                where="the environment: the interface to other hosts",
                fix=f"name one of {names}",
            ) from None
    return socket.inet_ntoa(answer[20:24])
