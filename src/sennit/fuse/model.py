"""A training step as the search sees it: operators by number, what they read, which gradient comes out where.

`StepModel` is made once from a graph and answers, for any grouping of operators and any buckets, how long a step takes
(`clock.py`). Groups and repeats are sets of numbers, so that they are compared and remembered fast; `strategy` turns
them into the value that prints and is enforced.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sennit.fuse.buckets import Gradient
from sennit.fuse.channel import Channel
from sennit.fuse.clock import BucketTime, StepTime, Timing, steady_state
from sennit.fuse.kernel_cost import Estimate, KernelCost
from sennit.fuse.known_cost import ManyKernels, Question
from sennit.fuse.looked_up import ROWS, LookUp, parameter_of
from sennit.fuse.operator_class import Class, classify
from sennit.fuse.row_blocks import RowProduct, are_rows, block_ends, cut_spans, ready_fractions
from sennit.fuse.row_uses import RowUse, use_blocks
from sennit.ir.graph import Graph, Op, OutputKind, Role
from sennit.ir.strategy import Bucket, Group, Part, Reduce, Strategy, WaitAt
from sennit.ir.strategy_check import Kernel

__all__ = ["Channel", "Class", "Grouping", "KernelOrder", "Numbers", "StepModel", "classify"]

Numbers = frozenset[int]
_NONE: Numbers = frozenset()


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of two operators or more, and what each computes again; every other operator is alone."""

    groups: frozenset[Numbers] = frozenset()
    again: frozenset[tuple[Numbers, Numbers]] = frozenset()  # group -> what it repeats

    def repeats(self) -> dict[Numbers, Numbers]:
        return dict(self.again)


