"""Local types of the buffers of a lane, and what its compute steps cost on a device.

Many buffers share a layout, devices of an even lane share all types, and layers and micro-batches repeat: each is found
once. Layouts and types are told apart by identity: the program and these tables keep them alive, and to compare them
costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sennit.cluster import Device
from sennit.cost import Cost, OperatorCosts
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Ref
from sennit.ir.memory_order import MemoryOrder
from sennit.ir.program import Buffer, Compute
from sennit.sim.lane import OPTIMIZER, LaneCode
from sennit.sim.optimizer import Optimizer

__all__ = ["LocalTypes", "Machine", "OperatorTimes", "StepCosts", "Types"]

Types = dict[str, TensorType]


@dataclass(frozen=True, slots=True)
class Machine:
    """A sort of device: what it is, and how many times as long as it should it takes for compute."""

    device: Device
    slowdown: float = 1.0


class LocalTypes:
    def __init__(self) -> None:
        self.even: dict[int, bool] = {}  # by layout
        self.shared: dict[tuple[int, DType], TensorType] = {}  # by layout and element type, of even layouts
        self.tables: dict[int, Types] = {}  # by code, of even lanes
        self.even_codes: dict[int, bool] = {}

    def is_even(self, code: LaneCode) -> bool:
        if id(code) not in self.even_codes:
            self.even_codes[id(code)] = all(self._layout_is_even(buffer) for buffer in code.buffers.values())
        return self.even_codes[id(code)]

    def of(self, code: LaneCode, device: int) -> Types:
        table = self.tables.get(id(code))
        if table is None:
            table = {name: self._type(buffer, device) for name, buffer in code.buffers.items()}
            if self.is_even(code):
                self.tables[id(code)] = table
        return table

    def _layout_is_even(self, buffer: Buffer) -> bool:
        key = id(buffer.layout)
        if key not in self.even:
            self.even[key] = buffer.layout.is_even
        return self.even[key]

    def _type(self, buffer: Buffer, device: int) -> TensorType:
        if not self._layout_is_even(buffer):
            return TensorType(buffer.local_shape(device), buffer.dtype)
        key = (id(buffer.layout), buffer.dtype)
        if key not in self.shared:
            self.shared[key] = TensorType(buffer.local_shape(device), buffer.dtype)
        return self.shared[key]


class OperatorTimes(Protocol):
    """Times of operators from elsewhere, as `cost/measured_torch.py` has them; None of what they do not know."""

    def cost(
        self, step: Compute, types: Mapping[str, TensorType], orders: Mapping[str, MemoryOrder] | None = None
    ) -> Cost | None: ...


class StepCosts:
    """Costs of the compute jobs of a lane, in their order; `operators` go before what the device's description says."""

    def __init__(self, optimizer: Optimizer | None = None, operators: OperatorTimes | None = None) -> None:
        self.optimizer, self.operators = optimizer, operators
        self.models: dict[int, OperatorCosts] = {}  # by device description
        self.steps: dict[object, Cost] = {}
        self.lanes: dict[tuple[int, int, int], list[Cost]] = {}
        self.seconds: dict[tuple[int, int, int], list[float]] = {}

    def of(self, code: LaneCode, types: Types, machine: Machine) -> list[float]:
        """Seconds; devices with the same local types and of the same sort share the list."""
        key = (id(code), id(types), id(machine))
        if key not in self.seconds:
            costs = self.lanes[key] = [self._cost(code, position, types, machine) for position in code.computes]
            self.seconds[key] = [cost.seconds * machine.slowdown for cost in costs]
        return self.seconds[key]

    def costs(self, code: LaneCode, types: Types, machine: Machine) -> list[Cost]:
        """What the seconds of `of` were made of, without slowdowns."""
        self.of(code, types, machine)
        return self.lanes[id(code), id(types), id(machine)]

    def _cost(self, code: LaneCode, position: int, types: Types, machine: Machine) -> Cost:
        job = code.jobs[position]
        step = job.step
        assert isinstance(step, Compute)
        if step.kind == OPTIMIZER:
            assert self.optimizer is not None
            return self.optimizer.cost((types[name] for name in job.reads), machine.device)
        local = tuple([id(types[name]) for name in job.reads] + [id(types[buffer.name]) for buffer in step.results])
        constants = tuple([arg for arg in step.args if not isinstance(arg, Ref)])
        orders = tuple([(job.reads.index(name), order) for name, order in job.orders])
        key = (step.kind, len(job.reads), local, constants, orders, id(machine.device))
        if key not in self.steps:
            if id(machine.device) not in self.models:
                self.models[id(machine.device)] = OperatorCosts.of(machine.device)
            known = self.operators.cost(step, types, dict(job.orders)) if self.operators is not None else None
            self.steps[key] = known or self.models[id(machine.device)].cost(step, types, dict(job.orders))
        return self.steps[key]
