"""The propagation along one axis: which strategy each operator runs with. `plan/propagate.py` states the rules.

| part | function |
|---|---|
| what the plan decided, what fits beside other axes, backward products as their forward ones | `plan/propagate_fit.py` |
| entries of inputs and parameters | `_inputs` |
| the cheapest strategy that follows what is read | `_choose`, `_cheapest`, `_moved` |
| pieces that a decided reader, a split parameter or a forward value will want | `_hint`, and all of `plan/propagate_hints.py` |
| sources, decided by their readers | `_is_free`, `_source`, `_reduce_instead` |
| when an operator runs, on a time axis | `_moment`, `_passes_on`, `_check_after`, `_postpone`, and all of `plan/propagate_time.py` |
"""

from __future__ import annotations

from collections.abc import Mapping

from sennit.capture.rules import (
    Letters,
    Strategy,
    carries_pending,
    making,
    propose,
    split_on,
)
from sennit.errors import PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Input, Op, Phase, Role
from sennit.ir.layout import Entry, Layout, Pending, Reduction, Split
from sennit.plan.plan import InputSplit
from sennit.plan.propagate_fit import AxisFit
from sennit.plan.propagate_hints import AxisHints, adds_gradients, root_of
from sennit.plan.propagate_index import Moment, PlanIndex, is_copy, is_product
from sennit.plan.propagate_time import fewest_ahead, made_with_each

__all__ = ["AxisPass"]


