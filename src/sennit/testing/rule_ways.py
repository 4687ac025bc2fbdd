"""Every way in which the rules of a graph's operators allow them to be split."""

from __future__ import annotations

from collections.abc import Iterator

from sennit.capture.rules import Chunks, Letters, Listed, Reshape, Rule, RuleBook, Strategy, Types, propose
from sennit.capture.rules.trial import Way, largest_difference
from sennit.ir.graph import Graph, Op
from sennit.ir.layout import Pending, Reduction, Split

__all__ = ["failures", "ways_of"]


def ways_of(op: Op, types: Types, rule: Rule, size: int = 2) -> Iterator[Way]:
    match rule:
        case Letters():
            shapes = [types[name].shape for name in op.reads] + [value.type.shape for value in op.results]
            sizes = dict(
                pair
                for dims, shape in zip((*rule.reads, *rule.results), shapes, strict=True)
                for pair in zip(dims, shape, strict=True)
            )
            for letter in rule.letters:
                if letter not in dict(rule.forms) or sizes[letter] % size == 0:  # forms are tried at the actual size
                    yield Way(letter=letter)
            for group in rule.linear:
                part = Pending(Reduction.SUM)
                reads = tuple(part if position in group else None for position in range(len(op.reads)))
                yield Way(pending=Strategy(reads, (part,) * len(op.results)))
        case Listed(rows):
            yield from (Way(row=number) for number in range(len(rows)))
        case Reshape() | Chunks():
            for position, name in enumerate(op.reads):
                shape = types[name].shape
                for dim, extent in enumerate(shape):
                    for stride in range(1, extent + 1):
                        if extent % (stride * size) == 0:
                            have = [Split(dim, stride) if at == position else None for at in range(len(op.reads))]
                            yield from (Way(digits=s) for s in propose(op, types, size, have)[1:])


def failures(graph: Graph, tolerance: float = 1e-9) -> tuple[int, list[str]]:
    """How many ways were tried, and those whose pieces are not the whole."""
    types = graph.types()
    book = RuleBook(types)
    seen: set[object] = set()
    tried = 0
    wrong: list[str] = []
    for op in graph.ops:
        if book.signature(op) in seen or op.kind.startswith("sennit."):
            continue
        seen.add(book.signature(op))
        rule = book.rule(op)
        for way in ways_of(op, types, rule):
            tried += 1
            try:
                difference = largest_difference(op, types, rule, way, 2)
            except Exception as error:  # torch raises many kinds; each one means that the way does not work
                wrong.append(f"{op.describe()} {way}: {type(error).__name__} {error}")
                continue
            if not difference <= tolerance:
                wrong.append(f"{op.describe()} {way}: {difference}")
    return tried, wrong
