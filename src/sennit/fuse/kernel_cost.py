"""What a kernel costs: the parts of a group, seen from outside.

A kernel reads each value that comes from outside once, writes each value that someone outside reads, and does the arithmetic of its body. What
stays inside never reaches memory: that is what operator fusion saves. So by the roofline

    seconds = max(bytes in and out / bandwidth, sum of the products' flops / rate, elements / special) + launch

with one launch for the whole group. A kernel of views only costs nothing. This is the estimate that needs nothing but a device description;
measured profiles and the learned estimator give the same type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sennit.cluster import Device
from sennit.cost.operator import operator_cost
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Op
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.ir.operators import is_view
from sennit.ir.program import Buffer, Compute
from sennit.ir.strategy_check import Kernel

__all__ = ["Estimate", "KernelCost", "Roofline", "traffic"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, and how far off they may be: the standard deviation of their logarithm."""

    seconds: float
    deviation: float = 0.0


class KernelCost(Protocol):
    """Where the time of a kernel comes from. `written` are its values that something outside reads."""

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate: ...


def traffic(kernel: Kernel, written: frozenset[str], types: Mapping[str, TensorType]) -> int:
    """Bytes that the kernel reads and writes. A value that is only looked at through views inside counts as what the views take."""
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
        body = [op for op in kernel.body if not is_view(op.kind)]
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
            self.alone[op.name] = operator_cost(_step(op, self.types), self.types, self.device).seconds
            self.alone[op.name] -= self.device.launch.value
        return self.alone[op.name]

    def _is_bound_by_work(self, op: Op) -> bool:
        moved = sum(self.types[name].bytes for name in set(op.reads)) + sum(value.type.bytes for value in op.results)
        return self._alone(op) > 1.01 * moved / self._bandwidth()


def _step(op: Op, types: Mapping[str, TensorType]) -> Compute:
    """The operator as a step on one device."""
    one = Mesh.parse("@0")
    results = tuple(
        Buffer(value.name, value.name, value.type.dtype, Layout(one, value.type.shape, ())) for value in op.results
    )
    return Compute(op.kind, op.args, op.kwargs, results, op.phase, op.module, op.name)
