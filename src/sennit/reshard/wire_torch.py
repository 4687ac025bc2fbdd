"""Messages between ranks, point to point: posting, staging, waiting with a limit.

The messages of a Move are posted in the order of their keys, in *batches*. A batch holds as many messages as fit into a
quarter of the staging memory; messages that lie contiguous in the input or output need none. Four batches are under way
at once: while the oldest travels the next is packed, and the staging memory in use is never more than four quarters.
One message that is alone larger than a quarter (an input that is not contiguous, a chunk limit of none) gets a batch
and a buffer of its own.

Each pair of ranks counts the messages between them, and the count is the tag: a receive takes the message that it was
planned with. The counts of a redistribution are set aside when it starts (`Wire.open`), so several may be under way and
pass each other. Tags start high, clear of those that programs choose by hand.

A wait that exceeds the limit raises `RunError` with the rank, the step and the peer; nothing hangs. gloo closes the
connection then, so the process group is lost; a program that wants to go on starts a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.errors import RunError
from sennit.reshard.lower_torch import Message, Move

__all__ = ["Channel", "Traffic", "Wire", "traffic_of", "wait_for"]

_UNDER_WAY = 4  # batches
_FIRST_TAG = 1 << 20
_TAGS = 1 << 29


@dataclass(frozen=True, slots=True)
class _Post:
    """A message under way. It keeps the buffer alive that the backend reads or writes."""

    work: dist.Work
    message: Message
    buffer: Tensor
    arrives: bool
    in_place: bool


Traffic = Mapping[tuple[int, bool], int]  # (peer, whether it arrives here) -> messages


def traffic_of(moves: Iterable[Move]) -> dict[tuple[int, bool], int]:
    """How many messages this rank has with each other, each way."""
    counts: dict[tuple[int, bool], int] = {}
    for move in moves:
        for arrives, messages in ((False, move.sends), (True, move.receives)):
            for message in messages:
                counts[message.peer, arrives] = counts.get((message.peer, arrives), 0) + 1
    return counts


class Channel:
    """The tags set aside for one redistribution, and the bytes that it may stage."""

    def __init__(self, first: dict[tuple[int, bool], int], staging: int) -> None:
        self._next = first
        self.staging = staging

    def tag(self, peer: int, arrives: bool) -> int:
        count = self._next[peer, arrives]
        self._next[peer, arrives] = count + 1
        return _FIRST_TAG + count % _TAGS


class Wire:
    """This rank's end of all messages. `timeout` is in seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._counts: dict[tuple[int, bool], int] = {}

    def open(self, traffic: Traffic, staging: int = 0) -> Channel:
        """Set the tags of a redistribution aside. Ranks that share messages open in the same order."""
        first = {key: self._counts.get(key, 0) for key in traffic}
        for key, count in traffic.items():
            self._counts[key] = first[key] + count
        return Channel(first, staging)

    def run(
        self, move: Move, tensor: Tensor, channel: Channel, into: Tensor | None = None
    ) -> Generator[None, None, Tensor]:
        """Yields when all is posted that can be, before it waits.

        The output is a new tensor, or `into`, contiguous, of which what is not received stays.
        """
        if move.copies or move.sends:
            tensor = tensor.reshape(move.given)
        output = (tensor.new_zeros if move.zeros else tensor.new_empty)(move.shape) if into is None else into
        batches = self._batches(move, tensor, channel.staging)
        posted = deque(self._post(batch, move, tensor, output, channel) for batch in islice(batches, _UNDER_WAY - 1))
        for take, put in move.copies:  # while the first messages travel
            take.copy(tensor, put, output, move.how if move.zeros else None)
        while posted:
            posted.extend(self._post(batch, move, tensor, output, channel) for batch in islice(batches, 1))
            yield
            for post in posted.popleft():
                self._finish(post, move, output)
        return output

    def _batches(self, move: Move, tensor: Tensor, staging: int) -> Iterator[Sequence[tuple[Message, bool]]]:
        """The messages with whether they arrive here, in the order of their keys."""
        limit = max(1, staging // _UNDER_WAY // max(1, tensor.element_size()))
        messages = [(message, False) for message in move.sends] + [(message, True) for message in move.receives]
        messages.sort(key=lambda pair: pair[0].key)
        batch: list[tuple[Message, bool]] = []
        staged = 0
        for message, arrives in messages:
            need = 0 if self._in_place(move, message, arrives, tensor) else message.part.elements
            if batch and staged + need > limit:
                yield batch
                batch, staged = [], 0
            batch.append((message, arrives))
            staged += need
        if batch:
            yield batch

    def _in_place(self, move: Move, message: Message, arrives: bool, tensor: Tensor) -> bool:
        return message.part.is_dense and (move.how is None if arrives else tensor.is_contiguous())

    def _post(
        self, batch: Sequence[tuple[Message, bool]], move: Move, tensor: Tensor, output: Tensor, channel: Channel
    ) -> list[_Post]:
        staged = sum(m.part.elements for m, arrives in batch if not self._in_place(move, m, arrives, tensor))
        stage = tensor.new_empty(staged)
        operations: list[dist.P2POp] = []
        buffers: list[tuple[Tensor, bool]] = []
        used = 0
        for message, arrives in batch:
            in_place = self._in_place(move, message, arrives, tensor)
            if in_place:
                buffer = message.part.view(output if arrives else tensor).reshape(-1)
            else:
                buffer = stage[used : used + message.part.elements]
                used += message.part.elements
                if not arrives:
                    message.part.take(tensor, buffer)
            call = dist.irecv if arrives else dist.isend
            operations.append(dist.P2POp(call, buffer, message.peer, tag=channel.tag(message.peer, arrives)))
            buffers.append((buffer, in_place))
        works = dist.batch_isend_irecv(operations) if operations else []
        if len(works) == 1 < len(operations):  # a backend that joins a batch into one work
            works = works * len(operations)
        return [
            _Post(work, message, buffer, arrives, in_place)
            for work, (message, arrives), (buffer, in_place) in zip(works, batch, buffers, strict=True)
        ]

    def _finish(self, post: _Post, move: Move, output: Tensor) -> None:
        verb = "receive from" if post.arrives else "send to"
        wait_for(post.work, post.buffer, self.timeout, f"to {verb} rank {post.message.peer}", move.label)
        if post.arrives and not post.in_place:
            post.message.part.put(output, post.buffer, move.how)

    # ---- small messages ----------------------------------------------------------------------------------------------

    def send(self, values: Tensor, peer: int, purpose: str) -> None:
        work = dist.isend(values, peer, tag=self.open({(peer, False): 1}).tag(peer, arrives=False))
        assert work is not None
        wait_for(work, values, self.timeout, f"to send to rank {peer}", purpose)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, purpose: str
    ) -> Tensor:
        values = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(values, peer, tag=self.open({(peer, True): 1}).tag(peer, arrives=True))
        assert work is not None
        wait_for(work, values, self.timeout, f"to receive from rank {peer}", purpose)
        return values

    def swap(self, values: Tensor, peers: Sequence[int], purpose: str) -> list[Tensor]:
        """The values of all peers, in their order, each of which gets this rank's: the same shape on all."""
        works = [(peer, dist.isend(values, peer, tag=self.open({(peer, False): 1}).tag(peer, False))) for peer in peers]
        found = [self.receive(tuple(values.shape), values.dtype, values.device, peer, purpose) for peer in peers]
        for peer, work in works:
            assert work is not None
            wait_for(work, values, self.timeout, f"to send to rank {peer}", purpose)
        return found


def wait_for(work: dist.Work, tensor: Tensor, timeout: float, doing: str, where: str) -> None:
    """Wait for a work at most `timeout` seconds.

    On an accelerator the wait is the stream's, and its limit that of the group.
    """
    try:
        if tensor.device.type == "cpu":
            done = work.wait(timedelta(seconds=timeout))
        else:
            done = work.wait()
    except RuntimeError as error:
        raise RunError(
            f"rank {dist.get_rank()} waited up to {timeout:g} s {doing}: {_first_line(error)}",
            where=f"{where} ({prod(tensor.shape)} elements of {str(tensor.dtype).removeprefix('torch.')})",
            fix="see what that rank did: it died, is late, or runs another redistribution",
        ) from error
    if done is False:
        raise RunError(f"rank {dist.get_rank()} failed {doing}", where=where)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
