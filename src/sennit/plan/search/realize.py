"""From a choice to the plan that it means, on the deep graph: for the compiler, the simulator and the ranks.

`planner_of(choice)` is a function from a graph and a mesh to a `Plan`, like those of the zoo, and `mesh_of(choice)` the
mesh that it is for: `pp`, `dp` and the axes of the way, with micro-batches as the time axis. Whatever a search returns
can be lowered; each decision is one step here:

| decision | step |
|---|---|
| `way` | `split_as`: operators over `tp`, `cp`, `ep`, inputs over `dp` and time |
| `stages`, `schedule` | `place` and `order`: runs of units on the lanes of a known pattern |
| `lanes` | each lane a mesh of its own, with as many replicas; micro-batches are cut before they are shared among replicas |
| `interlaced` | embeddings and heads on all lanes, cut on the vocabulary over `pp` too; the order by the modulo scheduler |
| `several-forward` | each pass of a run a stage of its own, on the run's lane; the order by the modulo scheduler |
| `co` of a unit | `co_shard` on the branches of the unit: each piece is computed again before its backward |
| `keep` of a unit | `recompute`: what the backward of a unit computes again; of a unit in pieces, what is not in pieces |
| `zero` | `zoo.sharded`: parameters live in pieces over `dp` |

Operators outside of units (embeddings, norms between and behind units, the loss) follow their neighbours, as
`propagate` says, where the choice has them on a neighbour's stage; where they begin a stage or fill one, they are
placed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, Phase, Role
from sennit.ir.mesh import Mesh
from sennit.plan.co_shard import Cut, co_shard
from sennit.plan.pattern import Pattern
from sennit.plan.plan import Plan, order, place, transform
from sennit.plan.recompute import recompute
from sennit.plan.scheduled import problem_of, scheduled
from sennit.plan.schedules import pass_after_pass
from sennit.plan.search.choice import Choice, Kind, Part
from sennit.plan.search.config import INTERLACED_SPARE, pattern_of
from sennit.plan.search.shallow import Shallow, shallow
from sennit.plan.search.ways import Keep, computed_again, embeddings, heads, split_as
from sennit.plan.zoo.find import pairs_of_products
from sennit.plan.zoo.zero import sharded

__all__ = ["mesh_of", "planner_of"]


def mesh_of(choice: Choice) -> Mesh:
    way = choice.way
    sizes = {"pp": choice.pp, "dp": choice.dp, "ep": way.ep, "cp": way.cp, "tp": way.tp}
    if choice.lanes:  # all of them; each lane has a part, with an axis dp of its own
        sizes = {"replica": sum(choice.lanes), "tp": way.tp}
    space = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    return Mesh.make(space, {"mb": choice.microbatches} if choice.microbatches > 1 else None)


def planner_of(choice: Choice) -> Callable[[Graph, Mesh], Plan]:
    """The planner of a choice."""

    def planner(graph: Graph, mesh: Mesh) -> Plan:
        units = _Units(choice, graph)
        interlaced = choice.pp > 1 and choice.kind is Kind.INTERLACED
        way = replace(choice.way, vocabulary=True) if interlaced else choice.way
        plan = replace(split_as(way, graph, mesh), name=choice.title)
        if choice.pp > 1:
            plan = _placed(plan, choice, units)
        plan = _in_pieces(plan, units)
        if choice.pp > 1:
            plan = order(plan, _pattern(plan, choice, units))
        return sharded(plan, level=choice.zero) if choice.zero else plan

    return planner


# ---- units -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit of the deep model: its module, its stage, and what was chosen for it."""

    module: str
    stage: int
    part: Part


