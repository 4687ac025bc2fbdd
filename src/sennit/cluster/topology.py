"""The wires of a cluster and the routes over them.

A *wire* is one direction of a link, with one capacity. A *route* is the wires that a transfer from one device to another
occupies, in order. Within a node it is the path of fewest wires, among those the one with the widest bottleneck, among
those the first declared; devices and NICs do not forward. Between nodes it goes from the device to its nearest NIC, over
that NIC's wire to its leaf, through the spine where the two NICs hang on different leaves, and down again.

Nodes are alike, so paths are found once, in a node, and moved by arithmetic: wire w of node n is `n * per_node + w`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.cluster.description import Cluster, Link, Nic, Protocol
from sennit.errors import ClusterError

__all__ = ["Edge", "Speed", "Topology", "Wire"]

Vertex = tuple[str, int]  # ("device", 3), ("nic", 0), (a switch, 0)
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Speed:
    """A protocol on a wire: seconds to start, and the part of the wire's bandwidth it carries."""

    name: str
    latency: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class Wire:
    """`bandwidth` is what large transfers reach, in bytes a second."""

    name: str
    link: str
    bandwidth: float
    latency: float
    speeds: tuple[Speed, ...] = ()
    multicast: float | None = None

    def speed(self, protocol: str | None) -> Speed:
        for speed in self.speeds:
            if speed.name == protocol:
                return speed
        return Speed("", self.latency, 1.0)


@dataclass(frozen=True, slots=True)
class Edge:
    """A wire from one end to another, by name: `device 3` (of the whole cluster), `node 0 nvswitch`, `leaf 2`, `spine`. The
    wire of a shared link has many edges."""

    tail: str
    head: str
    wire: int


