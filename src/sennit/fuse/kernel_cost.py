"""What a kernel costs: the parts of a group, seen from outside.

A kernel reads each value that comes from outside once, writes each value that someone outside reads, and does the
arithmetic of its body. What stays inside never reaches memory: that is what operator fusion saves. So by the roofline

    seconds = max(bytes in and out / bandwidth, sum of the products' flops / rate, elements / special) + launch

with one launch for the whole group. A kernel of views only costs nothing. This is the estimate (`Roofline`) that needs
nothing but a device description; measured profiles and the learned estimator give the same type.

**Stages.** A compiler leaves a matrix product to a library, so a group around one is up to three launches: what the
product reads, the product, what is made of it. `Staged` adds them up:

    seconds = sum over the stages of (bytes into and out of the stage / bandwidth + launch) + seconds of the product

with the product, or an operator that is alone, by the device's measured profile where it has one. What views of one
value show of it counts once; of a table that is looked up in, what is found.

Operators that were measured one by one (`Staged.measured`, by signature) take the time that they took: that is known of
a model before any of its groups is. A product of a transposed value takes another time than one of values that lie
plainly, and Inductor adds the bias of a product that only pointwise operators read with them; a sum of a product and
another value that is handed out it makes one call with the product. So a product is asked for as a compiler calls it in
the group (`called`): with the views in front of it, without such a bias; and by itself only where that was not
measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from sennit.cluster import Device
from sennit.cost import OperatorCosts
from sennit.cost.operator import operator_cost
from sennit.fuse.operator_class import PRODUCTS, Class, classify, is_elementwise, moves_nothing, picks, stem
from sennit.fuse.signature import signature
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Graph, Op, Ref
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Compute
from sennit.ir.strategy_check import Kernel

__all__ = [
    "Estimate",
    "KernelCost",
    "Lone",
    "Roofline",
    "Staged",
    "added_to",
    "as_step",
    "bases",
    "called",
    "copies_bias",
    "traffic",
]

_HALF = (DType.BF16, DType.F16)
_LINE, _GAPS = 128, 1024  # bytes of a line of the cache; elements of rows that may have gaps behind them


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, and how far off they may be: the standard deviation of their logarithm."""

    seconds: float
    deviation: float = 0.0


class KernelCost(Protocol):
    """Where the time of a kernel comes from. `written` are its values that something outside reads."""

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate: ...


