"""Messages between ranks of one host, through memory that they share: one copy in, one copy out.

The sender packs a part straight into its own staging memory and posts where it lies; the receiver puts it straight from
there to its place, or combines it with what is there. Nothing else is copied, and no system call is made while data
flows. Sends of one part to several peers (an all_gather) are packed once and read by all of them. A message that lies
contiguous at both ends may be of any size; it goes in *segments* of an eighth of the staging memory, as packed messages
are cut already. Both ends compute the same segments.

    send      := (part, segment, peers)      in the order of keys; one place in staging, one post to each peer
    receive   := (part, segment, peer)       per peer in the order of keys

**Order, and why nothing deadlocks.** Sends are posted in the order of their keys, and staging is given out in that
order. Parts that are assigned are received as they come, in order from each peer; parts that are reduced are received
in the order of their keys, so the bits do not depend on timing and are those of `wire_torch.py`. Of all messages not
yet taken consider the one with the least key. All that its sender posted before it are taken, so its staging is free
and it is posted; all that its receiver must take before it are taken, so it is taken.

Redistributions follow one another: one posts when those that were started before it have nothing more to send, as far
as staging allows, and receives when they are finished. So the argument holds with (redistribution, step, key) for the
key.

**Memory.** What this rank has posted and others have not taken is never more than the `staging` of the redistribution.
What it receives, it reads in the staging of others.

**Failures.** A wait looks around every 20 ms. A peer that died or failed, and the end of the time limit, raise
`RunError` with the rank, the step and the peer. Messages that were left half done cannot be sorted from later ones, so
after a failure this wire refuses to go on, and its peers are told.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sennit.errors import RunError
from sennit.reshard.lower_torch import Message, Move
from sennit.reshard.selection_torch import Selection, combine
from sennit.reshard.shared import GREETING, SharedMemory
from sennit.reshard.wire_torch import Traffic, Wire

__all__ = ["SharedChannel", "SharedWire"]

_logger = logging.getLogger(__name__)

_SEGMENTS_STAGED = 8  # a segment is this part of the staging memory


@dataclass(frozen=True, slots=True)
class _Send:
    """Elements `start` to `stop` of a packed part, for peers; `last` of its messages."""

    part: Selection
    start: int
    stop: int
    peers: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class _Receive:
    part: Selection
    start: int
    stop: int
    peer: int


class SharedChannel:
    """One redistribution: how many of its messages are still to be sent, and the bytes that it may stage."""

    __slots__ = ("staging", "unsent")

    def __init__(self, unsent: int, staging: int) -> None:
        self.unsent, self.staging = unsent, staging


class SharedWire:
    """This rank's end of the messages in shared memory. `make` makes the memory at the first use."""

    def __init__(self, rank: int, make: Callable[[], SharedMemory], timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self._make = make
        self._memory: SharedMemory | None = None
        self._reached: dict[tuple[int, ...], bool] = {}
        self._met: set[int] = set()
        self._said = False
        self._channels: deque[SharedChannel] = deque()
        self._views: dict[tuple[int, torch.dtype], Tensor] = {}
        self._broken: str | None = None

    # ---- who can be reached ------------------------------------------------------------------------------------------

    def knows(self, participants: tuple[int, ...]) -> bool:
        """Whether `reaches` answers without asking the others."""
        return participants in self._reached or len(participants) < 2 or self.rank not in participants

    def reaches(self, participants: tuple[int, ...], wire: Wire) -> bool:
        """Whether all participants share memory: the same answer on all of them.

        The first time they greet each other through `wire`, and then tell each other whether it worked.
        """
        if len(participants) < 2 or self.rank not in participants:
            return False
        if participants not in self._reached:
            others = [rank for rank in participants if rank != self.rank]
            fault = self._greet(others, wire)
            own = torch.tensor([fault is None], dtype=torch.uint8)
            verdicts = [bool(values[0]) for values in wire.swap(own, others, "an answer about shared memory")]
            self._reached[participants] = fault is None and all(verdicts)
            if not self._reached[participants] and not self._said:
                self._said = True
                why = fault or f"rank {others[verdicts.index(False)]} says so"
                _logger.info("redistributions among ranks %s go by messages, not shared memory: %s", participants, why)
        return self._reached[participants]

    def _greet(self, others: Sequence[int], wire: Wire) -> str | None:
        """Meet the others. Returns why this rank cannot share memory with all of them, if so."""
        fault: str | None = None
        if self._memory is None:
            try:
                self._memory = self._make()
            except RunError as error:
                fault = error.what
        own = _padded(b"" if self._memory is None else self._memory.greeting())
        for other, values in zip(others, wire.swap(own, others, "a greeting, to share memory"), strict=True):
            greeting = bytes(values.tolist()).rstrip(b"\0")
            if not greeting:
                fault = fault or f"rank {other} has none"
            elif self._memory is not None and other not in self._met:
                found = self._memory.meet(other, greeting)
                fault = fault or found
                if found is None:
                    self._met.add(other)
        return fault

    # ---- messages ----------------------------------------------------------------------------------------------------

    def open(self, traffic: Traffic, staging: int = 0) -> SharedChannel:
        """Begin a redistribution. Ranks that share messages open in the same order."""
        if self._broken is not None:
            raise RunError(
                f"rank {self.rank} cannot use its shared memory any more: {self._broken}",
                fix="start a new process group, or pass a new executor on all ranks",
            )
        unsent = sum(count for (_, arrives), count in traffic.items() if not arrives)
        channel = SharedChannel(unsent, staging)
        while self._channels and not self._channels[0].unsent:
            self._channels.popleft()
        if unsent:
            self._channels.append(channel)
        return channel

    def run(
        self, move: Move, tensor: Tensor, channel: SharedChannel, into: Tensor | None = None
    ) -> Generator[None, None, Tensor]:
        """Yields when all is posted that staging allows, before anything is received.

        The output is a new tensor, or `into`, contiguous, of which what is not received stays.
        """
        try:
            result = yield from self._run(move, tensor, channel, into)
        except BaseException as error:  # whatever it is: this rank stops in the middle, and its peers must know
            self._broken = f"{move.label} was not finished ({type(error).__name__})"
            if self._memory is not None:
                self._memory.leave()
            raise
        return result

    def _run(
        self, move: Move, tensor: Tensor, channel: SharedChannel, into: Tensor | None
    ) -> Generator[None, None, Tensor]:
        if move.copies or move.sends:
            tensor = tensor.reshape(move.given)
        output = (tensor.new_zeros if move.zeros else tensor.new_empty)(move.shape) if into is None else into
        most = self._segment(channel, tensor)
        sends, receives = deque(_sends(move.sends, most)), _Receives(move, most)
        self._send(sends, tensor, channel)
        for take, put in move.copies:  # while peers read
            take.copy(tensor, put, output, move.how if move.zeros else None)
        if not sends and not receives:
            return output
        yield
        deadline = time.monotonic() + self.timeout
        while sends or receives:
            moved = self._send(sends, tensor, channel)
            if self._receive(receives, move, output) or moved:
                deadline = time.monotonic() + self.timeout
            elif sends or receives:
                self._wait(sends, receives, move, deadline)
        return output

    def _segment(self, channel: SharedChannel, tensor: Tensor) -> int:
        """Elements of a segment at most."""
        return max(1, channel.staging // _SEGMENTS_STAGED // max(1, tensor.element_size()))

    def _send(self, sends: deque[_Send], tensor: Tensor, channel: SharedChannel) -> bool:
        """Pack and post as many as there is room for; whether there were any."""
        if not sends:
            return False
        while self._channels and not self._channels[0].unsent:
            self._channels.popleft()
        if self._channels[0] is not channel:
            return False
        memory, posted = self._shared, False
        while sends and memory.may_post(sends[0].peers):
            send = sends[0]
            nbytes = (send.stop - send.start) * tensor.element_size()
            place = memory.reserve(nbytes, channel.staging)
            if place is None:
                break
            _pack(send, tensor, self._at(self.rank, place, nbytes, tensor.dtype))
            memory.post(send.peers, place, nbytes)
            channel.unsent -= len(send.peers) if send.last else 0
            sends.popleft()
            posted = True
        return posted

    def _receive(self, receives: _Receives, move: Move, output: Tensor) -> bool:
        """Put in place what has arrived; whether anything had."""
        memory, any_came = self._shared, False
        for queue in receives.queues:
            while queue and (came := memory.arrival(queue[0].peer)) is not None:
                receive = queue.popleft()
                place, nbytes = came
                expected = (receive.stop - receive.start) * output.element_size()
                if nbytes != expected:
                    raise RunError(
                        f"rank {receive.peer} sends {nbytes} bytes where rank {self.rank} expects {expected}",
                        where=move.label,
                        fix="run the same redistributions in the same order on all ranks",
                    )
                values = self._at(receive.peer, place, nbytes, output.dtype)
                if receive.stop - receive.start == receive.part.elements:
                    receive.part.put(output, values, move.how)
                else:
                    assert receive.part.is_dense, "only what lies side by side at both ends is cut here"
                    combine(receive.part.view(output).reshape(-1)[receive.start : receive.stop], values, move.how)
                memory.take(receive.peer)
                any_came = True
        return any_came

    def _wait(self, sends: deque[_Send], receives: _Receives, move: Move, deadline: float) -> None:
        awaited, room = receives.awaited(), sends[0].peers if sends else ()
        if self._shared.wait(awaited, room):
            return
        gone = self._shared.gone({*awaited, *room})
        late = time.monotonic() > deadline
        # a peer may have done its part and gone
        if not (gone or late) or any(self._shared.arrival(peer) is not None for peer in awaited):
            return
        peer = min(gone) if gone else (*awaited, *room)[0]
        verb = "receive from" if peer in awaited else "send to"
        reason = gone.get(peer, "it did not come")
        raise RunError(
            f"rank {self.rank} waited up to {self.timeout:g} s to {verb} rank {peer}: {reason}",
            where=move.label,
            fix="see what that rank did: it died, is late, or runs another redistribution",
        )

    @property
    def _shared(self) -> SharedMemory:
        assert self._memory is not None, "`reaches` comes first"
        return self._memory

    def _at(self, rank: int, place: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Staging of a rank as a flat tensor, without a copy."""
        whole = self._views.get((rank, dtype))
        if whole is None:
            whole = self._views[rank, dtype] = torch.frombuffer(self._shared.memory(rank), dtype=dtype)
        size = dtype.itemsize
        return whole[place // size : (place + nbytes) // size]


class _Receives:
    """What is still to be received. Parts that are reduced stand in one queue; others in one for each peer."""

    __slots__ = ("queues",)

    def __init__(self, move: Move, most: int) -> None:
        queues: dict[int | None, deque[_Receive]] = {}
        for message in move.receives:
            queue = queues.setdefault(message.peer if move.how is None else None, deque())
            queue.extend(_Receive(message.part, start, stop, message.peer) for start, stop in _cut(message.part, most))
        self.queues = tuple(queues.values())

    def __bool__(self) -> bool:
        return any(self.queues)

    def awaited(self) -> list[int]:
        return [queue[0].peer for queue in self.queues if queue]


def _sends(messages: Sequence[Message], most: int) -> Iterator[_Send]:
    """In the order of keys; neighbours with one part are one send."""
    first = 0
    while first < len(messages):
        part, last = messages[first].part, first + 1
        peers = [messages[first].peer]
        while last < len(messages) and messages[last].part == part and messages[last].peer not in peers:
            peers.append(messages[last].peer)
            last += 1
        for start, stop in _cut(part, most):
            yield _Send(part, start, stop, tuple(peers), stop == part.elements)
        first = last


def _cut(part: Selection, most: int) -> Iterator[tuple[int, int]]:
    for start in range(0, part.elements, most):
        yield start, min(start + most, part.elements)


def _pack(send: _Send, tensor: Tensor, place: Tensor) -> None:
    if send.part.is_dense and tensor.is_contiguous():
        place.copy_(send.part.view(tensor).reshape(-1)[send.start : send.stop])
    elif send.stop - send.start == send.part.elements:
        send.part.take(tensor, place)
    else:  # a tensor that is not contiguous, where the plan took it to be
        place.copy_(send.part.take(tensor)[send.start : send.stop])


def _padded(greeting: bytes) -> Tensor:
    assert len(greeting) <= GREETING
    return torch.frombuffer(bytearray(greeting.ljust(GREETING, b"\0")), dtype=torch.uint8)
