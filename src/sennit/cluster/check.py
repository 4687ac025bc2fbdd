"""The checks of a cluster description: each raises a `ClusterError` that says what is wrong, where, and what to write."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from sennit.errors import ClusterError
from sennit.ir.dtype import DType

if TYPE_CHECKING:
    from sennit.cluster.description import Cluster, Device, Figure, Link, Protocol, Variant

__all__ = [
    "check_counts",
    "check_device",
    "check_fabric",
    "check_link",
    "check_positive",
    "check_rates",
    "check_seconds",
    "check_variant",
]


def check_counts(cluster: Cluster, scales_by_devices: bool) -> None:
    for place, count in (("nodes", cluster.nodes), ("[device] per_node", cluster.device.per_node)):
        if count < 1:
            raise ClusterError(
                f"{place} is {count}", where=f"cluster {cluster.name!r}", fix="give a count of at least 1"
            )
    if scales_by_devices and cluster.nodes != 1:
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


def check_positive(figure: Figure, what: str, where: str, fix: str) -> None:
    if not (math.isfinite(figure.value) and figure.value > 0):
        raise ClusterError(f"{what} is {figure.value:g}", where=where, fix=fix)


def _fraction(figure: Figure, what: str, where: str) -> None:
    if not 0 < figure.value <= 1:
        raise ClusterError(f"{what} is {figure.value:g}", where=where, fix="give a fraction above 0 and up to 1")


def check_device(device: Device) -> None:
    where = f"[device] {device.kind!r}"
    check_positive(device.memory, "the device's memory in bytes", where, "give what the device holds, such as 80e9")
    check_positive(
        device.bandwidth,
        "the device's memory bandwidth in bytes/s",
        where,
        "give the bytes read and written a second, such as 2039e9",
    )
    _fraction(device.bandwidth_efficiency, "bandwidth_efficiency", where)
    check_seconds(device.launch, "launch", where)
    rates = [(name, device.peak.of(DType(name))) for name in device.peak.__struct_fields__]
    if all(figure is None for _, figure in rates):
        raise ClusterError(
            "the device has no peak operations a second", where=where, fix="give [device.peak] f32 or bf16"
        )
    for name, figure in rates:
        if figure is not None:
            check_positive(figure, f"the peak of {name} in operations/s", where, "give the dense rate, such as 312e12")
    for name, figure in (
        ("cache in bytes", device.cache),
        ("cache_bandwidth in bytes/s", device.cache_bandwidth),
        ("special in elements/s", device.special),
        ("allocation in bytes", device.allocation),
    ):
        if figure is not None:
            check_positive(figure, name, where, "leave it out if it is not known")
    if (device.cache is None) != (device.cache_bandwidth is None):
        raise ClusterError("cache and cache_bandwidth go together", where=where, fix="give both, or neither")
    _fraction(device.matmul.efficiency, "[device.matmul] efficiency", where)
    for name, figure in (("tile", device.matmul.tile), ("units", device.matmul.units)):
        check_positive(figure, f"[device.matmul] {name}", where, "give a count of at least 1")
    if device.matmul.depth.value < 0:
        raise ClusterError(f"[device.matmul] depth is {device.matmul.depth.value:g}", where=where, fix="give 0 or more")


def check_seconds(figure: Figure, what: str, where: str) -> None:
    if not (math.isfinite(figure.value) and figure.value >= 0):
        raise ClusterError(f"{what} is {figure.value:g} s", where=where, fix="give seconds, 0 or more, such as 2e-6")


def check_rates(
    where: str,
    name: str,
    bandwidth: Figure,
    efficiency: Figure | None,
    latency: Figure,
    protocols: tuple[Protocol, ...],
) -> None:
    check_positive(
        bandwidth,
        f"the bandwidth of link {name!r} in bytes/s",
        where,
        "give the bytes a second of one direction, such as 25e9 for a NIC of 200 Gbit/s",
    )
    if efficiency is not None:
        _fraction(efficiency, f"the efficiency of link {name!r}", where)
    check_seconds(latency, f"the latency of link {name!r}", where)
    for protocol in protocols:
        _fraction(protocol.efficiency, f"the efficiency of protocol {protocol.name!r} of link {name!r}", where)
        check_seconds(protocol.latency, f"the latency of protocol {protocol.name!r} of link {name!r}", where)


def check_link(link: Link, cluster: Cluster) -> None:
    where = f"[[link]] {link.name!r}"
    check_rates(where, link.name, link.bandwidth, link.efficiency, link.latency, link.protocols)
    if link.multicast is not None:
        check_positive(
            link.multicast, f"the multicast rate of link {link.name!r} in bytes/s", where, "leave it out if none"
        )
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


def check_variant(variant: Variant, cluster: Cluster) -> None:
    where = f"[[variant]] of nodes {list(variant.nodes)}"
    if not variant.nodes or (variant.device is None and variant.nic is None):
        raise ClusterError("a variant that changes nothing", where=where, fix="give its nodes, and a device or a nic")
    for node in variant.nodes:
        if not 0 <= node < cluster.nodes:
            raise ClusterError(f"there is no node {node}, of {cluster.nodes}", where=where, fix="count nodes from 0")
        if sum(node in other.nodes for other in cluster.variant) > 1:
            raise ClusterError(f"node {node} has two variants", where=where, fix="put what differs into one variant")
    if variant.device is not None:
        check_device(variant.device)
        if variant.device.per_node != cluster.device.per_node:
            raise ClusterError(
                f"{variant.device.per_node} devices a node among nodes of {cluster.device.per_node}",
                where=where,
                fix="give all nodes the same number of devices, or describe two clusters",
            )
    if variant.nic is not None:
        nic = variant.nic
        check_rates(where, "nic", nic.bandwidth, nic.efficiency, nic.latency, nic.protocols)
        if cluster.nic is None or nic.per_node != cluster.nic.per_node:
            raise ClusterError(
                f"{nic.per_node} NICs a node among nodes of {cluster.nic.per_node if cluster.nic is not None else 0}",
                where=where,
                fix="give all nodes the same number of NICs",
            )


def check_fabric(cluster: Cluster) -> None:
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
        check_positive(cluster.host.cores, "the number of cores", "[host]", "give at least 1")
