"""Memory that ranks of one host share, as redistributions need it: what each rank stages, the others read where it
lies.

    own rank                                          a peer
    reserve(bytes)      -> place, or None: no room
    write at place
    post(peer, place)                       ----->    arrival(own rank) -> place
                                                      read in memory(own rank) at place
    the place is free again                 <-----    take(own rank)

Posts from one rank to another arrive in their order. Nothing here blocks but `wait`, which returns when something of
what was asked for has happened, or after some milliseconds: then the caller looks whether those that it waits for are
still there (`gone`) and whether the time is over.

`SharedMemory` is what `shared_torch.py` runs on. The runtime above this folder implements it
(`collective/runtime/shm_posts.py`), and whoever makes an executor passes the maker in: nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from typing import Protocol

__all__ = ["GREETING", "SharedMaker", "SharedMemory"]

GREETING = 512  # bytes


class SharedMemory(Protocol):
    """This rank's end. Places are bytes from the beginning of `memory` of the rank that wrote there."""

    @property
    def capacity(self) -> int:
        """The bytes that can be staged at once."""
        ...

    def greeting(self) -> bytes:
        """What another rank needs to `meet` this one; at most `GREETING` bytes."""
        ...

    def meet(self, peer: int, greeting: bytes) -> str | None:
        """Open a peer's memory; or why that is not possible."""
        ...

    def memory(self, rank: int) -> mmap:
        """Of this rank, or of one that was met."""
        ...

    def reserve(self, nbytes: int, most: int) -> int | None:
        """A place in the own memory; None while more than `most` bytes would be staged. The first alone always fits."""
        ...

    def may_post(self, peers: Iterable[int]) -> bool:
        """Whether each of them has taken enough of its posts for another."""
        ...

    def post(self, peers: Iterable[int], place: int, nbytes: int) -> None:
        """Tell peers what lies at a place that was reserved. It is free when all of them have taken it."""
        ...

    def arrival(self, peer: int) -> tuple[int, int] | None:
        """Place and size of the first post of a peer that was not taken; None while there is none."""
        ...

    def take(self, peer: int) -> None:
        """That post has been read."""
        ...

    def wait(self, arrivals: Sequence[int], room: Sequence[int]) -> bool:
        """Until a post arrives from one of the first, or there may be room for a post to the second:

        True. False after some milliseconds.
        """
        ...

    def gone(self, peers: Iterable[int]) -> dict[int, str]:
        """Those of the peers that will not come any more, and why."""
        ...

    def leave(self) -> None:
        """Tell all that this rank will not go on."""
        ...


SharedMaker = Callable[[int, int, int], SharedMemory]
"""Makes this rank's end from its rank, the number of ranks, and the bytes to stage.

Raises `RunError` where there can be none.
"""