class StepModel:
    """The graph in numbers, with a memory of what kernels cost."""

    def __init__(
        self,
        graph: Graph,
        cost: KernelCost,
        channel: Channel,
        in_rows: Mapping[str, RowProduct] | None = None,
        packed: Mapping[str, LookUp] | None = None,
        uses: Mapping[str, RowUse] | None = None,
        per_block: Mapping[str, float] | None = None,
    ) -> None:
        """`in_rows` are gradients that are made block by block of rows where they are cut (`row_blocks.py`), `uses`
        weights that are read so (`row_uses.py`); of those in `packed` only some rows travel where they are not cut
        (`looked_up.py`). `per_block`: by product, the seconds that it takes longer for each block but the first.
        """
        self.graph, self.cost, self.channel = graph, cost, channel
        self.in_rows, self.packed, self.uses = dict(in_rows or {}), dict(packed or {}), dict(uses or {})
        self.per_block = dict(per_block or {})
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
        self.bytes = {path: size for path, _, size in self.gradients}
        # what the clock and the search count for a gradient that is not cut
        self.whole_bytes = dict(self.bytes)
        for path, item in self.packed.items():
            self.whole_bytes[path] = self.bytes[path] * item.elements // self.elements[path]
        # a head without the rows that travel packed
        self.head_bytes = {
            parameter_of(path): self.bytes[path] - self.whole_bytes[path]
            for path, item in self.packed.items()
            if item.total is not None
        }
        self.whole_bytes |= self.head_bytes
        self.single = [frozenset((place,)) for place in range(len(self.ops))]
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
        uses = {path: first[parameter_of(path)] for path, _, _ in self.gradients if parameter_of(path) in first}
        return {**first, **uses}

    # ---- kernels -----------------------------------------------------------------------------------------------------

    def order(self, grouping: Grouping) -> list[Numbers] | None:
        """The kernels, each as the set of its operators, in the order in which they run; None where they wait for each
        other.
        """
        count = len(self.ops)
        home = list(
            range(count)
        )  # a kernel goes by its last operator, which is also its turn among those that are free
        members: dict[int, Numbers] = {}
        for group in grouping.groups:
            last = max(group)
            members[last] = group
            for place in group:
                home[place] = last
        repeats = {max(group): again for group, again in grouping.again}
        before: dict[int, set[int]] = {}
        for place, reads in enumerate(self.reads):
            kernel = home[place]
            waits = before.setdefault(kernel, set())
            again = repeats.get(kernel, _NONE)
            waits.update(home[read] for read in reads if read not in again)
        for kernel, again in repeats.items():
            inside = members[kernel] | again
            before[kernel].update(home[read] for place in again for read in self.reads[place] if read not in inside)
        after: dict[int, list[int]] = {}
        missing: dict[int, int] = {}
        for kernel, waits in before.items():
            waits.discard(kernel)
            missing[kernel] = len(waits)
            for other in waits:
                after.setdefault(other, []).append(kernel)
        free = [kernel for kernel, number in missing.items() if number == 0]
        heapq.heapify(free)
        found: list[Numbers] = []
        while free:
            kernel = heapq.heappop(free)
            found.append(members.get(kernel) or self.single[kernel])
            for other in after.get(kernel, ()):
                missing[other] -= 1
                if missing[other] == 0:
                    heapq.heappush(free, other)
        return found if len(found) == len(before) else None

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

    def seconds_of(self, kernels: Iterable[tuple[Numbers, Numbers]]) -> float:
        """Of kernels with what they repeat, one after another."""
        return sum(item.seconds for item in self._estimates(list(kernels)))

    def is_known(self, kernel: tuple[Numbers, Numbers]) -> bool:
        """Whether its time was asked before, so that it is at hand."""
        return kernel in self._costs

    def forget(self) -> None:
        """Ask the costs again: something was measured since."""
        self._costs.clear()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def arrivals(self, order: Sequence[Numbers], seconds: Sequence[float]) -> list[Gradient]:
        """The gradients in the order in which kernels make them, with the time of compute alone."""
        end: dict[int, float] = {}
        now = 0.0
        for kernel, length in zip(order, seconds, strict=True):
            now += length
            end.update(dict.fromkeys(kernel, now))
        found = [Gradient(path, end[place], self.whole_bytes[path]) for path, place, _ in self.gradients]
        return sorted(found, key=lambda item: item.ready)

    def step_time(self, grouping: Grouping, buckets: Sequence[Bucket]) -> StepTime:
        order = self.order(grouping)
        assert order is not None, "a grouping that was not checked"
        timing = KernelOrder(self, order, self.kernel_seconds(order, grouping)).timing(buckets)
        return steady_state(timing, self.channel.sharing)

    def carried(self, bucket: Bucket, cut: Collection[str] = ()) -> int:
        """Bytes of a bucket.

        `cut` are gradients that travel in pieces: of a table that is one of them, all rows travel, and all rows of a
        head. So they do of a head that is cut inside a row, and in a bucket that is reduced to shares.
        """
        short = {path for path in self.head_bytes if self._leaves_out(path, bucket) and path + ROWS not in cut}
        return sum(self._carried(part, is_short=part.path in short) for part in bucket.parts)

    def _leaves_out(self, path: str, bucket: Bucket) -> bool:
        spans = [part.span for part in bucket.parts if part.path == path and part.span is not None]
        return bucket.reduce is Reduce.ALL_REDUCE and are_rows(spans, self.packed[path + ROWS].width)

    def _carried(self, part: Part, *, is_short: bool) -> int:
        if is_short:
            size = self.head_bytes[part.path]
        else:
            size = self.bytes[part.path] if part.path in self.head_bytes or part.span else self.whole_bytes[part.path]
        return size if part.span is None else size * (part.span[1] - part.span[0]) // self.elements[part.path]

    def updated(self, bucket: Bucket) -> int:
        """Bytes of the parameters that it updates. A table is updated whole, and once."""
        parts = [part for part in bucket.parts if parameter_of(part.path) == part.path]
        spans = [(part.path, part.span or (0, self.elements[part.path])) for part in parts]
        return sum(self.bytes[path] * (stop - start) // self.elements[path] for path, (start, stop) in spans)

    def copied(self, bucket: Bucket) -> int:
        """Bytes that are copied when it is there: pieces of gradients, where it does not lie in the place of its only
        one.
        """
        if len(bucket.parts) == 1:
            return 0
        spans = [(part.path, part.span) for part in bucket.parts if part.span is not None]
        return sum(self.bytes[path] * (span[1] - span[0]) // self.elements[path] for path, span in spans)

    def strategy(self, name: str, grouping: Grouping, buckets: Sequence[Bucket]) -> Strategy:
        repeats = grouping.repeats()

        def names(places: Iterable[int]) -> tuple[str, ...]:
            return tuple(self.ops[place].name for place in sorted(places))

        groups = [Group(names(group), names(repeats.get(group, ()))) for group in sorted(grouping.groups, key=min)]
        return Strategy(name, tuple(groups), tuple(buckets))


class KernelOrder:
    """Kernels in order with their times: what buckets are timed against.

    The clock's events are the ends of kernels that make a bucket's last gradient and the starts of those that need one.
    Kernels between two events count as one, so that a bucketing is timed in a fraction of a millisecond whatever the
    size of the graph.
    """

    def __init__(self, model: StepModel, order: Sequence[Numbers], seconds: Sequence[float]) -> None:
        self.model, self.order, self.seconds = model, order, seconds
        place_of = [0] * len(model.ops)
        for index, kernel in enumerate(order):
            for place in kernel:
                place_of[place] = index
        self.maker = {path: place_of[place] for path, place, _ in model.gradients}
        self.use = {path: place_of[place] for path, place in model.first_use.items()}
        numbers = {op.name: place for place, op in enumerate(model.ops)} if model.in_rows or model.uses else {}
        products = {path: place_of[numbers[rows.product]] for path, rows in model.in_rows.items()}
        # a product in a group is one kernel with it
        self.product = {path: kernel for path, kernel in products.items() if len(order[kernel]) == 1}
        reading = {path: place_of[numbers[use.product]] for path, use in model.uses.items()}
        self.read_by = {path: kernel for path, kernel in reading.items() if len(order[kernel]) == 1}
        self._alone = frozenset(model.uses[path].product for path in self.read_by)
        self.until = list(accumulate(seconds, initial=0.0))  # seconds of the kernels before each

    def timing(self, buckets: Sequence[Bucket], *, by_priority: bool = False, also: Sequence[int] = ()) -> Timing:
        """With `by_priority` the channel chooses: what is needed first in the next step goes first, after what this
        step waits for. Kernels are also kept apart before those `also` names.
        """
        model, channel = self.model, self.model.channel
        ready = self._ready(buckets)
        needed = self._needed(buckets)
        bounds: list[float] = sorted({*ready, *also, *(place for place in needed if place), len(self.seconds)})
        segment = {bound: index for index, bound in enumerate(bounds)}
        cut = frozenset(part.path for bucket in buckets for part in bucket.parts if part.span is not None)
        times: list[BucketTime] = []
        for bucket, end, need in zip(buckets, ready, needed, strict=True):
            carried = model.carried(bucket, cut)
            gather = 0.0
            if bucket.reduce is Reduce.REDUCE_SCATTER:
                seconds, gather = channel.halves(carried)
            else:
                seconds = channel.seconds(carried, bucket.algorithm)
            times.append(
                BucketTime(
                    ready=segment[end],
                    seconds=seconds,
                    update=channel.update_per_byte * model.updated(bucket)
                    + channel.copy_per_byte * model.copied(bucket),
                    priority=-1 if need is None else need,
                    needed=None if need is None else segment[need] + 1 if need else 0,
                    gather=gather,
                )
            )
        lengths = [self._seconds_until(end) - self._seconds_until(start) for start, end in pairwise([0, *bounds])]
        for place, seconds in self._blocks_cost(buckets):
            lengths[bisect_right(bounds, place)] += seconds
        return Timing(tuple(lengths), tuple(times), by_priority)

    def _blocks_cost(self, buckets: Sequence[Bucket]) -> Iterator[tuple[float, float]]:
        """Where a block of a product begins, and the seconds that this costs: of one that is not the first, and of all
        of them where they are copied into their buckets.
        """
        per_block, copying = self.model.per_block, self.model.channel.copy_per_byte
        for path, spans in self._cut(buckets).items():
            rows, begun = self.model.in_rows[path], 0.0
            copied = 0.0 if are_rows(spans, rows.width) else copying * self.model.bytes[path]
            for _, _, done in block_ends(spans, rows):
                cost = copied * (done - begun) + (per_block.get(rows.product, 0.0) if begun else 0.0)
                yield self.product[path] + begun, cost
                begun = done
        for path, blocks in use_blocks(buckets, self.model.uses, self._alone).items():
            use, start = self.model.uses[path], 0
            for block in blocks[:-1]:
                start += block.stop - block.start
                yield self.read_by[path] + start / use.rows, per_block.get(use.product, 0.0)

    def _cut(self, buckets: Sequence[Bucket]) -> dict[str, list[tuple[int, int]]]:
        """The spans of gradients that are made in blocks."""
        return {path: spans for path, spans in cut_spans(buckets).items() if path in self.product}

    def _ready(self, buckets: Sequence[Bucket]) -> list[float]:
        """After how many kernels each bucket is full; 3.5 where that is halfway through the fourth."""
        done = {path: ready_fractions(spans, self.model.in_rows[path]) for path, spans in self._cut(buckets).items()}
        return [
            max(
                self.product[part.path] + done[part.path][part.span]
                if part.path in done and part.span is not None
                else self.maker[part.path] + 1.0
                for part in bucket.parts
            )
            for bucket in buckets
        ]

    def _needed(self, buckets: Sequence[Bucket]) -> list[float | None]:
        """After how many kernels of the next step each bucket is waited for; 3.5 where that is halfway through the
        fourth, None where this step waits for it.
        """
        rows: dict[tuple[str, int], float] = {}
        for path, blocks in use_blocks(buckets, self.model.uses, self._alone).items():
            done = 0
            for block in blocks:
                rows.setdefault((path, block.bucket), self.read_by[path] + done / self.model.uses[path].rows)
                done += block.stop - block.start
        return [
            min(rows.get((part.path, number), self.use[part.path]) for part in bucket.parts)
            if bucket.wait is WaitAt.NEXT
            else None
            for number, bucket in enumerate(buckets)
        ]

    def _seconds_until(self, kernels: float) -> float:
        whole = int(kernels)
        return self.until[whole] + ((kernels - whole) * self.seconds[whole] if kernels > whole else 0.0)
