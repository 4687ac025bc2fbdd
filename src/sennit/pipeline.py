"""The whole way, as consecutive calls. Read this file first.

    nn.Module ── capture ──► Graph ── plan ──► Plan ── propagate ──► Decisions ── lower ──► Program ── simulate ──► Timeline
                                                                                       │
                                                                                      run (threads, or gloo processes)

Data flows one way. Each arrow is a pure function of frozen values, and every value is kept: to look at, to save, to
compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sennit.capture import Model, capture
from sennit.capture.rules.certify import Certifier
from sennit.cluster import Cluster
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.ir.timeline import Timeline
from sennit.kernels import in_buckets
from sennit.plan import Decisions, Plan, lower, propagate
from sennit.plan.verify import verify
from sennit.sim import simulate

__all__ = ["Compilation", "Planner", "compile_graph", "compile_model"]

Planner = Callable[[Graph, Mesh], Plan]


@dataclass(frozen=True, slots=True)
class Compilation:
    """What each stage of the pipeline made."""

    graph: Graph
    plan: Plan
    decisions: Decisions
    program: Program
    timeline: Timeline


def compile_model(
    model: Model,
    sample: tuple[Any, ...],
    planner: Planner,
    mesh: Mesh,
    cluster: Cluster,
    certifier: Certifier | None = None,
) -> Compilation:
    """From an unmodified model, whose result is the loss, to a verified program and how it will run."""
    graph = capture(model, sample)
    return compile_graph(graph, planner, mesh, cluster, certifier)


def compile_graph(
    graph: Graph, planner: Planner, mesh: Mesh, cluster: Cluster, certifier: Certifier | None = None
) -> Compilation:
    """The same, from a captured graph: several plans of one model share it.

    A `certifier` executes every rule that the proof relies on, once.
    """
    cluster.require(len(mesh.devices), f"mesh {mesh}")
    plan = planner(graph, mesh)
    decisions = propagate(plan)
    program = lower(decisions)
    # the plan's own graph: rewrites and recomputation change operators
    verify(program, plan.graph, certifier=certifier)
    timeline = simulate(in_buckets(program), cluster)  # as ranks send it
    return Compilation(graph, plan, decisions, program, timeline)
