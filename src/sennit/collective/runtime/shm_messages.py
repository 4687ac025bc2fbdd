"""Messages between the ranks of a host: through a ring of bytes in the segment for each ordered pair of ranks.

    send, receive    by pairs, with tags; messages of one tag stay in order
    exchange         all ranks with all, sizes by pair: what collectives of unequal sizes are made of

A message is a header (tag, size) and its bytes, and may be larger than its ring. Locks are by peer and direction, so a
thread that receives does not wait for one that sends, nor for one that runs a collective. `exchange` is a collective
call and takes its turn with the others; it has rings of its own.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.collective.runtime.failure import Cause, RuntimeFailure
from sennit.collective.runtime.liveness import Identity
from sennit.collective.runtime.shm_abi import Status, TransferRecord
from sennit.collective.runtime.shm_endpoint import ShmEndpoint
from sennit.collective.runtime.shm_machine import Machine
from sennit.collective.runtime.shm_plan import SharedCache
from sennit.collective.runtime.shm_segment import Segment
from sennit.errors import CollectiveError

__all__ = ["Buffer", "ShmMessages"]

_MESSAGES, _EXCHANGES = 0, 1  # the two sets of rings


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of the user: an address and a size. What it lies in must be kept by the caller."""

    address: int
    nbytes: int

    @classmethod
    def of(cls, array: NDArray[np.generic]) -> Buffer:
        if not array.flags.c_contiguous:
            raise CollectiveError(
                f"an array of shape {array.shape} and strides {array.strides}", fix="pass a contiguous one"
            )
        return cls(array.ctypes.data, array.nbytes)


class ShmMessages(ShmEndpoint):
    """`ShmEndpoint` with messages."""

    def __init__(
        self,
        segment: Segment,
        identities: Sequence[Identity],
        machine: Machine,
        timeout: float,
        cores: Sequence[Set[int]],
        may_read: bool = False,
        cache: SharedCache | None = None,
    ) -> None:
        super().__init__(segment, identities, machine, timeout, cores, may_read, cache)
        self._peer_locks = [[threading.Lock() for _ in range(self.size)] for _ in ("send", "receive")]
        self._early: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(
            deque
        )  # not yet asked for, by peer and tag

    def send(self, data: Buffer, to: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Returns when the data is in the ring: small messages do not wait for the receiver, large ones do."""
        self._check_peer(to)
        with self._peer_locks[0][to]:
            self._exchange(_MESSAGES, [self._transfer(data, to, sends=True, tag=tag)], f"send to rank {to}", timeout)

    def receive(self, data: Buffer, source: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Messages of one tag arrive in order; those of other tags that come first are kept."""
        self._check_peer(source)
        with self._peer_locks[1][source]:
            early = self._early.get((source, tag))
            if early:
                self._deliver(early.popleft(), data, source, tag)
                if not early:
                    del self._early[source, tag]
                return
            transfer = self._transfer(data, source, sends=False, tag=tag)
            while not self._exchange(_MESSAGES, [transfer], f"receive from rank {source}", timeout):
                found = np.empty(transfer.found_bytes, dtype=np.uint8)
                other = self._transfer(Buffer.of(found), source, sends=False, tag=transfer.found_tag)
                self._exchange(_MESSAGES, [other], f"receive from rank {source}", timeout)
                if transfer.found_tag == tag:
                    self._deliver(found.tobytes(), data, source, tag)  # of another size: says so
                self._early[source, int(transfer.found_tag)].append(found.tobytes())

    def _deliver(self, message: bytes, data: Buffer, source: int, tag: int) -> None:
        if len(message) != data.nbytes:
            raise CollectiveError(
                f"a message of {len(message)} bytes from rank {source}, tag {tag}, for {data.nbytes} bytes",
                where=self._where(),
                fix="send and receive the same number of bytes",
            )
        ctypes.memmove(data.address, message, len(message))

    def exchange(
        self,
        sends: Sequence[Buffer],
        receives: Sequence[Buffer],
        *,
        what: str = "exchange",
        timeout: float | None = None,
    ) -> None:
        """Send `sends[r]` to every rank r, and receive `receives[r]` from it: sizes may differ, by pair.

        All ranks call it together.
        """
        if not len(sends) == len(receives) == self.size:
            raise CollectiveError(f"{len(sends)} and {len(receives)} buffers for {self.size} ranks", where=what)
        if sends[self.rank].nbytes != receives[self.rank].nbytes:
            raise CollectiveError(
                f"{sends[self.rank].nbytes} bytes for itself, and room for {receives[self.rank].nbytes}", where=what
            )
        with self._lock:
            self._usable()
            ctypes.memmove(receives[self.rank].address, sends[self.rank].address, sends[self.rank].nbytes)
            turns = [(self.rank + turn) % self.size for turn in range(1, self.size)]
            transfers = [self._transfer(sends[peer], peer, sends=True, tag=0) for peer in turns]
            transfers += [self._transfer(receives[peer], peer, sends=False, tag=0) for peer in turns]
            if not self._exchange(_EXCHANGES, transfers, what, timeout):
                self._wrong_size(transfers, what)

    def _wrong_size(self, transfers: Sequence[TransferRecord], what: str) -> None:
        for transfer in transfers:
            if not transfer.sends and transfer.stage == 0 and transfer.found_bytes != transfer.bytes:
                failure = RuntimeFailure(
                    f"rank {transfer.peer} sends {transfer.found_bytes} bytes where rank {self.rank} expects {transfer.bytes}",
                    cause=Cause.MISMATCH,
                    ranks=(int(transfer.peer), self.rank),
                    where=f"{what}, {self._where()}",
                    fix="give matching sizes on both sides, and make the same calls in the same order on all ranks",
                )
                self._fail(self._usable(), failure)

    def _transfer(self, data: Buffer, peer: int, *, sends: bool, tag: int) -> TransferRecord:
        return TransferRecord(
            data=data.address, bytes=data.nbytes, peer=peer, sends=sends, tag=tag, found_bytes=data.nbytes
        )

    def _exchange(self, rings: int, transfers: Sequence[TransferRecord], what: str, timeout: float | None) -> bool:
        """False where a message other than the one asked for stands first in a ring."""
        segment = self._usable()
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        table = (TransferRecord * len(transfers))(*transfers)
        while True:
            status = self.machine.exchange(self._record, self.address, rings, table, len(transfers))
            if status == Status.WAITING:
                waiting = {int(t.peer) for t in table if t.stage != 2}
                with self._unfinished(segment, what):
                    self._look_around(segment, tuple(sorted(waiting)), what, deadline, limit, None)
                continue
            for mine, done in zip(transfers, table, strict=True):
                mine.found_tag, mine.found_bytes, mine.stage = done.found_tag, done.found_bytes, done.stage
            return status == Status.DONE

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise CollectiveError(
                f"a message between rank {self.rank} and rank {peer}", fix="name another rank of the group"
            )
