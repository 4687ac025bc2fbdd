"""Fill in what a plan leaves open: a strategy for every operator on every axis, a stage and a moment for each.

**Layouts.** Operators are visited in order, one axis at a time; axes are independent, but for the digits of a dim: a later
axis takes only what the earlier ones left free. A decided operator does what the
plan says, and so do the parameters it reads, through their transposes. Any other follows what its reads have: among the
strategies of its rule (`capture/rules.py`) take the one with the fewest bytes to move now, then the least work. So a split
travels until an operator needs the whole, a contraction over a split dim leaves a pending sum, and the sum travels through
linear operators only where that is free. With the decisions of Megatron this gives Megatron's collectives, forward and
backward.

**Time.** A time axis (micro-batches) is propagated like any other, with one difference: nothing can be gathered over it while
micro-batches are in flight. Three moments make it work:

- *before*: operators that no parameter and no micro-batch flows into run once, on the whole batch. The number of targets that
  are not ignored is such a value: so a mean stays the mean over the whole batch;
- *during*: operators on a split of the time axis run once per micro-batch;
- *after*: operators on values that are pending over the time axis run once, on the accumulated sums.

An operator that needs the whole of something that depends on parameters (batch statistics, say) cannot be split in time.

**Stages.** Operators placed by the plan stay; a backward operator goes with its forward one; a sum of gradients goes to the
least stage of its terms; anything else to the greatest stage that it reads from, or the least that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sennit.capture.rules import Strategy, carries_pending, decide, is_relabelling, propose, through_view
from sennit.errors import LayoutError, PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Op, Phase, Role
from sennit.ir.layout import Entry, Layout, Pending, Split
from sennit.ir.mesh import Axis, AxisKind, Mesh
from sennit.plan.plan import OpSplit, Plan

__all__ = ["Decisions", "Entries", "Moment", "propagate"]

Entries = Mapping[str, Entry | None]  # axis -> entry


class Moment(Enum):
    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Decisions:
    """A complete plan. `values` gives the entries that each value has where it is made (or comes in)."""

    plan: Plan
    strategies: Mapping[str, Mapping[str, Strategy]]  # operator -> axis -> strategy; absent axes are replicated
    values: Mapping[str, Entries]
    stage: Mapping[str, int]
    moment: Mapping[str, Moment]

    def need(self, op: Op, position: int) -> Entries:
        """What an operator wants of its read at `position`."""
        return {axis: strategy.reads[position] for axis, strategy in self.strategies[op.name].items()}

    def makes(self, op: Op, position: int) -> Entries:
        return {axis: strategy.results[position] for axis, strategy in self.strategies[op.name].items()}


def propagate(plan: Plan) -> Decisions:
    graph = plan.graph
    strategies: dict[str, dict[str, Strategy]] = {op.name: {} for op in graph.ops}
    values: dict[str, dict[str, Entry | None]] = {value.name: {} for value in graph.values()}
    moment = {op.name: Moment.BEFORE for op in graph.ops}
    for axis in _by_freedom(plan):
        if axis.size > 1:
            _AxisPass(plan, axis, strategies, values).run(moment)
    if not any(axis.size > 1 for axis in plan.mesh.time):
        moment = {op.name: Moment.DURING for op in graph.ops}
    return Decisions(plan, strategies, values, _stages(plan), moment)


def _by_freedom(plan: Plan) -> list[Axis]:
    """The axes with the least choice first: in time nothing can be moved, and the batch is cut as the plan says."""
    inputs = {axis for split in plan.inputs for axis in split.axes}
    return sorted(plan.stages[0].axes, key=lambda axis: (axis.kind is not AxisKind.TIME, axis.name not in inputs))


class _AxisPass:
    """The propagation along one axis, after those of the axes with less freedom."""

    def __init__(
        self,
        plan: Plan,
        axis: Axis,
        strategies: dict[str, dict[str, Strategy]],
        values: dict[str, dict[str, Entry | None]],
    ) -> None:
        self.plan, self.axis = plan, axis
        self.strategies, self.values = strategies, values  # of the axes before, and where this one's go
        self.graph = plan.graph
        self.types = plan.graph.types()
        self.is_time = axis.kind is AxisKind.TIME
        producers = self.graph.producers()
        self.decided = {
            split.op: self._fit(producers[split.op], split) for split in plan.splits if split.axis == axis.name
        }
        self.have: dict[str, Entry | None] = {}  # on a time axis: what the value would have if everything were split
        self.whole = (
            _whole(self.graph) if self.is_time else set()
        )  # values that can be had whole before any micro-batch

    def run(self, moment: dict[str, Moment]) -> None:
        self._inputs()
        late: set[str] = set()  # values that exist only after the last micro-batch
        for op in self.graph.ops:
            strategy = self.decided.get(op.name) or self._choose(op)
            for value, entry in zip(op.results, strategy.results, strict=True):
                self.have[value.name] = entry
            if self.is_time:
                now = self._moment(op, strategy, late)
                moment[op.name] = now
                if now is not Moment.DURING:
                    continue  # done once: the time axis does nothing to its reads and results
            self.strategies[op.name][self.axis.name] = strategy
            for value, entry in zip(op.results, strategy.results, strict=True):
                self.values[value.name][self.axis.name] = entry
        if not self.is_time:
            for item in self.graph.inputs:
                self.values[item.value.name][self.axis.name] = self.have[item.value.name]

    def _fit(self, op: Op, split: OpSplit) -> Strategy:
        """What the plan decided. Where an earlier axis has split the dim already, in blocks inside its pieces."""
        strategy = decide(op, self.types, self.axis.size, split.letter, split.chunks)
        if self._fits(op, strategy):
            return strategy
        taken = [
            entry.stride
            for other in self.strategies[op.name].values()
            for entry, mine in zip((*other.reads, *other.results), (*strategy.reads, *strategy.results), strict=True)
            if isinstance(entry, Split) and isinstance(mine, Split) and entry.dim == mine.dim
        ]
        if taken and min(taken) % self.axis.size == 0:
            nested = _with_stride(strategy, min(taken) // self.axis.size)
            if self._fits(op, nested):
                return nested
        raise PlanError(
            f"dim {split.letter!r} has no room for axis {self.axis.name!r} beside the axes that split it already",
            where=op.describe(),
            fix="choose another dim, or a smaller axis",
        )

    def _fits(self, op: Op, strategy: Strategy) -> bool:
        """Whether the digits that this axis would take are free of the other axes', in all that the operator touches."""
        others = self.strategies[op.name]
        shapes = [self.types[name].shape for name in op.reads] + [value.type.shape for value in op.results]
        for position, (shape, entry) in enumerate(zip(shapes, (*strategy.reads, *strategy.results), strict=True)):
            if not isinstance(entry, Split):
                continue
            entries: dict[str, Entry | None] = {
                axis: (*other.reads, *other.results)[position] for axis, other in others.items()
            }
            if not _is_layout(self.plan.stages[0], shape, {**entries, self.axis.name: entry}):
                return False
        return True

    def _moment(self, op: Op, strategy: Strategy, late: set[str]) -> Moment:
        if all(value.name in self.whole for value in op.results):
            return Moment.BEFORE
        if any(isinstance(entry, Pending) for entry in strategy.reads) or any(name in late for name in op.reads):
            late.update(value.name for value in op.results)
            return Moment.AFTER
        return Moment.BEFORE if strategy.is_replicated else Moment.DURING

    def _inputs(self) -> None:
        """Entries of inputs: as the plan splits them, and for parameters as the first decided operator needs them."""
        splits = {split.path: split for split in self.plan.inputs if self.axis.name in split.axes}
        for item in self.graph.inputs:
            split = splits.get(item.path) if item.role is Role.INPUT else None
            self.have[item.value.name] = None
            if split is not None:
                layout = Layout.block(self.plan.mesh, item.value.type.shape, {split.dim: split.axes})
                self.have[item.value.name] = layout.entry(self.axis.name)
        producers = self.graph.producers()
        parameters = {item.value.name for item in self.graph.inputs if item.role is Role.PARAM}
        for op in self.graph.ops:
            strategy = self.decided.get(op.name)
            for name, entry in zip(op.reads, strategy.reads if strategy else (), strict=False):
                root, at_root = self._root(producers, name, entry)
                if root in parameters and self.have[root] is None and isinstance(at_root, Split):
                    entries = {**self.values[root], self.axis.name: at_root}
                    if _is_layout(self.plan.stages[0], self.types[root].shape, entries):
                        self.have[root] = at_root

    def _root(self, producers: Mapping[str, Op], name: str, entry: Entry | None) -> tuple[str, Entry | None]:
        while name in producers and is_relabelling(producers[name]):
            op = producers[name]
            try:
                entry = through_view(op, self.types, self.axis.size, entry)
            except LookupError:
                return name, None
            name = op.reads[0]
        return name, entry

    def _choose(self, op: Op) -> Strategy:
        have = [self.have[name] for name in op.reads]
        size = self.axis.size
        best: tuple[tuple[float, float], Strategy] | None = None
        for strategy in propose(op, self.types, size, have):
            passes = any(
                isinstance(entry, Pending) and entry == need for entry, need in zip(have, strategy.reads, strict=True)
            )
            if passes and not self.is_time and not carries_pending(op, self.types):
                continue
            if not self._fits(op, strategy):
                continue
            moved = sum(self._moved(*read) for read in zip(op.reads, have, strategy.reads, strict=True))
            cost = (moved, _work(op, self.types, strategy, size))
            if moved < float("inf") and (best is None or cost < best[0]):
                best = (cost, strategy)
        if best is None:
            names = [name for name, entry in zip(op.reads, have, strict=True) if entry is not None]
            raise PlanError(
                f"{op.kind} needs the whole of %{names[0]}, which axis {self.axis.name!r} splits in time",
                where=op.describe(),
                fix=f"do not micro-batch this model over {self.axis.name!r}, or keep the operator out of the training step",
            )
        return best[1]

    def _moved(self, name: str, have: Entry | None, need: Entry | None) -> float:
        """Bytes that a device sends to turn one entry into another; infinite where that is impossible."""
        if have == need or (self.is_time and name in self.whole and not isinstance(need, Pending)):
            return 0.0
        size, total = self.axis.size, float(self.types[name].bytes)
        match have, need:
            case (None, _):
                return 0.0
            case _ if self.is_time:
                return float("inf")
            case (Split(), None):
                return total * (size - 1) / size
            case (Split(), Split()):
                return total / size * (size - 1) / size
            case (Pending(), None):
                return 2 * total * (size - 1) / size
            case (Pending(), Split()):
                return total * (size - 1) / size
            case _:
                return float("inf")


