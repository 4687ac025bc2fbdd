"""ZeRO: replicas share what each of them would hold whole. (arXiv 1910.02054; level 3 is what FSDP does.)

Data parallel replicas hold the same parameters, gradients and optimizer state. Let each of d replicas be the *home* of
1/d of every parameter; the optimizer works on homes, so its state is cut too. With P bytes of parameters, K of
optimizer state, and m micro-batches:

| level | parameters | gradients | a step moves | lives on a device |
|---|---|---|---|---|
| data parallel | whole | summed once | all-reduce P | 2 P + K |
| 1 | gathered once, kept | summed over micro-batches, then reduce-scattered once | gather P, scatter P | 2 P + (P + K) / d |
| 2 | gathered once, kept | reduce-scattered each micro-batch, summed in pieces | gather P, scatter m P | P + (2 P + K) / d |
| 3 | gathered for each task, let go after their last use in it | as 2 | gather 2 m P, scatter m P | (2 P + K) / d, and the layers in use |

Level 1 moves what data parallelism does. Level 2 pays for smaller gradients with m - 1 more scatters, level 3 for
smaller parameters with a gather forward and one backward of every micro-batch. `sharded` cuts any plan so, with stages
or tensor parallelism, over the axis of its replicas.

A parameter is cut on its largest dim that divides over the axis and that no other axis splits. Where there is none (an
odd vector, a bias that tensor parallelism has cut) it stays whole: `kept_whole` names those.
"""

from __future__ import annotations

from dataclasses import replace

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Input, Role
from sennit.ir.layout import Split
from sennit.ir.mesh import Mesh
from sennit.plan.plan import Plan, transform
from sennit.plan.propagate import propagate
from sennit.plan.zoo.batch import data_parallel

__all__ = ["kept_whole", "sharded", "zero"]


def zero(graph: Graph, mesh: Mesh, *, level: int, least: int = 0) -> Plan:
    """Data parallelism whose replicas hold 1/dp of: optimizer state (level 1), gradients too (2), parameters too (3)."""
    return sharded(data_parallel(graph, mesh), level=level, least=least)


def sharded(plan: Plan, *, level: int, axis: str = "dp", least: int = 0) -> Plan:
    """Any plan, its parameters cut over the axis of its replicas.

    Parameters with fewer than `least` elements stay whole: many small collectives cost more than they save.
    """
    if level not in (1, 2, 3):
        raise PlanError(
            f"there is no level {level} of ZeRO", fix="use 1 (optimizer state), 2 (gradients) or 3 (parameters)"
        )
    if all(axis not in mesh for mesh in plan.stages):
        raise PlanError(f"mesh {plan.mesh} has no axis {axis!r}", fix="name the axis that replicas lie along")
    for dim, items in _cuts(plan, axis, least).items():
        plan = transform(plan, items, dim=dim, axis=axis)
    return replace(plan, name=f"{plan.name}, ZeRO-{level}", reduce_early=level >= 2, regather=level == 3)


def kept_whole(plan: Plan, axis: str = "dp") -> tuple[str, ...]:
    """The parameters that a plan does not cut over an axis, by path."""
    cut = {split.path for split in plan.inputs if axis in split.axes}
    return tuple(item.path for item in plan.graph.inputs if item.role is Role.PARAM and item.path not in cut)


def _cuts(plan: Plan, axis: str, least: int) -> dict[int, list[Input]]:
    """The parameters to cut, by the dim to cut them on."""
    found: dict[int, list[Input]] = {}
    pieces = max(mesh.size(axis) for mesh in plan.stages if axis in mesh)
    taken = _taken(plan) if plan.splits else {}
    for item in plan.graph.inputs:
        if item.role is Role.PARAM and item.value.type.elements >= least:
            shape, others = item.value.type.shape, taken.get(item.value.name, set())
            free = [dim for dim, size in enumerate(shape) if size % pieces == 0 and dim not in others]
            if free:
                found.setdefault(max(free, key=lambda dim: shape[dim]), []).append(item)
    return found


def _taken(plan: Plan) -> dict[str, set[int]]:
    """The dims of each parameter that operators' splits have cut already, on any stage."""
    found: dict[str, set[int]] = {}
    for (name, _), entries in propagate(plan).inputs.items():
        dims = {entry.dim for entry in entries.values() if isinstance(entry, Split)}
        found.setdefault(name, set()).update(dims)
    return found
