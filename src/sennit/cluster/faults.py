"""What may be wrong with the links of a cluster, as a change of its wires.

    fault  := "link" link "down" | "bandwidth" link "x" FACTOR | "latency" link "x" FACTOR
    link   := ("node" INT)? NAME (":" INT)?

NAME is a link of the description, `nic`, `spine` (leaves to spine), or `fabric`: the last two together. A number picks
what belongs to that device (for `nic` that NIC, for `spine` that leaf), counted within the node where one is named,
else over the whole cluster. Without node and number all of the name are meant. Both directions are.

A wire that is down carries nothing: routes go another way where there is one. A device whose NIC is down sends over the
NIC of the nearest device of its node, to which it goes over the links between them, as NCCL does (PXN).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sennit.cluster.description import Cluster
from sennit.cluster.wire import Wire
from sennit.errors import ClusterError

__all__ = ["Fault", "LinkChoice", "changed_wires"]


@dataclass(frozen=True, slots=True)
class LinkChoice:
    name: str
    node: int | None = None
    number: int | None = None

    def __str__(self) -> str:
        node = f"node {self.node} " if self.node is not None else ""
        return f"{node}{self.name}" + (f":{self.number}" if self.number is not None else "")


@dataclass(frozen=True, slots=True)
class Fault:
    """Factors of bandwidth and latency; a bandwidth of 0 is a link that is down."""

    link: LinkChoice
    bandwidth: float = 1.0
    latency: float = 1.0

    def __post_init__(self) -> None:
        if self.bandwidth < 0 or self.latency < 0:
            raise ClusterError(
                f"a factor of {min(self.bandwidth, self.latency):g}",
                where=f"link {self.link}",
                fix="give a positive factor, or say that the link is down",
            )

    @property
    def is_down(self) -> bool:
        return self.bandwidth == 0


def changed_wires(
    cluster: Cluster, wires: Sequence[Wire], faults: Sequence[Fault]
) -> tuple[list[Wire], frozenset[int], bool]:
    """The wires with the faults, the numbers of those that are down, and whether all nodes are still alike."""
    changed, down, uniform = list(wires), set[int](), True
    for fault in faults:
        chosen = _chosen(cluster, wires, fault.link)
        uniform = uniform and fault.link.node is None and fault.link.number is None
        for number in chosen:
            wire = changed[number]
            if fault.is_down:
                if wire.link == "spine":
                    raise ClusterError(
                        f"link {fault.link} cannot be down: a leaf's uplinks are many",
                        where=f"cluster {cluster.name!r}",
                        fix="say how much is left of them, as in 'bandwidth spine x0.5'",
                    )
                down.add(number)
                continue
            multicast = wire.multicast * fault.bandwidth if wire.multicast is not None else None
            speeds = tuple(replace(speed, latency=speed.latency * fault.latency) for speed in wire.speeds)
            changed[number] = replace(
                wire,
                bandwidth=wire.bandwidth * fault.bandwidth,
                latency=wire.latency * fault.latency,
                speeds=speeds,
                multicast=multicast,
            )
    return changed, frozenset(down), uniform


def _chosen(cluster: Cluster, wires: Sequence[Wire], link: LinkChoice) -> list[int]:
    names = {"fabric": ("nic", "spine")}.get(link.name, (link.name,))
    node, end = _end(cluster, link)
    chosen = [
        number
        for number, wire in enumerate(wires)
        if wire.link in names and (node is None or wire.node == node) and (end is None or end in wire.ends)
    ]
    if chosen:
        return chosen
    known = list(dict.fromkeys(wire.link for wire in wires))
    if any(wire.link in names for wire in wires):
        raise ClusterError(
            f"there is no link {link}: the cluster has {cluster.size}",
            where=f"cluster {cluster.name!r}",
            fix="count devices and NICs from 0, over the whole cluster or with 'node N' within a node",
        )
    near = difflib.get_close_matches(link.name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ClusterError(
        f"there is no link {link.name!r}",
        where=f"cluster {cluster.name!r}",
        fix=f"{hint}its links are {', '.join(known)}" + (", and fabric" if "nic" in known else ""),
    )


def _end(cluster: Cluster, link: LinkChoice) -> tuple[int | None, str | None]:
    """The node and the end that a choice means."""
    if link.number is None:
        return link.node, None
    if link.name == "spine":
        return None, f"leaf {link.number}"
    kind = "nic" if link.name in ("nic", "fabric") else "device"
    if link.node is not None:
        return link.node, f"{kind} {link.number}"
    per_node = cluster.nic.per_node if kind == "nic" and cluster.nic is not None else cluster.device.per_node
    return link.number // per_node, f"{kind} {link.number % per_node}"
