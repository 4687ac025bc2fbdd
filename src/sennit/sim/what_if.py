"""Questions to a simulation: what if a node is slow, what if a link fails.

    what-if := place "compute" "x" FACTOR                         its compute takes FACTOR times as long
             | "link" link "down" | "bandwidth" link "x" FACTOR | "latency" link "x" FACTOR
    place   := "node" INT | "device" INT | "all"
    link    := ("node" INT)? NAME (":" INT)?                      see `cluster/faults.py`

Examples: `node 3 compute x1.1`, `link nic:3 down`, `bandwidth fabric x0.5`, `latency node 1 nvlink x2`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sennit.cluster import Cluster, Fault, LinkChoice
from sennit.errors import ClusterError, ParseError
from sennit.sim.local import Machine

__all__ = ["Straggler", "WhatIf", "faults_of", "machines_of", "parse_what_if"]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A node or a device (both None: all) whose compute takes `slowdown` times as long."""

    slowdown: float
    node: int | None = None
    device: int | None = None

    def __str__(self) -> str:
        place = f"node {self.node}" if self.node is not None else f"device {self.device}"
        return f"{place if (self.node, self.device) != (None, None) else 'all'} compute x{self.slowdown:g}"


WhatIf = Straggler | Fault

LINK = r"(?:node (?P<node>\d+) )?(?P<name>[\w-]+?)(?::(?P<number>\d+))?"
FACTOR = r"x ?(?P<factor>\d+(?:\.\d*)?(?:e-?\d+)?)"


def parse_what_if(text: str) -> WhatIf:
    words = " ".join(text.split())
    if found := re.fullmatch(rf"(?:(?P<place>node|device) (?P<at>\d+)|all) compute {FACTOR}", words):
        at = int(found["at"]) if found["at"] else None
        place = found["place"]
        return Straggler(_factor(found, text), at if place == "node" else None, at if place == "device" else None)
    if found := re.fullmatch(rf"link {LINK} down", words):
        return Fault(_link(found), bandwidth=0.0)
    if found := re.fullmatch(rf"bandwidth {LINK} {FACTOR}", words):
        return Fault(_link(found), bandwidth=_factor(found, text))
    if found := re.fullmatch(rf"latency {LINK} {FACTOR}", words):
        return Fault(_link(found), latency=_factor(found, text))
    raise ParseError(
        f"{text!r} is no what-if",
        fix="write 'node 3 compute x1.1', 'link nic:3 down', 'bandwidth fabric x0.5' or 'latency nvlink x2'",
    )


def _factor(found: re.Match[str], text: str) -> float:
    factor = float(found["factor"])
    if factor <= 0:
        raise ParseError(
            f"a factor of {factor:g} in {text!r}", fix="give one above 0; a link that fails is 'link NAME down'"
        )
    return factor


def _link(found: re.Match[str]) -> LinkChoice:
    node, number = found["node"], found["number"]
    return LinkChoice(found["name"], int(node) if node else None, int(number) if number else None)


def faults_of(what_if: Sequence[WhatIf]) -> tuple[Fault, ...]:
    return tuple(item for item in what_if if isinstance(item, Fault))


def machines_of(cluster: Cluster, what_if: Sequence[WhatIf]) -> tuple[Machine, ...]:
    """The sort of each device. Devices of one sort share the object, so that sorts are told apart by identity."""
    slow = [1.0] * cluster.devices
    for item in what_if:
        if isinstance(item, Straggler):
            for device in _devices(cluster, item):
                slow[device] *= item.slowdown
    sorts: dict[tuple[int, float], Machine] = {}
    machines = []
    for device in range(cluster.devices):
        description = cluster.device_of(cluster.node_of(device))
        key = (id(description), slow[device])
        if key not in sorts:
            sorts[key] = Machine(description, slow[device])
        machines.append(sorts[key])
    return tuple(machines)


def _devices(cluster: Cluster, straggler: Straggler) -> range:
    size = cluster.device.per_node
    node, device = straggler.node, straggler.device
    if (node is not None and node >= cluster.nodes) or (device is not None and device >= cluster.devices):
        raise ClusterError(
            f"'{straggler}': there is no such place among {cluster.size}",
            where=f"cluster {cluster.name!r}",
            fix="count nodes and devices from 0",
        )
    if node is not None:
        return range(node * size, (node + 1) * size)
    return range(cluster.devices) if device is None else range(device, device + 1)
