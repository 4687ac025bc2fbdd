"""What an operator costs on a device, and a transfer on the wires."""

from sennit.cost.costs import OperatorCosts
from sennit.cost.operator import Product, efficiency, memory_time, operator_cost, products
from sennit.cost.transfer import Transfer, bus_bytes, collective, point_to_point
from sennit.cost.value import Cost, weakest

__all__ = [
    "Cost",
    "OperatorCosts",
    "Product",
    "Transfer",
    "bus_bytes",
    "collective",
    "efficiency",
    "memory_time",
    "operator_cost",
    "point_to_point",
    "products",
    "weakest",
]
