"""Collectives across hosts: shared memory inside a host, and between hosts each byte over the link once.

H hosts of g ranks. Rank k of a host and rank k of every other host are *counterparts*: they form a group of H, the
*column* of k, that talks over sockets. The ranks of a host form its *row*, which shares memory.

| | inside | between | inside | bytes that leave a host |
|---|---|---|---|---|
| all_reduce of n | reduce-scatter: rank k gets slice k | all-reduce of slice k in column k | all-gather | 2 n (H - 1) / H |
| all_gather of n each | | all-gather in columns | all-gather, once a host | n g (H - 1) |
| reduce_scatter, n for each | reduce-scatter, once a host | reduce-scatter in columns | | n g (H - 1) |
| broadcast of n | | down the root's column | broadcast from the root's counterpart | n (H - 1), from the root's host |
| reduce of n | to the root's counterpart | up the root's column | | n, from each other host |
| all_to_all | the pieces for the row | all other pieces, straight to where they belong | | what must |
| gather, scatter | | straight | | what must |

A flat ring over all ranks sends 2 n (H g - 1) / (H g) over each link: with 2 hosts of 4 ranks 1.75 n against 1 n here.

**Tiles.** A large all-reduce is cut into tiles, so that the link and the memory work at once. While some tiles are
under way between the hosts, the rank reduces the next one inside its host, and gathers the one that has come back. With
two hosts a tile takes one round of messages, which go on in the background; with more it takes several, and a thread
sees to each tile in flight. The order of calls inside a host is the same on all its ranks: reduce tile t, then gather
tile t - `_IN_FLIGHT`. The first tiles are small, so that the link has work soon, and so are the last ones, so that
little is left to do when it has done its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import Tensor

from sennit.collective.runtime.communicator_torch import Communicator
from sennit.collective.runtime.linked_torch import Linked, apart, cut, equal
from sennit.collective.runtime.p2p_links import Links
from sennit.collective.runtime.tensors_torch import writable

__all__ = ["Hosts", "tile_edges"]

_TILE, _SMALL_TILE = 1 << 21, 1 << 19  # bytes of the array; a rank sends a g-th of them
_IN_FLIGHT = 3  # tiles between the hosts at a time
_PATIENCE, _MOST_PATIENCE = 0.5, 5.0  # see `_longer`
_COLUMN, _FLAT = 2, 3  # kinds of messages

# a tile of the array, this rank's slice of it, and what brings the slice to its end
Tile = tuple[Tensor, Tensor, Callable[[], None]]


class Hosts:
    """`hosts` are the ranks of each host, as many on each, in the order that all ranks agree on."""

    def __init__(self, links: Links, hosts: Sequence[Sequence[int]], row: Communicator) -> None:
        self.rank, self.size = links.rank, links.size
        self.hosts, self.row = hosts, row
        self.here = next(index for index, ranks in enumerate(hosts) if links.rank in ranks)
        self.column = Linked(links, [ranks[row.rank] for ranks in hosts], _COLUMN)
        self.flat = Linked(links, range(links.size), _FLAT)
        self._threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix=f"sennit-tile-{links.rank}")

    # ---- all_reduce --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, reduction: str, timeout: float) -> None:
        width = self.row.size
        pending: deque[Tile] = deque()
        whole = tensor.numel() // width * width
        for start, stop in pairwise(tile_edges(whole, width, tensor.element_size())):
            self._start_tile(pending, tensor[start:stop], reduction, timeout)
        if whole < tensor.numel():
            rest = tensor.new_zeros(width)
            rest[: tensor.numel() - whole] = tensor[whole:]
            self._start_tile(pending, rest, reduction, timeout)
            self._end_tiles(pending, 0, timeout)
            tensor[whole:] = rest[: tensor.numel() - whole]
        self._end_tiles(pending, 0, timeout)

    def _start_tile(self, pending: deque[Tile], tile: Tensor, reduction: str, timeout: float) -> None:
        part = tile.new_empty(tile.numel() // self.row.size)
        self.row.reduce_scatter(part, tile, reduction, timeout)
        finish = self.column.start_all_reduce(part, reduction, _longer(timeout))
        if len(self.hosts) > 2:
            finish = self._threads.submit(writable()(finish)).result
        pending.append((tile, part, finish))
        self._end_tiles(pending, _IN_FLIGHT, timeout)

    def _end_tiles(self, pending: deque[Tile], leave: int, timeout: float) -> None:
        while len(pending) > leave:
            tile, part, finish = pending.popleft()
            finish()
            self.row.all_gather(tile, part, timeout)

    # ---- others ------------------------------------------------------------------------------------------------------

    def all_gather(self, output: Tensor, input: Tensor, timeout: float) -> None:
        column = input.new_empty((len(self.hosts), input.numel()))
        self.column.all_gather(column.view(-1), input, _longer(timeout))
        parts = output.view(self.size, -1)
        for ranks, part in zip(self.hosts, column, strict=True):
            target = self._rows(parts, ranks)
            self.row.all_gather(target.view(-1), part, timeout)
            if target.data_ptr() != parts[ranks[0]].data_ptr():
                parts[list(ranks)] = target

    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: str, timeout: float) -> None:
        parts = input.view(self.size, -1)
        column = output.new_empty((len(self.hosts), output.numel()))
        for ranks, part in zip(self.hosts, column, strict=True):
            source = self._rows(parts, ranks)
            if source.data_ptr() != parts[ranks[0]].data_ptr():
                source.copy_(parts[list(ranks)])
            self.row.reduce_scatter(part, source.view(-1), reduction, timeout)
        self.column.reduce_scatter(output, column.view(-1), reduction, _longer(timeout))

    def _rows(self, parts: Tensor, ranks: Sequence[int]) -> Tensor:
        """The parts of some ranks, one behind the other: where they lie, if they do, or new memory for them."""
        together = ranks[-1] - ranks[0] == len(ranks) - 1
        return parts[ranks[0] : ranks[-1] + 1] if together else parts.new_empty((len(ranks), parts.shape[1]))

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        host, place = self._find(root)
        if self.row.rank == place:
            self.column.broadcast(tensor, host, _longer(timeout))
        self.row.broadcast(tensor, place, timeout)

    def reduce(self, tensor: Tensor, root: int, reduction: str, timeout: float) -> None:
        host, place = self._find(root)
        total = tensor if self.rank == root else tensor.clone()  # others keep theirs
        self.row.reduce(total, place, reduction, timeout)
        if self.row.rank == place:
            self.column.reduce(total, host, reduction, _longer(timeout))

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        timeout: float,
    ) -> None:
        input_sizes = input_sizes or equal(input, self.size)
        output_sizes = output_sizes or equal(output, self.size)
        mine, input = self.hosts[self.here], apart(input, output)
        away = [rank for rank in range(self.size) if rank not in mine]
        pieces, places = cut(input, input_sizes), cut(output, output_sizes)
        sent = self.flat.start_exchange(
            [(rank, pieces[rank]) for rank in away], [(rank, places[rank]) for rank in away], timeout
        )
        gathered = torch.cat([pieces[rank] for rank in mine])
        received = output.new_empty(sum(output_sizes[rank] for rank in mine))
        sizes = [[items[rank] for rank in mine] for items in (output_sizes, input_sizes)]
        self.row.all_to_all(received, gathered, sizes[0], sizes[1], timeout)
        for rank, piece in zip(mine, cut(received, sizes[0]), strict=True):
            places[rank].copy_(piece)
        sent()

    def gather(self, output: Tensor | None, input: Tensor, root: int, timeout: float) -> None:
        self.flat.gather(output, input, root, timeout)

    def scatter(self, output: Tensor, input: Tensor | None, root: int, timeout: float) -> None:
        self.flat.scatter(output, input, root, timeout)

    def barrier(self, timeout: float) -> None:
        """Who leaves the column knows that all of its rows have come."""
        self.row.barrier(timeout)
        self.column.barrier(_longer(timeout))

    def abort(self, why: str) -> None:
        self.row.abort(why)
        self.column.abort(why)
        self._threads.shutdown(wait=False)

    def allocate(self, nbytes: int) -> Tensor | None:
        return self.row.allocate(nbytes)

    def close(self) -> None:
        self._threads.shutdown()
        self.row.close()
        self.column.close()

    def _find(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its place there."""
        return next((index, ranks.index(rank)) for index, ranks in enumerate(self.hosts) if rank in ranks)


def tile_edges(elements: int, width: int, itemsize: int) -> list[int]:
    """Where tiles begin and end: each as large as all before it, or half of what is left, within limits; multiples of
    `width`, which divides `elements`.
    """
    edges = [0]
    while edges[-1] < elements:
        done, left = edges[-1] * itemsize, (elements - edges[-1]) * itemsize
        size = min(max(min(done, left // 2), _SMALL_TILE), _TILE)
        rounded = max(1, size // itemsize // width) * width
        edges.append(min(edges[-1] + rounded, elements))
    return edges


def _longer(timeout: float) -> float:
    """The time limit between hosts.

    Inside a host it is seen who is late, so that limit should end first: between hosts a rank also waits for others
    that wait.
    """
    return timeout + min(_PATIENCE * timeout, _MOST_PATIENCE)
