"""Matrix products that are computed another way where that gives the same bits.

Two thirds of a step are products, and most gradients come out of them. Written as the graph has them, a product makes a new tensor, and what follows reads it once: it is scaled into its bucket, or added to a sum. A library's product does both itself:

    bucket[rows] = scale * (left @ right)[rows]           addmm(beta=0, alpha=scale, out=bucket[rows])            `RowBlocks`
    total += left @ right                                 total.addmm_(left, right)                               `ProductSum`

Each saves the memory of the result, and writing and reading it: for a recurrent model, whose weights get a product at every position, a tenth of the step.

Which rounding comes where is the library's choice: it may split a long sum of products and add each part to the total, or scale a factor before. So the first call computes both ways on the values at hand and compares the bits. Where
they differ it keeps to the plain way from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import frexp

import torch
from torch import Tensor

__all__ = ["ProductSum", "RowBlocks", "added_at", "from_zeros"]


@dataclass(slots=True)
class RowBlocks:
    """left @ right in blocks of rows, each with its first element's place. `is_same`: blocks have the bits of the whole; `is_direct`: and so they have where they are scaled and written to their place in one call."""

    rows: tuple[tuple[int, int], ...]
    width: int
    is_same: bool | None = None
    is_direct: bool | None = None

    def __call__(self, left: Tensor, right: Tensor) -> Iterator[tuple[int, Tensor]]:
        if self.is_same is None:
            whole = torch.mm(left, right)
            self.is_same = all(
                torch.equal(torch.mm(left[start:stop], right), whole[start:stop]) for start, stop in self.rows
            )
        for start, stop in self.rows if self.is_same else ((0, left.shape[0]),):
            yield start * self.width, torch.mm(left[start:stop], right)

    def written(
        self, left: Tensor, right: Tensor, places: Sequence[Tensor], scale: float
    ) -> Iterator[tuple[int, int]] | None:
        """The rows of each block once they are in their place, times `scale`. None, and nothing that counts is written, where that would give other bits."""
        if self.is_direct is None and frexp(scale)[0] != 0.5:
            self.is_direct = False  # of a few elements, bits may be the same by chance; a power of two changes none
        if self.is_direct is None:
            whole = torch.mm(left, right).mul_(scale)
            made = list(self._written(left, right, places, scale))
            pairs = zip(made, places, strict=True)
            self.is_direct = all(torch.equal(place, whole[start:stop]) for (start, stop), place in pairs)
        return self._written(left, right, places, scale) if self.is_direct else None

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
            plain = total + torch.mm(left, right)
            self.is_same = torch.equal(torch.addmm(total, left, right), plain)
            return total.copy_(plain)
        return total.addmm_(left, right) if self.is_same else total.add_(torch.mm(left, right))


def added_at(total: Tensor, term: Tensor, dim: int, index: int) -> Tensor:
    """The total with this term added to it at one index of a dim."""
    total.select(dim, index).add_(term)
    return total


def from_zeros(term: Tensor, shape: Sequence[int], dim: int, index: int) -> Tensor:
    """A total of this term alone."""
    return added_at(term.new_zeros(shape), term, dim, index)