def _is_layout(mesh: Mesh, shape: tuple[int, ...], entries: Entries) -> bool:
    """Whether these entries can lie on one array together, evenly."""
    try:
        return Layout.make(mesh, shape, entries).is_even
    except LayoutError:
        return False


def _with_stride(strategy: Strategy, stride: int) -> Strategy:
    def change(entry: Entry | None) -> Entry | None:
        return Split(entry.dim, stride) if isinstance(entry, Split) else entry

    return Strategy(tuple(map(change, strategy.reads)), tuple(map(change, strategy.results)))


def _whole(graph: Graph) -> set[str]:
    """Values that no parameter flows into: they can be computed on the whole batch before the first micro-batch."""
    whole = {item.value.name for item in graph.inputs if item.role is not Role.PARAM}
    for op in graph.ops:
        if all(name in whole for name in op.reads):
            whole.update(value.name for value in op.results)
    return whole


def _work(op: Op, types: Mapping[str, TensorType], strategy: Strategy, size: int) -> float:
    """Bytes touched per device, and those that a pending result will cost to resolve: the measure between strategies that
    move equally much."""
    pairs = [(types[name].bytes, entry) for name, entry in zip(op.reads, strategy.reads, strict=True)]
    pairs += [(value.type.bytes, entry) for value, entry in zip(op.results, strategy.results, strict=True)]
    return sum(total / size if isinstance(entry, Split) else total for total, entry in pairs)