@dataclass(frozen=True, slots=True)
class Topology:
    cluster: Cluster
    wires: tuple[Wire, ...]
    wires_per_node: int
    paths: dict[tuple[Vertex, Vertex], Path]
    direct: bool  # whether two devices of a node are joined without a switch between them

    @classmethod
    def of(cls, cluster: Cluster) -> Topology:
        wires, edges = _node(cluster)
        paths: dict[tuple[Vertex, Vertex], Path] = {}
        devices: list[Vertex] = [("device", i) for i in range(cluster.device.per_node)]
        nics: list[Vertex] = [("nic", i) for i in range(cluster.nic.per_node if cluster.nic is not None else 0)]
        for start in devices + nics:
            paths.update(((start, end), path) for end, path in _search(start, wires, edges).items())
        _check_connected(cluster, devices, paths)
        every = [
            Wire(f"node {node} {wire.name}", wire.link, wire.bandwidth, wire.latency, wire.speeds, wire.multicast)
            for node in range(cluster.nodes)
            for wire in wires
        ]
        if cluster.nic is not None:
            every += _network(cluster, cluster.nic)
        direct = len(devices) > 1 and len(paths[devices[0], devices[1]]) == 1
        return cls(cluster, tuple(every), len(wires), paths, direct)

    def route(self, source: int, target: int) -> Path:
        """The wires from one device to another; none from a device to itself."""
        if source == target:
            return ()
        size = self.cluster.device.per_node
        (node, here), (other, there) = divmod(source, size), divmod(target, size)
        if node == other:
            return self._inside(node, ("device", here), ("device", there))
        nic, far = self._nic(here), self._nic(there)
        up, down = self._nic_wire(node, nic), self._nic_wire(other, far) + 1
        middle: Path = ()
        if (leaf := self._leaf(node, nic)) != (far_leaf := self._leaf(other, far)):
            middle = (self._uplink(leaf), self._uplink(far_leaf) + 1)
        first = self._inside(node, ("device", here), ("nic", nic))
        return (*first, up, *middle, down, *self._inside(other, ("nic", far), ("device", there)))

    @property
    def is_uniform(self) -> bool:
        """Whether every node is as node 0: what holds for devices then holds for those some nodes further on."""
        return True

    def moved(self, wire: int, nodes: int) -> int:
        """The wire that is to the devices `nodes` further on what `wire` is to these."""
        cluster = self.cluster
        own = cluster.nodes * self.wires_per_node
        if wire < own:
            return wire + nodes * self.wires_per_node
        assert cluster.nic is not None
        if wire < own + 2 * cluster.nodes * cluster.nic.per_node:
            return wire + 2 * nodes * cluster.nic.per_node
        rails = cluster.fabric is not None and cluster.fabric.rails
        return wire if rails else wire + 2 * nodes  # a rail's leaf serves all nodes, another's its own

    def bandwidth(self, source: int, target: int) -> float:
        """Of the narrowest wire of the route, in bytes a second."""
        return min(self.wires[wire].bandwidth for wire in self.route(source, target))

    def latency(self, source: int, target: int, protocol: str | None = None) -> float:
        """The sum over the wires of the route."""
        return sum(self.wires[wire].speed(protocol).latency for wire in self.route(source, target))

    def protocols(self) -> tuple[str, ...]:
        """The names of the protocols that some wire has, in order of declaration."""
        return tuple(dict.fromkeys(speed.name for wire in self.wires for speed in wire.speeds))

    def edges(self) -> tuple[Edge, ...]:
        """The directed graph that the routes run over. A cluster of one node has no edges to its NICs: they lead nowhere."""
        found: list[Edge] = []
        cluster = self.cluster
        size = cluster.device.per_node
        for node in range(cluster.nodes):

            def label(vertex: Vertex, node: int = node) -> str:
                kind, number = vertex
                if kind == "device":
                    return f"device {node * size + number}"
                return f"node {node} nic {number}" if kind == "nic" else f"node {node} {kind}"

            for tail, targets in _node(cluster)[1].items():
                for head, wire in targets:
                    if cluster.nodes > 1 or "nic" not in (tail[0], head[0]):
                        found.append(Edge(label(tail), label(head), node * self.wires_per_node + wire))
        if cluster.nic is None or cluster.nodes == 1:
            return tuple(found)
        leaves: dict[int, None] = {}
        for node in range(cluster.nodes):
            for nic in range(cluster.nic.per_node):
                leaf = self._leaf(node, nic)
                leaves[leaf] = None
                up = self._nic_wire(node, nic)
                found.append(Edge(f"node {node} nic {nic}", f"leaf {leaf}", up))
                found.append(Edge(f"leaf {leaf}", f"node {node} nic {nic}", up + 1))
        for leaf in leaves:
            found.append(Edge(f"leaf {leaf}", "spine", self._uplink(leaf)))
            found.append(Edge("spine", f"leaf {leaf}", self._uplink(leaf) + 1))
        return tuple(found)

    def _inside(self, node: int, source: Vertex, target: Vertex) -> Path:
        offset = node * self.wires_per_node
        return tuple(offset + wire for wire in self.paths[source, target])

    def _nic(self, device: int) -> int:
        assert self.cluster.nic is not None
        return _nearest(device, self.cluster.nic.per_node, self.cluster.device.per_node)

    def _nic_wire(self, node: int, nic: int) -> int:
        assert self.cluster.nic is not None
        return self.cluster.nodes * self.wires_per_node + 2 * (node * self.cluster.nic.per_node + nic)

    def _leaf(self, node: int, nic: int) -> int:
        return nic if self.cluster.fabric is not None and self.cluster.fabric.rails else node

    def _uplink(self, leaf: int) -> int:
        assert self.cluster.nic is not None
        cluster = self.cluster
        return cluster.nodes * (self.wires_per_node + 2 * self.cluster.nic.per_node) + 2 * leaf


def _nearest(device: int, nics: int, devices: int) -> int:
    return device * nics // devices


# ---- the wires of one node and of the network --------------------------------------------------------------------------


def _speeds(protocols: tuple[Protocol, ...]) -> tuple[Speed, ...]:
    return tuple(Speed(item.name, item.latency.value, item.efficiency.value) for item in protocols)


def _wire(name: str, link: Link | Nic, kind: str) -> Wire:
    efficiency = link.efficiency.value if link.efficiency is not None else 1.0
    multicast = link.multicast.value if isinstance(link, Link) and link.multicast is not None else None
    return Wire(name, kind, link.bandwidth.value * efficiency, link.latency.value, _speeds(link.protocols), multicast)


def _node(cluster: Cluster) -> tuple[list[Wire], dict[Vertex, list[tuple[Vertex, int]]]]:
    wires: list[Wire] = []
    edges: dict[Vertex, list[tuple[Vertex, int]]] = {}

    def label(vertex: Vertex) -> str:
        return f"{vertex[0]} {vertex[1]}" if vertex[0] in ("device", "nic") else vertex[0]

    def add(link: Link, name: str) -> int:
        wires.append(_wire(f"{link.name} {name}".rstrip(), link, link.name))
        return len(wires) - 1

    for link in cluster.link:
        shared = add(link, "") if link.shared else None
        for left, right in _pairs(link, cluster):
            there = add(link, f"{label(left)} > {label(right)}") if shared is None else shared
            back = add(link, f"{label(right)} > {label(left)}") if shared is None else shared
            edges.setdefault(left, []).append((right, there))
            edges.setdefault(right, []).append((left, back))
    return wires, edges


