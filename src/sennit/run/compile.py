"""From a model without values to a verified program: the pipeline as `parallelize` runs it, on every rank alike.

    capture -> keep the wanted outputs -> plan -> propagate -> lower -> verify -> attention as kernels -> check

`Recipe` is what the user decided; with a model, its mode and a sample it determines the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sennit.capture import Captured, Signature, capture_call
from sennit.capture.rules.certify import Certifier
from sennit.errors import PlanError
from sennit.ir.graph import Graph, OutputKind, Role
from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.ir.program_check import check_program
from sennit.kernels import fuse_attention
from sennit.plan import Decisions, Plan, lower, propagate
from sennit.plan.verify import verify

__all__ = ["Compiled", "Planner", "Recipe", "at_once", "compile_call", "keep_outputs"]

Planner = Callable[[Graph, Mesh], Plan]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to compile a model: the plan and the mesh; which results a training step returns beside its losses (None:
    none, evaluation returns all); the type that autocast computes in; what executes the rules that the proof relies on
    (None: they are taken at their word); whether attention runs as torch's kernels (`kernels/attention.py`) or as it
    was captured.
    """

    planner: Planner
    mesh: Mesh
    results: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    certifier: Certifier | None = None
    fused_attention: bool = True


@dataclass(frozen=True, slots=True)
class Compiled:
    """What each stage made, and the seconds it took."""

    signature: Signature
    constants: Mapping[str, Tensor]  # tensors that the model's code makes from numbers, by path
    graph: Graph
    plan: Plan
    decisions: Decisions
    program: Program
    seconds: Mapping[str, float]


def compile_call(
    recipe: Recipe,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device_type: str,
    *,
    training: bool,
) -> Compiled:
    """The program of `model(*args, **kwargs)`: with gradients where `training`, else forward alone."""
    clock = _Clock()
    with torch.autocast(device_type, recipe.autocast) if recipe.autocast is not None else nullcontext():
        captured: Captured = capture_call(model, args, dict(kwargs), training=training)
    graph = captured.graph
    if training:
        graph = keep_outputs(graph, recipe.results)
    clock.lap("capture")
    plan = recipe.planner(graph, recipe.mesh if training else at_once(recipe.mesh))
    decisions = propagate(plan)
    program = lower(decisions)
    clock.lap("plan")
    # the plan's own graph: rewrites and recomputation change operators
    verify(program, plan.graph, certifier=recipe.certifier)
    if recipe.fused_attention:
        program = fuse_attention(program, device_type)
        check_program(program)
    clock.lap("verify")
    return Compiled(captured.signature, captured.constants, plan.graph, plan, decisions, program, clock.laps)


def at_once(mesh: Mesh) -> Mesh:
    """The mesh with one pass: evaluation keeps no activations for a backward pass, and its results are of the whole
    batch.
    """
    return Mesh.make({axis.name: axis.size for axis in mesh.space}, {axis.name: 1 for axis in mesh.time}, mesh.devices)


def keep_outputs(graph: Graph, results: Sequence[str]) -> Graph:
    """The graph without the results that nobody wants, and without the operators that only they need."""
    known = [output.path for output in graph.outputs if output.kind is OutputKind.RESULT]
    unknown = [path for path in results if path not in known]
    if unknown:
        raise PlanError(
            f"the model returns no {unknown[0]!r}",
            where=f"graph {graph.name!r}",
            fix=f"beside the loss it returns {', '.join(known) or 'nothing'}",
        )
    outputs = tuple(
        output for output in graph.outputs if output.kind is not OutputKind.RESULT or output.path in results
    )
    needed = {output.name for output in outputs}
    kept = []
    for op in reversed(graph.ops):
        if any(value.name in needed for value in op.results):
            kept.append(op)
            needed.update(op.reads)
    inputs = tuple(item for item in graph.inputs if item.value.name in needed or item.role is Role.INPUT)
    return replace(graph, inputs=inputs, ops=tuple(reversed(kept)), outputs=outputs)


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now
