"""What a cluster is made of, as its TOML file says it. Every figure carries where it comes from.

    name, summary, nodes, scale ("nodes" | "devices"), algorithms, switches
    collective_start, send_start, reduction
    [device]        kind, per_node, memory, bandwidth, bandwidth_efficiency, launch, cache, cache_bandwidth, special,
                    profile, carried_profile, allocation
    [device.peak]   f64, f32, bf16, f16, i8              floating (or integer) operations a second
    [device.matmul] efficiency, tile, units, depth       the shape of the matrix-product efficiency curve
    [[link]]        name, between, bandwidth, efficiency, latency, shared, multicast, protocols
    [nic]           per_node, bandwidth, efficiency, latency, protocols, burst
    [fabric]        rails, oversubscription
    [host]          cores, transfers_use_cores, blocking, transfer_cores, take_turns
    [[variant]]     nodes, device, nic                   nodes that differ from the others

A figure is `{ value = 450e9, basis = "data sheet", source = "..." }`, in bytes, seconds, bytes a second or operations a
second.

**Nodes** are all alike, but for those that a `[[variant]]` lists: they have its device, its NICs, or both, in the same
number. **Ends** of a link, in `between`: `"device"` (every device of the node), `"device 3"` (that one), `"nic"`, `"nic
0"`, or the name of a switch. Every device to a switch is a star; `["device", "device"]` joins each pair; `["device",
"nic"]` joins device i to its nearest NIC, i * nics // devices. A link is two directed wires of `bandwidth` each; with
`shared` all wires of the entry in a node, both ways, have that capacity together. `multicast` is the rate at which a
switch reduces and broadcasts (NVLink SHARP). `protocols` are faster starts at a lower bandwidth.

**Between nodes** each NIC has a wire each way to a leaf switch: leaf r serves NIC r of all nodes with `rails`, else a
leaf serves one node. Leaves meet in a spine, by an uplink of what their NICs bring together over `oversubscription`.
`burst` is the bytes that a NIC lets through at once when it was idle: networks of clouds and rate limits are token
buckets.

**Library.** `collective_start` and `send_start` are seconds before the first byte, on top of the links' latency.
`reduction` is the bytes a second that a device adds to its own when that is not done while others arrive; without it,
it is.

**Host.** With `[host]` the devices of a node are processes on its cores: work beyond `cores` slows all of it down
evenly. With `transfers_use_cores` a transfer keeps a core at each of its ends busy, or `transfer_cores` of one: a slow
link leaves most of it free. With `blocking` a device issues a transfer only once the compute steps before it are done,
as a CPU rank does; without, it issues ahead, as a GPU stream does. With `take_turns` two ranks send to each other one
way at a time, as over gloo (`sim/turns.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import msgspec

from sennit.cluster.check import (
    check_counts,
    check_device,
    check_fabric,
    check_link,
    check_positive,
    check_rates,
    check_seconds,
    check_variant,
)
from sennit.errors import ClusterError
from sennit.ir.dtype import DType

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
    "Variant",
]


class Basis(Enum):
    """What a figure, or a cost made of figures, rests on."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    DATA_SHEET = "data sheet"


class Scale(Enum):
    """What `name:N` multiplies."""

    NODES = "nodes"
    DEVICES = "devices"


class Algorithm(Enum):
    """How the cluster's communication library carries out a collective; `cost/transfer.py` has the closed forms."""

    RING = "ring"
    TREE = "tree"
    DIRECT = "direct"
    MULTICAST = "multicast"


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: float
    basis: Basis
    source: str


