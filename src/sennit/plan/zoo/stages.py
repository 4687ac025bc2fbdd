"""Pipelines: layers in runs over stages, micro-batches over time."""

from __future__ import annotations

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Phase
from sennit.ir.mesh import Mesh
from sennit.plan.pattern import one_forward_one_backward
from sennit.plan.plan import Plan, data_inputs, order, place, transform
from sennit.plan.zoo.batch import batch_axes

__all__ = ["pipeline"]


def pipeline(graph: Graph, mesh: Mesh, *, layers: tuple[str, ...], axis: str = "pp") -> Plan:
    """The layers in equal runs over the stages along `axis`, micro-batches over the time axis, in 1F1B order. What comes before
    the first layer goes with it, what comes after the last one with that."""
    stages = mesh.size(axis)
    if len(layers) < stages:
        raise PlanError(
            f"{len(layers)} layers for {stages} stages", fix=f"use at most {len(layers)} stages along {axis!r}"
        )
    plan = Plan("pipeline 1F1B", graph, mesh)
    plan = transform(plan, data_inputs(graph), dim=0, axis=batch_axes(mesh))
    for position, layer in enumerate(layers):
        stage = position * stages // len(layers)
        plan = place(plan, graph.select(f"{layer}|{layer}.*", phase=Phase.FORWARD), mesh.at(**{axis: stage}))
    return order(plan, one_forward_one_backward(stages, plan.microbatches))
