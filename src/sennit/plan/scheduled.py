"""An order for any plan: what its stages do and read, as a problem for the modulo scheduler.

From the graph: which stages have a backward part; which reads from which; how long each part takes, as flops over the
devices of the stage (only ratios matter). The scheduler (`plan/modulo.py`) then overlaps micro-batches, also where
stages are unequal, share devices, or lie on all of them. Lists only, no solver: every rank plans the same.
"""

from __future__ import annotations

from math import inf

from sennit.ir.graph import Phase
from sennit.plan.flops import flops_of
from sennit.plan.grid import Durations, Held
from sennit.plan.lower_index import weight_work
from sennit.plan.modulo import Problem, schedule
from sennit.plan.pattern import Pattern
from sennit.plan.plan import Plan
from sennit.plan.propagate import stages_of

__all__ = ["problem_of", "scheduled"]


def scheduled(plan: Plan, *, in_flight: float = inf, split: bool = False) -> Pattern:
    """A pattern for the plan.

    `in_flight` caps the micro-batches of trained stages that a lane holds; `split` schedules the gradients of weights
    apart.
    """
    return schedule(problem_of(plan, in_flight=in_flight, split=split), solver=False).pattern(plan.microbatches)


def problem_of(plan: Plan, *, in_flight: float = inf, split: bool = False) -> Problem:
    """The stages of a plan as a problem.

    A stage on all lanes holds nothing: its activations are those that the others send it.
    """
    graph, meshes, lanes = plan.graph, plan.stages, plan.lanes
    stage, types, producers = stages_of(plan), graph.types(), graph.producers()
    weights = weight_work(graph)
    forward, backward, apart = ([0.0] * len(meshes) for _ in range(3))
    edges: set[tuple[int, int]] = set()
    trained = [False] * len(meshes)
    for op in graph.ops:
        here = stage[op.name]
        work = flops_of(op, types) / len(meshes[here].devices)
        if op.phase is Phase.FORWARD:
            forward[here] += work
            above = {stage[producers[name].name] for name in op.reads if name in producers}
            edges.update((other, here) for other in above if other != here)
        else:
            trained[here] = True
            (apart if op.name in weights else backward)[here] += work
    on = [tuple(number for number, lane in enumerate(lanes) if here in lane.stages) for here in range(len(meshes))]
    scale = max(forward) or 1.0
    return Problem(
        lanes=tuple(on),
        durations=tuple(
            Durations(*(max(part / scale, 1e-6) for part in parts))
            for parts in zip(forward, backward, apart, strict=True)
        ),
        edges=tuple(sorted(edges)),
        trained=tuple(trained),
        held=tuple(Held() if len(own) == 1 or len(lanes) == 1 else Held(0.0, 0.0) for own in on),
        caps=(in_flight,) * len(lanes),
        split=split,
    )
