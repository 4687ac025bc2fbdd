"""A ticket: something under way that ends once, well or with an error, seen by any number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from sennit.errors import PeerError

__all__ = ["Ticket", "wait_for"]


class Ticket:
    """`what` and `peers` are for messages: what is under way, and which ranks it waits for.

    `source` is the rank that a message of any rank came from.
    """

    __slots__ = ("_callbacks", "_gate", "done", "error", "peers", "source", "what")

    def __init__(self, what: str, peers: tuple[int, ...] = ()) -> None:
        self.what, self.peers = what, peers
        self.done = False
        self.error: BaseException | None = None
        self.source: int | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._gate = threading.Lock()  # held until the end; a lock is the cheapest thing that a thread can wait for
        self._gate.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        """Called once, by whoever brings it to its end."""
        self.error = error
        self.done = True
        self._gate.release()
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # `then` took it meanwhile
                break
            callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Call it at the end, on the thread that brings the end; at once if that was before."""
        self._callbacks.append(callback)
        if self.done:
            try:
                self._callbacks.remove(callback)
            except ValueError:  # `finish` took it meanwhile
                return
            callback()

    def wait(self, timeout: float | None, limit: float | None = None) -> None:
        """Wait for the end, and raise its error. None: as long as it takes.

        `limit` is the time that it had in all, for the message, where `timeout` is what is left of it.
        """
        if not self._gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            late = f" from rank{'s' * (len(self.peers) > 1)} {', '.join(map(str, self.peers))}" if self.peers else ""
            raise PeerError(
                f"{self.what} did not end within {timeout if limit is None else limit:g} s: nothing came{late}",
                fix="look whether that rank failed, or calls something else; or give a longer timeout to init_process_group or new_group",
            )
        self._gate.release()
        if self.error is not None:
            raise self.error


def wait_for(tickets: Iterable[Ticket], timeout: float) -> None:
    """Wait for all, for so long in all; raise the first error."""
    deadline = time.monotonic() + timeout
    for ticket in tickets:
        ticket.wait(deadline - time.monotonic(), timeout)
