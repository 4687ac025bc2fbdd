"""The segment that the ranks of a host share: how it is laid out, made and found, and what ranks tell each other in it
besides data.

    token | status of each rank | calls of each rank | doorbells | flags | rings | staging | other strips | arenas

A strip after the first (`shm_strips.py`) has doorbells, flags and staging of its own.

It is a memfd: memory without a name, which goes when the last process that maps it goes, however it ends. Other ranks
open it through `/proc` of rank 0. Where that is not allowed, a file in `/dev/shm` serves that is unlinked as soon as
all have opened it.

Pages cost nothing until they are touched, so capacities are generous. A page that cannot be had when it is touched
would kill the process (SIGBUS). Of a memfd there is always one, or the kernel ends a process that it names; but not of
a file, when `/dev/shm` is full, nor where the kernel promises no more memory than there is (strict overcommit). There
the memory is *reserved*: all before the other strips, which are not used then, when the segment is made, and arrays in
the arenas by `reserve`.

Each word has one writer, or all write the same, so no locks are needed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import secrets
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sennit.collective.runtime.failure import RuntimeFailure
from sennit.collective.runtime.limits import SHARED_FILES, limit_behind, remedy_for
from sennit.collective.runtime.shm_abi import FLAG_BYTES, LINE, RING_HEAD, SLOTS
from sennit.errors import RunError

__all__ = [
    "BROKEN",
    "CALLS_KEPT",
    "NOTE_BYTES",
    "Capacity",
    "Exchange",
    "Layout",
    "Segment",
    "describe_call",
    "open_segment",
]

Exchange = Callable[[bytes], list[bytes]]  # an all-gather of small bytes, at set-up only

_PAGE = 4096
# state, failure, calls begun, when the last one in strips was, then the failure as JSON; the core knows it too
_STATUS_BYTES = _PAGE
_NOTE = struct.Struct("<QQ112s")  # number, what it is as a number, what it is in words
NOTE_BYTES = _NOTE.size
CALLS_KEPT = 64  # the core knows it too
_LEFT = 2
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which the mmap module does not name
_OTHERWISE = "shared memory joins ranks of one host and one user; use another backend between hosts or containers"
BROKEN = 64  # where a byte says that some rank has declared a failure


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of each rank.

    `slot`: bytes of staging for one tile, at most; `wide`: of the ring of staging for tiles that many read; `flags`: of
    all codes together; `ring`: bytes of messages to one peer; `arena`: bytes for `allocate`.

    Of a slot most codes use 384 KiB (`shm_plan.py`), a tile of 256 KiB with its scratch. Tiles of 128 to 512 KiB are
    within 5% of each other for an all-reduce of 16 MiB by 8 ranks on 16 cores; smaller ones wait more often, larger
    ones fall out of the cache.
    """

    slot: int = 1 << 20
    wide: int = 6 << 20
    flags: int = 2048
    ring: int = 1 << 17
    arena: int = 1 << 28


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things begin, in bytes."""

    ranks: int
    capacity: Capacity
    strips: int = 1

    def status(self, rank: int) -> int:
        return _PAGE + rank * _STATUS_BYTES

    def call(self, rank: int, number: int) -> int:
        return self.status(self.ranks) + (rank * CALLS_KEPT + number % CALLS_KEPT) * _NOTE.size

    def doorbells(self, strip: int = 0) -> int:
        return self._strip(strip) if strip else _pages(self.call(self.ranks, 0))

    def flags(self, strip: int = 0) -> int:
        return _pages(self.doorbells(strip) + self.ranks * LINE)

    def _flags_end(self, strip: int = 0) -> int:
        return _pages(self.flags(strip) + SLOTS * self.ranks * self.capacity.flags * FLAG_BYTES)

    @property
    def rings(self) -> int:
        return self._flags_end()

    def staging(self, strip: int = 0) -> int:
        if strip:
            return self._flags_end(strip)
        return _pages(self.rings + 2 * self.ranks**2 * (RING_HEAD + self.capacity.ring))

    @property
    def staging_step(self) -> int:
        """Slots, then the ring, which has more than SLOTS + 1 times the longest place: see `shm_core.c`."""
        return SLOTS * self.capacity.slot + _pages(max(self.capacity.wide, (SLOTS + 2) * self.capacity.slot))

    def _strip(self, strip: int) -> int:
        """Where what only a later strip has begins."""
        fixed = self.staging() + self.ranks * self.staging_step
        waits = _pages(self.ranks * LINE) + _pages(SLOTS * self.ranks * self.capacity.flags * FLAG_BYTES)
        return _pages(fixed) + (strip - 1) * (waits + _pages(self.ranks * self.staging_step))

    @property
    def reserved(self) -> int:
        """What a group cannot do without."""
        return self._strip(1)

    def arena(self, rank: int) -> int:
        return self._strip(self.strips) + rank * self.capacity.arena

    @property
    def size(self) -> int:
        return self.arena(self.ranks)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class Segment:
    """A mapped segment, seen by one rank. `scarce`: pages may be missing when they are touched."""

    __slots__ = ("address", "layout", "memory", "rank", "scarce")

    def __init__(self, descriptor: int, layout: Layout, rank: int, *, scarce: bool = False) -> None:
        self.memory = mmap.mmap(descriptor, layout.size)
        self.layout, self.rank, self.scarce = layout, rank, scarce
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def fill_ring(self, strip: int = 0) -> None:
        """Have the pages of this rank's ring of staging, so that no call waits for them; calls that need them do, where
        the kernel does not know the advice (5.14 does).
        """
        own = self.layout.staging(strip) + self.rank * self.layout.staging_step
        start = (own + SLOTS * self.layout.capacity.slot) // _PAGE * _PAGE
        with suppress(OSError):
            self.memory.madvise(_POPULATE_WRITE, start, own + self.layout.staging_step - start)

    def reserve(self, at: int, size: int) -> None:
        """Have the pages of a part of an arena, where they may be missing."""
        if not self.scarce:
            return
        start = at // _PAGE * _PAGE
        try:
            self.memory.madvise(_POPULATE_WRITE, start, at + size - start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an old kernel, which does not know the advice
                raise RunError(
                    f"there is no memory for an array of {size} bytes that the ranks share",
                    where=f"rank {self.rank} of a group of {self.layout.ranks}",
                    fix=remedy_for(errno.ENOSPC),
                ) from None

    # ---- states and failures: each rank writes its own only

    def leave(self) -> None:
        struct.pack_into("<I", self.memory, self.layout.status(self.rank), _LEFT)

    def has_left(self, rank: int) -> bool:
        return bool(struct.unpack_from("<I", self.memory, self.layout.status(rank))[0] == _LEFT)

    def declare(self, failure: RuntimeFailure) -> None:
        """Tell all ranks that the group is broken, and why."""
        at = self.layout.status(self.rank)
        what, where = failure.what[:800], (failure.where or "")[:800]  # texts of other ranks may be in it
        said = {"what": what, "cause": failure.cause.value, "ranks": failure.ranks, "where": where}
        text = json.dumps(said).encode()[: _STATUS_BYTES - 32]
        self.memory[at + 32 : at + 32 + len(text)] = text
        struct.pack_into("<I", self.memory, at + 4, len(text))  # after the text: who sees the length sees the text
        self.memory[BROKEN] = 1

    def failure(self) -> tuple[int, dict[str, object]] | None:
        """The first rank that declared one, and what it said."""
        for rank in range(self.layout.ranks):
            at = self.layout.status(rank)
            (length,) = struct.unpack_from("<I", self.memory, at + 4)
            if length:
                said: dict[str, object] = json.loads(bytes(self.memory[at + 32 : at + 32 + length]))
                return rank, said
        return None

    # ---- calls: what each rank has begun, noted by its machine, for messages when they differ

    @property
    def own_notes(self) -> int:
        """The address of the notes of this rank's calls."""
        return self.address + self.layout.call(self.rank, 0)

    @property
    def own_calls_begun(self) -> int:
        return self.address + self.layout.status(self.rank) + 8

    def calls_begun(self, rank: int) -> int:
        return int(struct.unpack_from("<Q", self.memory, self.layout.status(rank) + 8)[0])

    def call_of(self, rank: int, number: int) -> tuple[int, str] | None:
        """What a rank's call of this number is; None where it has not begun, or is long past."""
        if self.calls_begun(rank) < number:  # its note may be half written
            return None
        found, identity, words = _NOTE.unpack_from(self.memory, self.layout.call(rank, number))
        if found != number or self.calls_begun(rank) >= number + CALLS_KEPT - 1:  # or half overwritten
            return None
        return identity, words.rstrip(b"\0").decode(errors="replace")


