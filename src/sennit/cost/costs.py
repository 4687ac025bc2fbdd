"""The cost of operators on one sort of device: by its measured profile where that has the family, else by the roofline.

`Device.profile` names a profile of the device itself, `Device.carried_profile` one of another device, whose
efficiencies are carried over. A profile of another device under the first name is refused: its times would pass for
measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sennit.cluster import Device
from sennit.cost.operator import operator_cost
from sennit.cost.profile import Profile, load_profile
from sennit.cost.value import Cost, weakest
from sennit.cost.work import works
from sennit.errors import ClusterError
from sennit.ir.dtype import TensorType
from sennit.ir.memory_order import MemoryOrder
from sennit.ir.operators import is_view
from sennit.ir.program import Compute

__all__ = ["OperatorCosts"]


@dataclass(frozen=True, slots=True)
class OperatorCosts:
    """`carried` says that the profile is another device's."""

    device: Device
    profile: Profile | None = None
    carried: bool = False

    @classmethod
    def of(cls, device: Device) -> OperatorCosts:
        """With the profile that the device's description names."""
        if device.profile is not None:
            profile = load_profile(device.profile)
            if profile.device != device.kind:
                raise ClusterError(
                    f"the profile {device.profile!r} was measured on {profile.device!r}, the device is {device.kind!r}",
                    where="[device] profile",
                    fix="name it as carried_profile to carry its efficiencies over, or profile this device",
                )
            return cls(device, profile)
        if device.carried_profile is not None:
            return cls(device, load_profile(device.carried_profile), True)
        return cls(device)

    def cost(
        self, step: Compute, types: Mapping[str, TensorType], orders: Mapping[str, MemoryOrder] | None = None
    ) -> Cost:
        """Of a step on local types; `orders` are those of the buffers that do not lie plainly in memory."""
        if self.profile is None or is_view(step.kind) or not step.results:
            return operator_cost(step, types, self.device)
        parts = [
            self.profile.cost(work, self.device if self.carried else None) for work in works(step, types, orders or {})
        ]
        found = [part for part in parts if part is not None]
        if not found or len(found) < len(parts):
            return operator_cost(step, types, self.device)
        basis = weakest(*(part.basis for part in found))
        worst = next(part for part in found if part.basis is basis)
        return Cost(sum(part.seconds for part in found), basis, worst.source, worst.model)
