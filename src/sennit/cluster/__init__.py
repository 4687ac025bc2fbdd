"""The machine: devices, links and nodes, from TOML or a preset."""

from sennit.cluster.catalog import load, presets
from sennit.cluster.description import (
    Algorithm,
    Basis,
    Cluster,
    Device,
    Fabric,
    Figure,
    Host,
    Link,
    Matmul,
    Nic,
    Peak,
    Protocol,
    Scale,
    Variant,
)
from sennit.cluster.faults import Fault, LinkChoice
from sennit.cluster.topology import Topology
from sennit.cluster.wire import Wire

__all__ = [
    "Algorithm",
    "Basis",
    "Cluster",
    "Device",
    "Fabric",
    "Fault",
    "Figure",
    "Host",
    "Link",
    "LinkChoice",
    "Matmul",
    "Nic",
    "Peak",
    "Protocol",
    "Scale",
    "Topology",
    "Variant",
    "Wire",
    "load",
    "presets",
]
