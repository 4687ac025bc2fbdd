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
)
from sennit.cluster.topology import Topology, Wire

__all__ = [
    "Algorithm",
    "Basis",
    "Cluster",
    "Device",
    "Fabric",
    "Figure",
    "Host",
    "Link",
    "Matmul",
    "Nic",
    "Peak",
    "Protocol",
    "Scale",
    "Topology",
    "Wire",
    "load",
    "presets",
]
