"""The time of a compiled group from the parts that it becomes (`compiled_parts.py`): the base that the learned estimator corrects.

    seconds = sum over parts of (launches x gap + slowness x bytes / bandwidth(footprint)) + seconds of the products

The gap between two small kernels of a CUDA graph is shorter than a launch from the host: a pointwise kernel over a few elements takes 1.0 us on an H200 where a launch takes 2.5, one that fills the device 1.25, and reductions 1.6 and
more, because a program has to wait for its own sums. The bandwidth is that of the cache while all that the group touches fits into half of it, and that of memory from one and a quarter times its size on; between the
two the share that is found in the cache falls linearly. Where operators were measured one by one (`Staged.measured`), a product takes what it took, and a part is longer or shorter by as much as its reduction was, or the pointwise operator in it that is most like it (`_factor`). Convolutions in float32 run in TF32, as torch has them by default, in a fraction of the product's time by the profile.

The constants were read off the groups that were measured on an H200 (`benchmarks/fuse/data`), in parts of its launch and bandwidth; what they miss is for the network to learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sennit.fuse.compiled_parts import Part, Sort, parts_of
from sennit.fuse.kernel_cost import Estimate, Staged
from sennit.fuse.operator_class import Class, classify, moves_nothing, stem
from sennit.ir.dtype import DType
from sennit.ir.graph import Op
from sennit.ir.strategy_check import Kernel

__all__ = ["Compiled", "Split"]

_GAP = {Sort.POINT: 0.4, Sort.ROW: 0.64, Sort.COLUMN: 0.68, Sort.SCATTER: 0.68}  # of a launch
_FILL, _FULL = 0.1, 200e3  # of a launch more, for a pointwise part that moves so many bytes
_SLOWNESS = {Sort.POINT: 1.0, Sort.ROW: 1.1, Sort.COLUMN: 1.4, Sort.SCATTER: 1.4}
_CACHE, _CACHE_SPEED = 50e6, 1.8  # bytes, and over memory, where the device does not say
_TF32 = 0.25
_SECTORS = 48.0  # bytes of memory that an element takes which is written out of order


@dataclass(frozen=True, slots=True)
class Split:
    """A group as parts, with seconds in all, of library calls, and the bytes that it touches."""

    parts: tuple[Part, ...]
    seconds: float
    library: float
    footprint: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """Kernels of a graph as a compiler cuts them, with the device's profile for products."""

    staged: Staged

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        return Estimate(self.split(kernel, written).seconds)

    def split(self, kernel: Kernel, written: frozenset[str]) -> Split:
        if all(moves_nothing(op) for op in kernel.body):
            return Split((), 0.0, 0.0, 0)
        types = self.staged.roofline.types
        parts = parts_of(kernel, written, types)
        library = self._library(kernel, written, parts)
        footprint = sum(types[name].bytes for name in kernel.reads) + sum(part.written for part in parts)
        busy = [op for op in kernel.body if not moves_nothing(op)]
        others = [part for part in parts if part.sort is not Sort.LIBRARY]
        seconds = sum(self._modelled(part, footprint) * self._factor(part, busy) for part in others)
        return Split(parts, library + seconds, library, footprint)

    def _modelled(self, part: Part, footprint: int) -> float:
        launches = part.launches * _GAP[part.sort] + _filled(part)
        moved = _SLOWNESS[part.sort] * (part.read + part.written)
        seconds = launches * self.staged.roofline.device.launch.value + moved * self._per_byte(footprint)
        return seconds + part.reordered * _SECTORS / self._memory()

    def _factor(self, part: Part, busy: Sequence[Op]) -> float:
        """What one operator of a part took, over what its own parts should take: of a part that is this operator alone, it makes the time the measured one. In a reduction it is the reduction; of several, the one that did best, since some are slow by themselves
        only (`all`). Among pointwise operators over all elements of the part it is the one that moves most nearly what the part does, unless the part does not fit the cache: then its traffic decides."""
        inside = [op for op in busy if op.name in part.ops] if self.staged.measured else []
        moved = part.read + part.written
        if len(inside) > 1 and part.sort is not Sort.POINT:
            inside = [op for op in inside if classify(op, self.staged.roofline.types) is Class.REDUCTION]
        elif len(inside) > 1:
            inside = [op for op in inside if op.results[0].type.elements == part.size and moved <= self._cache()]
        found = [ratio for op in inside if (ratio := self._ratio(op)) is not None]
        if part.sort is Sort.POINT and found:
            return min(found, key=lambda item: abs(item[0] - moved))[1]
        return min((factor for _, factor in found), default=1.0)

    def _ratio(self, op: Op) -> tuple[float, float] | None:
        """Bytes that an operator moves by itself, and its measured time over the modelled one."""
        ratios = self.staged.ratios
        if op.name not in ratios:
            seconds = self.staged.as_measured(op)
            if seconds is None:
                ratios[op.name] = None
            else:
                results = frozenset(value.name for value in op.results)
                alone = Compiled(self.staged.with_measured({})).split(Kernel((op,)), results)
                ratios[op.name] = (float(sum(it.read + it.written for it in alone.parts)), seconds / alone.seconds)
        return ratios[op.name]

    def _library(self, kernel: Kernel, written: frozenset[str], parts: Sequence[Part]) -> float:
        calls = {name for part in parts if part.sort is Sort.LIBRARY for name in part.ops}
        seconds = 0.0
        for op in kernel.body:
            if op.name in calls:
                guessed = (
                    op.results[0].type.dtype is DType.F32 and self.staged.measured_inside(op, kernel, written) is None
                )
                factor = _TF32 if guessed and stem(op.kind).startswith("convolution") else 1.0
                seconds += factor * self.staged.inside(op, kernel, written)
        return seconds

    def _memory(self) -> float:
        device = self.staged.roofline.device
        return device.bandwidth.value * device.bandwidth_efficiency.value

    def _cache(self) -> float:
        cache = self.staged.roofline.device.cache
        return cache.value if cache is not None else _CACHE

    def _per_byte(self, footprint: int) -> float:
        device, memory = self.staged.roofline.device, self._memory()
        cache = self._cache()
        fast = device.cache_bandwidth.value if device.cache_bandwidth is not None else _CACHE_SPEED * memory
        found = min(1.0, max(0.0, (1.25 * cache - footprint) / (0.75 * cache)))
        return found / fast + (1.0 - found) / memory


def _filled(part: Part) -> float:
    return _FILL * min(1.0, (part.read + part.written) / _FULL) if part.sort is Sort.POINT else 0.0
