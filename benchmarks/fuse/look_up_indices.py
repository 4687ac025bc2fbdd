"""Up to where the indices of a group may go: what its look-ups are timed on.

A look-up that finds one row again and again reads it from the cache, and a scatter into one row waits for itself. So
where an input of a group names places in a table, its label is made with random places of that table.

    index_limits(kernel, types)     by input, the size of what it names places in

An input's values reach an index as they are through views, copies, selections and look-ups in the input itself; behind
any other arithmetic nobody knows what they become, and such an input stays zero (limit 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sennit.fuse.operator_class import moves_nothing, stem
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Op, Ref
from sennit.ir.strategy_check import Kernel

__all__ = ["index_limits"]


def index_limits(kernel: Kernel, types: Mapping[str, TensorType]) -> dict[str, int]:
    """Of the inputs whose values are indices, the number of places that each may name."""
    made = {value.name: op for op in kernel.body for value in op.results}
    limits: dict[str, int] = {}
    for op in kernel.body:
        for name, limit in _indices(op, types):
            for source, plain in _sources(name, made):
                limits[source] = min(limits.get(source, limit), limit if plain else 1)
    return limits


def _indices(op: Op, types: Mapping[str, TensorType]) -> Iterator[tuple[str, int]]:
    """The values that are indices of an operator, each with the size of what it names places in."""
    match stem(op.kind), op.args:
        case "embedding", (Ref(table), Ref(index), *_):
            yield index, types[table].shape[0]
        case "embedding_dense_backward", (_, Ref(index), int(rows), *_):
            yield index, rows
        case "gather" | "scatter" | "scatter_add" | "index_select", (Ref(table), int(dim), Ref(index), *_):
            yield index, types[table].shape[dim] if types[table].shape else 1
        case "index" | "index_put", (Ref(table), tuple(indices), *_):
            for dim, index_or_none in enumerate(indices):
                match index_or_none:
                    case Ref(index) if types[index].dtype is not DType.BOOL:
                        yield index, types[table].shape[dim]
                    case _:
                        pass
        case _:
            pass


def _sources(name: str, made: Mapping[str, Op], plain: bool = True) -> Iterator[tuple[str, bool]]:
    """The inputs that a value comes from, and whether it has their values as they are."""
    if name not in made:
        yield name, plain
        return
    op = made[name]
    for source in _passed_on(op):
        yield from _sources(source, made, plain)
    if not _passed_on(op):
        for source in op.reads:
            yield from _sources(source, made, False)


def _passed_on(op: Op) -> list[str]:
    """What an operator's result has its values of."""
    match stem(op.kind), op.args:
        case _ if moves_nothing(op) and op.reads:
            return [op.reads[0]]
        case "clone" | "_to_copy" | "gather" | "index" | "index_select" | "masked_fill" | "cat" | "stack", (first, *_):
            return list(_names(first))
        case "where", (_, *values):
            return [name for value in values for name in _names(value)]
        case _:
            return []


def _names(arg: Arg) -> Iterator[str]:
    match arg:
        case Ref(name):
            yield name
        case tuple():
            for part in arg:
                yield from _names(part)
        case _:
            pass
