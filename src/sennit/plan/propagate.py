"""Fill in what a plan leaves open: a strategy for every operator on every axis, a stage and a moment for each.

**Layouts.** Operators are visited in order, one axis at a time; axes are independent, but for the digits of a dim: a later
axis takes only what the earlier ones left free. A decided operator does what the
plan says, and so do the parameters it reads, through their transposes. Any other follows what its reads have: among the
strategies of its rule (`capture/rules.py`) take the one with the fewest bytes to move now, then the least work. So a split
travels until an operator needs the whole, a contraction over a split dim leaves a pending sum, and the sum travels through
linear operators only where that is free. Three rules make the decisions of Megatron give Megatron's collectives, forward and
backward:

- *join*: a pending sum passes only through operators that move values, scale them, or add sums that are all pending
  (`Letters.carries`); anything else resolves it. Where autograd adds the gradients of several readers, a whole one joins as a part;
- *hoist*: a redistribution sits at the root of a chain of views and serves all of them (`plan/lower.py`);
- *mirror*: a product of the backward pass is split as the forward product that it is a derivative of. With y = x w and letters m, k, n:
  dx = g w' sums over n, dw = x' g sums over m, so each letter of the forward product names one of the backward product. By
  bytes alone it might be cheaper to gather a weight than a gradient, once; but then its derivative is in the wrong place.

**Sources.** Operators that read nothing but the seed (positions, masks made of them, random numbers, fills) can be made in any piece,
and so can what is made of whole inputs (the one-hot rows of targets). They are decided last, backwards: split as all their
readers want them, whole where readers differ, since a slice is free.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from sennit.capture.rules import (
    Letters,
    RuleBook,
    Source,
    Strategy,
    carries_pending,
    decide,
    is_relabelling,
    making,
    propose,
    split_on,
    through_view,
)
from sennit.errors import LayoutError, PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Op, OutputKind, Phase, Role
from sennit.ir.layout import Entry, Layout, Pending, Reduction, Split
from sennit.ir.mesh import Axis, AxisKind
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


def propagate(plan: Plan, sources: Sequence[Source] = ()) -> Decisions:
    """Decide what the plan leaves open. `sources` give rules for operators that neither users nor our table know."""
    graph = plan.graph
    strategies: dict[str, dict[str, Strategy]] = {op.name: {} for op in graph.ops}
    values: dict[str, dict[str, Entry | None]] = {value.name: {} for value in graph.values()}
    moment = {op.name: Moment.BEFORE for op in graph.ops}
    index = _Index(plan, RuleBook(graph.types(), sources))
    for axis in _by_freedom(plan):
        if axis.size > 1:
            _AxisPass(index, axis, strategies, values).run(moment)
    if not any(axis.size > 1 for axis in plan.mesh.time):
        moment = {op.name: Moment.DURING for op in graph.ops}
    return Decisions(plan, strategies, values, _stages(plan), moment)


def _by_freedom(plan: Plan) -> list[Axis]:
    """The axes with the least choice first: in time nothing can be moved, and the batch is cut as the plan says."""
    inputs = {axis for split in plan.inputs for axis in split.axes}
    return sorted(plan.stages[0].axes, key=lambda axis: (axis.kind is not AxisKind.TIME, axis.name not in inputs))


class _Index:
    """Look-ups on a plan's graph that all axes share."""

    def __init__(self, plan: Plan, book: RuleBook) -> None:
        self.plan, self.book = plan, book
        self.graph, self.types, self.mesh = plan.graph, book.types, plan.stages[0]
        self.producers = plan.graph.producers()
        self.reads = {op.name: op.reads for op in plan.graph.ops}
        self.whole = _whole(plan.graph)  # values that can be had whole before any micro-batch
        self.sources = _sources(plan.graph)
        self.products = {
            op.seq: op for op in plan.graph.ops if op.phase is Phase.FORWARD and op.seq is not None and _is_product(op)
        }
        self.readers: dict[str, list[Op]] = {}
        for op in plan.graph.ops:
            for name in dict.fromkeys(op.reads):
                self.readers.setdefault(name, []).append(op)
        self.zeros = {
            op.name
            for op in plan.graph.ops
            if not op.reads and isinstance(rule := book.rule(op), Letters) and () in rule.linear
        }
        self._layouts: dict[tuple[object, ...], bool] = {}

    def root(self, name: str) -> str:
        """The value that a chain of relabellings and copies starts from."""
        while name in self.producers and (is_relabelling(self.producers[name]) or self.producers[name].kind in _COPIES):
            name = self.producers[name].reads[0]
        return name

    def is_layout(self, shape: tuple[int, ...], entries: Entries) -> bool:
        """Whether these entries can lie on one array together, evenly."""
        key = (shape, *((axis, entry) for axis, entry in entries.items() if entry is not None))
        if key not in self._layouts:
            try:
                self._layouts[key] = Layout.make(self.mesh, shape, entries).is_even
            except LayoutError:
                self._layouts[key] = False
        return self._layouts[key]