class Peak(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Operations a second by element type, dense, as a matrix product in torch reaches them by default."""

    f64: Figure | None = None
    f32: Figure | None = None
    bf16: Figure | None = None
    f16: Figure | None = None
    i8: Figure | None = None

    def of(self, dtype: DType) -> Figure | None:
        figure: Figure | None = getattr(self, dtype.value, None)
        return figure


class Matmul(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`efficiency` of a large product; `tile` and `depth` say how small dims lose, `units` how few tiles do."""

    efficiency: Figure
    tile: Figure
    units: Figure
    depth: Figure


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`cache` bytes move at `cache_bandwidth`; `special` is elements a second of operators that evaluate special
    functions or normalise. Where these are absent, memory bandwidth alone decides. `profile` names measured operator
    times of this device, `carried_profile` those of another (`cost/profile.py`); `allocation` is what the sizes of
    allocated memory are rounded up to.
    """

    kind: str
    per_node: int
    memory: Figure
    bandwidth: Figure
    bandwidth_efficiency: Figure
    launch: Figure
    peak: Peak
    matmul: Matmul
    cache: Figure | None = None
    cache_bandwidth: Figure | None = None
    special: Figure | None = None
    profile: str | None = None
    carried_profile: str | None = None
    allocation: Figure | None = None


class Protocol(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A way over a link that starts faster and carries less: `efficiency` is relative to the link's own."""

    name: str
    latency: Figure
    efficiency: Figure


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    between: tuple[str, str]
    bandwidth: Figure
    latency: Figure
    efficiency: Figure | None = None
    shared: bool = False
    multicast: Figure | None = None
    protocols: tuple[Protocol, ...] = ()


class Nic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    per_node: int
    bandwidth: Figure
    latency: Figure
    efficiency: Figure | None = None
    protocols: tuple[Protocol, ...] = ()
    burst: Figure | None = None


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rails: bool
    oversubscription: Figure


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    cores: Figure
    transfers_use_cores: bool
    blocking: bool
    transfer_cores: Figure | None = None
    take_turns: bool = False
    starts_use_cores: bool = False


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What some nodes have instead: newer devices, slower NICs."""

    nodes: tuple[int, ...]
    device: Device | None = None
    nic: Nic | None = None


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A checked description. `cluster/topology.py` gives its wires and routes; `str(cluster)` is its TOML."""

    name: str
    summary: str
    nodes: int
    device: Device
    link: tuple[Link, ...] = ()
    scale: Scale = Scale.NODES
    algorithms: tuple[Algorithm, ...] = (Algorithm.RING,)
    switches: tuple[str, ...] = ()
    nic: Nic | None = None
    fabric: Fabric | None = None
    host: Host | None = None
    collective_start: Figure | None = None
    send_start: Figure | None = None
    reduction: Figure | None = None
    variant: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        check_counts(self, self.scale is Scale.DEVICES)
        check_device(self.device)
        for link in self.link:
            check_link(link, self)
        if self.nic is not None:
            check_rates("[nic]", "nic", self.nic.bandwidth, self.nic.efficiency, self.nic.latency, self.nic.protocols)
            if self.nic.burst is not None:
                check_positive(self.nic.burst, "burst in bytes", "[nic]", "leave it out if there is none")
        check_fabric(self)
        if self.host is not None and self.host.transfer_cores is not None:
            check_positive(self.host.transfer_cores, "transfer_cores", "[host]", "leave it out for a whole core")
        for variant in self.variant:
            check_variant(variant, self)
        for name, figure in (("collective_start", self.collective_start), ("send_start", self.send_start)):
            if figure is not None:
                check_seconds(figure, name, f"cluster {self.name!r}")
        if self.reduction is not None:
            check_positive(
                self.reduction, "reduction in bytes/s", f"cluster {self.name!r}", "leave it out if there is none"
            )

    @property
    def devices(self) -> int:
        return self.nodes * self.device.per_node

    @property
    def size(self) -> str:
        """In words, for messages: `16 devices (2 nodes of 8)`."""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.devices} device{'s' if self.devices != 1 else ''} ({nodes} of {self.device.per_node})"

    def node_of(self, device: int) -> int:
        return device // self.device.per_node

    def device_of(self, node: int) -> Device:
        """What the devices of a node are."""
        for variant in self.variant:
            if node in variant.nodes and variant.device is not None:
                return variant.device
        return self.device

    def nic_of(self, node: int) -> Nic:
        for variant in self.variant:
            if node in variant.nodes and variant.nic is not None:
                return variant.nic
        assert self.nic is not None, "asked for the NIC of a cluster without"
        return self.nic

    def scaled(self, count: int) -> Cluster:
        """The cluster with `count` nodes, or with `count` devices on its one host where it scales by devices."""
        if count < 1:
            raise ClusterError(
                f"{self.name}:{count} has no devices", where=f"cluster {self.name!r}", fix="give a count of at least 1"
            )
        if self.scale is Scale.NODES:
            return msgspec.structs.replace(self, nodes=count)
        return msgspec.structs.replace(self, device=msgspec.structs.replace(self.device, per_node=count))

    def require(self, devices: int, where: str) -> None:
        """Raise unless the cluster has at least `devices` devices; `where` names what needs them."""
        if devices <= self.devices:
            return
        per = self.device.per_node if self.scale is Scale.NODES else 1
        enough = f"{self.name}:{-(-devices // per)}"
        raise ClusterError(
            f"{devices} devices are needed, the cluster {self.name!r} has {self.size}",
            where=where,
            fix=f"use the cluster {enough}, or a mesh of at most {self.devices} devices",
        )

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure with its place, for reports and for the check that each has a source."""
        yield from _figures("", self)

    def __str__(self) -> str:
        from sennit.cluster.toml import print_cluster

        return print_cluster(self)

    @classmethod
    def parse(cls, text: str, where: str = "a cluster text") -> Cluster:
        from sennit.cluster.toml import parse_cluster

        return parse_cluster(text, where)


def _figures(place: str, part: object) -> Iterator[tuple[str, Figure]]:
    match part:
        case Figure():
            yield place, part
        case tuple():
            for position, item in enumerate(part):
                yield from _figures(f"{place}[{getattr(item, 'name', position)}]", item)
        case msgspec.Struct():
            for field in part.__struct_fields__:
                yield from _figures(f"{place}.{field}" if place else field, getattr(part, field))
        case _:
            return
