"""A cluster from the times of messages between its ranks: what `cluster/probe_torch.py` measures becomes a description.

    seconds(size) = latency + max(0, size - burst) / bandwidth     for each class of pairs: within a node, between nodes

**Estimates.** Latency is the lowest decile of the times of the smallest message, one way: other work on the machines
only ever adds to it; with gloo no more than what an all-reduce of 8 bytes, a ring there, allows for its hops. Bandwidth
is the slope between the two largest sizes. `burst` is what the largest message is faster than both say, between nodes:
a token bucket lets through so many bytes at once after a pause. Each has a 95% interval, by resampling the measured
times of all pairs of the class; a burst whose interval holds 0 is none.

**All-reduces** of several sizes over all ranks. What they take beyond a ring's hops and bytes is `collective_start` (of
8 bytes) and, for gloo, `reduction`: the median over the sizes, in seconds a byte. One size alone may be an unlucky one:
gloo cuts large arrays into segments, and ranks that fall out of step then wait for each other.

**Gloo's ranks** also say what part of a core a transfer keeps busy (processor time over time of the large all-reduces),
and whether two ranks send to each other one way at a time: a message, and a quarter of its time later one the other
way; together they take 1.25 times as long as one, or twice.

**Sharing.** All disjoint pairs of a class send at once. What they carry together, over what one carries alone, is the
number of ways that there are: NICs between nodes; within a node as many as pairs where each device has a link of its
own, fewer where they share one, which then is one shared link of the capacity that was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from sennit.cluster.description import Basis, Cluster, Fabric, Figure, Host, Link, Nic, Scale
from sennit.errors import ClusterError

__all__ = ["Estimate", "PairClass", "Probe", "Times", "cluster_of_probe", "estimate", "estimate_burst"]

ONE_WAY = 1.6  # opposite messages that together take so many times as long as one take turns


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
    """`ways` is what all disjoint pairs carry at once, in bandwidths of one. `burst` is in bytes."""

    name: str
    pairs: int
    latency: Estimate
    bandwidth: Estimate
    ways: float
    at_once: int
    burst: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """`small_all_reduce` and `large_all_reduce` are seconds of all-reduces over all ranks, of 8 and of `large_bytes`
    bytes; `all_reduces` has those of other sizes. `cores_busy` is the part of a core that a transfer takes, `opposite`
    the time of two messages in opposite directions over that of one: see the module's text.
    """

    nodes: int
    per_node: int
    backend: str
    device: str
    inside: PairClass | None
    between: PairClass | None
    small_all_reduce: float
    large_all_reduce: float
    large_bytes: int
    all_reduces: tuple[tuple[int, float], ...] = ()
    cores_busy: float | None = None
    opposite: float | None = None


def estimate(times: Times, draws: int = 200) -> tuple[Estimate, Estimate]:
    """Latency and bandwidth with their intervals, from one class's times."""
    latency, bandwidth, _ = _estimates(times, draws)
    return latency, bandwidth


def estimate_burst(times: Times, draws: int = 200) -> Estimate | None:
    """Bytes that pass at once after a pause; None where the times do not show any."""
    _, _, burst = _estimates(times, draws)
    return burst if burst.low > 0 and burst.value < times.sizes[-2] else None


def _estimates(times: Times, draws: int) -> tuple[Estimate, Estimate, Estimate]:
    rows = [np.array(row) for row in times.seconds]

    def all_three(picked: Sequence[np.ndarray]) -> tuple[float, float, float]:
        middle = [float(np.median(row)) for row in picked]
        latency = float(np.quantile(picked[0], 0.1))
        bandwidth = (times.sizes[-1] - times.sizes[-2]) / max(1e-9, middle[-1] - middle[-2])
        return latency, bandwidth, times.sizes[-1] - (middle[-1] - latency) * bandwidth

    generator = np.random.default_rng(0)
    drawn = np.array([all_three([generator.choice(row, len(row)) for row in rows]) for _ in range(draws)])
    values = all_three(rows)
    low, high = np.quantile(drawn, 0.025, axis=0), np.quantile(drawn, 0.975, axis=0)
    return tuple(  # type: ignore[return-value]
        Estimate(value, min(value, float(a)), max(value, float(b)))
        for value, a, b in zip(values, low, high, strict=True)
    )


