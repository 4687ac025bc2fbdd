"""Gradients of tables: of an embedding, a step touches the rows that the batch names, and only those have to travel.

A rank with a batch of `count` indices makes a gradient of which at most `count` rows are not zero. Over all ranks that
is at most ranks * count rows. Where this is far less than the table, the ranks tell each other their indices when the
backward pass begins (the channel has nothing to carry then), each packs its rows of the union, and the packed rows are
summed in the table's place. The sum of the other rows is zero, so the result has the bits of the sum of whole tables.
In a language model the table of the tokens is made last and needed first: it is what no order of buckets can hide.

    path            LookUp(indices, count, rows, width)          carried: min(rows, ranks * count) * width elements

**A table that is also the head** (tied embeddings) has the sum of two gradients: that of the head, dense and made
first, and that of the look-up, made last. `rows_apart` gives such a parameter two gradients to communicate:

    gradient "tokens.weight" %add        becomes        gradient "tokens.weight" %of_head        gradient "tokens.weight:rows" %add

The first leaves early, without the rows of the union. These travel in the second, as sums of both: each is the mean of
what the ranks have as their own sums, as under DDP. The other rows are the head's alone: what is added to them is zero.

`looked_up` finds such gradients in a graph. Whoever enforces them makes the packed rows at once, without the table
(`table_rows_torch.py`), and falls back to whole tables where a rank adds to a gradient that is there already
(`channel_torch.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Op, Output, OutputKind, Phase, Ref
from sennit.ir.strategy import Bucket

__all__ = ["ROWS", "LookUp", "in_one_piece", "looked_up", "parameter_of", "rows_apart"]

ROWS = ":rows"  # behind a parameter's path: the rows that a look-up names
_WHOLE = 2  # packed where it is at most one in so many of the rows
_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.clone.default"})


@dataclass(frozen=True, slots=True)
class LookUp:
    """A gradient of `rows` rows of `width` elements, of which the values `indices`, `count` of them on each rank, name
    those that are not zero or differ from the head's. `most` rows travel at most.

    The operator `table` adds the rows of `source` up where `places` says, but for those at `padding`; the operator
    `total`, if there is one, adds the head's gradient.
    """

    indices: str
    count: int
    rows: int
    width: int
    most: int
    table: str
    source: str
    places: str
    padding: int
    total: str | None = None

    @property
    def elements(self) -> int:
        return self.most * self.width


def parameter_of(path: str) -> str:
    """The parameter that a gradient is of."""
    return path.removesuffix(ROWS)


def looked_up(graph: Graph, ranks: int) -> dict[str, LookUp]:
    """By gradient, those whose rows travel packed."""
    if ranks == 1:
        return {}
    producers, types = graph.producers(), graph.types()
    found: dict[str, LookUp] = {}
    for output in graph.outputs:
        if output.kind is not OutputKind.GRADIENT or (made := producers.get(output.name)) is None:
            continue
        again = output.path.endswith(ROWS)
        table = _added_table(made, producers) if again else made
        item = _look_up(table, producers, types, ranks) if table is not None else None
        if item is not None and (again or item.most * _WHOLE <= item.rows):
            found[output.path] = replace(item, total=made.name) if again else item
    return found


def in_one_piece(packed: Mapping[str, LookUp], buckets: Sequence[Bucket]) -> dict[str, LookUp]:
    """Those of which packed rows travel with these buckets: one that is cut travels whole."""
    whole = {part.path for bucket in buckets for part in bucket.parts if part.span is None}
    return {path: item for path, item in packed.items() if path in whole}


def rows_apart(graph: Graph, ranks: int) -> Graph:
    """The graph with two gradients for each table that is also something else, where few of its rows are looked up."""
    if ranks == 1:
        return graph
    producers, types = graph.producers(), graph.types()
    outputs: list[Output] = []
    for output in graph.outputs:
        made = producers.get(output.name)
        table = _added_table(made, producers) if output.kind is OutputKind.GRADIENT and made is not None else None
        item = _look_up(table, producers, types, ranks) if table is not None else None
        if made is None or table is None or item is None or item.most * _WHOLE > item.rows:
            outputs.append(output)
            continue
        (dense,) = [name for name in made.reads if name != table.name]
        outputs += [replace(output, name=dense), replace(output, path=output.path + ROWS)]
    return graph if tuple(outputs) == graph.outputs else replace(graph, outputs=tuple(outputs))


def _added_table(made: Op, producers: Mapping[str, Op]) -> Op | None:
    """The gradient of a look-up in a sum of it and one other value."""
    match made:
        case Op(kind="aten.add.Tensor", args=(Ref(left), Ref(right)), kwargs=()) if left != right:
            tables = [producers[name] for name in (left, right) if name in producers and _is_table(producers[name])]
            others = [name for name in (left, right) if name in producers and not _is_table(producers[name])]
            return tables[0] if len(tables) == len(others) == 1 else None
        case _:
            return None


def _is_table(op: Op) -> bool:
    return op.kind == "aten.embedding_dense_backward.default" and op.phase is Phase.BACKWARD


def _look_up(table: Op, producers: Mapping[str, Op], types: Mapping[str, TensorType], ranks: int) -> LookUp | None:
    match table:
        case Op(
            kind="aten.embedding_dense_backward.default",
            args=(Ref(source), Ref(places), int(), int(padding), False),
        ):
            indices = places
            # what the forward pass leaves, not a view that the backward pass makes of it
            while (made := producers.get(indices)) is not None and made.phase is Phase.BACKWARD:
                if made.kind not in _VIEWS:
                    return None
                indices = made.reads[0]
            rows, width = table.results[0].type.shape
            count = types[indices].elements
            most = min(rows, ranks * count)
            return LookUp(indices, count, rows, width, most, table.name, source, places, padding)
        case _:
            return None
