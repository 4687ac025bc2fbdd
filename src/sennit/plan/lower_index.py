"""Look-ups on the graph of a complete plan that all lanes share while it is lowered.

Stages on equal meshes are one *site*: a value made by one of them is there for the others. A site is named by the first
of its stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sennit.capture.rules import local_kind, localize, through_view
from sennit.errors import PlanError
from sennit.ir.graph import Arg, Graph, Op, Output, OutputKind, Phase, Role
from sennit.ir.layout import Entry, Layout, Pending
from sennit.plan.crossing import Crossing, cross, is_here
from sennit.plan.pattern import Pattern, Task, Work, one_forward_one_backward
from sennit.plan.plan import Plan
from sennit.plan.propagate import Decisions, Entries, Moment
from sennit.plan.propagate_index import is_copy

__all__ = ["LowerIndex", "Placed", "Template", "pattern_of", "weight_work"]


Placed = tuple[tuple[str, Entry], ...]  # entries in the order of a mesh, without those that do nothing


@dataclass(frozen=True, slots=True)
class Template:
    """What every micro-batch of an operator has in common: how it needs its reads and makes its results, and its local
    call.
    """

    reads: tuple[str, ...]
    needs: tuple[Placed, ...]
    layouts: tuple[Layout, ...]
    kind: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]


class LowerIndex:
    def __init__(self, decisions: Decisions) -> None:
        plan = decisions.plan
        graph = plan.graph
        self.decisions, self.plan = decisions, plan
        self.types = graph.types()
        self.producers = graph.producers()
        self.inputs = {item.value.name: item for item in graph.inputs}
        self.lanes = plan.lanes
        self.pattern = pattern_of(plan)
        self.meshes = plan.stages
        self.site_of_stage = tuple(self.meshes.index(mesh) for mesh in self.meshes)
        self.sites = {  # the lanes of each site
            site: tuple(number for number, lane in enumerate(self.lanes) if site in lane.stages)
            for site in dict.fromkeys(self.site_of_stage)
        }
        plain = all(lane.stages == (number,) for number, lane in enumerate(self.lanes))
        self.lane_names = tuple(f"{'stage' if plain else 'lane'}{number}" for number in range(len(self.lanes)))
        self.site = {op.name: self.site_of_stage[decisions.stage[op.name]] for op in graph.ops}
        self.site_of = {value.name: self.site[op.name] for op in graph.ops for value in op.results}
        self.reads = Counter(name for op in graph.ops for name in op.reads)
        self.holders: dict[str, set[int]] = {item.path: set() for item in graph.inputs}  # sites that hold an input
        self.readers: dict[str, dict[int, Entries]] = {}  # value -> site -> how its first reader there needs it
        for op in graph.ops:
            site = self.site[op.name]
            for position, name in enumerate(op.reads):
                self.readers.setdefault(name, {}).setdefault(site, decisions.need(op, position))
                if name in self.inputs:
                    self.holders[self.inputs[name].path].add(site)
        self.shared: dict[tuple[str, int], int] = {}  # an input on a site -> the site that it is taken from
        self._share_homes()
        self._outputs(graph)
        self.cut = self._cut()
        self.weights = (
            weight_work(graph) if any(Work.WEIGHTS in self.pattern.work(s) for s in range(len(self.meshes))) else set()
        )
        self.time = tuple(axis.name for axis in plan.mesh.time)
        # terms of sums over micro-batches that the next operator takes one by one, and sums up what it makes of them
        self.passed_on = {
            name
            for op in graph.ops
            if decisions.moment[op.name] is Moment.DURING
            for position, name in enumerate(op.reads)
            if any(isinstance(decisions.need(op, position).get(axis), Pending) for axis in self.time)
        }
        self.each = {value.name for op in graph.ops if decisions.moment[op.name] is Moment.EACH for value in op.results}
        self._crossings: dict[tuple[object, ...], Crossing] = {}
        self._layouts: dict[tuple[int, tuple[int, ...], Placed], Layout] = {}
        self._templates: dict[str, Template] = {}

    def placed(self, need: Entries, site: int) -> Placed:
        """The entries that a site has, in the order of its mesh."""
        return tuple((axis, entry) for axis in self.meshes[site].names if (entry := need.get(axis)) is not None)

    def layout(self, shape: tuple[int, ...], entries: Placed, site: int) -> Layout:
        """A layout on a site; the same one for the same entries."""
        key = (site, shape, entries)
        if key not in self._layouts:
            self._layouts[key] = Layout(self.meshes[site], shape, entries)
        return self._layouts[key]

    def template(self, op: Op) -> Template:
        if op.name not in self._templates:
            self._templates[op.name] = self._template(op)
        return self._templates[op.name]

    def _template(self, op: Op) -> Template:
        site, reads = self.site[op.name], op.reads
        needs = [self.decisions.need(op, i) for i in range(len(reads))]
        makes = [self.decisions.makes(op, i) for i in range(len(op.results))]
        if self.plan.reduce_early and is_copy(op) and op.name in self.early and reads[0] in self.early:
            needs, makes = [self.early[reads[0]]], [self.early[op.name]]
        layouts = tuple(
            self.layout(value.type.shape, self.placed(made, site), site)
            for value, made in zip(op.results, makes, strict=True)
        )
        args, kwargs = localize(op, [layout.local_shape() for layout in layouts])
        kind = local_kind(op, tuple(self.decisions.strategies[op.name].values()))
        return Template(reads, tuple(self.placed(need, site) for need in needs), layouts, kind, args, kwargs)

    def _share_homes(self) -> None:
        """A device holds a parameter once.

        Where two sites that share lanes read it, the one with more devices is its home, and the other takes its pieces
        from there.
        """
        for item in self.plan.graph.inputs:
            sites = self.holders[item.path]
            if item.role not in (Role.PARAM, Role.BUFFER) or len(sites) < 2:
                continue
            homes: list[int] = []
            for site in sorted(sites, key=lambda site: (-len(self.meshes[site].devices), site)):
                shared = [home for home in homes if set(self.sites[home]) & set(self.sites[site])]
                if not shared:
                    homes.append(site)
                    continue
                layouts = [
                    Layout.make(mesh, item.value.type.shape, {a: e for a, e in entries.items() if a in mesh})
                    for mesh, entries in ((self.meshes[at], self.home(item.value.name, at)) for at in (shared[0], site))
                ]
                if len(shared) > 1 or not is_here(*layouts):
                    raise PlanError(
                        f"{item.role.value} {item.path!r} is read on {self.meshes[shared[0]]} as {layouts[0]} and on "
                        f"{self.meshes[site]} as {layouts[1]}, which share devices",
                        fix="place its readers on one mesh, or on meshes of different devices",
                    )
                self.shared[item.value.name, site] = shared[0]
            self.holders[item.path] = set(homes)

    def _outputs(self, graph: Graph) -> None:
        by_path = {item.path: item.value.name for item in graph.inputs}
        # value -> outputs, and the layout they come in on each site that returns them
        self.outputs: dict[str, list[tuple[Output, Mapping[int, Entries]]]] = {}
        self.early: dict[str, Entries] = {}  # what only a gradient is made of -> how it lies in the parameter's pieces
        for output in graph.outputs:
            wanted: dict[int, Entries]
            if output.kind in (OutputKind.GRADIENT, OutputKind.BUFFER) and self.holders.get(output.path):
                name = by_path[output.path]
                wanted = {site: self.home(name, site) for site in sorted(self.holders[output.path])}
                for site, need in wanted.items():
                    self.readers.setdefault(output.name, {}).setdefault(site, need)
                self._note_early(output, wanted)
            else:
                wanted = {self.site[self.producers[output.name].name]: {}}
            self.outputs.setdefault(output.name, []).append((output, wanted))

    def home(self, name: str, site: int) -> Entries:
        """The entries of an input on a site."""
        stages = (stage for stage, where in enumerate(self.site_of_stage) if where == site)
        return next(self.decisions.inputs[name, stage] for stage in stages if (name, stage) in self.decisions.inputs)

    def _note_early(self, output: Output, wanted: Mapping[int, Entries]) -> None:
        """How a gradient lies in its parameter's pieces, back through views and casts of what is a sum over
        micro-batches.
        """
        site = self.site[self.producers[output.name].name]
        name, need = output.name, wanted.get(site)
        while need is not None:
            self.early.setdefault(name, need)
            op = self.producers.get(name)
            if op is None or not is_copy(op) or self.site[op.name] != site or self.reads[op.reads[0]] > 1:
                return
            mesh = self.meshes[site]
            try:
                need = {
                    axis: through_view(op, self.types, mesh.size(axis), need[axis]) for axis in need if axis in mesh
                }
            except LookupError:
                return
            name = op.reads[0]

    def _cut(self) -> frozenset[str]:
        """Parameters that the plan cuts where they live, and what is only a view or a cast of them."""
        paths = {split.path for split in self.plan.inputs}
        found = {item.value.name for item in self.plan.graph.inputs if item.role is Role.PARAM and item.path in paths}
        for op in self.plan.graph.ops if found else ():
            if is_copy(op) and op.reads[0] in found:
                found.update(value.name for value in op.results)
        return frozenset(found)

    def ops_of(self, ops: list[Op], task: Task) -> list[Op]:
        """Those of a stage's operators that a task runs."""
        match task.work:
            case Work.FORWARD:
                return [op for op in ops if op.phase is Phase.FORWARD]
            case Work.BACKWARD if Work.WEIGHTS in self.pattern.work(task.stage):
                return [op for op in ops if op.phase is Phase.BACKWARD and op.name not in self.weights]
            case Work.BACKWARD:
                return [op for op in ops if op.phase is Phase.BACKWARD]
            case Work.WEIGHTS:
                return [op for op in ops if op.name in self.weights]

    def crossing(self, source: Layout, origin: int, need: Layout, to: int) -> Crossing:
        """How values under `source` on one site get to `need` on another."""
        key = (origin, to, source.shape, source.entries, need.entries)
        if key not in self._crossings:
            alone = len(self.sites[origin]) == len(self.sites[to]) == 1 and self.sites[origin] != self.sites[to]
            listed = alone and all(
                self.meshes[site].devices == self.lanes[self.sites[site][0]].devices for site in (origin, to)
            )
            self._crossings[key] = cross(source, need, pairwise=listed)
        return self._crossings[key]


