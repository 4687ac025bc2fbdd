"""In which order a buffer's elements lie in memory, as far as the steps of a program tell.

    order := the dims from the outermost to the innermost, and whether the elements are dense (no gaps between them)

What a step writes is dense, with its dims in order. A view moves dims or leaves elements out without moving any, so its
result may be neither; a copy or a pointwise operator that reads it is then slower than its bytes say, by a factor of
two where rows stay whole and by more where neighbours are apart. A program's types have shapes and no strides; this is
what is kept of them. Where a view splits or merges dims that are out of order, the order is not known, and `dims` is
empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sennit.ir.dtype import TensorType
from sennit.ir.graph import Arg
from sennit.ir.program import Compute

__all__ = ["MemoryOrder", "order_of_view"]


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    dims: tuple[int, ...]
    dense: bool = True

    @classmethod
    def plain(cls, rank: int) -> MemoryOrder:
        return cls(tuple(range(rank)))

    @property
    def is_plain(self) -> bool:
        return self.dense and self.in_order

    @property
    def in_order(self) -> bool:
        return self.dims == tuple(range(len(self.dims)))

    @property
    def rows_are_whole(self) -> bool:
        """Whether the last dim is innermost."""
        return bool(self.dims) and self.dims[-1] == len(self.dims) - 1


def order_of_view(step: Compute, source: MemoryOrder, types: Mapping[str, TensorType], name: str) -> MemoryOrder:
    """The order of a view's results, from that of the buffer `name` that it looks at."""
    shape = types[name].shape
    rank, result = len(shape), len(step.results[0].layout.shape)
    unknown = MemoryOrder((), False)
    if len(source.dims) != rank:
        return unknown
    kind = step.kind.split(".")[1]
    match kind:
        case "permute":
            moved = _ints(step.args[1], rank)
            return MemoryOrder(tuple(moved.index(dim) for dim in source.dims), source.dense)
        case "transpose" | "t":
            left, right = _ints(step.args[1:3], rank) if kind == "transpose" else (0, rank - 1)
            swap = {left: right, right: left}
            return MemoryOrder(tuple(swap.get(dim, dim) for dim in source.dims), source.dense)
        case "unsqueeze":
            (at,) = _ints(step.args[1:2], rank + 1)
            dims = tuple(dim + (dim >= at) for dim in source.dims)
            # a dim of one element lies anywhere: put it where it keeps the order
            place = next((number for number, dim in enumerate(dims) if dim > at), len(dims))
            return MemoryOrder((*dims[:place], at, *dims[place:]), source.dense)
        case "select":
            (at,) = _ints(step.args[1:2], rank)
            dims = tuple(dim - (dim > at) for dim in source.dims if dim != at)
            return MemoryOrder(dims, source.dense and source.dims[0] == at)
        case "slice" | "split" | "split_with_sizes":
            at = _dim(step, rank)
            return MemoryOrder(source.dims, source.dense and source.dims[0] == at)
        case "expand":
            return MemoryOrder(tuple(range(result)), False) if source.in_order else unknown
        case "view" | "squeeze" | "reshape" | "parts":
            if source.in_order:
                return MemoryOrder(tuple(range(result)), source.dense)
            return unknown
        case _:
            return source if result == rank else unknown


def _ints(args: Arg, rank: int) -> tuple[int, ...]:
    assert isinstance(args, tuple)
    return tuple(int(arg) % rank for arg in args if isinstance(arg, int))


def _dim(step: Compute, rank: int) -> int:
    """The dim of a slice or a split: its second or third argument, 0 where it is left out."""
    position = 1 if step.kind.split(".")[1] == "slice" else 2
    arg = step.args[position] if len(step.args) > position else dict(step.kwargs).get("dim", 0)
    return int(arg) % rank if isinstance(arg, int) else 0
