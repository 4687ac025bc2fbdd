"""Ways to write the letters of an operator: the shapes that rules of the table have in common."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.capture.rules.rule import Dims, Letters, Shapes
from sennit.ir.graph import Arg, Op
from sennit.ir.layout import Reduction

__all__ = ["alphabet", "argument", "independent", "named_dims", "pointwise", "sums", "whole"]


def alphabet(count: int) -> tuple[str, ...]:
    return tuple(f"i{position}" for position in range(count))


def named_dims(dims: Arg, rank: int) -> tuple[int, ...]:
    """The dims that an argument names, counted from the front."""
    many = dims if isinstance(dims, tuple) else (dims,)
    return tuple(dim % rank for dim in many if isinstance(dim, int)) if rank else ()


def argument(op: Op, position: int, name: str, default: Arg = None) -> Arg:
    """An argument that may be given by position or by name."""
    return op.args[position] if len(op.args) > position else dict(op.kwargs).get(name, default)


def sums(*letters: str) -> tuple[tuple[str, Reduction], ...]:
    return tuple((letter, Reduction.SUM) for letter in letters)


def whole(reads: Shapes, results: Shapes) -> Letters:
    """Nothing can be split."""
    return Letters(tuple((None,) * len(shape) for shape in reads), tuple((None,) * len(shape) for shape in results))


def pointwise(reads: Shapes, results: Shapes, frozen: Sequence[int] = ()) -> Letters:
    """One letter per result dim, aligned from the right; a read that is broadcast along a dim has none there."""
    letters = tuple(None if dim in frozen else f"i{dim}" for dim in range(len(results[0])))

    def aligned(shape: tuple[int, ...]) -> Dims:
        tail = letters[len(letters) - len(shape) :]
        full = results[0][len(letters) - len(shape) :]
        return tuple(letter if size == whole else None for size, whole, letter in zip(shape, full, tail, strict=True))

    return Letters(tuple(map(aligned, reads)), tuple(map(aligned, results)))


def independent(reads: Shapes, results: Shapes, frozen: Sequence[int], *, linear: bool = False) -> Letters:
    """Tensors of one rank that work along `frozen` and do the same at each index of the other dims (sort, roll, pad,
    ...). A dim whose size differs between them is frozen too.
    """
    shapes = [*reads, *results]
    letters: Dims = tuple(
        f"i{dim}" if dim not in frozen and len({shape[dim] for shape in shapes}) == 1 else None
        for dim in range(len(reads[0]))
    )
    everything = (tuple(range(len(reads))),) if linear else ()
    return Letters((letters,) * len(reads), (letters,) * len(results), linear=everything, carries=linear)
