"""What a cluster is made of, as its TOML file says it. Every figure carries where it comes from.

    name, summary, nodes, scale ("nodes" | "devices"), algorithms, switches
    collective_start, send_start, reduction
    [device]        kind, per_node, memory, bandwidth, bandwidth_efficiency, launch, cache, cache_bandwidth, special
    [device.peak]   f64, f32, bf16, f16, i8              floating (or integer) operations a second
    [device.matmul] efficiency, tile, units, depth       the shape of the matrix-product efficiency curve
    [[link]]        name, between, bandwidth, efficiency, latency, shared, multicast, protocols
    [nic]           per_node, bandwidth, efficiency, latency, protocols
    [fabric]        rails, oversubscription
    [host]          cores, transfers_use_cores, blocking

A figure is `{ value = 450e9, basis = "data sheet", source = "..." }`, in bytes, seconds, bytes a second or operations a second.

**Nodes** are all alike. **Ends** of a link, in `between`: `"device"` (every device of the node), `"device 3"` (that one),
`"nic"`, `"nic 0"`, or the name of a switch. Every device to a switch is a star; `["device", "device"]` joins each pair;
`["device", "nic"]` joins device i to its nearest NIC, i * nics // devices. A link is two directed wires of `bandwidth`
each; with `shared` all wires of the entry in a node, both ways, have that capacity together. `multicast` is the rate at
which a switch reduces and broadcasts (NVLink SHARP). `protocols` are faster starts at a lower bandwidth.

**Between nodes** each NIC has a wire each way to a leaf switch: leaf r serves NIC r of all nodes with `rails`, else a leaf
serves one node. Leaves meet in a spine, by an uplink of what their NICs bring together over `oversubscription`.

**Library.** `collective_start` and `send_start` are seconds before the first byte, on top of the links' latency. `reduction` is
the bytes a second that a device adds to its own when that is not done while others arrive; without it, it is.

**Host.** With `[host]` the devices of a node are processes on its cores: work beyond `cores` slows all of it down evenly.
With `transfers_use_cores` a transfer occupies a core at each of its ends. With `blocking` a device issues a transfer only
once the compute steps before it are done, as a CPU rank does; without, it issues ahead, as a GPU stream does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from enum import Enum

import msgspec

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
    """`cache` bytes move at `cache_bandwidth`; `special` is elements a second of operators that evaluate special functions
    or normalise. Where these are absent, memory bandwidth alone decides."""

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


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rails: bool
    oversubscription: Figure


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cores: Figure
    transfers_use_cores: bool
    blocking: bool


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

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_device(self.device)
        for link in self.link:
            _check_link(link, self)
        if self.nic is not None:
            _check_rates("[nic]", "nic", self.nic.bandwidth, self.nic.efficiency, self.nic.latency, self.nic.protocols)
        _check_fabric(self)
        for name, figure in (("collective_start", self.collective_start), ("send_start", self.send_start)):
            if figure is not None:
                _check_seconds(figure, name, f"cluster {self.name!r}")
        if self.reduction is not None:
            _positive(self.reduction, "reduction in bytes/s", f"cluster {self.name!r}", "leave it out if there is none")

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


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_counts(cluster: Cluster) -> None:
    for place, count in (("nodes", cluster.nodes), ("[device] per_node", cluster.device.per_node)):
        if count < 1:
            raise ClusterError(
                f"{place} is {count}", where=f"cluster {cluster.name!r}", fix="give a count of at least 1"
            )
    if cluster.scale is Scale.DEVICES and cluster.nodes != 1:
        raise ClusterError(
            f"scale is 'devices' and nodes is {cluster.nodes}",
            where=f"cluster {cluster.name!r}",
            fix="give nodes = 1, or scale = 'nodes'",
        )
    if not cluster.algorithms:
        raise ClusterError("algorithms is empty", where=f"cluster {cluster.name!r}", fix="name one, such as 'ring'")
    for place, figure in cluster.figures():
        if not figure.source.strip():
            raise ClusterError(
                f"{place} = {figure.value:g} has no source",
                where=f"cluster {cluster.name!r}",
                fix="say where the figure comes from: a data sheet, a measurement, an estimate",
            )


def _positive(figure: Figure, what: str, where: str, fix: str) -> None:
    if not (math.isfinite(figure.value) and figure.value > 0):
        raise ClusterError(f"{what} is {figure.value:g}", where=where, fix=fix)


def _fraction(figure: Figure, what: str, where: str) -> None:
    if not 0 < figure.value <= 1:
        raise ClusterError(f"{what} is {figure.value:g}", where=where, fix="give a fraction above 0 and up to 1")


def _check_device(device: Device) -> None:
    where = f"[device] {device.kind!r}"
    _positive(device.memory, "the device's memory in bytes", where, "give what the device holds, such as 80e9")
    _positive(
        device.bandwidth,
        "the device's memory bandwidth in bytes/s",
        where,
        "give the bytes read and written a second, such as 2039e9",
    )
    _fraction(device.bandwidth_efficiency, "bandwidth_efficiency", where)
    _check_seconds(device.launch, "launch", where)
    rates = [(name, device.peak.of(DType(name))) for name in device.peak.__struct_fields__]
    if all(figure is None for _, figure in rates):
        raise ClusterError(
            "the device has no peak operations a second", where=where, fix="give [device.peak] f32 or bf16"
        )
    for name, figure in rates:
        if figure is not None:
            _positive(figure, f"the peak of {name} in operations/s", where, "give the dense rate, such as 312e12")
    for name, figure in (
        ("cache in bytes", device.cache),
        ("cache_bandwidth in bytes/s", device.cache_bandwidth),
        ("special in elements/s", device.special),
    ):
        if figure is not None:
            _positive(figure, name, where, "leave it out if it is not known")
    if (device.cache is None) != (device.cache_bandwidth is None):
        raise ClusterError("cache and cache_bandwidth go together", where=where, fix="give both, or neither")
    _fraction(device.matmul.efficiency, "[device.matmul] efficiency", where)
    for name, figure in (("tile", device.matmul.tile), ("units", device.matmul.units)):
        _positive(figure, f"[device.matmul] {name}", where, "give a count of at least 1")
    if device.matmul.depth.value < 0:
        raise ClusterError(f"[device.matmul] depth is {device.matmul.depth.value:g}", where=where, fix="give 0 or more")


def _check_seconds(figure: Figure, what: str, where: str) -> None:
    if not (math.isfinite(figure.value) and figure.value >= 0):
        raise ClusterError(f"{what} is {figure.value:g} s", where=where, fix="give seconds, 0 or more, such as 2e-6")


def _check_rates(
    where: str,
    name: str,
    bandwidth: Figure,
    efficiency: Figure | None,
    latency: Figure,
    protocols: tuple[Protocol, ...],
) -> None:
    _positive(
        bandwidth,
        f"the bandwidth of link {name!r} in bytes/s",
        where,
        "give the bytes a second of one direction, such as 25e9 for a NIC of 200 Gbit/s",
    )
    if efficiency is not None:
        _fraction(efficiency, f"the efficiency of link {name!r}", where)
    _check_seconds(latency, f"the latency of link {name!r}", where)
    for protocol in protocols:
        _fraction(protocol.efficiency, f"the efficiency of protocol {protocol.name!r} of link {name!r}", where)
        _check_seconds(protocol.latency, f"the latency of protocol {protocol.name!r} of link {name!r}", where)


def _check_link(link: Link, cluster: Cluster) -> None:
    where = f"[[link]] {link.name!r}"
    _check_rates(where, link.name, link.bandwidth, link.efficiency, link.latency, link.protocols)
    if link.multicast is not None:
        _positive(link.multicast, f"the multicast rate of link {link.name!r} in bytes/s", where, "leave it out if none")
    nics = cluster.nic.per_node if cluster.nic is not None else 0
    for end in link.between:
        match = re.fullmatch(r"(device|nic)(?: (\d+))?", end)
        limit = {"device": cluster.device.per_node, "nic": nics}.get(match.group(1), 0) if match else 0
        known = end in cluster.switches or (match is not None and int(match.group(2) or 0) < limit)
        if not known:
            ends = ["device", f"device 0 to {cluster.device.per_node - 1}", "nic", *cluster.switches]
            raise ClusterError(
                f"link {link.name!r} ends at {end!r}, which the node does not have",
                where=where,
                fix=f"use one of {', '.join(ends)}, or declare the switch in switches",
            )


def _check_fabric(cluster: Cluster) -> None:
    if cluster.fabric is not None:
        if not (math.isfinite(cluster.fabric.oversubscription.value) and cluster.fabric.oversubscription.value >= 1):
            raise ClusterError(
                f"oversubscription is {cluster.fabric.oversubscription.value:g}",
                where="[fabric]",
                fix="give 1 for a full fat tree, 2 where half of the bandwidth goes up",
            )
        if cluster.nic is None:
            raise ClusterError("a fabric without NICs", where="[fabric]", fix="add a [nic] table, or drop [fabric]")
    if cluster.host is not None:
        _positive(cluster.host.cores, "the number of cores", "[host]", "give at least 1")
