"""The values that say how an operator may be split over one mesh axis.

    Rule     := Letters | Reshape | Chunks | Listed
    Strategy := what one axis does to each read and each result, and the local form, if the pieces need one

**Letters** annotate an operator like an einsum: every dim of every tensor it reads or writes has a letter or none.

    addmm:  n, m k, k n -> m n        k is summed over, n of the bias is added after the sum

Over one axis of size p such an operator may run in one of these ways:

- replicated: the axis does nothing to any of its tensors;
- split on a letter: every tensor that has the letter is split there, with one stride, the others are replicated; a
  result
  without the letter is pending, by the letter's reduction; what is added after a split sum must come as a pending part too
  (or a bias would be counted p times);
- pending through: where the operator is linear in a set of its reads, and all of them are pending sums, so are the
  results.
  `carries` says where that is worth doing in space: through structural and scalar-linear operators and through sums
  of pending terms. Anything else resolves first, or pending sums would flow through everything and multiply.

**Reshape** and **Chunks** keep digits instead of letters. A digit of dim d at stride s lies in the flat index at F = s
* prod(shape[d+1:]), and belongs to the dim d' of the new shape with inner = prod(new[d'+1:]) dividing F and (F / inner)
* p dividing new[d']; if there is none, the view cannot be split there. A chunk of a dim (a slice, a part of a
concatenation) keeps a digit if its period s * p divides where the chunk begins and how long it is.

**Listed** rules are rows, each one way: for every tensor a dim, a reduction or nothing. They come from other sources
than our own table (`capture/rules_dtensor.py`, `discover.py`).

A **local form** replaces the operator on pieces where values depend on the position of the piece: rows of an embedding
that lie elsewhere, numbers that count. `ir/local_forms_numpy.py` defines each; a letter names its form in
`Letters.forms`.

Every strategy computes exactly what the unsplit operator does, on the pieces: that is the meaning of a rule, and what
`certify.py` executes. Axes are independent of each other, so one axis at a time is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sennit.ir.dtype import TensorType
from sennit.ir.layout import Entry, Reduction

__all__ = ["Chunks", "Dims", "Letters", "Listed", "Part", "Reshape", "Row", "Rule", "Shapes", "Strategy", "Types"]

Types = Mapping[str, TensorType]
Dims = tuple[str | None, ...]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Strategy:
    """What one axis does to each tensor that an operator reads (in the order of `Op.reads`) and to each result; `form`
    names the local form that takes the operator's place on the pieces.
    """

    reads: tuple[Entry | None, ...]
    results: tuple[Entry | None, ...]
    form: str | None = None

    @property
    def is_replicated(self) -> bool:
        return not any(self.reads) and not any(self.results)


@dataclass(frozen=True, slots=True)
class Letters:
    """`summed` maps a letter that some result lacks to its reduction; `addends` are reads added after that; `linear`
    lists the sets of reads in which the operator is linear (the empty set: it makes zeros, which sum to zeros);
    `structural` operators only move values, so any reduction passes; `forms` maps a letter to the local form that a
    split on it needs.
    """

    reads: tuple[Dims, ...]
    results: tuple[Dims, ...]
    summed: tuple[tuple[str, Reduction], ...] = ()
    addends: tuple[int, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    structural: bool = False
    carries: bool = False
    forms: tuple[tuple[str, str], ...] = ()

    @property
    def letters(self) -> tuple[str, ...]:
        """Every letter that can be split, in order of first appearance."""
        found = [letter for dims in (*self.reads, *self.results) for letter in dims if letter is not None]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Reshape:
    """One read, one result, the same elements in the same order."""

    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Where a tensor lies along the dim of `Chunks`: elements `start` to `start + length` of the whole."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """Parts of one tensor along `dim`, or the whole of them: every read and every result is a range of it, and all
    other dims are alike. Values outside the parts that are read are zero.
    """

    dim: int
    reads: tuple[Part, ...]
    results: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to split: per tensor the dim that is split, a reduction that is pending, or nothing."""

    reads: tuple[int | Reduction | None, ...]
    results: tuple[int | Reduction | None, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """Rows from `source`, which messages name. They hold for two or more equal pieces."""

    rows: tuple[Row, ...]
    source: str


Rule = Letters | Reshape | Chunks | Listed