def describe_call(collective: str, elements: int, dtype: str, reduction: str | None, root: int | None = None) -> str:
    text = f"{collective} of {elements} {dtype}"
    text = f"{text}, {reduction}" if reduction is not None else text
    return f"{text}, root {root}" if root is not None else text


def open_segment(rank: int, layout: Layout, exchange: Exchange) -> Segment:
    """Rank 0 makes it, all open it; nothing with a name is left when this returns or raises.

    What fails on one rank is known to all: each raises, or tries the next way.
    """
    told: list[str] = []
    fix = ""
    for way in _WAYS:
        with way(rank, layout) as made:
            path, token, fault = json.loads(exchange(json.dumps(made.said).encode())[0])
            segment = None
            if not fault:
                segment, fault = made.open(path, token)
            elif rank != 0:
                fault = ""  # that rank says it
            faults = {r: said.decode() for r, said in enumerate(exchange(fault.encode())) if said}
            if not faults:
                assert segment is not None
                return segment
            first = min(faults)
            what, _, fix = faults[first].partition("\n")
            told.append(f"rank {first} cannot {'open' if first or segment else 'make'} {what}")
    raise RunError(
        f"the memory that the ranks share cannot be had: {'; '.join(told)}",
        where=f"a group of {layout.ranks} ranks, whose segment has {layout.size} bytes",
        fix=fix or _OTHERWISE,
    )


