"""Data parallelism: the batch over devices, and over micro-batches in time."""

from __future__ import annotations

from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.plan.plan import Plan, data_inputs, transform

__all__ = ["batch_axes", "data_parallel", "split_batch"]


def data_parallel(graph: Graph, mesh: Mesh) -> Plan:
    """Every device runs the whole model on its part of the batch. Gradients become sums pending over `dp`."""
    plan = Plan("data parallel", graph, mesh)
    return transform(plan, data_inputs(graph), dim=0, axis=batch_axes(mesh))


def split_batch(plan: Plan, *names: str) -> Plan:
    """The inputs on their first dim over `dp`, the named axes, and the time axis, as far as the mesh has them."""
    axes = batch_axes(plan.mesh, *names)
    return transform(plan, data_inputs(plan.graph), dim=0, axis=axes) if axes else plan


def batch_axes(mesh: Mesh, *names: str) -> tuple[str, ...]:
    """The axes that split the batch: data parallel in space, then micro-batches in time."""
    space = tuple(name for name in ("dp", *names) if name in mesh)
    return space + tuple(axis.name for axis in mesh.time)
