"""How long a step takes: latency per message, bytes over links, bytes copied in memory.

    seconds(step) = alpha * messages + max over links (bytes / bandwidth) + gamma * bytes packed and unpacked

`LinkCost` has one class of links, as fast as it is told. `ClusterCost` lays the bytes of all groups of a collective, or
of all transfers of an exchange, on the wires of a cluster at once (`cost/transfer.py`), so that a step which crosses
nodes is paid for where it crosses.

`SharedCost` is that of memory which the ranks of one host share (`shared_torch.py`). There nothing is sent: every byte
is copied by a core, into staging and out of it, and small runs of bytes take longer than long ones. Of L elements
before and M after a step,

    seconds(step) = alpha * messages + gamma * bytes (packed + placed) + delta * (packed / run before + placed / run after)

where packed is what goes to others, once for all of them; placed is what is written to the result, or added to it; and
a run is how many elements of a part lie side by side in the piece that it is cut from, or put into (`_run`).

A step that is a collective can go through a group of the backend or as messages. `CollectiveCost` has the measured
seconds of both, for one kind: `alpha * (n - 1) + beta * bytes received per device` in a group of n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sennit.cluster import Cluster, Topology
from sennit.cost import collective, point_to_point
from sennit.ir.exchange import transfers
from sennit.ir.program import CollectiveKind
from sennit.reshard.redistribution import Step, StepKind
from sennit.reshard.step_cost import StepCost, held

__all__ = ["ClusterCost", "CollectiveCost", "LinkCost", "SharedCost", "Timing"]


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Of one kind of collective, through a group and as messages."""

    kind: StepKind
    group_alpha: float
    group_beta: float
    messages_alpha: float
    messages_beta: float

    def prefers_group(self, members: int, received: float) -> bool:
        """Whether a group of so many members, each of which receives so many bytes, is quicker than messages."""
        group = self.group_alpha * (members - 1) + self.group_beta * received
        return group < self.messages_alpha * (members - 1) + self.messages_beta * received


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds per message, per byte on the link, per byte copied.

    The defaults are round figures for devices in one machine (20 us, 10 GB/s, 40 GB/s): they order the candidates
    sensibly where no cluster is given, and predict nothing.
    """

    alpha: float = 20e-6
    beta: float = 1 / 10e9
    gamma: float = 1 / 40e9
    collectives: tuple[CollectiveCost, ...] = ()  # where both ways were measured

    def prefers_group(self, kind: StepKind, members: int, received: float) -> bool:
        """Whether a collective is quicker through a group of the backend. Not known without measurement: no."""
        return any(c.prefers_group(members, received) for c in self.collectives if c.kind is kind)

    def seconds(self, parts: Sequence[Step], cost: StepCost, itemsize: int) -> float:
        """Of one step, or of the steps that fill one result."""
        return self.alpha * cost.messages + (self.beta * cost.busiest + self.gamma * cost.copied) * itemsize


@dataclass(frozen=True, slots=True)
class SharedCost:
    """Seconds per message, per byte copied, per run copied; as `calibrate` measures them."""

    alpha: float
    gamma: float
    delta: float

    def seconds(self, parts: Sequence[Step], cost: StepCost, itemsize: int) -> float:
        """Of one step, or of the steps that fill one result."""
        step = parts[0]
        packed, placed = _copies(step, cost)
        before, after = step.source.local_shape(), step.result.local_shape()
        part = [min(mine, its) for mine, its in zip(before, after, strict=True)]
        cut, put = _run(part, before), _run(part, after)
        if step.kind is StepKind.ALL_REDUCE:  # works on flat chunks
            cut = put = max(1, step.source.local_elements())
        moved = min(placed, cost.busiest)  # the rest is copied from the input straight to the output
        runs = packed / cut + moved / put + (placed - moved) / min(cut, put)
        return self.alpha * cost.messages + self.gamma * (packed + placed) * itemsize + self.delta * runs


def _copies(step: Step, cost: StepCost) -> tuple[float, float]:
    """The elements that a device packs and places."""
    before, after = step.source.local_elements(), step.result.local_elements()
    match step.kind:
        case StepKind.ALL_GATHER:
            return before, after
        case StepKind.ALL_REDUCE:
            return before, 2 * before
        case StepKind.REDUCE_SCATTER:
            return cost.busiest, before
        case StepKind.EXCHANGE | StepKind.PERMUTE:
            return cost.copied / 2, after  # about half of the copies of `step_cost` are sends
        case _:
            return cost.busiest, after


def _run(part: Sequence[int], piece: Sequence[int]) -> int:
    """The elements of a part that lie side by side in a piece: all dims from the last one up to the first that is cut."""
    length = 1
    for mine, its in zip(reversed(part), reversed(piece), strict=True):
        length *= mine
        if mine < its:
            break
    return max(1, length)


@dataclass(frozen=True, slots=True)
class ClusterCost:
    """The steps on a cluster; device d of a mesh is device d of the cluster."""

    topology: Topology

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterCost:
        return cls(Topology.of(cluster))

    def seconds(self, parts: Sequence[Step], cost: StepCost, itemsize: int) -> float:
        """Of one step, or of the steps that fill one result: each of these starts its messages again."""
        device = self.topology.cluster.device
        copying = cost.copied * itemsize / (device.bandwidth.value * device.bandwidth_efficiency.value)
        step = parts[0]
        if not step.kind.communicates:
            return copying
        if step.kind in (StepKind.PERMUTE, StepKind.EXCHANGE):
            latency, drain = self._exchange(step, itemsize)
        else:
            latency, drain = self._collective(step, itemsize)
        return latency * len(parts) + drain + copying

    def _collective(self, step: Step, itemsize: int) -> tuple[float, float]:
        mesh = step.source.mesh
        kind = CollectiveKind(step.kind.value)
        # gathers and scatters are named by the size of the whole, the others by what a device holds
        large = step.result if step.kind is StepKind.ALL_GATHER else step.source
        size = held(large) // len(mesh.devices) * itemsize
        groups = {tuple(sorted(mesh.group(device, step.axes))) for device in mesh.devices}
        found = [collective(self.topology, kind, group, size) for group in sorted(groups)]
        load: dict[int, float] = {}
        for transfer in found:
            for wire, carried in transfer.load:
                load[wire] = load.get(wire, 0.0) + carried
        return max(transfer.latency for transfer in found), max(self._drain(load), *(t.floor for t in found), 0.0)

    def _exchange(self, step: Step, itemsize: int) -> tuple[float, float]:
        """Messages to one device start one after another; those to different devices at once."""
        latency: dict[int, float] = {}
        load: dict[int, float] = {}
        for transfer in transfers(step.source, step.result):
            if transfer.sender != transfer.receiver:
                size = transfer.region.size * itemsize
                sent = point_to_point(self.topology, transfer.sender, transfer.receiver, size)
                latency[transfer.receiver] = latency.get(transfer.receiver, 0.0) + sent.latency
                for wire, carried in sent.load:
                    load[wire] = load.get(wire, 0.0) + carried
        return max(latency.values(), default=0.0), self._drain(load)

    def _drain(self, load: dict[int, float]) -> float:
        return max((size / self.topology.wires[wire].bandwidth for wire, size in load.items()), default=0.0)


Timing = LinkCost | ClusterCost | SharedCost
