"""Several reductions or gathers in one collective, as the source of a lane calls it (`run/joined.py` says which ones).

sums_0 = rank.bucket("all_reduce", axis="dp", op="sum", parts=2, elements=24)
a = sums_0.add(x)             # copied into its place
b = sums_0.add(y)             # the last of the parts: the collective starts
a.wait()                      # a view of the flat result

run_0 = rank.gathers(axis="dp", parts=2, elements=24)
w = run_0.add(w_piece, dim=0, inner=8)
v = run_0.add(v_piece, dim=1, inner=4)
w.wait()                      # the whole parameter, copied out of what arrived; with the last one that is let go of
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sennit.run.handles import Handle

__all__ = ["Bucket", "GatherRun"]


class Bucket:
    """`pieces` is how many a reduce_scatter cuts each part into, or None for an all_reduce.

    `start` begins the collective on the flat tensor, which is [elements], or [pieces, elements].
    """

    def __init__(self, parts: int, elements: int, pieces: int | None, start: Callable[[Tensor], Handle]) -> None:
        self.left, self.elements, self.pieces, self.start = parts, elements, pieces, start
        self.filled = 0
        self.flat: Tensor | None = None
        self.handle: Handle | None = None

    def add(self, x: Tensor) -> _Part:
        """Put a part into its place: a tensor, or its pieces, stacked on dim 0."""
        assert self.left, "more parts than were announced"
        shape = x.shape if self.pieces is None else x.shape[1:]
        size = prod(shape)
        if self.flat is None:
            lead = () if self.pieces is None else (self.pieces,)
            self.flat = x.new_empty((*lead, self.elements))
        self.flat.narrow(-1, self.filled, size).view(x.shape).copy_(x)  # one copy, however x lies
        part = _Part(self, self.filled, shape)
        self.filled += size
        self.left -= 1
        if not self.left:
            assert self.filled == self.elements, "other sizes than were announced"
            self.handle, self.flat = self.start(self.flat), None
        return part

    def result(self) -> Tensor:
        if self.flat is None:
            assert self.handle is not None, "read before the last part was added"
            self.flat = self.handle.wait()
        return self.flat

    def let_go(self) -> None:
        self.flat = self.handle = None


@dataclass(frozen=True, slots=True)
class _Part:
    bucket: Bucket
    start: int
    shape: torch.Size

    def wait(self) -> Tensor:
        return self.bucket.result().narrow(0, self.start, prod(self.shape)).view(self.shape)


class GatherRun:
    """Filled as a bucket is; `start` begins the gather of the flat pieces, which gives [members, elements].

    `join` puts the pieces of one tensor together.
    """

    def __init__(
        self, parts: int, elements: int, start: Callable[[Tensor], Handle], join: Callable[[Tensor, int, int], Tensor]
    ) -> None:
        self.bucket, self.join, self.unread = Bucket(parts, elements, None, start), join, parts

    def add(self, x: Tensor, dim: int, inner: int) -> Handle:
        return _Gathered(self, self.bucket.add(x), dim, inner)

    def read(self, gathered: _Gathered) -> Tensor:
        part = gathered.part
        pieces = self.bucket.result().narrow(1, part.start, prod(part.shape)).view(-1, *part.shape)
        whole = self.join(pieces, gathered.dim, gathered.inner)
        self.unread -= 1
        if not self.unread:
            self.bucket.let_go()
        return whole


@dataclass(frozen=True, slots=True)
class _Gathered:
    run: GatherRun
    part: _Part
    dim: int
    inner: int

    def wait(self) -> Tensor:
        return self.run.read(self)