def traffic(kernel: Kernel, written: frozenset[str], types: Mapping[str, TensorType]) -> int:
    """Bytes that the kernel reads and writes.

    A value that is only looked at through views inside counts as what the views take.
    """
    made = {value.name for op in kernel.body for value in op.results}
    return sum(types[name].bytes for name in kernel.reads) + sum(types[name].bytes for name in made & written)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Kernels of a graph on a device."""

    device: Device
    types: Mapping[str, TensorType]
    alone: dict[str, float] = field(default_factory=dict)  # seconds of single operators without launch, by name

    @classmethod
    def of(cls, graph: Graph, device: Device) -> Roofline:
        return cls(device, graph.types())

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        body = [op for op in kernel.body if not moves_nothing(op)]
        if not body:
            return Estimate(0.0)
        launch = self.device.launch.value
        if len(body) == 1:
            return Estimate(self._alone(body[0]) + launch)
        memory = traffic(kernel, written, self.types) / self._bandwidth()
        # arithmetic is what an operator takes beyond its own traffic; fused, it overlaps with the traffic of the group
        work = sum(self._alone(op) for op in body if self._is_bound_by_work(op))
        return Estimate(max(memory, work) + launch)

    def _bandwidth(self) -> float:
        return self.device.bandwidth.value * self.device.bandwidth_efficiency.value

    def _alone(self, op: Op) -> float:
        if op.name not in self.alone:
            self.alone[op.name] = operator_cost(as_step(op), self.types, self.device).seconds
            self.alone[op.name] -= self.device.launch.value
        return self.alone[op.name]

    def _is_bound_by_work(self, op: Op) -> bool:
        moved = sum(self.types[name].bytes for name in set(op.reads)) + sum(value.type.bytes for value in op.results)
        return self._alone(op) > 1.01 * moved / self._bandwidth()


@dataclass(frozen=True, slots=True)
class Lone:
    """An operator by itself: the bytes that it moves, the seconds that it should take, and those that it took; `parts`
    launches or groups of them is it.
    """

    moved: int
    modelled: float
    took: float
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Staged:
    """Kernels of a graph on a device, by stages, with the device's profile.

    `measured` are seconds of lone operators, by signature.
    """

    roofline: Roofline
    costs: OperatorCosts
    measured: Mapping[str, float] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)  # seconds of single operators, by name
    found: dict[tuple[str, ...], float | None] = field(default_factory=dict)  # what was measured, by names
    lones: dict[str, Lone | None] = field(default_factory=dict)  # for `compiled_cost.py`, by name

    @classmethod
    def of(cls, graph: Graph, device: Device) -> Staged:
        return cls(Roofline.of(graph, device), OperatorCosts.of(device))

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        body = [op for op in kernel.body if not moves_nothing(op)]
        if not body:
            return Estimate(0.0)
        if len(body) == 1:
            return Estimate(self.alone(body[0]))
        types = self.roofline.types
        products = [op for op in body if classify(op, types) is Class.PRODUCT]
        before = _ancestors(kernel, products)
        stages = [
            [op for op in body if op not in products and op.name in before],
            [op for op in body if op not in products and op.name not in before],
        ]
        seconds = sum(self.inside(op, kernel, written) for op in products)
        return Estimate(seconds + sum(self._stage(stage, kernel, written) for stage in stages if stage))

    def alone(self, op: Op) -> float:
        """Seconds of one operator with its launch."""
        if moves_nothing(op):
            return 0.0
        if op.name not in self.known:
            seconds = self.as_measured(op)
            self.known[op.name] = self._by_profile(op) if seconds is None else seconds
        return self.known[op.name]

    def inside(self, op: Op, kernel: Kernel, written: frozenset[str]) -> float:
        """Seconds of one operator of a kernel: a product as a compiler calls it there."""
        seconds = self.measured_inside(op, kernel, written)
        return self.alone(op) if seconds is None else seconds

    def measured_inside(self, op: Op, kernel: Kernel, written: frozenset[str]) -> float | None:
        """The same, where it was measured; as the operator is, where only that was."""
        if not self.measured or moves_nothing(op):
            return None
        seconds = self.measured_call(op, kernel, written)
        return self.as_measured(op) if seconds is None else seconds

    def measured_call(self, op: Op, kernel: Kernel, written: frozenset[str]) -> float | None:
        """Seconds of a product as a compiler calls it in a kernel, where that was measured."""
        if not self.measured or not _is_product(op):
            return None
        return self._measured(called(op, kernel, written, self.roofline.types))

    def as_measured(self, op: Op) -> float | None:
        """Seconds of one operator, where it was measured."""
        return self._measured(Kernel((op,))) if self.measured else None

    def _measured(self, kernel: Kernel) -> float | None:
        """By the last operator's results."""
        key = (kernel.body[-1].kind, *(op.name for op in kernel.body))
        if key not in self.found:
            results = frozenset(value.name for value in kernel.body[-1].results)
            self.found[key] = self.measured.get(signature(kernel, results, self.roofline.types))
        return self.found[key]

    def with_measured(self, measured: Mapping[str, float]) -> Staged:
        """The same, with other operators measured."""
        return Staged(self.roofline, self.costs, measured)

    def _by_profile(self, op: Op) -> float:
        seconds = self.costs.cost(as_step(op), self.roofline.types).seconds
        if not picks(op):
            return seconds
        made = sum(value.type.bytes for value in op.results)
        device = self.roofline.device
        return min(seconds, 3 * made / device.bandwidth.value + device.launch.value)

    def _stage(self, stage: list[Op], kernel: Kernel, written: frozenset[str]) -> float:
        if len(stage) == 1:
            return self.alone(stage[0])
        types = self.roofline.types
        made = {value.name for op in stage for value in op.results}
        seen = bases(kernel)
        shown: dict[str, int] = {}  # of each value that is read, directly or through views, how much
        for op in stage:
            for name in op.reads:
                base = seen.get(name, name)
                if base not in made:
                    size = min(types[name].bytes, types[base].bytes)
                    if picks(op):  # it reads no more of a table than it makes
                        size = min(size, sum(value.type.bytes for value in op.results))
                    shown[base] = max(shown.get(base, 0), size)
        inside = {op.name for op in stage}
        wanted = {seen.get(name, name) for op in kernel.body if op.name not in inside for name in op.reads}
        wanted |= {seen.get(name, name) for name in written}
        moved = sum(shown.values()) + sum(types[name].bytes for name in made & wanted)
        device = self.roofline.device
        return moved / (device.bandwidth.value * device.bandwidth_efficiency.value) + device.launch.value


