"""The checker of a strategy, and the order in which its kernels run.

| rule | says |
|---|---|
| operators | a group names operators of the graph, each operator is in one group at most |
| phases | a group is all forward or all backward: between them the loss goes back to the user |
| repeats | what is computed `again` is in another group, is pure, and something in this group reads it |
| order | the groups, each as one node, have no cycle |
| buckets | every gradient is communicated once: whole in one bucket, or in spans that tile it |

**Order.** Contract every group to a node; an edge goes from the group that makes a value to each that reads it, unless
the reader makes it `again`. If the contracted graph has no cycle, `kernels` gives its nodes in an order that respects
it: among nodes that are free, the one whose last operator stands first in the graph. With no groups that is the graph's
own order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, OutputKind
from sennit.ir.strategy import Bucket, Group, Strategy

__all__ = ["Kernel", "check_buckets", "check_strategy", "is_pure", "kernels"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The operators that run together, in graph order; those named in `repeated` belong to other kernels too."""

    body: tuple[Op, ...]
    repeated: frozenset[str] = frozenset()

    @property
    def ops(self) -> tuple[Op, ...]:
        """Its own: what is not repeated."""
        return tuple(op for op in self.body if op.name not in self.repeated)

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that come from outside, each once."""
        made: set[str] = set()
        found: dict[str, None] = {}
        for op in self.body:
            found.update((name, None) for name in op.reads if name not in made)
            made.update(value.name for value in op.results)
        return tuple(found)


def check_strategy(strategy: Strategy, graph: Graph) -> None:
    """Raise `PlanError` with the first rule that the strategy breaks."""
    kernels(strategy, graph)
    check_buckets(strategy.buckets, graph)


def is_pure(op: Op) -> bool:
    """Whether it may be computed twice.

    A graph has no in-place operators, and its random numbers are functions of a counter.
    """
    return not op.kind.startswith("_c10d_functional.")


def kernels(strategy: Strategy, graph: Graph) -> tuple[Kernel, ...]:
    """The kernels in the order in which they run. Raises where groups do not fit the graph or wait for each other."""
    ops = {op.name: op for op in graph.ops}
    position = {op.name: place for place, op in enumerate(graph.ops)}
    home = _homes(strategy.groups, ops)
    alone = [Group((op.name,)) for op in graph.ops if op.name not in home]
    groups = (*strategy.groups, *alone)
    for number, group in enumerate(groups[len(strategy.groups) :], start=len(strategy.groups)):
        home[group.ops[0]] = number
    found = [_kernel(group, ops, position) for group in groups]
    return _ordered(found, home, position, graph)


def _homes(groups: Sequence[Group], ops: dict[str, Op]) -> dict[str, int]:
    home: dict[str, int] = {}
    for number, group in enumerate(groups):
        for name in (*group.ops, *group.again):
            if name not in ops:
                raise PlanError(f"%{name} is no operator of the graph", where=str(group), fix="name first results")
        if not group.ops:
            raise PlanError("a group without operators", where=f"group {number}", fix="remove it")
        for name in group.ops:
            if name in home:
                raise PlanError(
                    f"{ops[name].describe()} is in two groups", where=str(group), fix="put it in one, or under `again`"
                )
            home[name] = number
        phases = {ops[name].phase for name in group.ops}
        if len(phases) > 1:
            raise PlanError("a group mixes forward and backward", where=str(group), fix="split it by phase")
        _check_repeats(group, ops)
    return home


def _check_repeats(group: Group, ops: dict[str, Op]) -> None:
    read = {name for member in (*group.ops, *group.again) for name in ops[member].reads}
    for name in group.again:
        op = ops[name]
        if name in group.ops:
            raise PlanError(f"{op.describe()} is in the group and `again`", where=str(group), fix="name it once")
        if not is_pure(op):
            raise PlanError(f"{op.describe()} cannot be computed twice", where=str(group), fix="read its result")
        if not read & {value.name for value in op.results}:
            raise PlanError(
                f"nothing in the group reads what {op.describe()} makes", where=str(group), fix="remove the repeat"
            )


def _kernel(group: Group, ops: dict[str, Op], position: dict[str, int]) -> Kernel:
    names = sorted((*group.ops, *group.again), key=position.__getitem__)
    return Kernel(tuple(ops[name] for name in names), frozenset(group.again))


def _ordered(found: list[Kernel], home: dict[str, int], position: dict[str, int], graph: Graph) -> tuple[Kernel, ...]:
    maker = {value.name: home[op.name] for op in graph.ops for value in op.results}
    after: list[set[int]] = [set() for _ in found]
    missing = [0] * len(found)
    for number, kernel in enumerate(found):
        for before in {maker[name] for name in kernel.reads if name in maker}:
            after[before].add(number)
            missing[number] += 1
    key = [max(position[op.name] for op in kernel.ops) for kernel in found]
    free = [(key[number], number) for number, count in enumerate(missing) if count == 0]
    heapq.heapify(free)
    order: list[Kernel] = []
    while free:
        _, number = heapq.heappop(free)
        order.append(found[number])
        for other in after[number]:
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(free, (key[other], other))
    if len(order) < len(found):
        stuck = [kernel for kernel, count in zip(found, missing, strict=True) if count]
        raise PlanError(
            f"{len(stuck)} groups wait for each other",
            where="; ".join(kernel.ops[0].describe() for kernel in stuck[:3]),
            fix="a group must not contain an operator and something that another group computes between",
        )
    return tuple(order)


def check_buckets(buckets: Sequence[Bucket], graph: Graph) -> None:
    """Every gradient exactly once."""
    types = graph.types()
    sizes = {output.path: types[output.name].elements for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    spans: dict[str, list[tuple[int, int]]] = {path: [] for path in sizes}
    for bucket in buckets:
        for part in bucket.parts:
            if part.path not in sizes:
                raise PlanError(f"{part.path!r} has no gradient", where=str(bucket), fix="name parameters that train")
            start, stop = part.span or (0, sizes[part.path])
            if not 0 <= start < stop <= sizes[part.path]:
                raise PlanError(
                    f"{part.path!r} has {sizes[part.path]} elements, not {start} to {stop}", where=str(bucket)
                )
            spans[part.path].append((start, stop))
    for path, covered in spans.items():
        at = 0
        for start, stop in sorted(covered):
            if start != at:
                fault = "twice" if start < at else "not at all"
                raise PlanError(
                    f"elements {min(start, at)} to {max(start, at)} of the gradient of {path!r} are communicated {fault}",
                    fix="let the spans of a gradient tile it",
                )
            at = stop
        if at != sizes[path]:
            raise PlanError(
                f"elements {at} to {sizes[path]} of the gradient of {path!r} are in no bucket",
                fix="put every gradient in a bucket",
            )