def _pairs(link: Link, cluster: Cluster) -> list[tuple[Vertex, Vertex]]:
    """What a `[[link]]` entry joins, by the rules of `description.py`."""
    devices = cluster.device.per_node
    nics = cluster.nic.per_node if cluster.nic is not None else 0

    def ends(text: str) -> list[Vertex]:
        kind, _, number = text.partition(" ")
        if text in cluster.switches:
            return [(text, 0)]
        if number:
            return [(kind, int(number))]
        return [(kind, i) for i in range(devices if kind == "device" else nics)]

    match link.between:
        case ("device", "device"):
            return [(("device", i), ("device", j)) for i in range(devices) for j in range(i + 1, devices)]
        case ("device", "nic") | ("nic", "device"):
            return [(("device", i), ("nic", _nearest(i, nics, devices))) for i in range(devices)]
        case (left, right):
            return [(a, b) for a in ends(left) for b in ends(right) if a != b]


def _network(cluster: Cluster, nic: Nic) -> list[Wire]:
    wires = [
        _wire(f"node {node} nic {number} {way}", nic, "nic")
        for node in range(cluster.nodes)
        for number in range(nic.per_node)
        for way in ("up", "down")
    ]
    rails = cluster.fabric is not None and cluster.fabric.rails
    ratio = cluster.fabric.oversubscription.value if cluster.fabric is not None else 1.0
    leaves, members = (nic.per_node, cluster.nodes) if rails else (cluster.nodes, nic.per_node)
    capacity = members * nic.bandwidth.value * (nic.efficiency.value if nic.efficiency is not None else 1.0) / ratio
    # the hop's latency is counted on the NICs
    wires += [Wire(f"leaf {leaf} {way}", "spine", capacity, 0.0) for leaf in range(leaves) for way in ("up", "down")]
    return wires


# ---- paths -------------------------------------------------------------------------------------------------------------


def _search(start: Vertex, wires: list[Wire], edges: dict[Vertex, list[tuple[Vertex, int]]]) -> dict[Vertex, Path]:
    """Breadth first; a level is finished before the next, so that the widest of equally short paths is kept."""
    found: dict[Vertex, Path] = {start: ()}
    level: dict[Vertex, Path] = {start: ()}
    while level:
        reached: dict[Vertex, tuple[float, Path]] = {}
        for vertex, path in level.items():
            if vertex != start and vertex[0] in ("device", "nic"):
                continue
            for target, wire in edges.get(vertex, ()):
                longer = path if wire in path else (*path, wire)  # a shared bus is crossed once
                width = min(wires[step].bandwidth for step in longer)
                if target not in found and (target not in reached or width > reached[target][0]):
                    reached[target] = (width, longer)
        level = {vertex: path for vertex, (_, path) in reached.items()}
        found.update(level)
    return found


def _check_connected(cluster: Cluster, devices: list[Vertex], paths: dict[tuple[Vertex, Vertex], Path]) -> None:
    names = ", ".join(repr(link.name) for link in cluster.link) or "none"
    for device in devices[1:]:
        if (devices[0], device) not in paths:
            raise ClusterError(
                f"device 0 cannot reach device {device[1]}: no links join them",
                where=f"the links of a node: {names}",
                fix="add a [[link]] between each device and a switch, or between the two devices",
            )
    if cluster.nodes == 1:
        return
    if cluster.nic is None:
        raise ClusterError(
            f"device 0 cannot reach device {cluster.device.per_node}: {cluster.nodes} nodes and no NICs",
            where="[nic]",
            fix="add [nic] and [fabric] tables, or use one node",
        )
    for device in devices:
        nic = ("nic", _nearest(device[1], cluster.nic.per_node, len(devices)))
        if (device, nic) not in paths:
            raise ClusterError(
                f"device {device[1]} cannot reach its NIC {nic[1]}, and so no other node",
                where=f"the links of a node: {names}",
                fix='add a [[link]] with between = ["device", "nic"]',
            )
