"""The reference interpreter of a graph: each operator in order, on whole arrays, every result checked against its type.

A plan, a program or a generated script of the same graph is right if it gives what `run_graph` gives.
"""

from __future__ import annotations

from collections.abc import Mapping

from sennit.errors import GraphError
from sennit.ir.aten_numpy import apply, bind
from sennit.ir.dtype_numpy import numpy_dtype
from sennit.ir.graph import Graph, Op, Value
from sennit.ir.layout_numpy import Array

__all__ = ["run_graph"]


def run_graph(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every output by its value's name; `inputs` holds an array for each input, by its value's name."""
    values: dict[str, Array] = {}
    for item in graph.inputs:
        where = f"graph {graph.name!r}, {item.role.value} {item.path!r}"
        if item.value.name not in inputs:
            raise GraphError(
                f"no array is given for %{item.value.name}", where=where, fix=f"give one of type {item.value.type}"
            )
        values[item.value.name] = _checked(item.value, inputs[item.value.name], where)
    last_reader = {name: position for position, op in enumerate(graph.ops) for name in op.reads}
    kept = {output.name for output in graph.outputs}
    for position, op in enumerate(graph.ops):
        values |= _results(op, values, f"graph {graph.name!r}, {op.describe()}")
        for name in {*op.reads} - kept:
            if last_reader[name] == position:
                del values[name]  # a whole model's activations would not fit otherwise
    return {output.name: values[output.name] for output in graph.outputs}


def _results(op: Op, values: Mapping[str, Array], where: str) -> dict[str, Array]:
    try:
        arrays = apply(op.kind, bind(op.args, values), {name: bind(arg, values) for name, arg in op.kwargs})
    except GraphError as error:
        raise GraphError(error.what, where=where, fix=error.fix) from error
    if len(arrays) != len(op.results):
        raise GraphError(f"{len(arrays)} results where {len(op.results)} are declared", where=where)
    return {value.name: _checked(value, array, where) for value, array in zip(op.results, arrays, strict=True)}


def _checked(value: Value, array: Array, where: str) -> Array:
    if array.shape != value.type.shape or array.dtype != numpy_dtype(value.type.dtype):
        raise GraphError(
            f"%{value.name} is declared {value.type}, and its array is {array.dtype}{list(array.shape)}", where=where
        )
    return array