def pattern_of(plan: Plan) -> Pattern:
    """The plan's pattern.

    Left out: 1F1B where each lane is a stage; else all micro-batches forward, then all backward.
    """
    if plan.pattern is not None:
        return plan.pattern
    lanes = plan.lanes
    if all(lane.stages == (number,) for number, lane in enumerate(lanes)):
        return one_forward_one_backward(len(lanes), plan.microbatches)
    rows: list[tuple[Task, ...]] = []
    for lane in lanes:
        row = [Task(Work.FORWARD, m, stage) for m in range(plan.microbatches) for stage in lane.stages]
        row += [Task(Work.BACKWARD, m, stage) for m in range(plan.microbatches) for stage in reversed(lane.stages)]
        rows.append(tuple(row))
    return Pattern(tuple(rows))


def weight_work(graph: Graph) -> set[str]:
    """The backward operators that nothing but the gradient of one parameter waits for.

    Backwards over the operators: which outputs each one leads to. The product that makes a weight's gradient leads to
    that one; the product that makes an input's gradient leads to those of all modules before.
    """
    several = "several"  # all that counts beyond one, and a set a model long would be slow to carry
    leads: dict[str, set[str]] = {}
    for output in graph.outputs:
        # the new values of a parameter and of its optimizer's state (`plan/update.py`) wait for its gradient
        is_late = output.kind in (OutputKind.GRADIENT, OutputKind.BUFFER)
        key = output.path.partition("@")[0] if is_late else several
        leads.setdefault(output.name, set()).add(key)
    found: set[str] = set()
    for op in reversed(graph.ops):
        outputs = set().union(*(leads.get(value.name, set()) for value in op.results))
        if len(outputs) > 1:
            outputs = {several}
        for name in op.reads:
            leads.setdefault(name, set()).update(outputs)
        if op.phase is Phase.BACKWARD and outputs and several not in outputs:
            found.add(op.name)
    return found