class _Units:
    """The units of a choice on a deep graph, and which operator is in which."""

    def __init__(self, choice: Choice, graph: Graph) -> None:
        self.choice, self.graph = choice, graph
        self.model: Shallow = shallow(graph)
        self.all = tuple(self._read())
        self.by_module = {unit.module: number for number, unit in enumerate(self.all)}

    def _read(self) -> Iterator[_Unit]:
        items = {item.name: item for item in self.model.items}
        taken: dict[str, int] = {}
        for stage, parts in enumerate(self.choice.stages):
            for part in parts:
                item = items.get(part.item)
                if item is None:
                    raise PlanError(
                        f"the plan names {part.item!r}, which graph {self.graph.name!r} has not",
                        fix="use the plan with the model that it was searched for",
                    )
                begin = taken.get(part.item, 0)
                taken[part.item] = begin + part.units
                for module in item.modules[begin : begin + part.units]:
                    yield _Unit(module, stage, part)

    def of(self, op: Op) -> int | None:
        """The number of the unit that an operator is in."""
        path = op.module
        while path:
            if path in self.by_module:
                return self.by_module[path]
            path = path.rpartition(".")[0]
        return None

    def inside(self, graph: Graph) -> dict[str, int]:
        """The unit of each forward operator of a graph that is in one."""
        found = ((op.name, self.of(op)) for op in graph.ops if op.phase is Phase.FORWARD)
        return {name: number for name, number in found if number is not None}

    @cached_property
    def outside(self) -> dict[str, int]:
        """The stage of the operators that lie outside of units, where no neighbour would take them to it.

        Sources (masks, positions) always follow their readers.
        """
        stages: dict[str, int] = {}  # of items outside of units
        items = [item.name for item in self.model.items]
        lone: set[str] = set()
        for number, parts in enumerate(self.choice.stages):
            for place_, part in enumerate(parts):
                if part.item in items and not self.model.items[items.index(part.item)].modules:
                    stages[part.item] = number
                    first = items.index(part.item) == 0
                    behind = place_ > 0 and not first
                    before = first and place_ + 1 < len(parts)
                    if not (behind or before):
                        lone.add(part.item)
        fed = _fed_by_parameters(self.model.graph)
        return {
            name: stages[items[item]]
            for name, item in self.model.item_of.items()
            if items[item] in lone and name in fed
        }


def _fed_by_parameters(graph: Graph) -> set[str]:
    """The forward operators that parameters flow into."""
    values = {item.value.name for item in graph.inputs if item.role is Role.PARAM}
    found: set[str] = set()
    for op in graph.ops:
        if op.phase is Phase.FORWARD and any(name in values for name in op.reads):
            found.add(op.name)
            values.update(value.name for value in op.results)
    return found


# ---- stages and order ------------------------------------------------------------------------------------------------


def _placed(plan: Plan, choice: Choice, units: _Units) -> Plan:
    inside = units.inside(plan.graph)
    if choice.kind is Kind.INTERLACED:
        return _interlaced(plan, choice, units, inside)
    if _passes(plan.graph, inside) > 1:
        return _recycled(plan, choice, units, inside)
    pattern = pattern_of(choice.kind, choice.pp, choice.microbatches, choice.chunks)
    if pattern is None:
        raise PlanError(
            f"there is no schedule {choice.kind.value} of {choice.pp} lanes and {choice.microbatches} micro-batches",
            where=f"plan {choice.title!r}",
            fix="search for a plan with these numbers",
        )
    lane_of = {stage: lane for lane, stages in enumerate(pattern.stages) for stage in stages}
    parts = _parts(plan.mesh, choice)
    mine: list[list[Op]] = [[] for _ in choice.stages]
    for op in plan.graph.ops:
        if op.name in inside:
            mine[units.all[inside[op.name]].stage].append(op)
        elif op.name in units.outside:
            mine[units.outside[op.name]].append(op)
    for stage, ops in enumerate(mine):
        plan = place(plan, ops, parts[lane_of[stage]], stage)
    if choice.lanes:
        # time first: so a micro-batch has the same samples on every lane, however many replicas share them
        axes = (*(axis.name for axis in plan.mesh.time), "dp")
        plan = replace(plan, inputs=tuple(replace(split, axes=axes) for split in plan.inputs))
    return plan


def _parts(mesh: Mesh, choice: Choice) -> tuple[Mesh, ...]:
    """The mesh of each lane."""
    if not choice.lanes:
        return tuple(mesh.at(pp=lane) for lane in range(choice.pp))
    time, found, first = {axis.name: axis.size for axis in mesh.time}, list[Mesh](), 0
    for replicas in choice.lanes:
        space = {name: size for name, size in (("dp", replicas), ("tp", choice.way.tp)) if size > 1 or name == "dp"}
        count = replicas * choice.way.tp
        found.append(Mesh.make(space, time, mesh.devices[first : first + count]))
        first += count
    return tuple(found)


