"""A cluster as a picture: one node with its devices, switches, NICs and links, and how the nodes are joined.

A node is drawn in layers: switches above, devices in the middle, NICs below. Devices that are joined to each other
without a switch stand on an ellipse, so that their links can be seen. A link is as wide as the logarithm of its
bandwidth; each kind has a colour, and the legend gives its figures with what they rest on. Nodes are alike, so one is
drawn whole and the others as boxes on their leaf switches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log10, sqrt

from sennit.cluster import Cluster, Figure, Link, Nic, Topology
from sennit.report.canvas import document, rectangle, text

__all__ = ["cluster_svg"]

WIDTH, MARGIN = 900, 18
BOX, TALL = 62, 30  # a device or NIC
MOST_DEVICES, MOST_NODES, MOST_LEAVES = 16, 8, 8
COLOURS = ("forward", "collective", "backward", "send", "optimizer", "receive")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float
    label: str
    classes: str
    title: str

    @property
    def centre(self) -> Point:
        return self.x + self.width / 2, self.y + TALL / 2


def cluster_svg(cluster: Cluster, *, standalone: bool = True) -> str:
    """The picture.

    Of many devices, nodes and leaves the first are drawn, and the picture says how many more there are.
    """
    topology = Topology.of(cluster)
    elements = [
        text(f"{MARGIN}", MARGIN + 12, f"{cluster.name}: {cluster.size}", "title"),
        text(f"{MARGIN}", MARGIN + 30, cluster.summary, "faint"),
    ]
    top = MARGIN + 48
    boxes, bottom = _node_boxes(cluster, topology, top)
    colours = _colours(cluster)
    elements += _node_links(topology, boxes, colours)
    elements += [shape for box in boxes.values() for shape in _draw(box)]
    if cluster.device.per_node > MOST_DEVICES:
        more = cluster.device.per_node - MOST_DEVICES
        elements.append(text(f"{WIDTH - MARGIN}", bottom + 14, f"and {more} more devices", "faint end-anchor"))
    bottom += 26
    if cluster.nodes > 1 and cluster.nic is not None:
        shapes, bottom = _fabric(cluster, bottom, colours["nic"])
        elements += shapes
    legend, bottom = _legend(cluster, bottom + 8, colours)
    elements += legend
    return document(WIDTH, bottom + MARGIN, elements, f"the cluster {cluster.name}", standalone=standalone)


# ---- a node ----------------------------------------------------------------------------------------------------------


def _node_boxes(cluster: Cluster, topology: Topology, top: float) -> tuple[dict[str, _Box], float]:
    boxes: dict[str, _Box] = {}
    devices = min(cluster.device.per_node, MOST_DEVICES)
    joined = any(link.between[0].startswith("device") and link.between[1].startswith("device") for link in cluster.link)
    if cluster.switches:
        width = (WIDTH - 2 * MARGIN - 12 * (len(cluster.switches) - 1)) / len(cluster.switches)
        for place, name in enumerate(cluster.switches):
            label = f"node 0 {name}"
            boxes[label] = _Box(MARGIN + place * (width + 12), top, width, name, "switch", f"switch {name}")
        top += TALL + (70 if not joined else 40)
    memory = f"{cluster.device.kind}, {cluster.device.memory.value / 1e9:g} GB"
    tall = 210.0 if joined and devices > 2 else 0.0
    for number in range(devices):
        x, y = _spread(number, devices), top
        if tall:  # above and below in turn, so that each stays over its NIC
            along = (x + _wide(devices) / 2 - WIDTH / 2) / (WIDTH / 2)
            y += tall / 2 * (1 + (-1 if number % 2 == 0 else 1) * sqrt(1 - along**2))
        boxes[f"device {number}"] = _Box(x, y, _wide(devices), f"{number}", "device", f"device {number}: {memory}")
    bottom = top + tall + TALL
    nics = cluster.nic.per_node if cluster.nic is not None else 0
    if nics:
        shown = min(nics, MOST_DEVICES)
        bottom += 44
        for number in range(shown):
            title = f"NIC {number}, {_rate(cluster.nic.bandwidth)}" if cluster.nic is not None else ""
            boxes[f"node 0 nic {number}"] = _Box(
                _spread(number, shown), bottom, _wide(shown), f"nic {number}", "nic", title
            )
        bottom += TALL
    return boxes, bottom


def _wide(count: int) -> float:
    """The width of a box in a row of `count`, with room between them."""
    return min(BOX, (WIDTH - 2 * MARGIN) / count - 8)


def _spread(number: int, count: int) -> float:
    room = WIDTH - 2 * MARGIN
    return MARGIN + room * (number + 0.5) / count - _wide(count) / 2


def _node_links(topology: Topology, boxes: dict[str, _Box], colours: dict[str, str]) -> Iterable[str]:
    # a cluster of one node has no edges to its NICs; they are drawn all the same
    cluster = topology.cluster
    seen: set[frozenset[str]] = set()
    edges = [(edge.tail, edge.head, topology.wires[edge.wire].link, edge.wire) for edge in topology.edges()]
    for tail, head, kind, wire in edges:
        pair = frozenset((tail, head))
        if tail in boxes and head in boxes and pair not in seen:
            seen.add(pair)
            yield _line(boxes[tail], boxes[head], topology.wires[wire].bandwidth, colours[kind], kind)
    for link in cluster.link if cluster.nodes == 1 and cluster.nic is not None else ():
        if set(link.between) == {"device", "nic"}:
            assert cluster.nic is not None
            for number in range(min(cluster.device.per_node, MOST_DEVICES)):
                nic = boxes.get(f"node 0 nic {number * cluster.nic.per_node // cluster.device.per_node}")
                if nic is not None:
                    yield _line(boxes[f"device {number}"], nic, link.bandwidth.value, colours[link.name], link.name)


def _line(left: _Box, right: _Box, bandwidth: float, colour: str, title: str) -> str:
    """From edge to edge, straight where one box spans over the other, as a switch does."""
    upper, lower = (left, right) if left.y <= right.y else (right, left)
    (x1, y1), (x2, y2) = upper.centre, lower.centre
    if upper.y != lower.y and not (left.classes == right.classes == "device"):
        if upper.width > lower.width:
            x1 = min(max(x2, upper.x + 8), upper.x + upper.width - 8)
        if lower.y - upper.y > TALL:
            y1, y2 = upper.y + TALL, lower.y
    wide = max(1.0, 1.2 * (log10(max(bandwidth, 1e8)) - 8.5))
    return (
        f'<line x1="{x1:.4g}" y1="{y1:.4g}" x2="{x2:.4g}" y2="{y2:.4g}" style="stroke:var(--{colour});'
        f'stroke-width:{wide:.2g};stroke-opacity:.75"><title>{title}, {bandwidth / 1e9:.4g} GB/s each way</title></line>'
    )


def _draw(box: _Box) -> Iterable[str]:
    fill = {"switch": "track", "device": "forward", "nic": "compute"}[box.classes]
    yield rectangle(f"{box.x:.4g}", box.y, f"{box.width:.4g}", TALL, fill, box.title, rounded=5)
    style = ' style="fill:#ffffff;pointer-events:none"' if box.classes != "switch" else ""
    yield text(f"{box.centre[0]:.4g}", box.centre[1] + 4, box.label, "middle", style)


# ---- between nodes ---------------------------------------------------------------------------------------------------


def _fabric(cluster: Cluster, top: float, colour: str) -> tuple[list[str], float]:
    assert cluster.nic is not None
    rails = cluster.fabric is not None and cluster.fabric.rails
    ratio = cluster.fabric.oversubscription.value if cluster.fabric is not None else 1.0
    nodes = min(cluster.nodes, MOST_NODES)
    count = cluster.nic.per_node if rails else cluster.nodes
    leaves = min(count, MOST_LEAVES)
    kind = "rails: NIC r of every node on leaf r" if rails else "a leaf for each node"
    shapes = [text(f"{MARGIN}", top + 12, f"between nodes: {kind}, oversubscription {ratio:g}", "plan")]
    top += 24
    spine = _Box(MARGIN, top, WIDTH - 2 * MARGIN, "spine", "switch", "the spine switches")
    row = [
        _Box(_spread(n, leaves), top + TALL + 34, BOX, f"leaf {n}", "switch", f"leaf switch {n}") for n in range(leaves)
    ]
    below = [
        _Box(_spread(n, nodes), row[0].y + TALL + 58, BOX, f"node {n}", "device", _node_title(cluster, n))
        for n in range(nodes)
    ]
    rate = cluster.nic.bandwidth.value
    members = cluster.nodes if rails else cluster.nic.per_node
    shapes += [_line(spine, leaf, rate * members / ratio, "receive", "spine") for leaf in row]
    for n, node in enumerate(below):
        for m, leaf in enumerate(row):
            if rails or n == m:
                shapes.append(_line(leaf, node, rate, colour, "nic"))
    shapes += [shape for box in (spine, *row, *below) for shape in _draw(box)]
    bottom = below[0].y + TALL
    hidden = [f"{cluster.nodes - nodes} more nodes"] if cluster.nodes > nodes else []
    hidden += [f"{count - leaves} more leaves"] if count > leaves else []
    if hidden:
        shapes.append(text(f"{WIDTH - MARGIN}", bottom + 16, "and " + " and ".join(hidden), "faint end-anchor"))
        bottom += 18
    return shapes, bottom + 12


def _node_title(cluster: Cluster, node: int) -> str:
    return f"node {node}: {cluster.device.per_node} of {cluster.device_of(node).kind}"


# ---- the legend ------------------------------------------------------------------------------------------------------


def _colours(cluster: Cluster) -> dict[str, str]:
    names = dict.fromkeys([*(link.name for link in cluster.link), "nic"])
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)} | {"spine": "receive"}


def _legend(cluster: Cluster, top: float, colours: dict[str, str]) -> tuple[list[str], float]:
    shapes: list[str] = []
    entries: dict[str, Link | Nic] = {}
    for link in cluster.link:
        entries.setdefault(link.name, link)
    if cluster.nic is not None:
        entries["nic"] = cluster.nic
    for name, entry in entries.items():
        top += 18
        shapes.append(rectangle(f"{MARGIN}", top - 8, "22", 6, colours[name], rounded=2))
        reached = ""
        if entry.efficiency is not None:
            rate = entry.bandwidth.value * entry.efficiency.value
            reached = f", {rate / 1e9:.3g} reached ({entry.efficiency.basis.value})"
        shared = ", shared by all" if isinstance(entry, Link) and entry.shared else ""
        figures = f"{_rate(entry.bandwidth)} each way ({entry.bandwidth.basis.value}){reached}{shared}"
        words = f"{name}: {figures}; {entry.latency.value * 1e6:.3g} us an end ({entry.latency.basis.value})"
        shapes.append(text(f"{MARGIN + 30}", top, words, "faint"))
    device = cluster.device
    top += 18
    shapes.append(rectangle(f"{MARGIN}", top - 9, "22", 9, "forward", rounded=2))
    words = f"{device.kind}: {device.memory.value / 1e9:g} GB at {device.bandwidth.value / 1e9:g} GB/s ({device.bandwidth.basis.value})"
    shapes.append(text(f"{MARGIN + 30}", top, words, "faint"))
    return shapes, top


def _rate(figure: Figure) -> str:
    return f"{figure.value / 1e9:.4g} GB/s"
