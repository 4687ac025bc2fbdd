"""Messages and who asked for them: matched by peer and label, in the order in which they were sent and asked for.

    inbox = Inbox()
    inbox.post(peer, label, receive)            # asked for before it came
    inbox.take_posted(peer, label)              # it comes: for whom
    inbox.keep(peer, label, early)              # it comes before it is asked for
    inbox.take_early(peer, label, receive)      # it is asked for: what is there of it

A receive from any peer stands behind those from one. Nothing here locks: `p2p_links.py` calls it under its lock.
"""

from __future__ import annotations

from collections import defaultdict, deque

from sennit.collective.runtime.p2p_note import Note
from sennit.collective.runtime.p2p_ticket import Ticket
from sennit.collective.runtime.p2p_wire import Early, Label, Receive
from sennit.errors import PeerError

__all__ = ["Inbox", "deliver"]


class Inbox:
    """What was asked for and has not come, and what came and was not asked for."""

    def __init__(self) -> None:
        self._posted: dict[tuple[int, Label], deque[Receive]] = defaultdict(deque)
        self._posted_any: dict[Label, deque[Receive]] = defaultdict(deque)
        self._early: dict[tuple[int, Label], deque[Early]] = defaultdict(deque)

    def post(self, peer: int, label: Label, receive: Receive) -> None:
        self._posted[peer, label].append(receive)

    def post_any(self, label: Label, receive: Receive) -> None:
        self._posted_any[label].append(receive)

    def take_posted(self, peer: int, label: Label) -> Receive | None:
        """Who asked first for a message that comes now."""
        for queue in (self._posted.get((peer, label)), self._posted_any.get(label)):
            if queue:
                return queue.popleft()
        return None

    def keep(self, peer: int, label: Label, early: Early) -> None:
        self._early[peer, label].append(early)

    def take_early(self, peer: int, label: Label, receive: Receive) -> Early | None:
        """The first message that nobody had asked for, now asked for; perhaps still arriving."""
        queue = self._early.get((peer, label))
        if not queue:
            return None
        early = queue.popleft()
        early.receive = receive
        return early

    def withdraw(self, peer: int) -> list[Receive]:
        """What was asked of a peer that sends nothing more."""
        found: list[Receive] = []
        for (source, _), queue in self._posted.items():
            while source == peer and queue:
                found.append(queue.popleft())
        return found

    def asked_of_any(self) -> list[Receive]:
        return [item for queue in self._posted_any.values() for item in queue]


def deliver(early: Early, receive: Receive, peer: int) -> tuple[Ticket, BaseException | None]:
    """Hand a message from memory to its receiver, or say why it is not what was asked for."""
    receive.ticket.source = peer
    size, wanted = len(early.payload), receive.buffer.nbytes
    if size != wanted or receive.note not in (None, early.note):
        other = "" if receive.note in (None, early.note) else f" of another call ({Note.read(early.note)})"
        return receive.ticket, PeerError(
            f"{receive.ticket.what} meets a message of {size} bytes{other} from rank {peer}",
            fix="let all ranks call the same collectives in the same order, with the same sizes and types",
        )
    receive.buffer[:] = early.payload
    return receive.ticket, None