# ---- stages ----------------------------------------------------------------------------------------------------------


def _stages(plan: Plan) -> dict[str, int]:
    numbers = {mesh: number for number, mesh in enumerate(plan.stages)}
    placed = {name: numbers[mesh] for name, mesh in plan.places}
    graph = plan.graph
    if len(numbers) == 1:
        return {op.name: 0 for op in graph.ops}
    producers = graph.producers()
    stage: dict[str, int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            _place_forward(op, placed, producers, stage)
    _place_sources(graph, stage)
    by_seq: dict[int, int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.seq is not None:
            # one autograd node can trace to several operators; its backward belongs with the last of them
            by_seq[op.seq] = max(by_seq.get(op.seq, 0), stage[op.name])
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            terms = [stage[producers[name].name] for name in op.reads if name in producers]
            if op.name in placed:
                stage[op.name] = placed[op.name]
            elif op.seq is None:
                stage[op.name] = min(terms, default=0)
            else:
                stage[op.name] = by_seq.get(op.seq, max(terms, default=0))
    return stage


def _place_forward(op: Op, placed: Mapping[str, int], producers: Mapping[str, Op], stage: dict[str, int]) -> None:
    if op.name in placed:
        stage[op.name] = placed[op.name]
        return
    above = [stage[producers[name].name] for name in op.reads if name in producers and producers[name].name in stage]
    if above:
        stage[op.name] = max(above)


def _place_sources(graph: Graph, stage: dict[str, int]) -> None:
    """Forward operators that read nothing placed go to the least stage that reads them."""
    users: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.reads:
            users.setdefault(name, []).append(op)
    for op in reversed(graph.ops):
        if op.phase is Phase.FORWARD and op.name not in stage:
            below = [
                stage[user.name] for value in op.results for user in users.get(value.name, []) if user.name in stage
            ]
            stage[op.name] = min(below, default=0)