def _interlaced(plan: Plan, choice: Choice, units: _Units, inside: Mapping[str, int]) -> Plan:
    """Stage 0 and the last on all lanes: embeddings and heads, on the vocabulary."""
    graph, mesh, last = plan.graph, plan.mesh, len(choice.stages) - 1
    tables, products = embeddings(graph), heads(graph)
    if not tables or not products:
        raise PlanError(f"graph {graph.name!r} has no vocabulary to interlace", fix="pin another schedule")
    plan = place(plan, tables, mesh, 0)
    for stage in range(1, last):
        ops = [op for op in graph.ops if op.name in inside and units.all[inside[op.name]].stage == stage]
        plan = place(plan, ops, mesh.at(pp=stage - 1), stage)
    plan = place(plan, products, mesh, last)
    plan = transform(plan, tables, dim="v", axis="pp")
    return transform(plan, products, dim="n", axis="pp")


def _recycled(plan: Plan, choice: Choice, units: _Units, inside: Mapping[str, int]) -> Plan:
    """Pass r of the run on lane i is stage r S + i."""
    graph, lanes = plan.graph, choice.pp
    mine: list[list[Op]] = [[] for _ in range(_passes(graph, inside) * lanes)]
    for op in graph.ops:
        if op.name in inside:
            mine[op.call * lanes + units.all[inside[op.name]].stage].append(op)
    for stage, ops in enumerate(mine):
        plan = place(plan, ops, plan.mesh.at(pp=stage % lanes), stage)
    return plan


def _passes(graph: Graph, inside: Mapping[str, int]) -> int:
    return 1 + max((op.call for op in graph.ops if op.name in inside), default=0)


def _pattern(plan: Plan, choice: Choice, units: _Units) -> Pattern:
    match choice.kind:
        case Kind.INTERLACED:
            return scheduled(plan, in_flight=choice.pp + INTERLACED_SPARE)
        case Kind.SEVERAL_FORWARD:
            return scheduled(plan, in_flight=inf)
    passes = _passes(plan.graph, units.inside(plan.graph))
    if choice.kind is Kind.ONE_F_ONE_B and passes > 1:
        return pass_after_pass(choice.pp, choice.microbatches, passes, trained=problem_of(plan).trained)
    pattern = pattern_of(choice.kind, choice.pp, choice.microbatches, choice.chunks)
    assert pattern is not None, "stages were placed by it"
    return pattern


# ---- pieces, and what is computed again ------------------------------------------------------------------------------


def _in_pieces(plan: Plan, units: _Units) -> Plan:
    """Co-shard by unit, then recomputation by unit.

    What units in pieces compute again of their pieces, `co_shard` has said; of the rest, what does not need the pieces:
    the sums that close branches are kept.
    """
    before = {op.name for op in plan.graph.ops}
    factors = sorted({unit.part.pieces for unit in units.all} - {1})
    if factors:
        pairs, inside = pairs_of_products(plan.graph), units.inside(plan.graph)
        for pieces in factors:
            here = {op.name: op for op in plan.graph.ops}

            def mine(ops: tuple[Op, ...], pieces: int = pieces, here: Mapping[str, Op] = here) -> tuple[Op, ...]:
                chosen = [op for op in ops if op.name in inside and units.all[inside[op.name]].part.pieces == pieces]
                return tuple(here[op.name] for op in chosen)

            cuts = [Cut(mine(columns), "n", chunks) for chunks, columns in pairs.by_chunks().items()]
            cuts = [cut for cut in (*cuts, Cut(mine(pairs.rows), "k")) if cut.ops]
            plan = co_shard(plan, cuts, pieces) if cuts else plan
    keeps = {number: unit.part.keep for number, unit in enumerate(units.all) if unit.part.keep is not Keep.ALL}
    if not keeps:
        return plan
    of_pieces = {op.name for op in plan.graph.ops if op.name not in before}
    kept = {op.name for op in plan.graph.ops if op.name in of_pieces or any(name in of_pieces for name in op.reads)}
    return recompute(plan, computed_again(plan.graph, units.inside(plan.graph), keeps, kept))
