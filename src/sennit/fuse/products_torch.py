"""Matrix products that are computed another way where that gives the same bits.

Two thirds of a step are products, and most gradients come out of them. Written as the graph has them, a product makes a
new tensor, and what follows reads it once: it is scaled into its bucket, or added to a sum. A library's product does
both itself:

    bucket[rows] = scale * (left @ right)[rows]           addmm(beta=0, alpha=scale, out=bucket[rows])            `RowBlocks`
    total += left @ right                                 total.addmm_(left, right)                               `ProductSum`

Each saves the memory of the result, and writing and reading it: for a recurrent model, whose weights get a product at
every position, a tenth of the step. And a product whose right factor comes in pieces is computed with them
(`ReadInBlocks`).

Which rounding comes where is the library's choice: it may split a long sum of products and add each part to the total,
or scale a factor before. So the first call computes both ways on the values at hand and compares the bits. Where they
differ it keeps to the plain way from then on. A few elements may be the same by chance, so small products are compared
on random values too, until `ENOUGH` elements were (`samples`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import frexp

import torch
from torch import Tensor

from sennit.fuse.row_uses import UseBlock

__all__ = ["ENOUGH", "ProductSum", "ReadInBlocks", "RowBlocks", "added_at", "from_zeros", "samples"]

ENOUGH, _MOST = 1 << 12, 64


def samples(elements: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, and random ones that lie as they do: as many as give `ENOUGH` of results that have so many elements.

    Nothing is taken from torch's generator.
    """
    yield tensors
    drawn = torch.Generator(tensors[0].device).manual_seed(0)
    for _ in range(min(_MOST, ENOUGH // max(1, elements))):
        yield tuple(torch.empty_like(tensor).normal_(generator=drawn) for tensor in tensors)


@dataclass(slots=True)
class RowBlocks:
    """left @ right in blocks of rows, each with its first element's place.

    `is_same`: blocks have the bits of the whole; `is_direct`: and so they have where they are scaled and written to
    their place in one call.
    """

    rows: tuple[tuple[int, int], ...]
    width: int
    is_same: bool | None = None
    is_direct: bool | None = None

    def __call__(self, left: Tensor, right: Tensor) -> Iterator[tuple[int, Tensor]]:
        if self.is_same is None:
            self.is_same = all(
                self._is_same(*factors) for factors in samples(left.shape[0] * right.shape[1], left, right)
            )
        for start, stop in self.rows if self.is_same else ((0, left.shape[0]),):
            yield start * self.width, torch.mm(left[start:stop], right)

    def _is_same(self, left: Tensor, right: Tensor) -> bool:
        whole = torch.mm(left, right)
        return all(torch.equal(torch.mm(left[start:stop], right), whole[start:stop]) for start, stop in self.rows)

    def written(
        self, left: Tensor, right: Tensor, places: Sequence[Tensor], scale: float
    ) -> Iterator[tuple[int, int]] | None:
        """The rows of each block once they are in their place, times `scale`.

        None, and nothing that counts is written, where that would give other bits.
        """
        if self.is_direct is None and frexp(scale)[0] != 0.5:
            self.is_direct = False  # a power of two changes no bits, another number may
        if self.is_direct is None:
            elements = left.shape[0] * right.shape[1]
            self.is_direct = all(
                self._is_direct(one, other, places, scale) for one, other in samples(elements, left, right)
            )
        return self._written(left, right, places, scale) if self.is_direct else None

    def _is_direct(self, left: Tensor, right: Tensor, places: Sequence[Tensor], scale: float) -> bool:
        whole = torch.mm(left, right).mul_(scale)
        made = list(self._written(left, right, places, scale))
        return all(torch.equal(place, whole[start:stop]) for (start, stop), place in zip(made, places, strict=True))

    def _written(
        self, left: Tensor, right: Tensor, places: Sequence[Tensor], scale: float
    ) -> Iterator[tuple[int, int]]:
        for (start, stop), place in zip(self.rows, places, strict=True):
            torch.addmm(place, left[start:stop], right, beta=0, alpha=scale, out=place)
            yield start, stop


@dataclass(slots=True)
class ProductSum:
    """total + left @ right, written over the total."""

    is_same: bool | None = None

    def __call__(self, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        if self.is_same is None:
            self.is_same = all(
                torch.equal(torch.addmm(*some), some[0] + torch.mm(*some[1:]))
                for some in samples(total.numel(), total, left, right)
            )
        return total.addmm_(left, right) if self.is_same else total.add_(torch.mm(left, right))


@dataclass(slots=True)
class ReadInBlocks:
    """x @ weight.T + bias, each block of columns when its rows of the weight are there:

    `settle` waits for a bucket, and for one that is there it does nothing.
    """

    blocks: tuple[UseBlock, ...]
    is_same: bool | None = None

    def __call__(self, settle: Callable[[int], None], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.is_same:
            return self._made(settle, x, weight, bias)
        for block in self.blocks:
            settle(block.bucket)
        factors = (x, weight) if bias is None else (x, weight, bias)
        if self.is_same is None:
            some = samples(x.shape[0] * weight.shape[0], *factors)
            self.is_same = all(torch.equal(self._made(settle, *one), _linear(*one)) for one in some)
        return _linear(*factors)

    def _made(self, settle: Callable[[int], None], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made = x.new_empty(x.shape[0], weight.shape[0])
        for block in self.blocks:
            settle(block.bucket)
            rows = slice(block.start, block.stop)
            if bias is None:
                torch.mm(x, weight[rows].t(), out=made[:, rows])
            else:
                torch.addmm(bias[rows], x, weight[rows].t(), out=made[:, rows])
        return made


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def added_at(total: Tensor, term: Tensor, dim: int, index: int) -> Tensor:
    """The total with this term added to it at one index of a dim."""
    total.select(dim, index).add_(term)
    return total


def from_zeros(term: Tensor, shape: Sequence[int], dim: int, index: int) -> Tensor:
    """A total of this term alone."""
    return added_at(term.new_zeros(shape), term, dim, index)
