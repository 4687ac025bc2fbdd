"""Memory that each rank of a host owns and the others read: what redistributions are staged in (`reshard/shared.py`
says how).

    token | state | doorbell | posts to each rank | taken from each rank | staging

Every rank makes one such area, a memfd; a peer maps it through `/proc` when the two first meet. There is no group:
whichever ranks take part in a redistribution, each has one area, so staging memory does not grow with the number of
meshes. The area has no name and goes with the last process that maps it, however these end.

A *post* is a cache line of the sender's area: its number, where the data lies, how many bytes. Each pair of ranks has
`_POSTS` of them, used in turn. *Taken* is a counter in the receiver's area. So every word has one writer. Numbers are
stored with release after what they speak of and loaded with acquire, by the core; sleeping and waking are the core's
too (`shm_core.c`).

Staging is given out in a ring, oldest first; a piece is free when all to whom it was posted have taken it. When all are
free the ring starts over, so that small redistributions use the same, cached, memory.

Only the compiled core can order memory: without it there is no such memory.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sennit.collective.runtime.liveness import Identity, Liveness, own_identity
from sennit.collective.runtime.shm_abi import LINE, GroupRecord, Status, WatchRecord, load_core
from sennit.collective.runtime.shm_cores import has_own_core
from sennit.errors import RunError

__all__ = ["HostMemory"]

_PAGE = 4096
_POSTS = 16  # to one peer that it has not taken
_ALIGNMENT = 16  # the largest item, a complex of doubles
_STATE, _DOOR = LINE, 2 * LINE
_LEFT = 1
_POST = struct.Struct("<QQ")  # after the number: place, bytes
_PATIENCE = 20_000_000  # nanoseconds
_SPIN_LIMIT = 2_000  # rounds, some 50 microseconds
_YIELDS = 400


@dataclass(frozen=True, slots=True)
class _Area:
    """A mapped area of one rank. Addresses are of this process."""

    memory: mmap.mmap
    address: int
    ranks: int

    @classmethod
    def map(cls, descriptor: int, ranks: int, staging: int) -> _Area:
        memory = mmap.mmap(descriptor, cls.first(ranks) + staging)
        return cls(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), ranks)

    @staticmethod
    def first(ranks: int) -> int:
        """Where staging begins."""
        return -(-(_PAGE + ranks * (_POSTS + 1) * LINE) // _PAGE) * _PAGE

    @property
    def door(self) -> int:
        return self.address + _DOOR

    def post(self, to: int, number: int) -> int:
        """Where a post to a rank lies, from the beginning of the memory."""
        return _PAGE + (to * _POSTS + number % _POSTS) * LINE

    def taken(self, source: int) -> int:
        """The address of the counter of what this rank has taken of another's posts."""
        return self.address + _PAGE + (self.ranks * _POSTS + source) * LINE

    @property
    def has_left(self) -> bool:
        return self.memory[_STATE] == _LEFT


@dataclass(frozen=True, slots=True)
class _Peer:
    area: _Area
    liveness: Liveness


@dataclass(frozen=True, slots=True)
class _Staged:
    """A piece of staging, and who reads it: the number of their post."""

    begin: int
    end: int
    readers: list[tuple[int, int]]


