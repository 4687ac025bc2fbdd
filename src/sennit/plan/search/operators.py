"""Which letter each operator is split on, over one axis: a choice for every operator, and what changes of layout
between them cost.

The zoo finds Megatron's splits by the shape of a graph. Here nothing is known but the rules: operator o of the joint
graph (forward and backward) may take one of the strategies S_o of its rule, a parameter one of the entries that a
reader could want. Let c[o, s] be the seconds of o on its local pieces, and m[v, a, b] those that value v takes from
entry a, as it is made, to entry b, as it is read: an all-gather, all-reduce, reduce-scatter or all-to-all, or nothing.
A change serves all readers that want it. With x[o, s] = 1 where s is chosen:

    minimise    sum c[o, s] x[o, s]  +  sum m[v, a, b] z[v, a, b]
    subject to  sum over s of x[o, s] = 1                                                          for each o
                sum over b of y[r, a, b] = the x of v's maker that make it as a                    for each reader r of v, and a
                sum over a of y[r, a, b] = the x of r that read it as b                            for each reader r of v, and b
                z[v, a, b] >= y[r, a, b]                                                           for each reader r of v

The gradient of a parameter is read as the parameter lies; a loss is read whole. The linear relaxation is solved with
HiGHS; where it comes out fractional, HiGHS branches. Its optimum is the bound. (Alpa, arXiv 2201.12023, section 4, has
the pairwise form; z is new: without it one gathered activation is paid for by each of its readers.)

`choose_ops` gives the choice as splits of a plan, which `propagate` completes like any other's: a redistribution is
hoisted over views there, and backward products mirror their forward ones, so what is lowered may be better than what
was chosen. `seconds_of` puts the same price on any complete plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from sennit.capture.rules import (
    Letters,
    RuleBook,
    Strategy,
    carries_pending,
    decide,
    is_relabelling,
    localize,
    propose,
    split_on,
    through_view,
)
from sennit.cluster import Cluster
from sennit.cost import OperatorCosts
from sennit.errors import PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Op, OutputKind, Phase, Role
from sennit.ir.layout import Entry, Layout, Pending, Reduction, Split
from sennit.ir.mesh import Mesh
from sennit.ir.operators import is_view
from sennit.ir.program import Buffer, CollectiveKind, Compute
from sennit.plan.plan import OpSplit, Plan
from sennit.plan.propagate import Decisions
from sennit.plan.propagate_index import is_product
from sennit.plan.search.pairwise import Choices, Reader
from sennit.plan.search.probe import Wires
from sennit.plan.zoo.find import pairs_of_products

__all__ = ["AxisCost", "ChosenOps", "choose_ops", "choose_strategies", "seconds_of"]

_MOST = 24  # strategies of an operator that are looked at
_SUM = Pending(Reduction.SUM)


class AxisCost:
    """Seconds of operators on pieces over an axis of `size` devices, and of changes of layout."""

    def __init__(self, graph: Graph, cluster: Cluster, size: int) -> None:
        self.types, self.size, self.wires = graph.types(), size, Wires(cluster)
        self.model, self.alone = OperatorCosts.of(cluster.device), Mesh.make({"one": 1})
        self.found: dict[tuple[str, Strategy], float] = {}

    def compute(self, op: Op, strategy: Strategy) -> float:
        key = (op.name, strategy)
        if key not in self.found:
            self.found[key] = 0.0 if is_view(op.kind) else self._compute(op, strategy)
        return self.found[key]

    def _compute(self, op: Op, strategy: Strategy) -> float:
        types = {name: self._local(self.types[name], need) for name, need in zip(op.reads, strategy.reads, strict=True)}
        results = [
            (value.name, self._local(value.type, made))
            for value, made in zip(op.results, strategy.results, strict=True)
        ]
        types.update(results)
        args, kwargs = localize(op, [kind.shape for _, kind in results])
        buffers = tuple(Buffer(name, name, kind.dtype, Layout(self.alone, kind.shape, ())) for name, kind in results)
        step = Compute(op.kind, args, kwargs, buffers, op.phase, op.module, op.name)
        return self.model.cost(step, types).seconds

    def _local(self, whole: TensorType, entry: Entry | None) -> TensorType:
        if not isinstance(entry, Split):
            return whole
        shape = tuple(n // self.size if dim == entry.dim else n for dim, n in enumerate(whole.shape))
        return TensorType(shape, whole.dtype)

    def move(self, name: str, have: Entry | None, need: Entry | None) -> float:
        """Infinite where there is no such change. What is whole is cut, or taken as a part of a sum, for nothing."""
        whole = self.types[name].bytes
        match have, need:
            case _ if have == need:
                return 0.0
            case None, _:
                return 0.0
            case Split(), None:
                return self._collective(CollectiveKind.ALL_GATHER, whole)
            case Split(), Split():
                return self._collective(CollectiveKind.ALL_TO_ALL, whole // self.size)
            case Pending(), None:
                return self._collective(CollectiveKind.ALL_REDUCE, whole)
            case Pending(), Split():
                return self._collective(CollectiveKind.REDUCE_SCATTER, whole)
            case _:
                return inf

    def _collective(self, kind: CollectiveKind, size: int) -> float:
        return self.wires.collective(kind, 1, self.size, size)


@dataclass(frozen=True, slots=True)
class ChosenOps:
    """`seconds` is the price of the choice, `bound` that of the relaxation; `inputs` are the entries of parameters."""

    strategies: Mapping[str, Strategy]
    inputs: Mapping[str, Entry | None]
    seconds: float
    bound: float
    splits: tuple[OpSplit, ...]


def choose_ops(
    plan: Plan, axis: str, cost: AxisCost, seeds: Sequence[Decisions] = (), most_seconds: float = 60.0
) -> tuple[Plan, ChosenOps]:
    """The plan with the splits over an axis that cost least; what was chosen.

    The choice is never dearer than the `seeds`, complete plans whose strategies are looked at too. The graph is taken
    as it is: give it the batch of one micro-batch.
    """
    chosen = choose_strategies(plan.graph, axis, cost, seeds, most_seconds)
    return replace(plan, splits=(*plan.splits, *chosen.splits)), chosen


def choose_strategies(
    graph: Graph, axis: str, cost: AxisCost, seeds: Sequence[Decisions] = (), most_seconds: float = 60.0
) -> ChosenOps:
    options = _Options(graph, axis, cost, seeds)
    bound, strategies, inputs = _solve(graph, options, cost, most_seconds)
    splits = tuple(_splits(graph, strategies, axis, cost))
    return ChosenOps(strategies, inputs, _seconds(graph, strategies, inputs, cost), bound, splits)


def seconds_of(decisions: Decisions, axis: str, cost: AxisCost) -> float:
    """The price of a complete plan along an axis, whatever else it splits."""
    graph = decisions.plan.graph
    strategies = {op.name: decisions.strategies[op.name].get(axis, _replicated(op)) for op in graph.ops}
    return _seconds(graph, strategies, _inputs_of(decisions, axis), cost)


def _inputs_of(decisions: Decisions, axis: str) -> dict[str, Entry | None]:
    return {name: entries.get(axis) for (name, _), entries in decisions.inputs.items()}


def _seconds(
    graph: Graph, strategies: Mapping[str, Strategy], inputs: Mapping[str, Entry | None], cost: AxisCost
) -> float:
    made = dict(inputs)
    wanted: dict[str, set[Entry | None]] = {}
    for op in graph.ops:
        made.update(zip((value.name for value in op.results), strategies[op.name].results, strict=True))
        for name, need in zip(op.reads, strategies[op.name].reads, strict=True):
            wanted.setdefault(name, set()).add(need)
    for name, path in _outputs(graph):
        wanted.setdefault(name, set()).add(inputs.get(path) if path is not None else None)
    total = sum(cost.compute(op, strategies[op.name]) for op in graph.ops)
    return total + sum(cost.move(name, made.get(name), need) for name, needs in wanted.items() for need in needs)


def _outputs(graph: Graph) -> Iterator[tuple[str, str | None]]:
    """The values that are returned; of gradients, the parameter that they lie as."""
    named = {item.path: item.value.name for item in graph.inputs}
    for output in graph.outputs:
        is_gradient = output.kind in (OutputKind.GRADIENT, OutputKind.BUFFER)
        yield output.name, named.get(output.path) if is_gradient else None


# ---- options ---------------------------------------------------------------------------------------------------------


class _Options:
    """The strategies of each operator and the entries of each input.

    In the order of the graph: an operator may follow any entry that one of its reads can have, or, being a product, an
    embedding or a norm, open a split of its own. A parameter may lie as an opening operator wants it, back through
    views.
    """

    def __init__(self, graph: Graph, axis: str, cost: AxisCost, seeds: Sequence[Decisions]) -> None:
        self.types, self.size, self.book = graph.types(), cost.size, RuleBook(graph.types())
        self.chunks, self.producers = _chunks(graph), graph.producers()
        opened = {op.name: tuple(self._opened(op)) for op in graph.ops}
        entries: dict[str, dict[Entry | None, None]] = {item.value.name: {None: None} for item in graph.inputs}
        for item in graph.inputs:
            entries[item.value.name].update((_inputs_of(seed, axis).get(item.value.name), None) for seed in seeds)
        parameters = {item.value.name for item in graph.inputs if item.role is Role.PARAM}
        for op in graph.ops:
            for strategy in opened[op.name]:
                for name, need in zip(op.reads, strategy.reads, strict=True):
                    root, at_root = self._root(name, need)
                    if root in parameters and isinstance(at_root, Split):
                        entries[root].setdefault(at_root)
        self.ops: dict[str, tuple[Strategy, ...]] = {}
        for op in graph.ops:
            seeded = (seed.strategies[op.name].get(axis, _replicated(op)) for seed in seeds)
            own = dict.fromkeys((_replicated(op), *seeded, *opened[op.name]))
            for strategy in self._following(op, entries):
                if len(own) < _MOST:
                    own.setdefault(strategy)
            self.ops[op.name] = tuple(own)
            for position, value in enumerate(op.results):
                entries[value.name] = dict.fromkeys(strategy.results[position] for strategy in own)
        self.inputs = {item.value.name: tuple(entries[item.value.name]) for item in graph.inputs}

    def _following(self, op: Op, entries: Mapping[str, Mapping[Entry | None, None]]) -> Iterator[Strategy]:
        rule, nothing = self.book.rule(op), (None,) * len(op.reads)
        for position, name in enumerate(op.reads):
            for entry in entries[name]:
                have = (*nothing[:position], entry, *nothing[position + 1 :])
                if entry is not None and (not isinstance(entry, Pending) or carries_pending(rule)):
                    yield from propose(op, self.types, self.size, have, rule)
        for group in rule.linear if isinstance(rule, Letters) and rule.carries else ():
            if group and all(_SUM in entries[op.reads[position]] for position in group):
                have = tuple(_SUM if position in group else None for position in range(len(op.reads)))
                yield from propose(op, self.types, self.size, have, rule)

    def _opened(self, op: Op) -> Iterator[Strategy]:
        rule = self.book.rule(op)
        if op.phase is not Phase.FORWARD or not (is_product(op) or op.kind in _OPENING):
            return
        for letter in rule.letters if isinstance(rule, Letters) else ():
            for chunks in sorted({1, self.chunks.get(op.name, 1)}):
                try:
                    yield decide(op, self.types, self.size, letter, chunks)
                except PlanError:  # the dim does not divide: no such option
                    continue

    def _root(self, name: str, entry: Entry | None) -> tuple[str, Entry | None]:
        while name in self.producers and is_relabelling(self.producers[name]):
            op = self.producers[name]
            try:
                entry = through_view(op, self.types, self.size, entry)
            except LookupError:
                return name, None
            name = op.reads[0]
        return name, entry


_OPENING = ("aten.embedding.default", "aten.native_layer_norm.default", "aten._fused_rms_norm.default")


def _chunks(graph: Graph) -> Mapping[str, int]:
    try:
        return pairs_of_products(graph).chunks
    except PlanError:  # no branches: nothing lies in chunks
        return {}


def _replicated(op: Op) -> Strategy:
    return Strategy((None,) * len(op.reads), (None,) * len(op.results))


def _splits(graph: Graph, strategies: Mapping[str, Strategy], axis: str, cost: AxisCost) -> Iterator[OpSplit]:
    """The letters of the forward operators that the axis splits; views and the backward pass follow them."""
    book = RuleBook(graph.types())
    for op in graph.ops:
        rule, strategy = book.rule(op), strategies[op.name]
        strides = {entry.stride for entry in (*strategy.reads, *strategy.results) if isinstance(entry, Split)}
        if op.phase is not Phase.FORWARD or not isinstance(rule, Letters) or not op.reads or len(strides) != 1:
            continue
        (stride,) = strides
        for letter in rule.letters:
            if split_on(rule, letter, stride) == strategy:
                extent = next(
                    shape[dims.index(letter)]
                    for dims, shape in zip(
                        (*rule.reads, *rule.results),
                        (*(cost.types[name].shape for name in op.reads), *(value.type.shape for value in op.results)),
                        strict=True,
                    )
                    if letter in dims
                )
                yield OpSplit(op.name, axis, letter, extent // (stride * cost.size))
                break


# ---- the linear program ----------------------------------------------------------------------------------------------


def _solve(
    graph: Graph, options: _Options, cost: AxisCost, most_seconds: float
) -> tuple[float, dict[str, Strategy], dict[str, Entry | None]]:
    program = Choices()
    producers = {value.name: (op.name, position) for op in graph.ops for position, value in enumerate(op.results)}
    readers: dict[str, dict[Reader, None]] = {}
    for name, entries in options.inputs.items():
        program.node(f"input {name}", [0.0] * len(entries))
    for op in graph.ops:
        program.node(op.name, [cost.compute(op, strategy) for strategy in options.ops[op.name]])
        for position, name in enumerate(op.reads):
            needs = tuple(strategy.reads[position] for strategy in options.ops[op.name])
            readers.setdefault(name, {}).setdefault(Reader(op.name, needs))
    for name, path in _outputs(graph):
        reader = Reader("output", (None,)) if path is None else Reader(f"input {path}", options.inputs[path])
        readers.setdefault(name, {}).setdefault(reader)
    program.node("output", [0.0])
    for name, wanting in readers.items():
        if name in producers:
            maker, position = producers[name]
            made = tuple(strategy.results[position] for strategy in options.ops[maker])
        else:
            maker, made = f"input {name}", options.inputs[name]
        program.value(partial(cost.move, name), maker, made, tuple(wanting))
    bound, chosen = program.run(most_seconds)
    strategies = {op.name: options.ops[op.name][chosen[op.name]] for op in graph.ops}
    return bound, strategies, {name: entries[chosen[f"input {name}"]] for name, entries in options.inputs.items()}
