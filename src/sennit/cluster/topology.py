"""The wires of a cluster and the routes over them.

A *wire* is one direction of a link, with one capacity. A *route* is the wires that a transfer from one device to
another occupies, in order. Within a node it is the path of fewest wires, among those the one with the widest
bottleneck, among those the first declared; devices and NICs do not forward. Between nodes it goes from the device to
its nearest NIC, over that NIC's wire to its leaf, through the spine where the two NICs hang on different leaves, and
down again.

Nodes are alike, so paths are found once, in a node, and moved by arithmetic: wire w of node n is `n * per_node + w`.
Where faults (`cluster/faults.py`) leave a node with fewer wires than others, its paths are found for it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sennit.cluster.description import Cluster, Link, Nic, Protocol
from sennit.cluster.faults import Fault, changed_wires
from sennit.cluster.wire import Speed, Wire
from sennit.errors import ClusterError

__all__ = ["Edge", "Topology"]

Vertex = tuple[str, int]  # ("device", 3), ("nic", 0), (a switch, 0)
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """A wire from one end to another, by name:

    `device 3` (of the whole cluster), `node 0 nvswitch`, `leaf 2`, `spine`. The wire of a shared link has many edges.
    """

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
    is_uniform: bool = True  # every node as node 0: what holds for devices holds for those some nodes further on
    special: dict[int, dict[tuple[Vertex, Vertex], Path]] = field(
        default_factory=dict
    )  # by node with wires that are down
    dead_nics: frozenset[tuple[int, int]] = frozenset()  # node and NIC

    @classmethod
    def of(cls, cluster: Cluster, faults: Sequence[Fault] = ()) -> Topology:
        wires, edges = _node(cluster)
        paths = _paths(cluster, wires, edges)
        _check_connected(cluster, paths)
        every = [
            replace(wire, name=f"node {node} {wire.name}", node=node) for node in range(cluster.nodes) for wire in wires
        ]
        if cluster.nic is not None:
            every += _network(cluster)
        direct = cluster.device.per_node > 1 and len(paths[("device", 0), ("device", 1)]) == 1
        changed, down, uniform = changed_wires(cluster, every, faults)
        uniform = uniform and all(item.nic is None for item in cluster.variant)
        special: dict[int, dict[tuple[Vertex, Vertex], Path]] = {}
        for node in sorted({number // len(wires) for number in down if number < cluster.nodes * len(wires)}):
            lost = {number - node * len(wires) for number in down}
            left = {end: [edge for edge in found if edge[1] not in lost] for end, found in edges.items()}
            special[node] = _paths(cluster, wires, left)
            _check_connected(cluster, special[node], f"node {node} with links down")
        dead = frozenset(
            (wire.node, int(wire.ends[0].split()[1]))
            for wire in (every[number] for number in down)
            if wire.link == "nic" and wire.node is not None
        )
        topology = cls(cluster, tuple(changed), len(wires), paths, direct, uniform, special, dead)
        for node in sorted({node for node, _ in dead}) if cluster.nodes > 1 else ():
            for device in range(cluster.device.per_node):
                topology._exit(node, device)  # raises where no NIC is left
        return topology

    def route(self, source: int, target: int) -> Path:
        """The wires from one device to another; none from a device to itself."""
        if source == target:
            return ()
        size = self.cluster.device.per_node
        (node, here), (other, there) = divmod(source, size), divmod(target, size)
        if node == other:
            return self._inside(node, ("device", here), ("device", there))
        (nic, proxy), (far, far_proxy) = self._exit(node, here), self._exit(other, there)
        up, down = self._nic_wire(node, nic), self._nic_wire(other, far) + 1
        middle: Path = ()
        if (leaf := self._leaf(node, nic)) != (far_leaf := self._leaf(other, far)):
            middle = (self._uplink(leaf), self._uplink(far_leaf) + 1)
        first = self._inside(node, ("device", proxy), ("nic", nic))
        last = self._inside(other, ("nic", far), ("device", far_proxy))
        if proxy != here:
            first = (*self._inside(node, ("device", here), ("device", proxy)), *first)
        if far_proxy != there:
            last = (*last, *self._inside(other, ("device", far_proxy), ("device", there)))
        return (*first, up, *middle, down, *last)

    def _exit(self, node: int, device: int) -> tuple[int, int]:
        """The NIC by which a device leaves its node, and the device whose NIC that is."""
        nic = self._nic(device)
        if not self.dead_nics or (node, nic) not in self.dead_nics:
            return nic, device
        order = sorted(range(self.cluster.device.per_node), key=lambda other: (abs(other - device), other))
        for other in order:
            if (node, self._nic(other)) not in self.dead_nics:
                return self._nic(other), other
        raise ClusterError(
            f"node {node} has no NIC left: its devices cannot reach another node",
            where=f"cluster {self.cluster.name!r}",
            fix="leave at least one NIC of a node up, or use one node",
        )

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
        """The directed graph that the routes run over.

        A cluster of one node has no edges to its NICs: they lead nowhere.
        """
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
        paths = self.special.get(node, self.paths) if self.special else self.paths
        return tuple([offset + wire for wire in paths[source, target]])

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


# ---- the wires of one node and of the network ------------------------------------------------------------------------


def _speeds(protocols: tuple[Protocol, ...]) -> tuple[Speed, ...]:
    return tuple(Speed(item.name, item.latency.value, item.efficiency.value) for item in protocols)


def _wire(name: str, link: Link | Nic, kind: str, node: int | None, ends: tuple[str, ...]) -> Wire:
    efficiency = link.efficiency.value if link.efficiency is not None else 1.0
    multicast = link.multicast.value if isinstance(link, Link) and link.multicast is not None else None
    bandwidth = link.bandwidth.value * efficiency
    burst = link.burst.value if isinstance(link, Nic) and link.burst is not None else 0.0
    return Wire(name, kind, bandwidth, link.latency.value, _speeds(link.protocols), multicast, node, ends, burst)


def _node(cluster: Cluster) -> tuple[list[Wire], dict[Vertex, list[tuple[Vertex, int]]]]:
    wires: list[Wire] = []
    edges: dict[Vertex, list[tuple[Vertex, int]]] = {}

    def label(vertex: Vertex) -> str:
        return f"{vertex[0]} {vertex[1]}" if vertex[0] in ("device", "nic") else vertex[0]

    def add(link: Link, *ends: Vertex) -> int:
        names = tuple(map(label, ends))
        wires.append(_wire(f"{link.name} {' > '.join(names)}".rstrip(), link, link.name, None, names))
        return len(wires) - 1

    for link in cluster.link:
        shared = add(link) if link.shared else None
        for left, right in _pairs(link, cluster):
            there = add(link, left, right) if shared is None else shared
            back = add(link, right, left) if shared is None else shared
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


def _network(cluster: Cluster) -> list[Wire]:
    assert cluster.nic is not None
    nics = [cluster.nic_of(node) for node in range(cluster.nodes)]
    wires = [
        _wire(f"node {node} nic {number} {way}", nic, "nic", node, (f"nic {number}",))
        for node, nic in enumerate(nics)
        for number in range(nic.per_node)
        for way in ("up", "down")
    ]
    rails = cluster.fabric is not None and cluster.fabric.rails
    ratio = cluster.fabric.oversubscription.value if cluster.fabric is not None else 1.0
    rates = [nic.bandwidth.value * (nic.efficiency.value if nic.efficiency is not None else 1.0) for nic in nics]
    # a leaf's uplinks bring what its NICs do together; the hop's latency is counted on the NICs
    per_node = cluster.nic.per_node
    uplinks = [sum(rates) / ratio] * per_node if rails else [per_node * rate / ratio for rate in rates]
    # and lets through what they let through at once
    burst = sum(nic.burst.value for nic in nics if nic.burst is not None)
    wires += [
        Wire(f"leaf {leaf} {way}", "spine", capacity, 0.0, ends=(f"leaf {leaf}",), burst=burst)
        for leaf, capacity in enumerate(uplinks)
        for way in ("up", "down")
    ]
    return wires


# ---- paths -----------------------------------------------------------------------------------------------------------


def _paths(
    cluster: Cluster, wires: list[Wire], edges: dict[Vertex, list[tuple[Vertex, int]]]
) -> dict[tuple[Vertex, Vertex], Path]:
    starts: list[Vertex] = [("device", i) for i in range(cluster.device.per_node)]
    starts += [("nic", i) for i in range(cluster.nic.per_node if cluster.nic is not None else 0)]
    return {(start, end): path for start in starts for end, path in _search(start, wires, edges).items()}


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


def _check_connected(
    cluster: Cluster, paths: dict[tuple[Vertex, Vertex], Path], place: str = "the links of a node"
) -> None:
    names = ", ".join(repr(link.name) for link in cluster.link) or "none"
    devices: list[Vertex] = [("device", i) for i in range(cluster.device.per_node)]
    for device in devices[1:]:
        if (devices[0], device) not in paths:
            raise ClusterError(
                f"device 0 cannot reach device {device[1]}: no links join them",
                where=f"{place}: {names}",
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
                where=f"{place}: {names}",
                fix='add a [[link]] with between = ["device", "nic"]',
            )