class HostMemory:
    """One rank's end; see `SharedMemory`. Used by one thread at a time, as its executor is."""

    def __init__(self, rank: int, ranks: int, staging: int) -> None:
        core = load_core() if hasattr(os, "memfd_create") else None
        if core is None:
            raise RunError(
                "there is no compiled core of the shared-memory runtime",
                where=f"rank {rank}",
                fix="install sennit on Linux where a C compiler is present",
            )
        self.rank, self.ranks = rank, ranks
        self.capacity = max(_PAGE, -(-staging // _PAGE) * _PAGE)
        self._post, self._look, self._await = core.sennit_post, core.sennit_look, core.sennit_await
        descriptor = os.memfd_create("sennit", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)  # open until then: peers that come later open it by its number
        first = _Area.first(ranks)
        os.ftruncate(descriptor, first + self.capacity)
        self._token = secrets.token_hex(16)
        os.pwrite(descriptor, self._token.encode(), 0)
        self._descriptor, self._area = descriptor, _Area.map(descriptor, ranks, self.capacity)
        self._peers: dict[int, _Peer] = {}
        self._sent, self._taken = [0] * ranks, [0] * ranks  # posts
        self._seen = [0] * ranks  # what peers have taken, when last looked
        self._staged: deque[_Staged] = deque()
        self._ring = range(first, first + self.capacity)
        self._next, self._used = first, 0
        self._reserved: _Staged | None = None
        self._record = GroupRecord(doorbells=self._area.door, rank=0, ranks=1)
        self._record.yields, self._record.patience = _YIELDS, _PATIENCE
        self._cores: list[set[int]] = [os.sched_getaffinity(0)]  # this rank's, then those of peers that it has met
        self._record.spin = self._record.spin_limit = _SPIN_LIMIT

    # ---- meeting -----------------------------------------------------------------------------------------------------

    def greeting(self) -> bytes:
        me = own_identity()
        said = [me.host, me.pid, me.started, self._descriptor, self._token, self.ranks, self.capacity]
        return json.dumps(said).encode()

    def meet(self, peer: int, greeting: bytes) -> str | None:
        host, pid, started, number, token, ranks, capacity = json.loads(greeting)
        if host != own_identity().host:
            return f"rank {peer} is on another host or in another container than rank {self.rank}"
        path = f"/proc/{pid}/fd/{number}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return f"rank {self.rank} cannot open the memory of rank {peer}: {error}"
        try:
            if os.pread(descriptor, len(token), 0) != token.encode() or ranks != self.ranks:
                return f"{path} is not the memory of rank {peer}"
            area = _Area.map(descriptor, ranks, capacity)
        finally:
            os.close(descriptor)
        liveness = Liveness([Identity(host, pid, started)])
        weakref.finalize(self, liveness.close)
        with suppress(OSError):  # it has ended: who waits for it will see that
            self._cores.append(os.sched_getaffinity(pid))
        if not has_own_core(0, self._cores):
            self._record.spin = self._record.spin_limit = 0
        self._peers[peer] = _Peer(area, liveness)
        return None

    def memory(self, rank: int) -> mmap.mmap:
        return self._area.memory if rank == self.rank else self._peers[rank].area.memory

    # ---- sending -----------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, most: int) -> int | None:
        assert self._reserved is None, "a place was reserved and not posted"
        self._reclaim()
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if not self._staged:
            self._next = self._ring.start
        elif self._used + nbytes > most:
            return None
        begin = self._fit(nbytes)
        if begin is not None:
            self._reserved = _Staged(begin, begin + nbytes, [])
        return begin

    def _fit(self, nbytes: int) -> int | None:
        if nbytes > len(self._ring):
            raise RunError(
                f"a message of {nbytes} bytes, and {len(self._ring)} bytes of staging",
                where=f"rank {self.rank}",
                fix="raise `staging`",
            )
        oldest = self._staged[0].begin if self._staged else None
        if oldest is not None and self._next <= oldest:  # the ring has come round, and ends at the oldest
            return self._next if self._next + nbytes <= oldest else None
        if self._next + nbytes <= self._ring.stop:
            return self._next
        return self._ring.start if oldest is None or self._ring.start + nbytes <= oldest else None

    def may_post(self, peers: Iterable[int]) -> bool:
        return all(self._has_taken(peer, self._sent[peer] - _POSTS) for peer in peers)

    def post(self, peers: Iterable[int], place: int, nbytes: int) -> None:
        staged = self._reserved
        assert staged is not None
        assert staged.begin == place
        for peer in peers:
            number = self._sent[peer]
            at = self._area.post(peer, number)
            _POST.pack_into(self._area.memory, at + 8, place, nbytes)
            self._post(self._area.address + at, number + 1, self._peers[peer].area.door)
            self._sent[peer] = number + 1
            staged.readers.append((peer, number))
        self._staged.append(staged)
        self._used += staged.end - staged.begin
        self._next, self._reserved = staged.end, None

    def _has_taken(self, peer: int, number: int) -> bool:
        """Whether a peer has taken a post. Its counter is read when what was last seen of it is not enough."""
        if self._seen[peer] <= number:
            self._seen[peer] = self._look(self._peers[peer].area.taken(self.rank))
        return self._seen[peer] > number

    def _reclaim(self) -> None:
        while self._staged and all(self._has_taken(*reader) for reader in self._staged[0].readers):
            staged = self._staged.popleft()
            self._used -= staged.end - staged.begin

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def arrival(self, peer: int) -> tuple[int, int] | None:
        area, number = self._peers[peer].area, self._taken[peer]
        at = area.post(self.rank, number)
        if self._look(area.address + at) <= number:
            return None
        place, nbytes = _POST.unpack_from(area.memory, at + 8)
        return place, nbytes

    def take(self, peer: int) -> None:
        self._taken[peer] += 1
        self._post(self._area.taken(peer), self._taken[peer], self._peers[peer].area.door)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, arrivals: Sequence[int], room: Sequence[int]) -> bool:
        watches: list[WatchRecord] = []
        for peer in arrivals:
            area, number = self._peers[peer].area, self._taken[peer]
            watches.append(WatchRecord(area.address + area.post(self.rank, number), number + 1))
        if room:
            needed = [(peer, self._sent[peer] - _POSTS) for peer in room]
            needed += self._staged[0].readers if self._staged else []
            waiting = [(peer, number) for peer, number in needed if not self._has_taken(peer, number)]
            if not waiting:
                return True
            watches += [WatchRecord(self._peers[peer].area.taken(self.rank), number + 1) for peer, number in waiting]
        table = (WatchRecord * len(watches))(*watches)
        status = self._await(ctypes.addressof(self._record), ctypes.addressof(table), len(watches))
        return bool(status == Status.DONE)

    def gone(self, peers: Iterable[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        for peer in peers:
            if self._peers[peer].liveness.dead((0,)):
                found[peer] = "it died"
            elif self._peers[peer].area.has_left:
                found[peer] = "it failed"
        return found

    def leave(self) -> None:
        self._area.memory[_STATE] = _LEFT
