"""Where the pieces of a tensor lie in it: what a collective cuts, and what a rank puts together."""

from __future__ import annotations

from math import prod

from sennit.ir.layout import Layout

__all__ = ["inner_size"]


def inner_size(layout: Layout, axis: str) -> tuple[int, int]:
    """The dim that an axis splits, and how many local elements of it lie below the axis's digit: a local dim of size
    outer * inner becomes outer * p * inner when the axis is gathered, and the other way round when it is sliced."""
    split = layout.split(axis)
    assert split is not None
    below = [digit.size for digit in layout.digits(split.dim) if digit.stride < split.stride]
    return split.dim, split.stride // prod(below)
