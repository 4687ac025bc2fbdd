"""A cluster from the times of messages between its ranks: what `cluster/probe_torch.py` measures becomes a description.

    seconds(size) = latency + size / bandwidth          for each class of pairs: within a node, between nodes

**Estimates.** Latency is the median time of the smallest message, one way. Bandwidth is the slope between the two largest
sizes. Each has a 95% interval, by resampling the measured times of all pairs of the class.

**Sharing.** All disjoint pairs of a class send at once. What they carry together, over what one carries alone, is the number of
ways that there are: NICs between nodes; within a node as many as pairs where each device has a link of its own, fewer where
they share one, which then is one shared link of the capacity that was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sennit.cluster.description import Basis, Cluster, Fabric, Figure, Link, Nic, Scale
from sennit.errors import ClusterError

__all__ = ["Estimate", "PairClass", "Probe", "Times", "cluster_of_probe", "estimate"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the interval that holds it with a confidence of 95%."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one message, one way: by size, then by repetition, of all pairs of a class."""

    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class PairClass:
    """`ways` is what all disjoint pairs carry at once, in bandwidths of one."""

    name: str
    pairs: int
    latency: Estimate
    bandwidth: Estimate
    ways: float
    at_once: int


@dataclass(frozen=True, slots=True)
class Probe:
    """`small_all_reduce` and `large_all_reduce` are seconds of all-reduces over all ranks, of 8 and of `large_bytes` bytes."""

    nodes: int
    per_node: int
    backend: str
    device: str
    inside: PairClass | None
    between: PairClass | None
    small_all_reduce: float
    large_all_reduce: float
    large_bytes: int


def estimate(times: Times, draws: int = 200) -> tuple[Estimate, Estimate]:
    """Latency and bandwidth with their intervals, from one class's times."""
    rows = [np.array(row) for row in times.seconds]

    def both(picked: Sequence[np.ndarray]) -> tuple[float, float]:
        middle = [float(np.median(row)) for row in picked]
        carried = max(1e-9, middle[-1] - middle[-2])
        return middle[0], (times.sizes[-1] - times.sizes[-2]) / carried

    generator = np.random.default_rng(0)
    drawn = np.array([both([generator.choice(row, len(row)) for row in rows]) for _ in range(draws)])
    values = both(rows)
    low, high = np.quantile(drawn, 0.025, axis=0), np.quantile(drawn, 0.975, axis=0)
    return tuple(  # type: ignore[return-value]
        Estimate(value, min(value, float(a)), max(value, float(b)))
        for value, a, b in zip(values, low, high, strict=True)
    )


def cluster_of_probe(probe: Probe, like: Cluster, name: str) -> Cluster:
    """`like` says what the devices are and what their library knows; links, NICs and starts are the measured ones."""
    if like.device.per_node != probe.per_node:
        like = msgspec.structs.replace(like, device=msgspec.structs.replace(like.device, per_node=probe.per_node))
    inside, between = probe.inside, probe.between
    links: list[Link] = []
    if inside is not None:
        shared = inside.at_once > 1 and inside.ways < 0.75 * inside.at_once
        rate = inside.bandwidth.value * (max(1.0, inside.ways) if shared else 1.0)
        what = f"{inside.pairs} pairs, messages one way, 95% interval {_span(inside.bandwidth)} bytes/s"
        if shared:
            what += f"; {inside.at_once} pairs at once carry {inside.ways:.2g} times as much as one: shared"
        links.append(
            Link(
                name="local",
                between=("device", "switch"),
                bandwidth=_measured(rate, probe, what),
                latency=_measured(
                    inside.latency.value / 2, probe, f"half of a message's way, {_span(inside.latency)} s"
                ),
                shared=shared,
            )
        )
    nic = None
    if between is not None:
        count = max(1, min(probe.per_node, round(between.ways)))
        while probe.per_node % count:
            count -= 1
        what = f"{between.pairs} pairs between nodes, 95% interval {_span(between.bandwidth)} bytes/s"
        nic = Nic(
            per_node=count,
            bandwidth=_measured(between.bandwidth.value, probe, what),
            latency=_measured(between.latency.value / 2, probe, f"half of a message's way, {_span(between.latency)} s"),
        )
        links.append(_through("nic"))
    if not links:
        raise ClusterError("one rank has no links to probe", fix="start at least two, as torchrun --nproc-per-node 2")
    start = _start(probe)
    full = Figure(1.0, Basis.ESTIMATED, "not probed: pairs of nodes were measured one at a time")
    return msgspec.structs.replace(
        like,
        name=name,
        summary=f"probed: {probe.nodes} nodes of {probe.per_node}, {probe.device}, over {probe.backend}",
        nodes=probe.nodes,
        scale=like.scale if probe.nodes == 1 else Scale.NODES,
        link=tuple(links),
        switches=("switch",) if inside is not None else (),
        nic=nic,
        fabric=Fabric(False, full) if nic is not None else None,
        collective_start=_measured(start, probe, "an all-reduce of 8 bytes over all ranks, less its hops"),
        reduction=_reduction(probe, links, nic),
        send_start=Figure(0.0, Basis.MEASURED, "counted in the links' latency, which was measured with the library"),
        variant=(),
    )


def _through(end: str) -> Link:
    nothing = Figure(0.0, Basis.ESTIMATED, "counted in the network's")
    return Link(
        name="to " + end,
        between=("device", end),
        bandwidth=Figure(1e13, Basis.ESTIMATED, "never the narrowest: what is behind it was measured"),
        latency=nothing,
    )


def _start(probe: Probe) -> float:
    """What a small all-reduce takes beyond the hops of a ring, in which each is a message's way."""
    hops = 0.0
    if probe.inside is not None:
        hops += 2 * (probe.per_node - 1) * probe.nodes * probe.inside.latency.value
    if probe.between is not None:
        hops += 2 * (probe.nodes - 1) * probe.between.latency.value
    return max(0.0, probe.small_all_reduce - hops)


def _reduction(probe: Probe, links: Sequence[Link], nic: Nic | None) -> Figure | None:
    """What gloo adds a second: its large all-reduce less the small one and less a ring's bytes on the wires. Libraries of
    GPUs add while others arrive."""
    if probe.backend != "gloo":
        return None
    count = probe.nodes * probe.per_node
    share = (count - 1) / count * probe.large_bytes
    carried = 0.0
    if probe.inside is not None:
        rate = links[0].bandwidth.value
        carried = 2 * share * (count if links[0].shared else 1) / rate
    if nic is not None:
        carried = max(carried, 2 * share * probe.per_node / nic.per_node / probe.per_node / nic.bandwidth.value)
    adding = probe.large_all_reduce - probe.small_all_reduce - carried
    if adding <= 0:
        return None
    size = f"{probe.large_bytes / 2**20:g} MiB"
    return _measured(share / adding, probe, f"an all-reduce of {size} over all ranks, less its bytes on the wires")


def _measured(value: float, probe: Probe, what: str) -> Figure:
    return Figure(float(f"{value:.5g}"), Basis.MEASURED, f"sennit probe over {probe.backend}: {what}")


def _span(item: Estimate) -> str:
    return f"{item.low:.3g} to {item.high:.3g}"