class _Nameless:
    """A way to have the segment: rank 0 makes it on entry, and says by which path and token others open it. What cannot
    be done is said in words: a fault.
    """

    place = "memory without a name (memfd)"

    def __init__(self, rank: int, layout: Layout) -> None:
        self.rank, self.layout = rank, layout
        self.descriptor = -1
        self.said = "", "", ""  # path, token, fault

    def __enter__(self) -> _Nameless:
        if self.rank == 0:
            token = secrets.token_hex(16)
            try:
                path = self.make()
                os.ftruncate(self.descriptor, self.layout.size)
                if self.scarce:
                    os.posix_fallocate(self.descriptor, 0, self.layout.reserved)
                os.pwrite(self.descriptor, token.encode(), 0)
                self.said = path, token, ""
            except OSError as error:
                self.said = "", "", self.fault(error)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    @property
    def scarce(self) -> bool:
        return _strict_overcommit()

    def make(self) -> str:
        """Rank 0's descriptor; returns the path for the others."""
        self.descriptor = os.memfd_create("sennit", os.MFD_CLOEXEC)
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def open(self, path: str, token: str) -> tuple[Segment | None, str]:
        """Map it; or say why it cannot be."""
        try:
            if self.rank != 0:
                self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if os.pread(self.descriptor, len(token), 0).decode(errors="replace") != token:
                    return None, f"{path} is not the segment of this group"
            return Segment(self.descriptor, self.layout, self.rank, scarce=self.scarce), ""
        except OSError as error:
            return None, self.fault(error)

    def fault(self, error: OSError) -> str:
        reason = os.strerror(error.errno or 0)
        needed = self.layout.reserved if error.errno == errno.ENOSPC else self.layout.size
        remedy = remedy_for(error.errno) or _OTHERWISE
        return f"{needed} bytes of {self.place}: {reason}{limit_behind(error.errno)}\n{remedy}"


class _Named(_Nameless):
    place = "a file in /dev/shm"
    path: Path | None = None

    def __exit__(self, *exception: object) -> None:
        super().__exit__()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    @property
    def scarce(self) -> bool:
        return True

    def make(self) -> str:
        path = SHARED_FILES / f"sennit-{secrets.token_hex(8)}"
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.path = path
        return str(path)


_WAYS = (_Nameless, _Named)  # in the order in which they are tried


def _strict_overcommit() -> bool:
    with suppress(OSError):
        return Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "2"
    return False
