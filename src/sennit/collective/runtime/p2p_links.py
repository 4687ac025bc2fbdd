"""Messages between the ranks of a group over sockets: matched by peer and label, in the background, with the dead
named.

    links = Links(rank, exchange, host=..., address=...)
    ticket = links.receive(peer, label, buffer)      # returns at once; `buffer` is filled when the ticket is done
    links.send(peer, label, buffer).wait(30.0)

**Connections.** One in each direction of a pair, opened by the sender at its first message: a Unix socket (abstract, so
no file is left) where both ranks are on one host, TCP between hosts. Nobody answers on a connection, so the end of it
means that the peer is gone: killed, or gone from the group. A receive opens one towards its peer too, to see this even
if the peer has never sent anything. What a peer sent before it went still arrives: a receive fails when the connection
*from* the peer has been read to its end, or when there is none a moment after the one *to* the peer has ended.

**Farewell.** A rank that leaves because something failed says why, on all its connections, before it ends them: so who
waited for it learns of the rank that failed first.

**Matching** (`p2p_matching.py`). Messages of one peer and label arrive in the order in which they were sent; with
different labels in any order that the receiver asks for. What arrives before it is asked for is kept in memory. A send
is done when the kernel has taken its last byte; `buffer` must stay unchanged until then.

**Progress.** One thread per group, asleep in epoll. A send is tried at once by its caller, and left to the thread where
the kernel takes only a part.

A child made by fork has neither the thread nor the connections: it closes its copies, so that peers still see the end
of the parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from sennit.collective.runtime.limits import explained
from sennit.collective.runtime.p2p_matching import Inbox, deliver
from sennit.collective.runtime.p2p_ticket import Ticket, wait_for
from sennit.collective.runtime.p2p_wire import (
    FAREWELL,
    HEADER,
    HELLO,
    MAGIC,
    Address,
    Early,
    Incoming,
    Label,
    Outgoing,
    Receive,
    Send,
)
from sennit.errors import PeerError

__all__ = ["Address", "Label", "Links"]

_logger = logging.getLogger(__name__)

_PER_EVENT = 1 << 20  # bytes read from one peer before the others get their turn
_SOCKET_BUFFER = 1 << 20
_MOMENT = 0.25  # seconds in which a connection from a peer that is gone may still turn up
_BREATH = 0.02  # seconds between attempts to accept a connection, where too many files are open
_QUIET = select.EPOLLIN | select.EPOLLRDHUP  # on a connection to a peer, which never answers: its end

Exchange = Callable[[bytes], list[bytes]]
_Ends = list[tuple[Ticket, BaseException | None]]  # tickets that are done, to be told outside of the lock


class Links:
    """The messages of one rank.

    `host` is a name that is equal on ranks that share a kernel's network; `address` the interface address for TCP;
    `exchange` an all-gather of bytes, for setting up.
    """

    def __init__(self, rank: int, exchange: Exchange, *, host: str, address: str, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of everything below, but what only the thread touches
        self._outgoing: dict[int, Outgoing] = {}
        self._inbox = Inbox()
        self._gone: dict[int, str] = {}  # why; nothing can be sent to these
        self._incoming: dict[int, Incoming] = {}  # connections from peers that are open
        self._drained: set[int] = set()  # peers that nothing more can come from
        self._suspects: dict[
            int, float
        ] = {}  # peers that are gone and may have sent something: until when to wait for it
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._short_of_files = False
        here = self._open(host, address)
        try:
            self.addresses = tuple(Address.decode(text) for text in exchange(here.encode()))
        except BaseException:
            self._release()
            raise
        self.size = len(self.addresses)
        self._thread = threading.Thread(target=self._run, name=f"sennit-links-{rank}", daemon=True)
        self._thread.start()
        weak = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(weak))

    # ---- what ranks call ---------------------------------------------------------------------------------------------

    def send(self, peer: int, label: Label, buffer: memoryview, *, note: int = 0) -> Ticket:
        """Send the bytes of a buffer, which must not change before the ticket is done."""
        ticket = Ticket(f"a send of {buffer.nbytes} bytes to rank {peer}", (peer,))
        header = HEADER.pack(label.kind, note, label.tag, buffer.nbytes)
        parts = [memoryview(header), *([buffer.cast("B")] if buffer.nbytes else [])]
        outgoing = self._connect(peer)
        ends: _Ends
        with self._lock:
            if outgoing is None or peer in self._gone:
                ends = [(ticket, self._gone_error(peer, ticket.what))]
            else:
                outgoing.queue.append(Send(ticket, parts))
                ends = self._push(peer, outgoing) if len(outgoing.queue) == 1 else []
        _finish(ends)
        return ticket

    def receive(self, peer: int, label: Label, buffer: memoryview, *, note: int | None = None) -> Ticket:
        """Receive into a buffer. With a `note`, the message must bear it."""
        ticket = Ticket(f"a receive of {buffer.nbytes} bytes from rank {peer}", (peer,))
        receive = Receive(ticket, _bytes(buffer), note)
        ends: _Ends = []
        with self._lock:
            taken = self._take_early(peer, label, receive, ends)
            if not taken:
                self._inbox.post(peer, label, receive)
        if not taken:
            self._connect(peer)  # to see its end
            with self._lock:
                if peer in self._gone:
                    ends += self._suspect(peer)
        _finish(ends)
        return ticket

    def receive_any(self, label: Label, buffer: memoryview) -> Ticket:
        """Receive from whoever sends a message of this label first; `ticket.source` says who."""
        ticket = Ticket(f"a receive of {buffer.nbytes} bytes from any rank")
        receive = Receive(ticket, _bytes(buffer), None)
        ends: _Ends = []
        with self._lock:
            if not any(self._take_early(peer, label, receive, ends) for peer in range(self.size)):
                self._inbox.post_any(label, receive)
        _finish(ends)
        return ticket

    def exchange(
        self,
        label: Label,
        sends: Sequence[tuple[int, memoryview]],
        receives: Sequence[tuple[int, memoryview]],
        *,
        note: int = 0,
        timeout: float,
    ) -> None:
        """One batch: all these messages at once, and their end."""
        tickets = [self.receive(peer, label, buffer, note=note) for peer, buffer in receives]
        tickets += [self.send(peer, label, buffer, note=note) for peer, buffer in sends]
        wait_for(tickets, timeout)

    def close(self, why: str | None = None) -> None:
        """End the connections, and say why if something failed.

        What was sent still arrives; what nobody asked for is dropped.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if why is not None:
                self._say_farewell(why)
            os.eventfd_write(self._wake, 1)  # under the lock: the thread closes the descriptor once it has seen the end
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _say_farewell(self, why: str) -> None:
        text = why.encode()[:4096]
        message = HEADER.pack(FAREWELL, 0, 0, len(text)) + text
        for outgoing in self._outgoing.values():
            if not outgoing.queue:  # else it would stand in the middle of a message
                with contextlib.suppress(OSError):  # who cannot take it learns of the end alone
                    outgoing.socket.send(message)

    # ---- connections -------------------------------------------------------------------------------------------------

    def _open(self, host: str, address: str) -> Address:
        """The descriptors of this rank; all or none."""
        with contextlib.ExitStack() as opened:
            try:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK)
                opened.callback(os.close, self._wake)
                self._epoll = opened.enter_context(select.epoll())
                self._epoll.register(self._wake, select.EPOLLIN)
                self._handlers[self._wake] = lambda _: self._woken()
                here = self._listen(host, address, opened)
            except OSError as error:
                raise explained(
                    error, f"rank {self.rank} cannot open its sockets", f"messages, at {address}"
                ) from error
            opened.pop_all()
            return here

    def _listen(self, host: str, address: str, opened: contextlib.ExitStack) -> Address:
        name = f"\0sennit-{uuid.uuid4().hex}"
        unix = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        tcp = opened.enter_context(socket.socket())
        unix.bind(name)
        tcp.bind((address, 0))
        for listener in (unix, tcp):
            listener.listen(1024)
            listener.setblocking(False)
            self._watch(listener, select.EPOLLIN, partial(self._accept, listener))
        return Address(host, name, address, tcp.getsockname()[1])

    def _connect(self, peer: int) -> Outgoing | None:
        """The connection to a peer, made at its first use. None: the peer is gone."""
        if os.getpid() != self._pid:
            raise PeerError(
                "this process was forked from a rank and is not one", fix="make a new group in the child, or use spawn"
            )
        with self._lock:
            if self._closed:
                raise PeerError("the group is closed", where=f"rank {self.rank}", fix="make a new one")
            if (found := self._outgoing.get(peer)) is not None or peer in self._gone:
                return found
            try:
                made = self._dial(self.addresses[peer])
            except OSError as error:
                self._gone[peer] = f"no connection can be made to it ({error})"
                return None
            found = self._outgoing[peer] = Outgoing(made)
            self._watch(made, _QUIET, partial(self._outgoing_ready, peer))
            return found

    def _dial(self, there: Address) -> socket.socket:
        near = there.host == self.addresses[self.rank].host
        made = socket.socket(socket.AF_UNIX if near else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if not near:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            made.settimeout(self.timeout)
            made.connect(there.unix if near else (there.tcp, there.port))
            made.sendall(HELLO.pack(MAGIC, self.rank))
            made.setblocking(False)
        except OSError:
            made.close()
            raise
        return made

    def _watch(self, item: socket.socket, events: int, handler: Callable[[int], None]) -> None:
        self._sockets.add(item)
        self._handlers[item.fileno()] = handler
        self._epoll.register(item, events)

    def _unwatch(self, item: socket.socket) -> None:
        self._sockets.discard(item)
        if self._handlers.pop(item.fileno(), None) is not None:
            self._epoll.unregister(item)
        item.close()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            for number, mask in self._epoll.poll(self._pause()):
                if (handler := self._handlers.get(number)) is not None:
                    handler(mask)
            self._convict()
        ends: _Ends = []
        with self._lock:
            for peer in range(self.size):
                self._gone.setdefault(peer, "this rank closed the group")
                ends += self._fail_waiting(peer)
            for peer, incoming in self._incoming.items():
                ends += self._cut_off(incoming, peer)
            for item in self._inbox.asked_of_any():
                ends.append((item.ticket, PeerError(f"{item.ticket.what}: this rank closed the group")))
            self._release()
        _finish(ends)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _pause(self) -> float | None:
        """How long to sleep: until the first suspect's time is over."""
        with self._lock:
            return max(0.0, min(self._suspects.values()) - time.monotonic()) if self._suspects else None

    def _convict(self) -> None:
        """Suspects from which nothing came in time are gone for good."""
        ends: _Ends = []
        with self._lock:
            for peer in [peer for peer, until in self._suspects.items() if time.monotonic() >= until]:
                del self._suspects[peer]
                if peer not in self._incoming:
                    ends += self._drain(peer)
        _finish(ends)

    def _release(self) -> None:
        """Close every descriptor."""
        for item in list(self._sockets):
            self._unwatch(item)
        self._epoll.close()
        os.close(self._wake)

    def _accept(self, listener: socket.socket, _events: int) -> None:
        try:
            made, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # too many files are open: it waits until one is closed
            if not self._short_of_files:
                self._short_of_files = True
                _logger.warning(
                    "rank %d cannot accept the connection of a peer: %s. Messages wait until it can: raise the limit "
                    "(ulimit -n 4096)",
                    self.rank,
                    error,
                )
            time.sleep(_BREATH)
            return
        made.setblocking(False)
        incoming = Incoming(made)
        with self._lock:
            self._watch(made, select.EPOLLIN, partial(self._incoming_ready, incoming))

    def _outgoing_ready(self, peer: int, events: int) -> None:
        with self._lock:
            if events & (select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                ends = self._lose(peer, "its process ended, or it left the group")
            else:
                ends = self._push(peer, self._outgoing[peer])
        _finish(ends)

    def _push(self, peer: int, outgoing: Outgoing) -> _Ends:
        """Send what the kernel takes; the sends that are done. The rest waits for the kernel."""
        ends: _Ends = []
        waited = bool(outgoing.queue) and outgoing.watched
        try:
            while outgoing.queue:
                head = outgoing.queue[0]
                sent = outgoing.socket.sendmsg(head.parts)
                while head.parts and sent >= head.parts[0].nbytes:
                    sent -= head.parts.pop(0).nbytes
                if head.parts:
                    head.parts[0] = head.parts[0][sent:]
                else:
                    outgoing.queue.popleft()
                    ends.append((head.ticket, None))
        except BlockingIOError:
            pass
        except OSError as error:
            return ends + self._lose(peer, f"its connection broke ({error})")
        if bool(outgoing.queue) != waited:
            outgoing.watched = not waited
            self._epoll.modify(outgoing.socket, _QUIET | (select.EPOLLOUT if outgoing.watched else 0))
        return ends

    def _incoming_ready(self, incoming: Incoming, _events: int) -> None:
        """Read up to a limit: a hello, then headers and payloads."""
        left = _PER_EVENT
        try:
            while left > 0:
                if incoming.target is None:
                    want = HELLO.size if incoming.peer is None else HEADER.size
                    got = incoming.socket.recv(want - len(incoming.head))
                    incoming.head += got
                    count = len(got)
                    if len(incoming.head) == want:
                        self._headed(incoming)
                else:
                    count = incoming.socket.recv_into(incoming.target[incoming.filled :])
                    incoming.filled += count
                    if incoming.filled == incoming.target.nbytes:
                        self._filled(incoming)
                if count == 0:
                    raise ConnectionResetError("it closed the connection")
                left -= count
        except BlockingIOError:
            return
        except OSError:
            with self._lock:
                self._unwatch(incoming.socket)
                ends = [] if incoming.peer is None else self._end_incoming(incoming, incoming.peer)
            _finish(ends)

    def _end_incoming(self, incoming: Incoming, peer: int) -> _Ends:
        """All that the peer sent has been read. A message that was cut off fails with those that never began."""
        self._incoming.pop(peer, None)
        ends = self._lose(peer, "its process ended, or it left the group")
        return ends + self._cut_off(incoming, peer) + self._drain(peer)

    def _cut_off(self, incoming: Incoming, peer: int) -> _Ends:
        """The message that is being read will not come to its end."""
        receive = incoming.early.receive if incoming.early is not None else incoming.receive
        return [] if receive is None else [(receive.ticket, self._gone_error(peer, receive.ticket.what))]

    def _headed(self, incoming: Incoming) -> None:
        """A hello or a header is complete."""
        head = bytes(incoming.head)
        incoming.head.clear()
        if incoming.peer is None:
            magic, peer = HELLO.unpack(head)
            if magic != MAGIC or not 0 <= peer < self.size:
                raise ConnectionAbortedError("a stranger")
            incoming.peer = peer
            with self._lock:
                self._incoming[peer] = incoming
            return
        kind, note, tag, size = HEADER.unpack(head)
        label = Label(kind, tag)
        with self._lock:
            receive = self._inbox.take_posted(incoming.peer, label)
            early = None
            if kind == FAREWELL:
                incoming.early, incoming.target, incoming.filled = None, memoryview(bytearray(size)), 0
                return
            if receive is None or receive.buffer.nbytes != size or receive.note not in (None, note):
                early = Early(note, bytearray(size), receive=receive)
                if receive is None:
                    self._inbox.keep(incoming.peer, label, early)
        incoming.receive, incoming.early = receive, early
        incoming.target = memoryview(early.payload) if early is not None else receive.buffer  # type: ignore[union-attr]
        incoming.filled = 0
        if size == 0:
            self._filled(incoming)

    def _filled(self, incoming: Incoming) -> None:
        """A payload is complete."""
        ends: _Ends = []
        early, receive = incoming.early, incoming.receive
        assert incoming.peer is not None
        with self._lock:
            if early is not None:
                early.complete = True
                if early.receive is not None:
                    ends.append(deliver(early, early.receive, incoming.peer))
            elif receive is not None:
                receive.ticket.source = incoming.peer
                ends.append((receive.ticket, None))
            elif incoming.target is not None:
                said = bytes(incoming.target).decode(errors="replace")
                self._gone[incoming.peer] = (
                    f"it left the group, since: {said}"  # in place of what its end alone would say
                )
                ends = self._lose(incoming.peer, "") + self._drain(incoming.peer)
        incoming.target = incoming.early = incoming.receive = None
        _finish(ends)

    # ---- who asked, and who is gone, all under the lock --------------------------------------------------------------

    def _take_early(self, peer: int, label: Label, receive: Receive, ends: _Ends) -> bool:
        early = self._inbox.take_early(peer, label, receive)
        if early is None:
            return False
        if early.complete:
            ends.append(deliver(early, receive, peer))
        elif peer in self._drained:  # its rest never came
            ends.append((receive.ticket, self._gone_error(peer, receive.ticket.what)))
        return True

    def _lose(self, peer: int, why: str) -> _Ends:
        """Nothing more can be sent to the peer."""
        self._gone.setdefault(peer, why)
        if (outgoing := self._outgoing.pop(peer, None)) is None:
            return self._suspect(peer)
        self._unwatch(outgoing.socket)
        ends: _Ends = [(item.ticket, self._gone_error(peer, item.ticket.what)) for item in outgoing.queue]
        return ends + self._suspect(peer)

    def _suspect(self, peer: int) -> _Ends:
        """The peer is gone; what it sent before may still come."""
        if peer in self._drained:
            return self._fail_waiting(peer)
        if peer not in self._incoming and peer not in self._suspects:
            self._suspects[peer] = time.monotonic() + _MOMENT
            os.eventfd_write(self._wake, 1)  # the thread sleeps no longer than this
        return []

    def _drain(self, peer: int) -> _Ends:
        """Nothing more can come from the peer."""
        self._drained.add(peer)
        return self._fail_waiting(peer)

    def _fail_waiting(self, peer: int) -> _Ends:
        tickets = [receive.ticket for receive in self._inbox.withdraw(peer)]
        return [(ticket, self._gone_error(peer, ticket.what)) for ticket in tickets]

    def _gone_error(self, peer: int, what: str) -> PeerError:
        return PeerError(f"{what} failed: rank {peer} is gone: {self._gone.get(peer, 'it left')}")


def _bytes(buffer: memoryview) -> memoryview:
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())


def _finish(ends: _Ends) -> None:
    """Outside of the lock: what waits for a ticket may use the links again."""
    for ticket, error in ends:
        ticket.finish(error)


def _forget(weak: weakref.ref[Links]) -> None:
    """In a forked child: close its copies of the parent's descriptors, so that the parent's end is seen by its peers."""
    links = weak()
    if links is not None and not links._closed:
        for item in links._sockets:
            item.close()
        links._sockets.clear()
        links._epoll.close()
        os.close(links._wake)
        links._closed = True
