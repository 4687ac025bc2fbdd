"""The text of a rule: how users annotate an operator.

    rule    := tensors "->" tensors
    tensors := (tensor ("," tensor)*)?
    tensor  := "..."? dim*                     one word per dim; nothing for a scalar
    dim     := LETTER mark?  |  "_"
    mark    := "+" | ":" ("sum" | "max" | "min" | "prod")

`m k+, k+ n -> m n` is a matrix product: `m` and `n` may be split; a split `k` leaves a pending sum. `_` is a dim that
is needed whole. `...` stands for any number of leading dims, which are independent and the same in every tensor that
has it. A letter that some result lacks must say how its pieces combine, wherever it occurs: `k+` and `k:sum` are sums,
`k:max` a maximum.

    rms norm       ... _, _ -> ... _           the last dim whole, all others free
    row maximum    m n:max -> m
    scale          ... d, d -> ... d
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sennit.capture.rules.rule import Dims, Letters, Shapes
from sennit.errors import ParseError
from sennit.ir.layout import Reduction

__all__ = ["Annotation", "parse_annotation"]


@dataclass(frozen=True, slots=True)
class _Tensor:
    dims: tuple[str | None, ...]
    leading: bool


@dataclass(frozen=True, slots=True)
class Annotation:
    """A parsed rule, for any rank that it fits."""

    text: str
    reads: tuple[_Tensor, ...]
    results: tuple[_Tensor, ...]
    reductions: tuple[tuple[str, Reduction], ...]

    def letters(self, reads: Shapes, results: Shapes) -> Letters:
        """The rule for tensors of these shapes; `ValueError` says what does not fit."""
        for what, mine, given in (("reads", self.reads, reads), ("returns", self.results, results)):
            if len(mine) != len(given):
                raise ValueError(f"it {what} {len(given)} tensors, and the annotation has {len(mine)}")
        sizes: dict[str, int] = {}
        found = [
            _name(tensor, shape, sizes)
            for tensor, shape in zip((*self.reads, *self.results), (*reads, *results), strict=True)
        ]
        return Letters(tuple(found[: len(reads)]), tuple(found[len(reads) :]), self.reductions)


def _name(tensor: _Tensor, shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    extra = len(shape) - len(tensor.dims)
    if extra < 0 or (extra and not tensor.leading):
        wanted = f"{len(tensor.dims)}{' or more' if tensor.leading else ''}"
        raise ValueError(f"a tensor of shape {list(shape)} has {len(shape)} dims, and the annotation names {wanted}")
    dims: Dims = (*(f"i{at}" for at in range(extra)), *tensor.dims)
    for letter, size in zip(dims, shape, strict=True):
        if letter is not None and sizes.setdefault(letter, size) != size:
            raise ValueError(
                f"letter {letter!r} is {sizes[letter]} in one tensor and {size} in another of shape {list(shape)}"
            )
    return dims


def parse_annotation(text: str) -> Annotation:
    if text.count("->") != 1:
        raise _wrong(text, f"it has {text.count('->')} arrows", "write what is read, one ->, and what is returned")
    left, right = text.split("->")
    marks: dict[str, Reduction] = {}
    reads, results = _tensors(text, left, marks), _tensors(text, right, marks)
    for letter in dict.fromkeys(name for tensor in (*reads, *results) for name in tensor.dims if name is not None):
        lacking = any(letter not in tensor.dims for tensor in results)
        if not any(letter in tensor.dims for tensor in reads) and letter not in marks:
            raise _wrong(
                text, f"letter {letter!r} is returned and never read", "use _ for a dim that the operator makes"
            )
        if letter in marks and not lacking:
            raise _wrong(
                text, f"letter {letter!r} is reduced, and every result has it", f"write {letter} without a mark"
            )
        if letter not in marks and lacking and len(results) == 1:
            raise _wrong(
                text,
                f"letter {letter!r} is read and not returned",
                f"write {letter}+ if its pieces are summed, {letter}:max for a maximum, _ if it is needed whole",
            )
    return Annotation(text, reads, results, tuple(marks.items()))


def _tensors(text: str, side: str, marks: dict[str, Reduction]) -> tuple[_Tensor, ...]:
    if not side.strip():
        return ()
    return tuple(_tensor(text, part.split(), marks) for part in side.split(","))


def _tensor(text: str, words: list[str], marks: dict[str, Reduction]) -> _Tensor:
    leading = bool(words) and words[0] == "..."
    dims: list[str | None] = []
    for word in words[leading:]:
        if word == "_":
            dims.append(None)
            continue
        match = re.fullmatch(r"([A-Za-z][A-Za-z0-9]*)(\+|:(sum|max|min|prod))?", word)
        if match is None:
            raise _wrong(text, f"{word!r} is no dim", "write a letter, a letter with + or :max, or _")
        letter, mark, name = match.groups()
        if letter in dims:
            raise _wrong(text, f"letter {letter!r} occurs twice in one tensor", "give each dim its own letter")
        dims.append(letter)
        if mark:
            reduction = Reduction.SUM if mark == "+" else Reduction(name)
            if marks.setdefault(letter, reduction) is not reduction:
                raise _wrong(text, f"letter {letter!r} has two reductions", "use one")
    return _Tensor(tuple(dims), leading)


def _wrong(text: str, what: str, fix: str) -> ParseError:
    return ParseError(f"rule {text!r}: {what}", fix=fix)
