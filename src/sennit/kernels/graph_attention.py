"""Attention as one kernel in a captured graph: what `attention.py` does for a program, for those who run the graph as
it is, on one device.

The graph is written as the lane of a single device, where a value and its piece are the same, and read back.
"""

from __future__ import annotations

from dataclasses import replace

from sennit.ir.graph import Graph, Op, Value
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Compute, Lane, LaneInput, Program
from sennit.kernels.attention import fuse_attention

__all__ = ["with_fused_attention"]


def with_fused_attention(graph: Graph, device_type: str) -> Graph:
    """The graph with each attention as one operator of `device_type` ("cuda" or "cpu"), and another for its derivative.

    Where a model calls `F.scaled_dot_product_attention`, eager torch runs such kernels too; attention that is written
    by hand stays as it is.
    """
    mesh = Mesh.make({"one": 1})
    inputs = tuple(LaneInput(item.role, _buffer(item.value, mesh), item.path) for item in graph.inputs)
    steps = tuple(_compute(op, mesh) for op in graph.ops)
    lane = Lane("graph", mesh.devices, inputs, steps, graph.outputs)
    (fused,) = fuse_attention(Program(graph.name, (lane,)), device_type).lanes
    origin = {op.name: op for op in graph.ops}
    ops = tuple(_op(step, origin) for step in fused.steps if isinstance(step, Compute))
    return replace(graph, ops=ops, repeats=()) if ops != graph.ops else graph


def _buffer(value: Value, mesh: Mesh) -> Buffer:
    return Buffer(value.name, value.name, value.type.dtype, Layout.make(mesh, value.type.shape))


def _compute(op: Op, mesh: Mesh) -> Compute:
    results = tuple(_buffer(value, mesh) for value in op.results)
    return Compute(op.kind, op.args, op.kwargs, results, op.phase, op.module, op.name)


def _op(step: Compute, origin: dict[str, Op]) -> Op:
    """Where it comes from, as the operator says in whose place it stands."""
    results = tuple(Value(buffer.name, buffer.type) for buffer in step.results)
    like = origin[step.op]
    return replace(like, kind=step.kind, args=step.args, kwargs=step.kwargs, results=results)
