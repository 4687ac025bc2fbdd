"""The cost of operators on one sort of device: its measured profile where there is one, else the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sennit.cluster import Device
from sennit.cost.operator import operator_cost
from sennit.cost.value import Cost
from sennit.ir.dtype import TensorType
from sennit.ir.program import Compute

__all__ = ["OperatorCosts"]


@dataclass(frozen=True, slots=True)
class OperatorCosts:
    device: Device

    @classmethod
    def of(cls, device: Device) -> OperatorCosts:
        return cls(device)

    def cost(self, step: Compute, types: Mapping[str, TensorType]) -> Cost:
        return operator_cost(step, types, self.device)
