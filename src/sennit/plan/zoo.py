"""The plans that people know, each a short function to read and copy: from a graph and a mesh to a `Plan`."""

from __future__ import annotations

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Phase
from sennit.ir.mesh import Mesh
from sennit.plan.pattern import one_forward_one_backward
from sennit.plan.plan import Plan, data_inputs, order, place, transform

__all__ = ["data_parallel", "pipeline", "tensor_parallel"]


def data_parallel(graph: Graph, mesh: Mesh) -> Plan:
    """Every device runs the whole model on its part of the batch. Gradients become sums pending over `dp`."""
    plan = Plan("data parallel", graph, mesh)
    return transform(plan, data_inputs(graph), dim=0, axis=_batch_axes(mesh))


def tensor_parallel(graph: Graph, mesh: Mesh, *, column: str, row: str, qkv: str | None = None) -> Plan:
    """Megatron's split: `column` layers are split on their outputs, `row` layers on their inputs, over `tp`; a fused query,
    key and value layer has three chunks of outputs. Between the two, every device works on its own heads or hidden units."""
    plan = Plan("tensor parallel", graph, mesh)
    if "dp" in mesh or mesh.time:
        plan = transform(plan, data_inputs(graph), dim=0, axis=_batch_axes(mesh))
    products = "aten.mm.default|aten.addmm.default"
    if qkv is not None:
        plan = transform(plan, graph.select(qkv, products, Phase.FORWARD), dim="n", axis="tp", chunks=3)
    plan = transform(plan, graph.select(column, products, Phase.FORWARD), dim="n", axis="tp")
    return transform(plan, graph.select(row, products, Phase.FORWARD), dim="k", axis="tp")


def pipeline(graph: Graph, mesh: Mesh, *, layers: tuple[str, ...], axis: str = "pp") -> Plan:
    """The layers in equal runs over the stages along `axis`, micro-batches over the time axis, in 1F1B order. What comes before
    the first layer goes with it, what comes after the last one with that."""
    stages = mesh.size(axis)
    if len(layers) < stages:
        raise PlanError(
            f"{len(layers)} layers for {stages} stages", fix=f"use at most {len(layers)} stages along {axis!r}"
        )
    plan = Plan("pipeline 1F1B", graph, mesh)
    plan = transform(plan, data_inputs(graph), dim=0, axis=_batch_axes(mesh))
    for position, layer in enumerate(layers):
        stage = position * stages // len(layers)
        plan = place(plan, graph.select(f"{layer}|{layer}.*", phase=Phase.FORWARD), mesh.at(**{axis: stage}))
    return order(plan, one_forward_one_backward(stages, plan.microbatches))


def _batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that split the batch: data parallel in space, then micro-batches in time."""
    axes = ("dp",) if "dp" in mesh else ()
    return axes + tuple(axis.name for axis in mesh.time)
