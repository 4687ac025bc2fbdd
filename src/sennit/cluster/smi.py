"""A cluster from what `nvidia-smi topo -m` prints.

    matrix := header row*                       header: the names of GPUs and NICs, then affinities, which are not read
    row    := NAME cell*                        a cell for each name of the header
    cell   := "X" | "NV" INT | "PIX" | "PXB" | "PHB" | "NODE" | "SYS"

The classes, from near to far, and what they become here:

| cell | is | becomes |
|---|---|---|
| `NV#` | # NVLinks bonded | the same # between all pairs of more than two GPUs: a switch, to which each GPU has # links; else a link between the two |
| `PIX`, `PXB` | one or several PCIe bridges, no host bridge | a PCIe switch `pcie N` with a link to each of those that it joins |
| `PHB`, `NODE` | through the host bridge, or between those of one NUMA node | a host `host N`, with a link to each PCIe switch |
| `SYS` | over the link between sockets | a link between hosts |

The matrix has no rates: those of the classes are data sheet figures, and NVLink's depends on the device's generation.
What the devices are is taken from a preset or a file. NICs that no GPU is nearest to (storage, management) are left
out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from sennit.cluster.description import Basis, Cluster, Figure, Link
from sennit.errors import ParseError

__all__ = ["Matrix", "cluster_of_matrix", "parse_matrix"]

NEAR = ("X", "NV", "PIX", "PXB", "PHB", "NODE", "SYS")  # from near to far


@dataclass(frozen=True, slots=True)
class Matrix:
    """`cells[i][j]` is the class between `names[i]` and `names[j]`."""

    names: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(number for number, name in enumerate(self.names) if name.startswith("GPU"))

    @property
    def nics(self) -> tuple[int, ...]:
        return tuple(number for number, name in enumerate(self.names) if not name.startswith("GPU"))

    def distance(self, left: int, right: int) -> int:
        return NEAR.index(re.sub(r"\d+$", "", self.cells[left][right]))


def parse_matrix(text: str) -> Matrix:
    """The matrix in the output of `nvidia-smi topo -m`; other lines are passed over."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    is_name = re.compile(r"(GPU|NIC|mlx\w*_)\d+$")
    header = next(
        (words for words in lines if len(words) > 1 and is_name.match(words[0]) and is_name.match(words[1])), None
    )
    if header is None and len([words for words in lines if words and words[0] == "GPU0"]) > 1:
        header = ["GPU0"]  # one GPU alone
    if header is None:
        raise ParseError(
            "no matrix of GPUs in this text",
            fix="give the whole output of `nvidia-smi topo -m`, its first line with GPU0, GPU1, ... included",
        )
    names = []
    for word in header:
        if not is_name.match(word):
            break
        names.append(word)
    rows: dict[str, tuple[str, ...]] = {}
    for words in lines:
        if words is not header and len(words) > len(names) and words[0] in names and words[0] not in rows:
            rows[words[0]] = tuple(words[1 : 1 + len(names)])
    for name in names:
        _check_row(name, rows, names)
    return Matrix(tuple(names), tuple(rows[name] for name in names))


def _check_row(name: str, rows: dict[str, tuple[str, ...]], names: list[str]) -> None:
    if name not in rows:
        raise ParseError(f"the matrix has a column {name} and no row of it", fix="give the output unchanged")
    for other, cell in zip(names, rows[name], strict=True):
        if re.sub(r"\d+$", "", cell) not in NEAR:
            raise ParseError(
                f"{cell!r} between {name} and {other} is no class of connection",
                fix=f"known are {', '.join(NEAR[2:])}, X and NV with a number",
            )


def cluster_of_matrix(matrix: Matrix, like: Cluster, name: str, nvlink: float = 25e9, nodes: int = 1) -> Cluster:
    """`like` gives device, NIC, fabric and library; `nvlink` is the rate of one NVLink, one way (NVLink 5: 50e9)."""
    gpus = matrix.gpus
    nics = _nics_in_use(matrix)
    links = [*_nvlinks(matrix, nvlink, like), *_pcie_links(matrix, nics, like)]
    switches = dict.fromkeys(end for link in links for end in link.between if not re.match(r"(device|nic)\b", end))
    nic = None
    if nics and like.nic is not None:
        nic = msgspec.structs.replace(like.nic, per_node=len(nics))
    return Cluster(
        name=name,
        summary=f"{len(gpus)} GPUs a node, from nvidia-smi topo -m; devices as of {like.name}",
        nodes=nodes,
        device=msgspec.structs.replace(like.device, per_node=len(gpus)),
        link=tuple(links),
        algorithms=like.algorithms,
        switches=tuple(switches),
        nic=nic,
        fabric=like.fabric if nic is not None else None,
        collective_start=like.collective_start,
        send_start=like.send_start,
    )