def called(op: Op, kernel: Kernel, written: frozenset[str], types: Mapping[str, TensorType]) -> Kernel:
    """A product of a kernel as a compiler calls it: with the views of the kernel that its operands are, without its
    bias where only pointwise operators of the kernel read it (in half precision the bias stays, since the sum would be
    rounded twice, or is copied before the product: `copies_bias`), and with the sum that it makes one call of
    (`added_to`).
    """
    if _has_bias(op) and _is_only_for_pointwise(op, kernel, written, types) and not _keeps_bias(op):
        op = replace(op, kind="aten.mm.default", args=op.args[1:])
    elif (total := added_to(op, kernel, written, types)) is not None:
        mine = _for_one(op, kernel, written)
        addend = next(arg for arg in total.args if mine is not None and arg != Ref(mine[0]))
        op = replace(op, kind="aten.addmm.default", args=(addend, *op.args))
    needed, found = set(op.reads), [op]
    for other in reversed(kernel.body):
        if moves_nothing(other) and any(value.name in needed for value in other.results):
            needed.update(other.reads)
            found.append(other)
    return Kernel(tuple(reversed(found)))


def copies_bias(op: Op, kernel: Kernel, written: frozenset[str], types: Mapping[str, TensorType]) -> bool:
    """Whether the bias of a product in half precision is copied into its result first.

    A compiler leaves gaps in values of its own whose rows are long and end within a line of the cache, and there the
    library cannot add a bias by itself.
    """
    is_half = _has_bias(op) and op.results[0].type.dtype in _HALF
    return is_half and not _keeps_bias(op) and _is_only_for_pointwise(op, kernel, written, types)


def _has_bias(op: Op) -> bool:
    return stem(op.kind) == "addmm" and len(op.args) == 3 and not op.kwargs


def _keeps_bias(op: Op) -> bool:
    kind = op.results[0].type
    line = _LINE // kind.dtype.itemsize
    return kind.dtype in _HALF and (kind.shape[-1] <= _GAPS or kind.shape[-1] % line == 0)


def added_to(op: Op, kernel: Kernel, written: frozenset[str], types: Mapping[str, TensorType]) -> Op | None:
    """The sum of a product `mm` and another value that a compiler makes one call of the library, `addmm`: nothing else
    reads the product, and something reads the sum that is not pointwise, or is outside. Rows and columns that are
    exchanged twice are as they were. Of two products the first takes the second.
    """
    mine = _for_one(op, kernel, written)
    if mine is None:
        return None
    name, total = mine
    match total:
        case Op(kind="aten.add.Tensor", args=(Ref(left), Ref(right)), kwargs=()) if left != right:
            other = right if left == name else left
        case _:
            return None
    if name == right:
        for first in kernel.body:
            if (taken := _for_one(first, kernel, written)) is not None and taken[0] == left:
                return None
    kind, made = types[other], op.results[0].type
    fits = kind.dtype is made.dtype and len(kind.shape) <= 2 and total.results[0].type.shape == made.shape
    return total if fits and not _is_only_for_pointwise(total, kernel, written, types) else None


def _for_one(op: Op, kernel: Kernel, written: frozenset[str]) -> tuple[str, Op] | None:
    """Of a product `mm` that one operator reads: its value there, which may have been transposed and back, and the
    operator.
    """
    if op.kind != "aten.mm.default":
        return None
    name, turned = op.results[0].name, False
    while name not in written:
        readers = [other for other in kernel.body if name in other.reads]
        match readers:
            case [Op(kind="aten.permute.default", args=(_, (1, 0))) as view]:
                name, turned = view.results[0].name, not turned
            case [reader] if not turned:
                return name, reader
            case _:
                return None
    return None


def _is_product(op: Op) -> bool:
    return stem(op.kind) in PRODUCTS


def _is_only_for_pointwise(op: Op, kernel: Kernel, written: frozenset[str], types: Mapping[str, TensorType]) -> bool:
    shown = {value.name for value in op.results}  # it, and views of it
    for other in kernel.body:
        if shown.isdisjoint(other.reads):
            continue
        if moves_nothing(other):
            shown.update(value.name for value in other.results)
        elif not is_elementwise(other, types):
            return False
    return shown.isdisjoint(written)


def _ancestors(kernel: Kernel, products: list[Op]) -> set[str]:
    """The operators of the kernel whose results a product needs."""
    needed = {name for op in products for name in op.reads}
    found: set[str] = set()
    for op in reversed(kernel.body):
        if any(value.name in needed for value in op.results):
            found.add(op.name)
            needed.update(op.reads)
    return found


def bases(kernel: Kernel) -> dict[str, str]:
    """For each view inside the kernel, the value that it shows."""
    found: dict[str, str] = {}
    for op in kernel.body:
        if moves_nothing(op) and op.reads:
            base = found.get(op.reads[0], op.reads[0])
            found.update((value.name, base) for value in op.results)
    return found


def as_step(op: Op) -> Compute:
    """The operator as a step on one device."""
    one = Mesh.parse("@0")
    results = tuple(
        Buffer(value.name, value.name, value.type.dtype, Layout(one, value.type.shape, ())) for value in op.results
    )
    return Compute(op.kind, op.args, op.kwargs, results, op.phase, op.module, op.name)
