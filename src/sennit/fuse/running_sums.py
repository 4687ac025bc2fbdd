"""Sums that grow term by term, and terms that need not be made as tensors of their own.

The gradient of what is used many times is a sum with a term for each use: a recurrent weight has a product for every
position, and the input of a recurrent layer, of which every position takes a slice, has the gradient of a slice: zeros,
but for one position. `in_place_torch.py` writes such a sum over its first term. Two kinds of terms then go into it
without being written first:

    m = mm(left, right)                                         ProductTerm        total += left @ right         (`products_torch.py`)
    t2 = add(t1, m)

    s1 = select_backward(g1, shape, dim, 1)                     SliceStart         total = zeros; total[.., 1] += g1
    s0 = select_backward(g0, shape, dim, 0)
    t  = add(s1, s0)                                            SliceTerm          total[.., 0] += g0

The bits are those of the sum. Elements outside of a slice get zeros added to them, and x + 0 is x, but for x = -0,
which becomes 0. A total that starts from zeros never holds -0, since 0 + -0 is 0 and x - x is 0; written out, the first
term may hold it until the second is added. Slices of one sum are at different indices, so each of its elements is one
term or 0, and 0 where that term is -0.

A term stands right before its sum, and nothing else reads it. Small products are left alone: to write them costs
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sennit.ir.graph import Op, Ref
from sennit.ir.strategy_check import Kernel

__all__ = ["ProductTerm", "SliceStart", "SliceTerm", "Term", "running_sums"]

_LEAST = 1 << 14  # elements of a product


@dataclass(frozen=True, slots=True)
class ProductTerm:
    """left @ right is added to `total`."""

    total: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class SliceTerm:
    """`of` is added to `total` at one index of a dim."""

    total: str
    of: str
    dim: int
    index: int


@dataclass(frozen=True, slots=True)
class SliceStart:
    """Zeros, to which `of` is added at one index of a dim."""

    of: str
    shape: tuple[int, ...]
    dim: int
    index: int


Term = ProductTerm | SliceTerm | SliceStart


def running_sums(
    kernels: Sequence[Kernel], over: Collection[str], kept: Collection[str], inside: Collection[str] = ()
) -> dict[str, Term | None]:
    """By operator: what is done in its place, None for nothing.

    `over` are operators that write over their first operand, `kept` values that are read after the pass, `inside`
    operators that run inside something else.
    """
    body = [op for kernel in kernels for op in kernel.body]
    alone = {kernel.body[0].name for kernel in kernels if len(kernel.body) == 1}.difference(inside)
    reads = Counter(name for op in body for name in op.reads)
    # what one operator reads, and nobody else
    private = {op.name for op in body if op.name in alone and reads[op.name] == 1 and op.name not in kept}
    made = {op.name: op for op in body}
    found: dict[str, Term | None] = {}
    indices: dict[str, tuple[int, frozenset[int]]] = {}  # of sums of slices: the dim, and where there is a slice
    for place, op in enumerate(body):
        match op:
            case Op(kind="aten.add.Tensor", args=(Ref(total), Ref(term)), kwargs=()) if op.name in over:
                product = _product(body, place, term, private)
                if product is not None:
                    found |= {**dict.fromkeys(product[1]), op.name: ProductTerm(total, *product[0])}
                elif body[place - 1].name == term and term in private and (slot := _slice(body[place - 1])):
                    start = _slice(made[total]) if total in made and total in private else None
                    dim, taken = (
                        (start.dim, frozenset({start.index})) if start else indices.get(total, (-1, frozenset()))
                    )
                    if slot.dim == dim and slot.index not in taken:
                        found |= {total: start} if start else {}
                        found |= {term: None, op.name: SliceTerm(total, slot.of, dim, slot.index)}
                        indices[op.name] = dim, taken | {slot.index}
            case _:
                pass
    return found


def _product(
    body: Sequence[Op], place: int, term: str, private: Collection[str]
) -> tuple[tuple[str, str], list[str]] | None:
    """The factors of a product whose result, seen through views that exchange rows and columns and back, is this term;
    and the operators that make it. They stand right before the sum.
    """
    names: list[str] = []
    turned = False
    for op in reversed(body[:place]):
        if op.name != term or term not in private:
            return None
        names.append(op.name)
        match op:
            case Op(kind="aten.permute.default", args=(Ref(term), (1, 0))):
                turned = not turned
            case Op(kind="aten.mm.default", args=(Ref(left), Ref(right)), kwargs=()):
                return None if turned or op.results[0].type.elements < _LEAST else ((left, right), names)
            case _:
                return None
    return None


def _slice(op: Op) -> SliceStart | None:
    match op:
        case Op(kind="aten.select_backward.default", args=(Ref(of), tuple(shape), int(dim), int(index)), kwargs=()):
            sizes = tuple(size for size in shape if isinstance(size, int))
            return SliceStart(of, sizes, dim % len(sizes), index % sizes[dim])
        case _:
            return None
