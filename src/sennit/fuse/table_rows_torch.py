"""Rows of tables that travel packed: made, kept apart from the head's, and left out of it (`looked_up.py`).

**Made.** The gradient of a look-up adds rows of the batch up in a table of zeros. Where only the rows of the union U
travel, the table has |U| rows, and indices are places in U:

    table[i]  +=  rows of the batch with index i                packed[place of i in U]  +=  the same rows, in the same order

**The head's.** A table that is also the head has the head's gradient in all its rows. It leaves first, block by block.
Rows of U are kept when their block is made (`HeadRows`), and the packed rows are sums of both.

**Left out.** Rows of U travel packed, so the head's need not carry them. Before a bucket leaves, the rows of the head
at its end that are not in U move to the places of those that are, and the bucket ends where they were; when it has
arrived they move back (`LeftOut`):

    a b c d e f    U = {b, e}        a f c d | e f        sent: a f c d        arrived, moved back: A F C D E F  ->  A . C D . F        the packed rows take the places of b and e
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from sennit.fuse.looked_up import ROWS, LookUp
from sennit.ir.strategy import Part

__all__ = ["HeadEnd", "HeadRows", "LeftOut", "looked_up_rows", "looked_up_table"]


def looked_up_table(item: LookUp, source: Tensor, places: Tensor) -> Tensor:
    """The gradient of a look-up, whole."""
    return torch.ops.aten.embedding_dense_backward(source, places, item.rows, item.padding, False)  # type: ignore[no-any-return]


def looked_up_rows(item: LookUp, source: Tensor, places: Tensor, union: Tensor) -> Tensor:
    """The rows of the union, which is in order and holds all places."""
    padding = -1
    if item.padding >= 0:
        at = int(torch.searchsorted(union, item.padding))
        padding = at if at < union.numel() and int(union[at]) == item.padding else -1
    return torch.ops.aten.embedding_dense_backward(  # type: ignore[no-any-return]
        source, torch.searchsorted(union, places.long().contiguous()), union.numel(), padding, False
    )


@dataclass(slots=True)
class HeadRows:
    """Of the head's gradient, the rows of the union, each times `scale`."""

    union: Tensor
    rows: Tensor
    scale: float = 1.0

    def keep(self, first: int, block: Tensor) -> None:
        """The rows from `first` on are there."""
        start, stop = torch.searchsorted(self.union, torch.tensor([first, first + block.shape[0]])).tolist()
        if start < stop:
            torch.index_select(block, 0, self.union[start:stop] - first, out=self.rows[start:stop])

    def add(self, packed: Tensor, scale: float, out: Tensor) -> None:
        """out = scale * (the head's + packed)"""
        if self.scale == scale:  # a power of two, so that it changes no bits which of the two is done first
            torch.add(self.rows, packed, alpha=scale, out=out)
        else:
            torch.add(self.rows, packed, out=out).mul_(scale)


@dataclass(frozen=True, slots=True)
class HeadEnd:
    """The end of a bucket's buffer that holds rows of a head: of `spans`, one behind the other.

    The gradient `path` has those that travel packed.
    """

    path: str
    region: Tensor
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, parts: Sequence[Part], packed: Mapping[str, LookUp], buffer: Tensor) -> HeadEnd | None:
        """None where a bucket of these parts does not end with rows of one head, or where they are cut inside a row."""
        path = parts[-1].path + ROWS
        if (item := packed.get(path)) is None:
            return None
        last = list(takewhile(lambda part: part.path == parts[-1].path, reversed(parts)))
        ends = [part.span or (0, item.rows * item.width) for part in reversed(last)]
        if any(cut % item.width for span in ends for cut in span):
            return None
        spans = tuple((start // item.width, stop // item.width) for start, stop in ends)
        rows = sum(stop - start for start, stop in spans)
        return cls(path, buffer[buffer.numel() - rows * item.width :].view(rows, item.width), spans)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows at the end of `region`, from `sent` on, that were moved: those at `moved` lie at `holes` while it travels."""

    region: Tensor
    sent: int
    holes: Tensor
    moved: Tensor

    @classmethod
    def of(cls, region: Tensor, spans: Sequence[tuple[int, int]], union: Tensor) -> LeftOut:
        """Moves the rows of `region`, which holds these spans of the table's rows one behind the other."""
        inside = torch.zeros(region.shape[0], dtype=torch.bool)
        at = 0
        for first, last in spans:
            start, stop = torch.searchsorted(union, torch.tensor([first, last])).tolist()
            inside[union[start:stop] - (first - at)] = True
            at += last - first
        sent = region.shape[0] - int(inside.sum())
        holes = inside[:sent].nonzero().view(-1)
        moved = (~inside[sent:]).nonzero().view(-1) + sent
        region.index_copy_(0, holes, region.index_select(0, moved))
        return cls(region, sent, holes, moved)

    def move_back(self) -> None:
        self.region.index_copy_(0, self.moved, self.region.index_select(0, self.holes))