def cluster_of_probe(probe: Probe, like: Cluster, name: str) -> Cluster:
    """`like` says what the devices are and what their library knows; links, NICs and starts are the measured ones."""
    probe = _in_step(probe)
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
            burst=_burst(probe, between.burst),
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
        host=_host(probe, like.host),
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


def _in_step(probe: Probe) -> Probe:
    """The probe with latencies that its small all-reduce allows, where that is a ring."""
    hops = _hops(probe)
    if probe.backend != "gloo" or not 0 < probe.small_all_reduce < hops:
        return probe
    factor = probe.small_all_reduce / hops

    def bounded(pairs: PairClass | None) -> PairClass | None:
        if pairs is None:
            return None
        latency = pairs.latency
        return replace(pairs, latency=replace(latency, value=latency.value * factor, low=latency.low * factor))

    return replace(probe, inside=bounded(probe.inside), between=bounded(probe.between))


def _hops(probe: Probe) -> float:
    """Seconds of the hops of a ring, in which each is a message's way."""
    hops = 0.0
    if probe.inside is not None:
        hops += 2 * (probe.per_node - 1) * probe.nodes * probe.inside.latency.value
    if probe.between is not None:
        hops += 2 * (probe.nodes - 1) * probe.between.latency.value
    return hops


def _start(probe: Probe) -> float:
    """What a small all-reduce takes beyond its hops."""
    return max(0.0, probe.small_all_reduce - _hops(probe))


def _reduction(probe: Probe, links: Sequence[Link], nic: Nic | None) -> Figure | None:
    """What gloo adds a second: its all-reduces less the small one and less a ring's bytes on the wires.

    Libraries of GPUs add while others arrive.
    """
    if probe.backend != "gloo":
        return None
    count = probe.nodes * probe.per_node
    part = (count - 1) / count
    a_byte = 0.0  # seconds on the wires
    if probe.inside is not None:
        a_byte = 2 * part * (count if links[0].shared else 1) / links[0].bandwidth.value
    if nic is not None:
        a_byte = max(a_byte, 2 * part / nic.per_node / nic.bandwidth.value)
    timed = probe.all_reduces or ((probe.large_bytes, probe.large_all_reduce),)
    beyond = float(np.median([(seconds - probe.small_all_reduce) / size - a_byte for size, seconds in timed]))
    if beyond <= 0:
        return None
    sizes = " and ".join(dict.fromkeys(f"{size / 2**20:.3g}" for size, _ in (timed[0], timed[-1])))
    what = f"all-reduces of {sizes} MiB over all ranks, less their bytes on the wires: the median of {len(timed)} sizes"
    return _measured(part / beyond, probe, what)


def _burst(probe: Probe, burst: Estimate | None) -> Figure | None:
    if burst is None:
        return None
    return _measured(burst.value, probe, f"what large messages are ahead of their bandwidth, {_span(burst)} bytes")


def _host(probe: Probe, host: Host | None) -> Host | None:
    if host is None:
        return None
    busy, opposite = probe.cores_busy, probe.opposite
    if busy is not None:
        what = f"processor time over time of an all-reduce of {probe.large_bytes / 2**20:g} MiB"
        host = msgspec.structs.replace(host, transfer_cores=_measured(max(1e-3, min(1.0, busy)), probe, what))
    if opposite is not None:
        host = msgspec.structs.replace(host, take_turns=opposite > ONE_WAY)
    return host


def _measured(value: float, probe: Probe, what: str) -> Figure:
    return Figure(float(f"{value:.5g}"), Basis.MEASURED, f"sennit probe over {probe.backend}: {what}")


def _span(item: Estimate) -> str:
    return f"{item.low:.3g} to {item.high:.3g}"