class AxisPass:
    """The propagation along one axis, after those of the axes with less freedom."""

    def __init__(
        self,
        index: PlanIndex,
        axis: str,
        is_time: bool,
        strategies: dict[str, dict[str, Strategy]],
        values: dict[str, dict[str, Entry | None]],
        inputs: dict[tuple[str, int], dict[str, Entry | None]],
    ) -> None:
        self.index, self.plan, self.axis, self.is_time = index, index.plan, axis, is_time
        self.strategies, self.values, self.inputs = strategies, values, inputs  # of the axes before, and of this one
        self.graph, self.types = index.graph, index.types
        self.fit = AxisFit(index, axis, self.types, strategies)
        self.decided = {
            split.op: self.fit.decided(index.producers[split.op], split)
            for split in self.plan.splits
            if split.axis == axis
        }
        # on a time axis: what the value would have if everything were split
        self.have: dict[str, Entry | None] = {}
        self.held: dict[tuple[str, int], Entry | None] = {}  # of an input, by stage
        self.homes: set[str] = set()  # parameters that the plan cuts over this axis only where they live
        self.chosen: dict[tuple[object, ...], Strategy] = {}  # layers repeat, and so do choices
        self.hints: dict[str, Entry] = {}
        self.terms: dict[str, Entry] = {}
        # pending values that some operator needs reduced: the others get that for nothing
        self.resolved: set[str] = set()
        self.at_home: set[str] = set()  # gradients of parameters that are split where they are used
        self.spread: set[str] = set()  # results of operators that their readers decide
        # on a time axis: how small what a value is made into gets before it has to be summed up
        self.ahead: Mapping[str, int] = fewest_ahead(index) if is_time else {}

    def run(self, moment: dict[str, Moment]) -> None:
        self._inputs()
        if not self.is_time:
            hints = AxisHints(self.index, self.axis, self.decided, self.held, self.homes)
            self.hints, self.terms, self.at_home = hints.of, hints.terms, hints.at_home
        late: set[str] = set()  # values that exist only after the last micro-batch
        free: list[Op] = []  # to be decided by their readers
        wanted: dict[str, set[Entry | None]] = {output.name: {None} for output in self.graph.outputs}
        for op in self.graph.ops:
            if self._size(op) == 1:
                self.have.update((value.name, None) for value in op.results)
                self._settle(op, self._replicated(op), wanted, moment)
                continue
            if self._is_free(op):
                free.append(op)
                self.spread.update(value.name for value in op.results)
                self.have.update((value.name, None) for value in op.results)
                continue
            strategy = (
                self.decided.get(op.name) or (None if self.is_time else self.fit.mirrored(op)) or self._choose(op)
            )
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
        if self.is_time:
            self._postpone(moment, wanted)
            split = {name for (name, _), entry in self.held.items() if entry is not None}
            moment.update(dict.fromkeys(made_with_each(self.index, moment, split), Moment.EACH))
        else:
            for (name, stage), entry in self.held.items():
                self.inputs[name, stage][self.axis] = entry

    # ---- what is where -----------------------------------------------------------------------------------------------

    def _size(self, op: Op) -> int:
        return self.index.size(self.index.stage[op.name], self.axis)

    def _seen(self, name: str, op: Op) -> Entry | None:
        """The entry of a value as an operator sees it from its own stage."""
        if self.homes and self.index.root(name) in self.homes and not is_copy(op):
            return None
        stage = self.index.stage[op.name]
        if name not in self.index.producers:
            return self.held[name, stage]
        entry, made = self.have[name], self._size(self.index.producers[name])
        return entry if entry is None or made == self._size(op) else _resized(entry, made, self._size(op))

    def _is_free(self, op: Op) -> bool:
        """Whether any piece of what the operator makes can be made here, without moving anything: it reads nothing but
        the seed, or, in space, only values that are whole on this axis and that no parameter flows into; or it repeats
        whole values.
        """
        if op.name in self.decided:
            return False
        if op.name in self.index.sources:
            return True
        if any(self._seen(name, op) for name in self.index.reads[op.name]):
            return False
        early = all(value.name in self.index.whole for value in op.results)
        return (early and not self.is_time) or self._spreads(op)

    def _spreads(self, op: Op) -> bool:
        """Whether it repeats whole values along a dim of its result that none of them has: a bias of positions, once
        for each sample. Or passes such a result on.
        """
        rule = self.index.book.rule(op)
        if is_product(op) or (isinstance(rule, Letters) and rule.summed):
            return False
        size = max(value.type.elements for value in op.results)
        return all(name in self.spread or self.types[name].elements < size for name in self.index.reads[op.name])

    def _settle(
        self, op: Op, strategy: Strategy, wanted: dict[str, set[Entry | None]], moment: Mapping[str, Moment]
    ) -> None:
        """Write a strategy down. What is done once in time does nothing to its reads and results."""
        once = self.is_time and moment[op.name] is not Moment.DURING
        for name, entry in zip(self.index.reads[op.name], strategy.reads, strict=True):
            producer = self.index.producers.get(name)
            alike = producer is None or self._size(producer) == self._size(op)
            wanted.setdefault(name, set()).add(None if once or not alike else entry)
            if (entry is None or not alike) and isinstance(self.have.get(name), Pending) and not self.is_time:
                self.resolved.add(name)
        if once or self._size(op) == 1:
            return
        self.strategies[op.name][self.axis] = strategy
        for value, entry in zip(op.results, strategy.results, strict=True):
            self.values[value.name][self.axis] = entry

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
                strategy = making(op, self.types, self._size(op), position, entry, rule)
                others = strategy and zip(op.results, strategy.results, strict=True)
                if strategy is not None and all({made} >= wanted.get(item.name, set()) for item, made in others or ()):
                    return strategy if self.fit.fits(op, strategy) else self._replicated(op)
        return self._replicated(op)

    def _reduce_instead(self, name: str, entry: Split) -> bool:
        """Where some readers want a piece, and those that want the whole only sum it up: let these sum their piece, and
        leave the sums pending. A sum over the vocabulary is one number per token; the rows that it sums would be whole
        on every device.
        """
        revised: list[tuple[Op, Strategy]] = []
        for reader in self.index.readers.get(name, ()):
            strategy = self.strategies[reader.name].get(self.axis) or self._replicated(reader)
            if self._size(reader) != self._size(self.index.producers[name]):
                return False
            position = reader.reads.index(name)
            if strategy.reads[position] == entry:
                continue
            rule = self.index.book.rule(reader)
            letter = rule.reads[position][entry.dim] if isinstance(rule, Letters) else None
            if not isinstance(rule, Letters) or letter is None or letter not in dict(rule.summed):
                return False
            reduced = split_on(rule, letter, entry.stride)
            others = [at for at, need in enumerate(reduced.reads) if need is not None and at != position]
            if not strategy.is_replicated or others or not self.fit.fits(reader, reduced):
                return False
            revised.append((reader, reduced))
        for reader, strategy in revised:
            self.strategies[reader.name][self.axis] = strategy
            for value, made in zip(reader.results, strategy.results, strict=True):
                self.values[value.name][self.axis] = made
        return bool(revised)

    def _replicated(self, op: Op) -> Strategy:
        return Strategy((None,) * len(self.index.reads[op.name]), (None,) * len(op.results))

    def _moment(self, op: Op, strategy: Strategy, late: set[str]) -> Moment:
        if all(value.name in self.index.whole for value in op.results):
            return Moment.BEFORE
        sums = [name for name in op.reads if isinstance(self._seen(name, op), Pending)]
        if sums and not any(name in late for name in op.reads) and self._passes_on(op, strategy, sums):
            return Moment.DURING
        if sums or any(name in late for name in op.reads):
            self._check_after(op, strategy, late)
            late.update(value.name for value in op.results)
            return Moment.AFTER
        return Moment.BEFORE if strategy.is_replicated else Moment.DURING

    def _passes_on(self, op: Op, strategy: Strategy, sums: list[str]) -> bool:
        """Whether it runs on the term of each micro-batch, and what it makes is summed up in place of what it reads:
        where that gets smaller, by this operator or by those behind it. The gradient of a table of biases, and not
        those of all pairs of positions.
        """
        stage = self.index.stage[op.name]
        terms = [name for name, need in zip(op.reads, strategy.reads, strict=True) if isinstance(need, Pending)]
        return (
            len(op.results) == 1
            and isinstance(strategy.results[0], Pending)
            and set(sums) <= set(terms)
            and all(self.index.readers[name] == [op] for name in terms)
            and all(self.index.stage[self.index.producers[name].name] == stage for name in terms)
            and not any(name in self.index.returned for name in terms)
            and all(self.ahead[op.results[0].name] < self.types[name].bytes for name in sums)
        )

    def _postpone(self, moment: dict[str, Moment], wanted: dict[str, set[Entry | None]]) -> None:
        """What could run before the first micro-batch, and is read one micro-batch at a time, runs with each of them.

        The rows of targets over a vocabulary, of the whole batch, would be there through all of the step.
        """
        outputs = {output.name for output in self.graph.outputs}
        for op in reversed(self.graph.ops):
            early = moment[op.name] is Moment.BEFORE and all(value.name in self.index.whole for value in op.results)
            if not early or op.name in self.decided or len(op.results) > 1:
                continue
            (value,) = op.results
            readers = self.index.readers.get(value.name, [])
            near = all(self.index.stage[reader.name] == self.index.stage[op.name] for reader in readers)
            needs = {entry for reader in readers for entry in self._needs(reader, value.name, moment)}
            if not near or value.name in outputs or len(needs) != 1 or not isinstance(need := needs.pop(), Split):
                continue
            strategy = making(op, self.types, self._size(op), 0, need, self.index.book.rule(op))
            if strategy is not None and self.fit.fits(op, strategy):
                moment[op.name] = Moment.DURING
                self._settle(op, strategy, wanted, moment)

    def _needs(self, reader: Op, name: str, moment: Mapping[str, Moment]) -> set[Entry | None]:
        strategy = self.strategies[reader.name].get(self.axis)
        if strategy is None or moment[reader.name] is not Moment.DURING:
            return {None}
        return {need for read, need in zip(self.index.reads[reader.name], strategy.reads, strict=True) if read == name}

    def _check_after(self, op: Op, strategy: Strategy, late: set[str]) -> None:
        """What waits for the last micro-batch cannot also read one micro-batch at a time."""
        parts = [name for name, entry in zip(op.reads, strategy.reads, strict=True) if isinstance(entry, Split)]
        if parts and not all(name in self.index.whole for name in parts):
            sums = [name for name in op.reads if name in late or isinstance(self._seen(name, op), Pending)]
            raise PlanError(
                f"{op.kind} reads %{parts[0]}, which axis {self.axis!r} splits in time, and %{sums[0]}, which is a sum over all "
                f"of {self.axis!r}",
                where=op.describe(),
                fix=f"do not micro-batch this model over {self.axis!r}: this needs all micro-batches before any goes on",
            )

    def _inputs(self) -> None:
        """Entries of inputs: as the plan splits them, and for parameters as the first decided operator needs them."""
        splits = {split.path: split for split in self.plan.inputs if self.axis in split.axes}
        for item in self.graph.inputs:
            name, split = item.value.name, splits.get(item.path)
            for stage in self.index.holders[name]:
                self.held[name, stage] = None if split is None else self._cut(item, split, stage)
            if split is not None and item.role is Role.PARAM:
                self.homes.add(name)
        parameters = {item.value.name for item in self.graph.inputs if item.role is Role.PARAM} - self.homes
        for made, strategy in self.decided.items():
            home = self.index.stage[made]
            for name, entry in zip(self.index.reads[made], strategy.reads, strict=True):
                root, at_root = root_of(self.index, self.axis, name, entry)
                if root not in parameters or not isinstance(at_root, Split):
                    continue
                for stage in self.index.holders[root]:
                    if self.held[root, stage] is None and self._alike(stage, home):
                        entries = {**self.inputs[root, stage], self.axis: at_root}
                        if self.index.is_layout(stage, self.types[root].shape, entries):
                            self.held[root, stage] = at_root

    def _alike(self, one: int, other: int) -> bool:
        return self.index.size(one, self.axis) == self.index.size(other, self.axis)

    def _cut(self, item: Input, split: InputSplit, stage: int) -> Entry | None:
        """How a plan's split of an input lies on a stage: in blocks over those of its axes that the stage has."""
        mesh, shape = self.index.meshes[stage], item.value.type.shape
        axes = tuple(axis for axis in split.axes if axis in mesh)
        if self.axis not in axes or mesh.size(self.axis) == 1:
            return None
        entry = Layout.block(mesh, shape, {split.dim: axes}).entry(self.axis)
        if item.role is Role.PARAM:
            entries = {**self.inputs[item.value.name, stage], self.axis: entry}
            if not self.index.is_layout(stage, shape, entries):
                raise PlanError(
                    f"parameter {item.path!r} {item.value.type}: dim {split.dim} has no room for axis {self.axis!r}",
                    where=f"stage {stage} on {mesh}, where other axes split it as {self.inputs[item.value.name, stage]}",
                    fix="cut another dim, or leave the parameter whole",
                )
        return entry

    def _choose(self, op: Op) -> Strategy:
        names = self.index.reads[op.name]
        have = tuple(self._seen(name, op) for name in names)
        if not any(have):
            return self._piece_of_gradient(op) or self._replicated(op)
        pending = next((entry for entry in have if entry == Pending(Reduction.SUM)), None)
        if pending is not None and not self.is_time and adds_gradients(op):
            # one reduction after several sums, not one for each: what is whole joins as a part, the others being zero
            have = tuple(pending if entry is None else entry for entry in have)
        if pending is not None:  # zeros are added to a sum as parts that are zero
            have = tuple(
                pending if name in self.index.zeros else entry for name, entry in zip(names, have, strict=True)
            )
        others = tuple((axis, strategy) for axis, strategy in self.strategies[op.name].items())
        early = tuple(name in self.index.whole for name in names) if self.is_time else ()
        needed = op.name in self.at_home or any(isinstance(entry, Pending) for entry in have)
        hint = self._hint(op, names, have) if needed else None
        early += tuple(name in self.resolved for name in names)
        home = op.name in self.at_home
        key = (self.index.book.signature(op), self.index.stage[op.name], have, others, early, hint, home)
        if key not in self.chosen:
            self.chosen[key] = self._cheapest(op, have, hint)
        return self.chosen[key]

    def _hint(self, op: Op, names: tuple[str, ...], have: tuple[Entry | None, ...]) -> Entry | None:
        """Where a pending sum is wanted: as a decided reader wants it; a gradient, as the value lies that it is the
        gradient of.
        """
        forward = self.index.forward.get(op.seq) if op.phase is Phase.BACKWARD and op.seq is not None else None
        if op.name in self.hints or forward is None or self.is_time:
            return self.hints.get(op.name)
        value, entry = forward.results[0], self.have.get(forward.name)
        is_gradient = any(
            isinstance(part, Pending) and self.types[name] == value.type for name, part in zip(names, have, strict=True)
        )
        alike = op.results[0].type == value.type and self._size(op) == self._size(forward)
        return entry if is_gradient and alike and isinstance(entry, Split) else None

    def _piece_of_gradient(self, op: Op) -> Strategy | None:
        """A gradient that is made of whole values, for a parameter that is split: only the parameter's piece of it is
        needed.
        """
        entry = self.terms.get(op.name)
        strategy = (
            making(op, self.types, self._size(op), 0, entry, self.index.book.rule(op)) if entry is not None else None
        )
        return strategy if strategy is not None and self.fit.fits(op, strategy) else None

    def _cheapest(self, op: Op, have: tuple[Entry | None, ...], hint: Entry | None) -> Strategy:
        size, rule = self._size(op), self.index.book.rule(op)
        best: tuple[tuple[float, float, float], Strategy] | None = None
        hinted = making(op, self.types, size, 0, hint, rule) if hint is not None else None
        for strategy in (*propose(op, self.types, size, have, rule), *((hinted,) if hinted is not None else ())):
            passes = any(
                isinstance(entry, Pending) and entry == need for entry, need in zip(have, strategy.reads, strict=True)
            )
            if passes and not self.is_time and not carries_pending(rule):
                continue
            if not self.fit.fits(op, strategy):
                continue
            moved = sum(self._moved(size, *read) for read in zip(op.reads, have, strategy.reads, strict=True))
            if (
                op.name in self.at_home
            ):  # what is left pending is reduced at once: a table's gradient, against those of its tokens
                moved += _left(op, strategy) * (size - 1) / size
            cost = (moved, _left(op, strategy), _work(op, self.types, strategy, size))
            if moved < float("inf") and (best is None or cost < best[0]):
                best = (cost, strategy)
        if best is None:
            names = [name for name, entry in zip(op.reads, have, strict=True) if entry is not None]
            raise PlanError(
                f"{op.kind} needs the whole of %{names[0]}, which axis {self.axis!r} splits in time",
                where=op.describe(),
                fix=f"do not micro-batch this model over {self.axis!r}, or keep the operator out of the training step",
            )
        return best[1]

    def _moved(self, size: int, name: str, have: Entry | None, need: Entry | None) -> float:
        """Bytes that a device sends to turn one entry into another; infinite where that is impossible."""
        if (
            have == need
            or (need is None and name in self.resolved)
            or (self.is_time and name in self.index.whole and not isinstance(need, Pending))
        ):
            return 0.0
        total = float(self.types[name].bytes)
        match have, need:
            case (None, Pending()) if self.is_time:
                return float("inf")
            case (None, _):
                return 0.0
            case (Pending(), None) if self.is_time:
                # after the last micro-batch, when the sum is complete; what passes the sum on is as good, and first
                return 1.0
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


def _resized(entry: Entry, made: int, seen: int) -> Entry | None:
    """An entry on an axis of `made` pieces, on one of `seen`: as many blocks of the same run of indices; a sum is
    reduced.
    """
    if isinstance(entry, Pending) or seen == 1 or entry.stride * made % seen:
        return None
    return Split(entry.dim, entry.stride * made // seen)


def _left(op: Op, strategy: Strategy) -> float:
    """Bytes of results that are left pending: to be reduced later, by whoever needs them."""
    results = zip(op.results, strategy.results, strict=True)
    return float(sum(value.type.bytes for value, entry in results if isinstance(entry, Pending)))


def _work(op: Op, types: Mapping[str, TensorType], strategy: Strategy, size: int) -> float:
    """Bytes touched per device: the measure between strategies that move equally much and leave equally much."""
    pairs = [(types[name].bytes, entry) for name, entry in zip(op.reads, strategy.reads, strict=True)]
    pairs += [(value.type.bytes, entry) for value, entry in zip(op.results, strategy.results, strict=True)]
    return sum(total / size if isinstance(entry, Split) else total for total, entry in pairs)