_COPIES = ("aten.expand.default", "aten.clone.default", "aten._to_copy.default")


class _AxisPass:
    """The propagation along one axis, after those of the axes with less freedom."""

    def __init__(
        self,
        index: _Index,
        axis: Axis,
        strategies: dict[str, dict[str, Strategy]],
        values: dict[str, dict[str, Entry | None]],
    ) -> None:
        self.index, self.plan, self.axis = index, index.plan, axis
        self.strategies, self.values = strategies, values  # of the axes before, and where this one's go
        self.graph, self.types = index.graph, index.types
        self.is_time = axis.kind is AxisKind.TIME
        self.decided = {
            split.op: self._fit(index.producers[split.op], split)
            for split in self.plan.splits
            if split.axis == axis.name
        }
        self.have: dict[str, Entry | None] = {}  # on a time axis: what the value would have if everything were split
        self.chosen: dict[tuple[object, ...], Strategy] = {}  # layers repeat, and so do choices
        self.hints = self._hints()
        self.gradients: dict[str, Entry] = {}
        self.resolved: set[str] = (
            set()
        )  # pending values that some operator needs reduced: the others get that for nothing

    def run(self, moment: dict[str, Moment]) -> None:
        self._inputs()
        self.gradients = self._gradients()
        self.hints = {**self.gradients, **self.hints}
        late: set[str] = set()  # values that exist only after the last micro-batch
        free: list[Op] = []  # to be decided by their readers
        wanted: dict[str, set[Entry | None]] = {output.name: {None} for output in self.graph.outputs}
        for op in self.graph.ops:
            if self._is_free(op):
                free.append(op)
                self.have.update((value.name, None) for value in op.results)
                continue
            strategy = self.decided.get(op.name) or self._mirror(op) or self._choose(op)
            for value, entry in zip(op.results, strategy.results, strict=True):
                self.have[value.name] = entry
            if self.is_time:
                moment[op.name] = self._moment(op, strategy, late)
            self._settle(op, strategy, wanted, moment)
        for op in reversed(free):
            strategy = self._source(op, wanted)
            if self.is_time:
                moment[op.name] = Moment.BEFORE if strategy.is_replicated else Moment.DURING
            self._settle(op, strategy, wanted, moment)
        if not self.is_time:
            for item in self.graph.inputs:
                self.values[item.value.name][self.axis.name] = self.have[item.value.name]

    def _is_free(self, op: Op) -> bool:
        """Whether any piece of what the operator makes can be made here, without moving anything: it reads nothing but the seed,
        or, in space, only values that are whole on this axis and that no parameter flows into."""
        if op.name in self.decided:
            return False
        if op.name in self.index.sources:
            return True
        early = all(value.name in self.index.whole for value in op.results)
        return early and not self.is_time and not any(self.have[name] for name in self.index.reads[op.name])

    def _settle(
        self, op: Op, strategy: Strategy, wanted: dict[str, set[Entry | None]], moment: Mapping[str, Moment]
    ) -> None:
        """Write a strategy down. What is done once in time does nothing to its reads and results."""
        once = self.is_time and moment[op.name] is not Moment.DURING
        for name, entry in zip(self.index.reads[op.name], strategy.reads, strict=True):
            wanted.setdefault(name, set()).add(None if once else entry)
            if entry is None and isinstance(self.have.get(name), Pending) and not self.is_time:
                self.resolved.add(name)
        if once:
            return
        self.strategies[op.name][self.axis.name] = strategy
        for value, entry in zip(op.results, strategy.results, strict=True):
            self.values[value.name][self.axis.name] = entry

    def _source(self, op: Op, wanted: dict[str, set[Entry | None]]) -> Strategy:
        """Split as every reader of every result wants it, or whole."""
        rule = self.index.book.rule(op)
        for position, value in enumerate(op.results):
            needs = wanted.get(value.name, set())
            if len(needs) == 2 and None in needs and not self.is_time:
                (entry,) = needs - {None}
                if isinstance(entry, Split) and self._reduce_instead(value.name, entry):
                    needs = wanted[value.name] = {entry}
            if len(needs) == 1 and (entry := next(iter(needs))) is not None:
                strategy = making(op, self.types, self.axis.size, position, entry, rule)
                others = strategy and zip(op.results, strategy.results, strict=True)
                if strategy is not None and all({made} >= wanted.get(item.name, set()) for item, made in others or ()):
                    return strategy if self._fits(op, strategy) else self._replicated(op)
        return self._replicated(op)

    def _reduce_instead(self, name: str, entry: Split) -> bool:
        """Where some readers want a piece, and those that want the whole only sum it up: let these sum their piece, and leave the
        sums pending. A sum over the vocabulary is one number per token; the rows that it sums would be whole on every device."""
        revised: list[tuple[Op, Strategy]] = []
        for reader in self.index.readers.get(name, ()):
            strategy = self.strategies[reader.name].get(self.axis.name) or self._replicated(reader)
            position = reader.reads.index(name)
            if strategy.reads[position] == entry:
                continue
            rule = self.index.book.rule(reader)
            letter = rule.reads[position][entry.dim] if isinstance(rule, Letters) else None
            if not isinstance(rule, Letters) or letter is None or letter not in dict(rule.summed):
                return False
            reduced = split_on(rule, letter, entry.stride)
            others = [at for at, need in enumerate(reduced.reads) if need is not None and at != position]
            if not strategy.is_replicated or others or not self._fits(reader, reduced):
                return False
            revised.append((reader, reduced))
        for reader, strategy in revised:
            self.strategies[reader.name][self.axis.name] = strategy
            for value, made in zip(reader.results, strategy.results, strict=True):
                self.values[value.name][self.axis.name] = made
        return bool(revised)

    def _replicated(self, op: Op) -> Strategy:
        return Strategy((None,) * len(self.index.reads[op.name]), (None,) * len(op.results))

    def _mirror(self, op: Op) -> Strategy | None:
        """A product of the backward pass, split as the forward product with its sequence number is."""
        forward = self.index.products.get(op.seq) if op.phase is Phase.BACKWARD and op.seq is not None else None
        if forward is None or self.is_time or not _is_product(op) or op.kind == "aten.addmm.default":
            return None
        strategy = self.strategies[forward.name].get(self.axis.name)
        letter = _letter(forward, strategy) if strategy is not None else None
        if strategy is None or letter is None:
            return None
        mapped, stride = self._mapped(op, forward, letter[0]), letter[1]
        if mapped is None:
            return None
        rule = self.index.book.rule(op)
        assert isinstance(rule, Letters)
        mirrored = split_on(rule, mapped, stride)
        return mirrored if self._fits(op, mirrored) else None

    def _mapped(self, op: Op, forward: Op, letter: str) -> str | None:
        """The letter of a derivative that a letter of y = x w is: by which of x and w it reads besides the gradient."""
        if letter == "b":
            return "b"
        x, w = (self.index.root(name) for name in forward.reads[-2:])
        roots = [self.index.root(name) for name in op.reads]
        for position, other in enumerate(roots):
            if other in (x, w) and x != w and roots[1 - position] not in (x, w):
                summed, own, theirs = ("n", "k", "m") if other == w else ("m", "k", "n")
                names = {summed: "k", own: "mn"[position], theirs: "nm"[position]}
                return names[letter]
        return None

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
            nested = self._restrided(op, split.letter, strategy, min(taken) // self.axis.size)
            if nested is not None and self._fits(op, nested):
                return nested
        raise PlanError(
            f"dim {split.letter!r} has no room for axis {self.axis.name!r} beside the axes that split it already",
            where=op.describe(),
            fix="choose another dim, or a smaller axis",
        )

    def _restrided(self, op: Op, letter: str, strategy: Strategy, stride: int) -> Strategy | None:
        """The same split with another stride. A view's strides before and after differ, so it is made from its result's."""
        rule = self.index.book.rule(op)
        if isinstance(rule, Letters):
            return split_on(rule, letter, stride)
        entry = strategy.results[0]
        return (
            making(op, self.types, self.axis.size, 0, Split(entry.dim, stride), rule)
            if isinstance(entry, Split)
            else None
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
            if not self.index.is_layout(shape, {**entries, self.axis.name: entry}):
                return False
        return True

    def _moment(self, op: Op, strategy: Strategy, late: set[str]) -> Moment:
        if all(value.name in self.index.whole for value in op.results):
            return Moment.BEFORE
        if any(isinstance(entry, Pending) for entry in strategy.reads) or any(name in late for name in op.reads):
            self._check_after(op, strategy, late)
            late.update(value.name for value in op.results)
            return Moment.AFTER
        return Moment.BEFORE if strategy.is_replicated else Moment.DURING

    def _check_after(self, op: Op, strategy: Strategy, late: set[str]) -> None:
        """What waits for the last micro-batch cannot also read one micro-batch at a time."""
        parts = [name for name, entry in zip(op.reads, strategy.reads, strict=True) if isinstance(entry, Split)]
        if parts and not all(name in self.index.whole for name in parts):
            sums = [name for name in op.reads if name in late or isinstance(self.have[name], Pending)]
            raise PlanError(
                f"{op.kind} reads %{parts[0]}, which axis {self.axis.name!r} splits in time, and %{sums[0]}, which is a sum over all "
                f"of {self.axis.name!r}",
                where=op.describe(),
                fix=f"do not micro-batch this model over {self.axis.name!r}: this needs all micro-batches before any goes on",
            )

    def _inputs(self) -> None:
        """Entries of inputs: as the plan splits them, and for parameters as the first decided operator needs them."""
        splits = {split.path: split for split in self.plan.inputs if self.axis.name in split.axes}
        for item in self.graph.inputs:
            split = splits.get(item.path) if item.role is Role.INPUT else None
            self.have[item.value.name] = None
            if split is not None:
                layout = Layout.block(self.plan.mesh, item.value.type.shape, {split.dim: split.axes})
                self.have[item.value.name] = layout.entry(self.axis.name)
        producers = self.index.producers
        parameters = {item.value.name for item in self.graph.inputs if item.role is Role.PARAM}
        for made, strategy in self.decided.items():
            for name, entry in zip(self.index.reads[made], strategy.reads, strict=True):
                root, at_root = self._root(producers, name, entry)
                if root in parameters and self.have[root] is None and isinstance(at_root, Split):
                    entries = {**self.values[root], self.axis.name: at_root}
                    if self.index.is_layout(self.types[root].shape, entries):
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
        names = self.index.reads[op.name]
        have = tuple(self.have[name] for name in names)
        if not any(have):
            return self._piece_of_gradient(op) or self._replicated(op)
        pending = next((entry for entry in have if entry == Pending(Reduction.SUM)), None)
        if pending is not None and not self.is_time and _adds_gradients(op):
            # one reduction after several sums, not one for each: what is whole joins as a part, the others being zero
            have = tuple(pending if entry is None else entry for entry in have)
        if pending is not None:  # zeros are added to a sum as parts that are zero
            have = tuple(
                pending if name in self.index.zeros else entry for name, entry in zip(names, have, strict=True)
            )
        others = tuple((axis, strategy) for axis, strategy in self.strategies[op.name].items())
        early = tuple(name in self.index.whole for name in names) if self.is_time else ()
        hint = self.hints.get(op.name) if any(isinstance(entry, Pending) for entry in have) else None
        early += tuple(name in self.resolved for name in names)
        key = (self.index.book.signature(op), have, others, early, hint)
        if key not in self.chosen:
            self.chosen[key] = self._cheapest(op, have, hint)
        return self.chosen[key]

    def _piece_of_gradient(self, op: Op) -> Strategy | None:
        """A gradient that is made of whole values, for a parameter that is split: only the parameter's piece of it is needed."""
        entry = self.gradients.get(op.name)
        strategy = (
            making(op, self.types, self.axis.size, 0, entry, self.index.book.rule(op)) if entry is not None else None
        )
        return strategy if strategy is not None and self._fits(op, strategy) else None

    def _gradients(self) -> dict[str, Entry]:
        """How the parameter lies that a value is the gradient of."""
        inputs = {item.path: item.value.name for item in self.graph.inputs}
        found: dict[str, Entry] = {}
        for output in () if self.is_time else self.graph.outputs:
            if output.kind is OutputKind.GRADIENT:
                root, entry = self._root(self.index.producers, output.name, self.have[inputs[output.path]])
                if isinstance(entry, Split):
                    found.setdefault(root, entry)
        return found

    def _hints(self) -> dict[str, Entry]:
        """How the first decided reader of a value wants it: a pending sum is scattered to there, rather than reduced and cut."""
        hints: dict[str, Entry] = {}
        for made, strategy in () if self.is_time else self.decided.items():
            for name, entry in zip(self.index.reads[made], strategy.reads, strict=True):
                root, at_root = self._root(self.index.producers, name, entry)
                if isinstance(at_root, Split):
                    hints.setdefault(root, at_root)
        return hints

    def _cheapest(self, op: Op, have: tuple[Entry | None, ...], hint: Entry | None) -> Strategy:
        size, rule = self.axis.size, self.index.book.rule(op)
        best: tuple[tuple[float, float, float], Strategy] | None = None
        hinted = making(op, self.types, size, 0, hint, rule) if hint is not None else None
        for strategy in (*propose(op, self.types, size, have, rule), *((hinted,) if hinted is not None else ())):
            passes = any(
                isinstance(entry, Pending) and entry == need for entry, need in zip(have, strategy.reads, strict=True)
            )
            if passes and not self.is_time and not carries_pending(rule):
                continue
            if not self._fits(op, strategy):
                continue
            moved = sum(self._moved(*read) for read in zip(op.reads, have, strategy.reads, strict=True))
            cost = (moved, _left(op, strategy), _work(op, self.types, strategy, size))
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
        if (
            have == need
            or (need is None and name in self.resolved)
            or (self.is_time and name in self.index.whole and not isinstance(need, Pending))
        ):
            return 0.0
        size, total = self.axis.size, float(self.types[name].bytes)
        match have, need:
            case (None, Pending()) if self.is_time:
                return float("inf")
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


def _whole(graph: Graph) -> set[str]:
    """Values that no parameter flows into: they can be computed on the whole batch before the first micro-batch."""
    whole = {item.value.name for item in graph.inputs if item.role is not Role.PARAM}
    for op in graph.ops:
        if all(name in whole for name in op.reads):
            whole.update(value.name for value in op.results)
    return whole


def _sources(graph: Graph) -> set[str]:
    """The operators that read nothing but the seed, or what such operators make: by name."""
    free = {item.value.name for item in graph.inputs if item.role is Role.SEED}
    found: set[str] = set()
    for op in graph.ops:
        if all(name in free for name in op.reads):
            found.add(op.name)
            free.update(value.name for value in op.results)
    return found


def _adds_gradients(op: Op) -> bool:
    """Whether it is one of the sums that autograd makes where a value has several readers."""
    return op.kind == "aten.add.Tensor" and op.phase is Phase.BACKWARD and op.seq is None


def _is_product(op: Op) -> bool:
    return op.kind in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


def _letter(product: Op, strategy: Strategy) -> tuple[str, int] | None:
    """The letter, and the stride, that a product is split on; None where it is not."""
    x, w = strategy.reads[-2:]
    names = ("b", "m", "k") if product.kind == "aten.bmm.default" else ("m", "k")
    if isinstance(x, Split):
        return names[x.dim], x.stride
    return ("n", w.stride) if isinstance(w, Split) else None


def _left(op: Op, strategy: Strategy) -> float:
    """Bytes of results that are left pending: to be reduced later, by whoever needs them."""
    results = zip(op.results, strategy.results, strict=True)
    return float(sum(value.type.bytes for value, entry in results if isinstance(entry, Pending)))


def _work(op: Op, types: Mapping[str, TensorType], strategy: Strategy, size: int) -> float:
    """Bytes touched per device: the measure between strategies that move equally much and leave equally much."""
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
