"""What communicating a bucket costs: straight lines over its bytes, one for each algorithm.

    all-reduce       min over the algorithms of  latency + per_byte * bytes
    reduce-scatter   its own line, and the gather of the shares another

A process group that was measured has one line (`profile_torch.py`). A cluster that is described (`of_cluster`) has one
for each algorithm that its library uses at some size, by the formulas of `cost/transfer.py`, so that the best one for
each bucket is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sennit.cluster import Cluster, Topology
from sennit.cost import collective
from sennit.fuse.clock import Sharing
from sennit.ir.program import CollectiveKind

__all__ = ["Channel", "Line", "of_cluster"]


@dataclass(frozen=True, slots=True)
class Line:
    """`name` is the algorithm."""

    name: str
    latency: float
    per_byte: float

    def seconds(self, size: int) -> float:
        return self.latency + self.per_byte * size


@dataclass(frozen=True, slots=True)
class Channel:
    """Communication of x bytes takes `latency + per_byte * x`, or the least of the algorithms' lines where there are
    some; updating x bytes of parameters `update_per_byte * x`, and copying x bytes from a bucket to the rest of their
    gradient `copy_per_byte * x`.
    """

    latency: float
    per_byte: float
    update_per_byte: float = 0.0
    sharing: Sharing = field(default_factory=Sharing)
    algorithms: tuple[Line, ...] = ()
    scatter: Line | None = None
    gather: Line | None = None
    copy_per_byte: float = 0.0

    def seconds(self, size: int, algorithm: str | None = None) -> float:
        """By the algorithm of this name; by the fastest without one."""
        lines = [line for line in self.algorithms if algorithm is None or line.name == algorithm]
        if not lines:
            return self.latency + self.per_byte * size
        return min(line.seconds(size) for line in lines)

    def algorithm(self, size: int) -> str | None:
        """The name of the fastest; None where there is no choice."""
        if len(self.algorithms) < 2:
            return None
        return min(self.algorithms, key=lambda line: line.seconds(size)).name

    def halves(self, size: int) -> tuple[float, float]:
        """Seconds of reducing to shares, and of gathering them.

        Where nobody measured them, each starts as an all-reduce does and carries half of its bytes.
        """
        half = Line("half", self.latency, self.per_byte / 2)
        return (self.scatter or half).seconds(size), (self.gather or half).seconds(size)


_SIZES = tuple(part << power for power in range(10, 31) for part in (2, 3))


def of_cluster(cluster: Cluster, devices: Sequence[int], *, update_per_byte: float = 0.0) -> Channel:
    """All-reduces over these devices of a described cluster."""
    topology = Topology.of(cluster)
    lines = _lines(topology, CollectiveKind.ALL_REDUCE, devices)
    scatter = _lines(topology, CollectiveKind.REDUCE_SCATTER, devices)[-1]
    gather = _lines(topology, CollectiveKind.ALL_GATHER, devices)[-1]
    longest = lines[-1]
    return Channel(longest.latency, longest.per_byte, update_per_byte, algorithms=lines, scatter=scatter, gather=gather)


def _lines(topology: Topology, kind: CollectiveKind, devices: Sequence[int]) -> tuple[Line, ...]:
    """One for each algorithm that is the fastest at two of the sizes or more, those of small sizes first."""
    found: dict[str, list[tuple[int, float]]] = {}
    for size in _SIZES:
        transfer = collective(topology, kind, devices, size)
        found.setdefault(transfer.algorithm, []).append((size, transfer.seconds(topology)))
    return tuple(_line(name, points) for name, points in found.items() if len(points) > 1)


def _line(name: str, points: list[tuple[int, float]]) -> Line:
    (small, short), (large, long) = points[0], points[-1]
    per_byte = (long - short) / (large - small)
    return Line(name, max(0.0, short - per_byte * small), per_byte)