def _nvlinks(matrix: Matrix, rate: float, like: Cluster) -> Iterable[Link]:
    counts: dict[tuple[int, int], int] = {}
    for a, left in enumerate(matrix.gpus):
        for b, right in enumerate(matrix.gpus):
            if a < b and (found := re.fullmatch(r"NV(\d+)", matrix.cells[left][right])):
                counts[a, b] = int(found[1])
    known = next((link for link in like.link if "nvlink" in link.name.lower()), None)
    pairs = len(matrix.gpus) * (len(matrix.gpus) - 1) // 2

    def link(between: tuple[str, str], count: int) -> Link:
        source = f"nvidia-smi topo -m: NV{count}, {count} links of {rate / 1e9:g} GB/s each way"
        latency = known.latency if known is not None else _figure(1.7e-6, "half of an NVLink ring hop of 3.4 us")
        return Link(
            name="nvlink",
            between=between,
            bandwidth=Figure(count * rate, Basis.DATA_SHEET, source),
            latency=latency,
            efficiency=known.efficiency if known is not None else None,
            multicast=known.multicast if known is not None and between[1] == "nvswitch" else None,
            protocols=known.protocols if known is not None else (),
        )

    if len(matrix.gpus) > 2 and len(counts) == pairs and len(set(counts.values())) == 1:
        return [link(("device", "nvswitch"), next(iter(counts.values())))]
    return [link((f"device {a}", f"device {b}"), count) for (a, b), count in counts.items()]


def _pcie_links(matrix: Matrix, nics: tuple[int, ...], like: Cluster) -> Iterable[Link]:
    members = [*matrix.gpus, *nics]
    ends = {number: f"device {place}" for place, number in enumerate(matrix.gpus)}
    ends |= {number: f"nic {place}" for place, number in enumerate(nics)}
    known = next((link for link in like.link if "pcie" in link.name.lower()), None)
    rate = known.bandwidth if known is not None else _figure(32e9, "PCIe 4.0 x16, one direction")
    still = _figure(0.0, "counted where the transfer starts")
    bridges = _groups(matrix, members, NEAR.index("PXB"))
    hosts = _groups(matrix, members, NEAR.index("NODE"))

    def link(name: str, left: str, right: str, latency: Figure = still) -> Link:
        return Link(name=name, between=(left, right), bandwidth=rate, latency=latency)

    for place, bridge in enumerate(bridges):
        yield from (link("pcie", ends[number], f"pcie {place}") for number in bridge)
        host = next(h for h, group in enumerate(hosts) if bridge[0] in group)
        yield link("host bridge", f"pcie {place}", f"host {host}", _figure(0.5e-6, "a host bridge, not measured"))
    for place in range(1, len(hosts)):
        yield link("socket", "host 0", f"host {place}", _figure(0.5e-6, "a hop between sockets, not measured"))


def _groups(matrix: Matrix, members: list[int], reach: int) -> list[list[int]]:
    """Members that are at most `reach` apart over PCIe; NVLinks say nothing of that, so NICs and order decide there."""
    groups: list[list[int]] = []
    for number in members:
        for group in groups:
            if any(
                0 < matrix.distance(number, other) <= reach and matrix.distance(number, other) != 1 for other in group
            ):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def _nics_in_use(matrix: Matrix) -> tuple[int, ...]:
    """The NICs that some GPU is nearest to, each GPU counting for one; in the order of the GPUs."""
    used: dict[int, None] = {}
    for gpu in matrix.gpus:
        free = [nic for nic in matrix.nics if nic not in used]
        nearest = min((matrix.distance(gpu, nic) for nic in matrix.nics), default=None)
        mine = [nic for nic in matrix.nics if matrix.distance(gpu, nic) == nearest]
        best = next((nic for nic in mine if nic in free), None)
        if nearest is not None and nearest <= NEAR.index("PXB") and best is not None:
            used[best] = None
    if not used and matrix.nics:
        used = dict.fromkeys(matrix.nics)
    # a NIC serves equally many GPUs: as many as divide them
    count = len(used)
    while count and len(matrix.gpus) % count:
        count -= 1
    return tuple(used)[:count]


def _figure(value: float, source: str) -> Figure:
    return Figure(value, Basis.ESTIMATED, source)
