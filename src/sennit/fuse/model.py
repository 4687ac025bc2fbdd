"""A training step as the search sees it: operators by number, what they read, which gradient comes out where.

`StepModel` is made once from a graph and answers, for any grouping of operators and any buckets, how long a step takes (`clock.py`). Groups and repeats are
sets of numbers, so that they are compared and remembered fast; `strategy` turns them into the value that prints and is enforced.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sennit.fuse.buckets import Gradient
from sennit.fuse.clock import BucketTime, Sharing, StepTime, Timing, steady_state
from sennit.fuse.kernel_cost import Estimate, KernelCost
from sennit.fuse.known_cost import ManyKernels, Question
from sennit.fuse.operator_class import Class, classify
from sennit.ir.graph import Graph, Op, OutputKind, Role
from sennit.ir.strategy import Bucket, Group, Strategy, WaitAt
from sennit.ir.strategy_check import Kernel

__all__ = ["Channel", "Class", "Grouping", "Numbers", "StepModel", "classify"]

Numbers = frozenset[int]
_NONE: Numbers = frozenset()


@dataclass(frozen=True, slots=True)
class Channel:
    """Communication of x bytes takes `latency + per_byte * x`; updating x bytes of parameters `update_per_byte * x`."""

    latency: float
    per_byte: float
    update_per_byte: float = 0.0
    sharing: Sharing = field(default_factory=Sharing)

    def seconds(self, size: int) -> float:
        return self.latency + self.per_byte * size


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of two operators or more, and what each computes again; every other operator is alone."""

    groups: frozenset[Numbers] = frozenset()
    again: frozenset[tuple[Numbers, Numbers]] = frozenset()  # group -> what it repeats

    def repeats(self) -> dict[Numbers, Numbers]:
        return dict(self.again)


