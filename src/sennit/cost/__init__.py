"""What an operator costs on a device, and a transfer on the wires."""

from sennit.cost.costs import OperatorCosts
from sennit.cost.operator import Product, efficiency, memory_time, operator_cost, products
from sennit.cost.profile import Profile, load_profile
from sennit.cost.size_class import CollectiveTimes, by_size_class
from sennit.cost.transfer import Transfer, bus_bytes, collective, point_to_point
from sennit.cost.value import Cost, weakest
from sennit.cost.work import Work, works
from sennit.cost.workspace import workspace

__all__ = [
    "CollectiveTimes",
    "Cost",
    "OperatorCosts",
    "Product",
    "Profile",
    "Transfer",
    "Work",
    "bus_bytes",
    "by_size_class",
    "collective",
    "efficiency",
    "load_profile",
    "memory_time",
    "operator_cost",
    "point_to_point",
    "products",
    "weakest",
    "works",
    "workspace",
]
