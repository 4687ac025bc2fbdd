"""The time of a compiled group from the parts that it becomes (`compiled_parts.py`): the base that the learned
estimator corrects.

    seconds of a part = waits + ((traffic)^p + (instructions / rate)^p)^(1/p)          p from 2 in the cache to 4 in memory: long loads hide arithmetic better
    waits             = start + loads that wait for one another + reductions that do + a step for each doubling of what is reduced, in launches
    traffic           = found * max(written / w + read / b, read / r) + (1 - found) * (read + written) / memory

and products as measured, or by the device's profile. A kernel in a CUDA graph starts in a quarter of what a launch from
the host takes: on an H200, one that is made of numbers takes 0.63 us, one that loads something 0.88, one that loads an
index first 1.2; reductions 0.4 us more for each that waits for another. The cache takes what is written at 1.1 times
the speed of memory and gives what is read at 1.9 times it; read beside a write it costs a fifth of that. What is found
there falls from all at two thirds of its size to nothing at four thirds, by what the group touches; lines that were
written count for more. A loop over rows so long that all programs together do not fit reads them from memory twice.
What it takes to compute is in `part_effort.py`.

Where operators were measured one by one (`Staged.measured`), a product takes what it took, and parts are corrected by
their operators (`_corrected`). Convolutions in float32 run in TF32, as torch has them by default, in a fraction of the
product's time by the profile.

The constants were read off lone operators and groups of one part that were measured on an H200
(`benchmarks/fuse/data`), in parts of its launch and bandwidth; with them alone, nothing measured, groups of several
pointwise operators are off by 3.1 % in the median and 9.9 % at p90. What they miss is for the network to learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, log2
from statistics import fmean

import numpy as np

from sennit.fuse.compiled_parts import Part, Sort, parts_of
from sennit.fuse.kernel_cost import Estimate, Lone, Staged, added_to, bases, copies_bias
from sennit.fuse.operator_class import Class, classify, moves_nothing, stem
from sennit.fuse.part_effort import Effort, looked_at
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Op
from sennit.ir.strategy_check import Kernel

__all__ = ["Compiled", "Split"]

_TF32 = 0.25
_FULL = 200e3  # bytes that fill the device with programs
_WIDE = 131072  # elements that do: with fewer, processors are idle, or wait for the result of each instruction
_ADDED_KEPT, _ADDED = 0.4, 0.7  # of the excess of a reduction whose rows are kept, or looped over
_LONGER = 0.8  # at least, where reductions took longer than modelled
_SHARED = 0.85  # of the factor of an operator of several parts, for each of them
_STARTS = 0.5  # of a launch, what the second of two reductions in one loop saves
_NEARER = 0.5  # less of memory's time, for what a loop moves beyond its reductions in the cache
_AGAIN = 0.7  # of the rows of two batch norms in one loop, what has left the cache before they are read again
_LEAST = 0.3  # of what a part should take
_MORE = 0.4  # of a launch, for each further kernel of a part
_SECTORS = 51.0  # bytes of memory that an element takes which is written out of order
_COPY = 0.72  # of a launch, the kernel that copies a bias
_STREAM = 0.05  # of what is written, for each value beyond the second
_CACHE = 50e6  # bytes, where the device does not say
_FOUND = (
    (0.67, 0.77, 0.88, 1.0, 1.16, 1.34),
    (1.0, 0.7, 0.42, 0.18, 0.06, 0.0),
)  # touched over the cache's size: the share that is found there
_DIRTY, _EVEN = 1.3, 1.15  # of what is written, over what is read; and of both in equal shares
_IN_FLIGHT = 528  # programs at a time: four on each multiprocessor


@dataclass(frozen=True, slots=True)
class _Speed:
    """Of a sort of parts.

    In launches of the device: `start` of a kernel, `load` for each load that waits for another, `pass_` for each
    reduction that does, `fill` of the device with programs, `step` for each doubling of what is reduced, `each` for
    each reduction beside the first. Over the bandwidth of memory: of the cache for what is `read` alone, for what is
    `written`, and for what is read `beside` that; `far` of memory.
    """

    start: float
    load: float
    pass_: float
    fill: float
    step: float
    each: float
    read: float
    written: float
    beside: float
    far: float


_POINT = _Speed(0.268, 0.086, 0.0, 0.045, 0.0, 0.0, 1.855, 1.126, 5.5, 1.025)
_KEPT = _Speed(0.065, 0.085, 0.166, 0.022, 0.0135, 0.025, 1.76, 1.3, 2.7, 0.988)
_LOOP = _Speed(0.14, 0.12, 0.33, 0.0, 0.0, 0.235, 1.15, 1.06, 4.6, 1.018)
_COLUMN = _Speed(0.32, 0.082, 0.15, 0.0, 0.0, 0.15, 1.35, 0.8, 6.4, 1.0)


@dataclass(frozen=True, slots=True)
class Split:
    """A group as parts, with seconds in all, of library calls, and the bytes that it touches; `modelled` are the
    seconds without what operators took by themselves, but for products; `piled` are those of measured reductions one
    behind the other, with the time that memory takes for what a part moves beyond them.
    """

    parts: tuple[Part, ...]
    seconds: float
    library: float
    footprint: int
    modelled: float
    piled: float


@dataclass(frozen=True, slots=True)
class Compiled:
    """Kernels of a graph as a compiler cuts them, with the device's profile for products."""

    staged: Staged

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        return Estimate(self.split(kernel, written).seconds)

    def split(self, kernel: Kernel, written: frozenset[str]) -> Split:
        if all(moves_nothing(op) for op in kernel.body):
            return Split((), 0.0, 0.0, 0, 0.0, 0.0)
        types = self.staged.roofline.types
        parts = parts_of(kernel, written, types)
        library = self._library(kernel, written, parts)
        footprint = self._touched(kernel, parts)
        busy = [op for op in kernel.body if not moves_nothing(op)]
        others = [part for part in parts if part.sort is not Sort.LIBRARY]
        modelled = [self._modelled(part, footprint) for part in others]
        found = [self._corrected(part, time, busy, footprint) for part, time in zip(others, modelled, strict=True)]
        seconds, piled = sum(it[0] for it in found), sum(it[1] for it in found)
        return Split(parts, library + seconds, library, footprint, library + sum(modelled), library + piled)

    def _modelled(self, part: Part, footprint: int) -> float:
        speed, effort = _speed(part), part.effort
        launch, memory = self.staged.roofline.device.launch.value, self._memory()
        inner = part.size / part.outer
        starts = (
            speed.start + speed.load * effort.depth + speed.pass_ * effort.passes + speed.step * log2(max(1, inner))
        )
        starts += speed.each * max(0, part.shape.reductions - 1)
        starts += speed.fill * min(1.0, (part.read + part.written) / _FULL) + _MORE * (part.launches - 1)
        found = self._found(footprint)
        streams = 1.0 + _STREAM * max(0, part.shape.stores - 2)
        near = max(part.written * streams / speed.written + part.read / speed.beside, part.read / speed.read)
        far = (part.read + part.written + self._read_again(part, footprint)) / speed.far
        traffic = (found * near + (1.0 - found) * far) / memory
        work = effort.instructions / self._rate() / min(1.0, part.size / _WIDE)
        # loads and arithmetic of different programs overlap, the better the longer the loads take
        power = 2.0 * found + 4.0 * (1.0 - found)
        both: float = (traffic**power + work**power) ** (1.0 / power)
        return starts * launch + both + part.reordered * _SECTORS / memory

    def _read_again(self, part: Part, footprint: int) -> int:
        """Bytes that a loop over long rows finds no longer in the cache when it comes to them for the second time: all
        programs are in their first pass at once.
        """
        return part.effort.again if not part.kept and part.outer <= _IN_FLIGHT and footprint > self._cache() else 0

    def _rate(self) -> float:
        """Instructions in a second, for one element each: half of what is multiplied and added."""
        peak = self.staged.roofline.device.peak.f32
        return peak.value / 2 if peak is not None else inf

    def _touched(self, kernel: Kernel, parts: Sequence[Part]) -> int:
        """Bytes of the cache that a group wants: what it reads, of its views what they show, and what it writes.

        A line that was written stays longer, until it has gone to memory.
        """
        busy = [op for op in kernel.body if not moves_nothing(op)]
        made = {value.name for op in kernel.body for value in op.results}
        read = looked_at(busy, made, bases(kernel), self.staged.roofline.types)
        return int((sum(read.values()) + _DIRTY * sum(part.written for part in parts)) / _EVEN)

    def _corrected(self, part: Part, seconds: float, busy: Sequence[Op], footprint: int) -> tuple[float, float]:
        """Seconds of a part by what operators in it took, each by itself, over what they should have taken; and its
        reductions one behind the other (`Split.piled`). Of a part that is one operator, what it took.

        A pointwise part is longer by the factor that its operators over all of its elements were, in the geometric
        mean. A reduction's own excess is in its waiting more than in its bytes: most of it is added, that of the
        reduction which moves most nearly what the part does, and of others of its kind. Two norms in one loop over rows
        take no less than both, and a batch norm's loop, whose rows lie in pieces, no less than it and what the part
        moves beyond it; two batch norms' rows leave the cache before they are read again.
        """
        inside = [op for op in busy if op.name in part.ops] if self.staged.measured else []
        alone = len(inside) == 1
        types = self.staged.roofline.types
        if not alone and part.sort is Sort.POINT:
            inside = [op for op in inside if op.results[0].type.elements == part.size]
        elif not alone:
            inside = [op for op in inside if classify(op, types) is Class.REDUCTION]
        inside = [op for op in inside if self._lone(op) is not None]
        found = [lone for op in inside if (lone := self._lone(op)) is not None]
        if not found:
            return seconds, seconds
        if alone or part.sort is Sort.POINT:
            seconds *= exp(fmean(log(lone.took / lone.modelled) for lone in found))
            return seconds, seconds
        moved = part.read + part.written
        kind = min(zip(inside, found, strict=True), key=lambda pair: abs(pair[1].moved - moved))[0].kind
        # two norms of two values wait for each of them
        alike = {op.reads[0]: lone for op, lone in zip(inside, found, strict=True) if op.kind == kind}
        added = 1.0 if part.sort is not Sort.ROW else _ADDED_KEPT if part.kept else _ADDED
        if any(lone.parts > 1 for lone in alike.values()):  # which of its parts was longer nobody knows
            seconds *= exp(_SHARED * fmean(log(lone.took / lone.modelled) for lone in alike.values()))
            return seconds, seconds
        excess = sum(lone.took - lone.modelled for lone in alike.values())
        # each has waits of its own that may be longer; what all of them need not wait for is one start
        less = _ADDED_KEPT if part.sort is Sort.COLUMN else added
        change = max(added, _LONGER) * excess if excess > 0 else less * excess / len(alike)
        seconds = max(_LEAST * seconds, seconds + change)
        near = self._found(footprint)
        more = max(0, moved - sum(lone.moved for lone in alike.values())) * (1.0 - _NEARER * near)
        if len(alike) > 1 and "batch_norm" in kind:
            more += _AGAIN * part.effort.again * (1.0 - near)
        starts = (len(alike) - 1) * _STARTS * self.staged.roofline.device.launch.value
        piled = sum(lone.took for lone in alike.values()) - starts + more / self._memory()
        is_loop = part.sort is Sort.ROW and not part.kept and not part.launches > 1
        waits = is_loop and (len(alike) > 1 or "batch_norm" in kind)
        return max(seconds, piled) if waits else seconds, piled

    def _lone(self, op: Op) -> Lone | None:
        lones = self.staged.lones
        if op.name not in lones:
            took = self.staged.as_measured(op)
            if took is None:
                lones[op.name] = None
            else:
                results = frozenset(value.name for value in op.results)
                split = Compiled(self.staged.with_measured({})).split(Kernel((op,)), results)
                lones[op.name] = Lone(
                    sum(it.read + it.written for it in split.parts), split.seconds, took, len(split.parts)
                )
        return lones[op.name]

    def _library(self, kernel: Kernel, written: frozenset[str], parts: Sequence[Part]) -> float:
        calls = {name for part in parts if part.sort is Sort.LIBRARY for name in part.ops}
        types = self.staged.roofline.types
        totals = {op.name: added_to(op, kernel, written, types) for op in kernel.body if op.name in calls}
        sums = {total.name for total in totals.values() if total is not None}
        shown = bases(kernel)
        seconds = 0.0
        for op in kernel.body:
            if op.name not in calls or op.name in sums or stem(op.kind) == "clone":
                continue
            is_known = self.staged.measured_inside(op, kernel, written) is not None
            guessed = op.results[0].type.dtype is DType.F32 and not is_known
            factor = _TF32 if guessed and stem(op.kind).startswith("convolution") else 1.0
            seconds += factor * self.staged.inside(op, kernel, written)
            if is_known and stem(op.kind) == "convolution":
                seconds -= self._copied(types[op.reads[0]], shown.get(op.reads[0], op.reads[0]), parts)
            if copies_bias(op, kernel, written, types):
                seconds += _COPY * self.staged.roofline.device.launch.value
            if (total := totals[op.name]) is not None and self.staged.measured_call(op, kernel, written) is None:
                seconds += self.staged.alone(total)  # the library copies what is added first
        return seconds

    def _copied(self, read: TensorType, value: str, parts: Sequence[Part]) -> float:
        """Of a convolution by itself, the copy of what it reads, if that is laid out by the part of a group which makes
        it.
        """
        for part in parts:
            if part.reordered and value in part.stored:
                copy = Part(Sort.POINT, read.elements, read.elements, 1, read.bytes, read.bytes, part.ops, part.ops)
                return self._modelled(replace(copy, effort=Effort(depth=1)), 2 * read.bytes)
        return 0.0

    def _memory(self) -> float:
        device = self.staged.roofline.device
        return device.bandwidth.value * device.bandwidth_efficiency.value

    def _cache(self) -> float:
        cache = self.staged.roofline.device.cache
        return cache.value if cache is not None else _CACHE

    def _found(self, footprint: int) -> float:
        """The share of what a group touches that it finds in the cache, if it ran just before."""
        return float(np.interp(footprint / self._cache(), *_FOUND))


def _speed(part: Part) -> _Speed:
    match part.sort:
        case Sort.POINT:
            return _POINT
        case Sort.ROW:
            return _KEPT if part.kept else _LOOP
        case Sort.COLUMN | Sort.SCATTER:
            return _COLUMN
        case Sort.LIBRARY:
            raise AssertionError("products are not modelled by parts")