class StepModel:
    """The graph in numbers, with a memory of what kernels cost."""

    def __init__(self, graph: Graph, cost: KernelCost, channel: Channel) -> None:
        self.graph, self.cost, self.channel = graph, cost, channel
        self.ops: tuple[Op, ...] = graph.ops
        number = {value.name: place for place, op in enumerate(graph.ops) for value in op.results}
        self.reads: list[tuple[int, ...]] = [
            tuple(dict.fromkeys(number[name] for name in op.reads if name in number)) for op in graph.ops
        ]
        self.readers: list[list[int]] = [[] for _ in graph.ops]
        for place, before in enumerate(self.reads):
            for other in before:
                self.readers[other].append(place)
        types = graph.types()
        self.kind = [classify(op, types) for op in graph.ops]
        self.phase = [op.phase for op in graph.ops]
        self.outputs = frozenset(number[output.name] for output in graph.outputs if output.name in number)
        self.gradients = self._gradients(number)
        self.first_use = self._first_uses()
        self.elements = {
            output.path: types[output.name].elements for output in graph.outputs if output.kind is OutputKind.GRADIENT
        }
        self._costs: dict[tuple[Numbers, Numbers], Estimate] = {}

    def _gradients(self, number: dict[str, int]) -> tuple[tuple[str, int, int], ...]:
        """(path, operator that makes it, bytes), in the order in which they come."""
        types = self.graph.types()
        found = [
            (output.path, number[output.name], types[output.name].bytes)
            for output in self.graph.outputs
            if output.kind is OutputKind.GRADIENT and output.name in number
        ]
        return tuple(sorted(found, key=lambda item: item[1]))

    def _first_uses(self) -> dict[str, int]:
        """By parameter path, the first operator that reads it."""
        parameters = {item.value.name: item.path for item in self.graph.inputs if item.role is Role.PARAM}
        first: dict[str, int] = {}
        for place, op in enumerate(self.ops):
            for name in op.reads:
                if name in parameters:
                    first.setdefault(parameters[name], place)
        return first

    # ---- kernels -------------------------------------------------------------------------------------------------------

    def order(self, grouping: Grouping) -> list[Numbers] | None:
        """The kernels, each as the set of its operators, in the order in which they run; None where they wait for each other."""
        repeats = grouping.repeats()
        home: dict[int, Numbers] = {place: group for group in grouping.groups for place in group}
        kernels = {home.get(place, frozenset((place,))) for place in range(len(self.ops))}
        missing: dict[Numbers, int] = {}
        after: dict[Numbers, list[Numbers]] = {kernel: [] for kernel in kernels}
        for kernel in kernels:
            before = set()
            inside = kernel | repeats.get(kernel, frozenset())
            for place in inside:
                for other in self.reads[place]:
                    if other not in inside:
                        before.add(home.get(other, frozenset((other,))))
            missing[kernel] = len(before)
            for other_kernel in before:
                after[other_kernel].append(kernel)
        free = [(max(kernel), kernel) for kernel, count in missing.items() if count == 0]
        heapq.heapify(free)
        found: list[Numbers] = []
        while free:
            _, kernel = heapq.heappop(free)
            found.append(kernel)
            for other_kernel in after[kernel]:
                missing[other_kernel] -= 1
                if missing[other_kernel] == 0:
                    heapq.heappush(free, (max(other_kernel), other_kernel))
        return found if len(found) == len(kernels) else None

    def question(self, kernel: Numbers, repeated: Numbers = frozenset()) -> Question:
        """The kernel of these operators, and its values that something outside reads."""
        written = frozenset(
            value.name
            for place in kernel
            if place in self.outputs or any(reader not in kernel for reader in self.readers[place])
            for value in self.ops[place].results
        )
        body = tuple(self.ops[place] for place in sorted(kernel | repeated))
        return Kernel(body, frozenset(self.ops[place].name for place in repeated)), written

    def estimate(self, kernel: Numbers, repeated: Numbers = frozenset()) -> Estimate:
        return self._estimates([(kernel, repeated)])[0]

    def _estimates(self, asked: Sequence[tuple[Numbers, Numbers]]) -> list[Estimate]:
        new = [key for key in asked if key not in self._costs]
        if new:
            questions = [self.question(*key) for key in new]
            if isinstance(self.cost, ManyKernels):
                found = self.cost.estimate_all(questions)
            else:
                found = [self.cost.estimate(*question) for question in questions]
            self._costs.update(zip(new, found, strict=True))
        return [self._costs[key] for key in asked]

    def kernel_seconds(self, order: Iterable[Numbers], grouping: Grouping) -> list[float]:
        repeats = grouping.repeats()
        return [item.seconds for item in self._estimates([(kernel, repeats.get(kernel, _NONE)) for kernel in order])]

    def forget(self) -> None:
        """Ask the costs again: something was measured since."""
        self._costs.clear()

    # ---- steps ---------------------------------------------------------------------------------------------------------

    def arrivals(self, order: Sequence[Numbers], seconds: Sequence[float]) -> list[Gradient]:
        """The gradients in the order in which kernels make them, with the time of compute alone."""
        end: dict[int, float] = {}
        now = 0.0
        for kernel, length in zip(order, seconds, strict=True):
            now += length
            end.update(dict.fromkeys(kernel, now))
        found = [Gradient(path, end[place], size) for path, place, size in self.gradients]
        return sorted(found, key=lambda item: item.ready)

    def timing(
        self,
        order: Sequence[Numbers],
        seconds: Sequence[float],
        buckets: Sequence[Bucket],
        *,
        by_priority: bool = False,
    ) -> Timing:
        """The step as the clock takes it. With `by_priority` the channel chooses: what is needed first in the next step goes first, after what
        this step waits for."""
        place_of = {place: index for index, kernel in enumerate(order) for place in kernel}
        maker = {path: place_of[place] for path, place, _ in self.gradients}
        size = {path: bytes_ for path, _, bytes_ in self.gradients}
        elements = self.elements
        times: list[BucketTime] = []
        for bucket in buckets:
            carried = sum(
                size[part.path]
                if part.span is None
                else size[part.path] * (part.span[1] - part.span[0]) // elements[part.path]
                for part in bucket.parts
            )
            needed: int | None = None
            if bucket.wait is WaitAt.NEXT:
                needed = min(place_of[self.first_use[part.path]] for part in bucket.parts)
            times.append(
                BucketTime(
                    ready=max(maker[part.path] for part in bucket.parts),
                    seconds=self.channel.seconds(carried),
                    update=self.channel.update_per_byte * carried,
                    priority=-1 if needed is None else needed,
                    needed=needed,
                )
            )
        return Timing(tuple(seconds), tuple(times), by_priority)

    def step_time(self, grouping: Grouping, buckets: Sequence[Bucket]) -> StepTime:
        order = self.order(grouping)
        assert order is not None, "a grouping that was not checked"
        timing = self.timing(order, self.kernel_seconds(order, grouping), buckets)
        return steady_state(timing, self.channel.sharing)

    def strategy(self, name: str, grouping: Grouping, buckets: Sequence[Bucket]) -> Strategy:
        repeats = grouping.repeats()

        def names(places: Iterable[int]) -> tuple[str, ...]:
            return tuple(self.ops[place].name for place in sorted(places))

        groups = [Group(names(group), names(repeats.get(group, ()))) for group in sorted(grouping.groups, key=min)]
        return Strategy(name, tuple(groups), tuple(buckets))
