"""A training step as the search sees it: operators by number, what they read, which gradient comes out where.

`StepModel` is made once from a graph and answers, for any grouping of operators and any buckets, how long a step takes (`clock.py`). Groups and repeats are
sets of numbers, so that they are compared and remembered fast; `strategy` turns them into the value that prints and is enforced.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sennit.fuse.buckets import Gradient
from sennit.fuse.clock import BucketTime, Sharing, StepTime, Timing, steady_state
from sennit.fuse.kernel_cost import Estimate, KernelCost
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Op, OutputKind, Role
from sennit.ir.operators import is_view
from sennit.ir.strategy import Bucket, Group, Strategy, WaitAt
from sennit.ir.strategy_check import Kernel

__all__ = ["Channel", "Class", "Grouping", "Numbers", "StepModel", "classify"]

Numbers = frozenset[int]


class Class(Enum):
    """What decides whether an operator may share a kernel."""

    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    PRODUCT = "product"
    OTHER = "other"


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
        self.kind = [classify(op, graph.types()) for op in graph.ops]
        self.phase = [op.phase for op in graph.ops]
        self.outputs = frozenset(number[output.name] for output in graph.outputs if output.name in number)
        self.gradients = self._gradients(number)
        self.first_use = self._first_uses()
        types = graph.types()
        self.elements = {
            output.path: types[output.name].elements for output in graph.outputs if output.kind is OutputKind.GRADIENT
        }
        self._costs: dict[tuple[Numbers, Numbers, frozenset[str]], Estimate] = {}

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

    def estimate(self, kernel: Numbers, repeated: Numbers = frozenset()) -> Estimate:
        written = frozenset(
            value.name
            for place in kernel
            if place in self.outputs or any(reader not in kernel for reader in self.readers[place])
            for value in self.ops[place].results
        )
        key = (kernel, repeated, written)
        if key not in self._costs:
            body = tuple(self.ops[place] for place in sorted(kernel | repeated))
            names = frozenset(self.ops[place].name for place in repeated)
            self._costs[key] = self.cost.estimate(Kernel(body, names), written)
        return self._costs[key]

    def kernel_seconds(self, order: Iterable[Numbers], grouping: Grouping) -> list[float]:
        repeats = grouping.repeats()
        return [self.estimate(kernel, repeats.get(kernel, frozenset())).seconds for kernel in order]

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


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "linear", "mv", "addmv")
_REDUCTIONS = (
    "sum",
    "mean",
    "amax",
    "amin",
    "var",
    "var_mean",
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
)
_OPAQUE = (
    "embedding_dense_backward",
    "index_put",
    "scatter",
    "scatter_add",
    "sort",
    "topk",
    "cumsum",
    "nonzero",
    "native_batch_norm",
    "native_batch_norm_backward",
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
)


def classify(op: Op, types: dict[str, TensorType]) -> Class:
    """By what the operator does to its elements. Anything that is not known to be pointwise or a reduction is left alone."""
    if is_view(op.kind):
        return Class.VIEW
    if not op.kind.startswith("aten."):
        return Class.OTHER
    name = op.kind.split(".")[1]
    if name in _PRODUCTS or name.startswith("_scaled_dot_product"):
        return Class.PRODUCT
    if name in _REDUCTIONS:
        return Class.REDUCTION
    if name in _OPAQUE or len(op.results) > 1:
        return Class.OTHER
    shape = op.results[0].type.shape
    broadcast = all(_fits(types[read].shape, shape) for read in op.reads)
    return Class.POINTWISE if broadcast else Class.OTHER


def _fits(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to the result's."""
    if len(shape) > len(result):
        return False
    tail = result[len(result) - len(shape) :]
    return all(size in (1, whole) for size, whole in zip(shape, tail, strict=True))
