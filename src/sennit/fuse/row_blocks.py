"""Gradients that a matrix product makes, block by block of rows.

The first gradient of a step is often a large product: the head of a language model. Nothing travels until it is done.
Each row of a product is made by itself, so where a strategy cuts the gradient over several buckets, the product is
computed in blocks of rows, and a bucket leaves with its block:

    dw = dy.T @ x          for start, stop in blocks:    dw[start:stop] = dy.T[start:stop] @ x

`row_products` finds the gradients of a graph that are made so: `mm`, then views that give its rows in order. Nothing
else reads them, but for the sum with a look-up's rows in a table that is also the head (`looked_up.py`), which whoever
takes the product makes too. `blocks` turns the spans of a strategy into rows: a span that ends inside a row gets the
whole of it in its block, and the span that begins there waits for that block; nor can such blocks be computed in their
places in the buckets. Which element of a row is summed in which order is the library's choice and might depend on
how many rows there are; whoever runs blocks compares the bits (`program_torch.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sennit.fuse.looked_up import parameter_of
from sennit.ir.graph import Graph, Op, OutputKind, Phase, Ref
from sennit.ir.strategy import Bucket

__all__ = ["RowProduct", "are_rows", "block_ends", "blocks", "cut_spans", "ready_fractions", "row_products", "turns"]


@dataclass(frozen=True, slots=True)
class RowProduct:
    """`product` is the operator %product = left @ right; `views` the operators behind it, the last of which gives the
    gradient; it has `rows` rows of `width` elements.
    """

    product: str
    left: str
    right: str
    views: tuple[str, ...]
    rows: int
    width: int

    def aligned(self, element: int) -> int:
        """The end of a row that is nearest to this element, inside the gradient."""
        return min(self.rows - 1, max(1, round(element / self.width))) * self.width if self.rows > 1 else element


def row_products(graph: Graph) -> dict[str, RowProduct]:
    """By parameter, the gradients that are products which may be cut into rows."""
    producers, types = graph.producers(), graph.types()
    # of an operator with several results, the first may have no reader
    readers = Counter(name for op in graph.ops for name in op.reads)
    readers.update(output.name for output in graph.outputs)
    for name in _added_to_rows(graph, producers):
        readers[name] -= 1
    found: dict[str, RowProduct] = {}
    for output in graph.outputs:
        if output.kind is not OutputKind.GRADIENT:
            continue
        made: Op | None = producers.get(output.name)
        views: list[str] = []
        turned = False
        while made is not None and readers[made.name] == 1 and (turned_here := turns(made)) is not None:
            views.append(made.name)
            turned ^= turned_here
            made = producers.get(made.reads[0])
        if made is None or turned or made.kind != "aten.mm.default" or readers[made.name] != 1:
            continue
        match made.args:
            case (Ref(left), Ref(right)) if made.phase is Phase.BACKWARD and not made.kwargs:
                rows, width = types[made.name].shape
                found[output.path] = RowProduct(made.name, left, right, tuple(reversed(views)), rows, width)
    return found


def _added_to_rows(graph: Graph, producers: Mapping[str, Op]) -> list[str]:
    """Gradients of heads that are looked up as well, where they are made before the look-up's."""
    place = {op.name: number for number, op in enumerate(graph.ops)}
    dense = {output.path: output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    found: list[str] = []
    for path, name in dense.items():
        head = dense.get(parameter_of(path), name)
        if head != name and head in producers:
            (table,) = [other for other in producers[name].reads if other != head]
            if place[producers[head].name] < place[producers[table].name]:
                found.append(head)
    return found


def turns(op: Op) -> bool | None:
    """Whether this view exchanges rows and columns; None for what is no such view."""
    match op.kind, op.args:
        case "aten.permute.default", (_, (1, 0)):
            return True
        case "aten.permute.default", (_, (0, 1)):
            return False
        case "aten.t.default", _:
            return True
        case _:
            return None


def cut_spans(buckets: Sequence[Bucket]) -> dict[str, list[tuple[int, int]]]:
    """Of each gradient that is cut, its spans in the order in which their buckets travel."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for bucket in buckets:
        for part in bucket.parts:
            if part.span is not None:
                spans.setdefault(part.path, []).append(part.span)
    return {path: found for path, found in spans.items() if len(found) > 1}


def blocks(spans: Sequence[tuple[int, int]], product: RowProduct) -> tuple[tuple[int, int], ...]:
    """(first row, row behind the last) of each block, in the order of the spans. Blocks tile the rows."""
    ends = {0: 0}
    for _, stop in spans:
        ends[stop] = -(-stop // product.width)
    made = [(ends[start], ends[stop]) for start, stop in spans]
    return tuple((start, stop) for start, stop in made if stop > start)


def are_rows(spans: Iterable[tuple[int, int]], width: int) -> bool:
    """Whether none of them begins or ends inside a row."""
    return not any(edge % width for span in spans for edge in span)


def block_ends(spans: Sequence[tuple[int, int]], product: RowProduct) -> tuple[tuple[int, int, float], ...]:
    """The blocks, each with how much of the product is done when it is."""
    made = blocks(spans, product)
    done = accumulate(stop - start for start, stop in made)
    return tuple((*block, rows / product.rows) for block, rows in zip(made, done, strict=True))


def ready_fractions(spans: Sequence[tuple[int, int]], product: RowProduct) -> Mapping[tuple[int, int], float]:
    """How much of the product is done when a span of it is there: its own block, and the one with the row that it
    begins in, which may come much later.
    """
    ends = block_ends(spans, product)
    if are_rows(spans, product.width):
        return {span: done for span, (_, _, done) in zip(spans, ends, strict=True)}

    def ready(start: int, stop: int) -> float:
        first, last = start // product.width, -(-stop // product.width)
        return max(done for one, other, done in ends if one < last and first < other)

    return {span: ready(*span) for span in spans}
