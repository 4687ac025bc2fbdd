"""A training step in an order in which every gradient is made as early as it can be.

A captured backward pass computes, for each layer, the gradient of the layer's input and then those of its parameters;
and a gradient that is ready in memory may wait for a view that stands behind other products. The channel has nothing to
carry meanwhile. An operator is a *tail* if one gradient of a parameter comes of it and nothing else. `gradients_first`
moves every tail to the place where all that it reads is there; among tails, and among the others, the order stays.

    dx = dy @ W        (others read it)             dw = dy.T @ x      (a tail)
    dw = dy.T @ x      (a tail)           becomes   dx = dy @ W
    x_before = f(dx)                                x_before = f(dx)

What is made of the data alone between the place where the last parameter is read for the first time and the first
gradient (the places of the labels, in a loss) needs no loss: it is computed before that place. There the channel is
busy; behind it, it waits for the first gradient.

The gradient of a weight comes earlier by the time of the layer's input gradient; those of the layers below it come when
they came before. The values are the same: operators of a graph have no side effects, and operators that draw random
numbers are not in the backward pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from sennit.ir.graph import Graph, Op, OutputKind, Phase, Role

__all__ = ["gradients_first"]


def gradients_first(graph: Graph) -> Graph:
    """The same graph, its operators in the order that the module's text says."""
    forward = [op for op in graph.ops if op.phase is not Phase.BACKWARD]
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD]
    if graph.ops != (*forward, *backward):
        return graph  # passes that are interleaved have an order for a reason of their own
    backward = _ordered(backward, _tails(graph, backward))
    ops = _with_data_early(graph, forward, backward)
    return graph if ops == graph.ops else replace(graph, ops=ops, repeats=())


def _with_data_early(graph: Graph, forward: Sequence[Op], backward: Sequence[Op]) -> tuple[Op, ...]:
    parameters = {item.value.name for item in graph.inputs if item.role is Role.PARAM}
    data = {item.value.name for item in graph.inputs if item.role is Role.INPUT}
    gradients = {output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    seen: set[str] = set()
    last = 0  # the operator that is the last to read a parameter which none before it read
    for place, op in enumerate(forward):
        if new := parameters.intersection(op.reads) - seen:
            seen |= new
            last = place
    early: list[Op] = []
    for place, op in enumerate(forward):
        if _is_of(data, op) and place >= last:
            early.append(op)
    for op in backward:
        if any(value.name in gradients for value in op.results):
            break
        if _is_of(data, op):
            early.append(replace(op, phase=Phase.FORWARD))
    moved = {op.name for op in early}
    behind = [op for op in (*forward[last:], *backward) if op.name not in moved]
    return (*forward[:last], *early, *behind)


def _is_of(data: set[str], op: Op) -> bool:
    """Whether an operator reads data only, and so do its results then. What draws random numbers keeps its turn."""
    if op.kind.startswith("sennit.") or not data.issuperset(op.reads):
        return False
    data.update(value.name for value in op.results)
    return True


def _tails(graph: Graph, backward: Sequence[Op]) -> set[str]:
    """Operators of which one gradient comes, and nothing else."""
    gradients = {output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    others = {output.name for output in graph.outputs if output.kind is not OutputKind.GRADIENT}
    leads: dict[str, set[str]] = {}  # value -> gradients that come of it, two of them at most: more are as good as two
    tails: set[str] = set()
    for op in reversed(backward):
        names = [value.name for value in op.results]
        # what is made of a gradient beside it (the rows of a table that is also the head) does not hold it up
        found = {gradient for name in names for gradient in ({name} if name in gradients else leads.get(name, ()))}
        if len(found) == 1 and not any(name in others for name in names):
            tails.add(op.name)
        some = sorted(found)[:2]
        for name in op.reads:
            if len(known := leads.setdefault(name, set())) < 2:
                known.update(some)
    return tails


def _ordered(backward: Sequence[Op], tails: set[str]) -> list[Op]:
    maker = {value.name: place for place, op in enumerate(backward) for value in op.results}
    reads = [sorted({maker[name] for name in op.reads if name in maker}) for op in backward]
    # A tail that waits for nothing in this pass (zeros to add to, a transposed input) could go to its very start, where
    # it would hold up the first gradient. It goes before its first reader.
    lazy: set[int] = set()
    for place, op in enumerate(backward):
        if op.name in tails and all(other in lazy for other in reads[place]):
            lazy.add(place)
    after: list[list[int]] = [[] for _ in backward]
    missing = [0] * len(backward)
    for place, makers in enumerate(reads):
        if place not in lazy:
            missing[place] = sum(other not in lazy for other in makers)
            for other in makers:
                after[other].append(place)
    found: dict[int, None] = {}

    def emit(place: int) -> None:
        for other in reads[place]:
            if other in lazy and other not in found:
                emit(other)
        found[place] = None

    free = [(backward[place].name not in tails, place) for place in range(len(backward)) if not missing[place]]
    free = [item for item in free if item[1] not in lazy]
    heapq.heapify(free)
    while free:
        _, place = heapq.heappop(free)
        emit(place)
        for other in after[place]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(free, (backward[other].name not in tails, other))
    for place in sorted(lazy):  # gradients that the data decides alone
        if place not in found:
            emit(place)
    return [backward[place] for place in found]
