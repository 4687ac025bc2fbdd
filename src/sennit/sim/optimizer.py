"""What an optimizer adds to a step: state that stays in memory, and the time to go through all of it once.

A *kind* of optimizer keeps `states` values for each element of a parameter, `state_bytes` each, and with `master` a
copy of the parameter in f32 where it is of a smaller type. A step reads parameters, gradients and all of that, and
writes all but the gradients; it is bound by memory. A device keeps the state of the pieces of parameters that it holds.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from sennit.cluster import Device
from sennit.cost import Cost, memory_time, weakest
from sennit.errors import PlanError
from sennit.ir.dtype import TensorType

__all__ = ["Optimizer", "optimizer"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    name: str
    states: int
    state_bytes: int = 4
    master: bool = False

    def bytes(self, parameter: TensorType) -> int:
        """Memory for one parameter."""
        copy = 4 if self.master and parameter.dtype.itemsize < 4 else 0
        return parameter.elements * (self.states * self.state_bytes + copy)

    def cost(self, parameters: Iterable[TensorType], device: Device) -> Cost:
        moved = sum(3 * item.bytes + 2 * self.bytes(item) for item in parameters)
        seconds, source = memory_time(moved, device)
        basis = weakest(device.bandwidth.basis, device.bandwidth_efficiency.basis, device.launch.basis)
        return Cost(seconds + device.launch.value, basis, f"{self.name}, {source}")


def optimizer(name: str) -> Optimizer:
    """By name: `sgd`, `momentum`, `adam`, `adamw`; with `-master` a copy of small types in f32, with `-bf16` small
    states.
    """
    base, *rest = name.split("-")
    states = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
    if base not in states or not set(rest) <= {"master", "bf16"}:
        near = difflib.get_close_matches(base, states, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PlanError(
            f"unknown optimizer {name!r}",
            fix=f"{hint}use one of {', '.join(states)}, with -master for a copy in f32, with -bf16 for small states",
        )
    return Optimizer(name, states[base], 2 if "bf16" in rest else 4, "master" in rest)
