"""From a choice to the plan that it means, on the deep graph: for the compiler, the simulator and the ranks.

`planner_of(choice)` is a function from a graph and a mesh to a `Plan`, like those of the zoo, and `mesh_of(choice)` the mesh that it is for: `pp`, `dp` and the axes
of the way, with micro-batches as the time axis. Stages, the order and what each unit keeps are those of the choice.

Not every choice can be lowered today: one that shares state among replicas (`zero`), runs units in pieces (`co`) or is interlaced is estimated only, and
`planner_of` refuses it. `LOWERED` is the space without those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, Phase
from sennit.ir.mesh import Mesh
from sennit.plan.plan import Plan, order, place
from sennit.plan.recompute import recompute
from sennit.plan.search.choice import Choice, Kind, Part
from sennit.plan.search.config import pattern_of
from sennit.plan.search.search import Space
from sennit.plan.search.shallow import shallow
from sennit.plan.search.ways import Keep, split_as
from sennit.plan.zoo.find import weights_of

__all__ = ["lowered_space", "mesh_of", "planner_of"]


def lowered_space(space: Space | None = None) -> Space:
    """The part of a space whose plans can be lowered and run."""
    return replace(space or Space(), zeros=(0,), pieces=(1,), interlaced=False)


def mesh_of(choice: Choice) -> Mesh:
    way = choice.way
    sizes = {"pp": choice.pp, "dp": choice.dp, "ep": way.ep, "cp": way.cp, "tp": way.tp}
    space = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    return Mesh.make(space, {"mb": choice.microbatches} if choice.microbatches > 1 else None)


def planner_of(choice: Choice) -> Callable[[Graph, Mesh], Plan]:
    """The planner of a choice. Raises where it cannot be lowered."""
    if (
        choice.zero
        or choice.kind is Kind.INTERLACED
        or any(part.pieces > 1 for stage in choice.stages for part in stage)
    ):
        raise PlanError(
            f"the plan {choice.title!r} shares state among replicas, runs units in pieces or is interlaced, which is estimated here and not lowered",
            fix="search with lowered_space(), or pin zero = 0 and co = 1",
        )

    def planner(graph: Graph, mesh: Mesh) -> Plan:
        plan = split_as(choice.way, graph, mesh)
        units = list(_units(choice, graph))
        if choice.pp > 1:
            plan = _placed(plan, choice, units)
        for _, part, modules in units:
            if part.keep is not Keep.ALL:
                plan = recompute(plan, tuple(_again(plan.graph, modules, part.keep)))
        return plan

    return planner


def _units(choice: Choice, graph: Graph) -> Iterator[tuple[int, Part, tuple[str, ...]]]:
    """The units of the deep graph in order: the stage of each, its part, and its modules."""
    items = {item.name: item for item in shallow(graph).items}
    taken: dict[str, int] = {}
    for stage, parts in enumerate(choice.stages):
        for part in parts:
            item = items.get(part.item)
            if item is None:
                raise PlanError(
                    f"the plan names {part.item!r}, which graph {graph.name!r} has not",
                    fix="use the plan with the model that it was searched for",
                )
            if not item.modules:
                continue
            for _ in range(part.units):
                begin = taken.get(part.item, 0)
                taken[part.item] = begin + 1
                yield stage, part, item.modules[begin : begin + 1]


def _placed(plan: Plan, choice: Choice, units: list[tuple[int, Part, tuple[str, ...]]]) -> Plan:
    pattern = pattern_of(choice.kind, choice.pp, choice.microbatches, choice.chunks)
    assert pattern is not None, "an estimate has a schedule"
    lane_of = {stage: lane for lane, stages in enumerate(pattern.stages) for stage in stages}
    for stage in range(len(choice.stages)):
        globs = [f"{module}|{module}.*" for own, _, modules in units if own == stage for module in modules]
        ops = plan.graph.select("|".join(globs), phase=Phase.FORWARD)
        plan = place(plan, ops, plan.mesh.at(pp=lane_of[stage]), stage)
    return order(plan, pattern)


def _again(graph: Graph, modules: tuple[str, ...], keep: Keep) -> Iterator[Op]:
    """The forward operators of a unit that its backward computes again: none that another unit reads, none of the products kept."""

    def inside(op: Op) -> bool:
        return any(op.module == module or op.module.startswith(f"{module}.") for module in modules)

    leaves = {name for op in graph.ops if op.phase is Phase.FORWARD and not inside(op) for name in op.reads}
    weights = weights_of(graph) if keep is Keep.PRODUCTS else set()
    for op in graph.ops:
        if op.phase is not Phase.FORWARD or not inside(op) or any(value.name in leaves for value in op.results):
            continue
        products = ("aten.mm.default", "aten.addmm.default", "aten.convolution.default")
        if not (op.kind in products and any(name in weights for name in op.reads)):
            yield op
