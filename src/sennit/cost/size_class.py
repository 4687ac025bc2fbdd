"""Times of collectives that are costly to find, asked for at powers of two only.

A schedule that is simulated chunk by chunk takes a while, and a program has hundreds of sizes. Between 2^k and 2^(k+1)
bytes the time, and what it lays on each wire, is taken as a straight line: exact for latency + bytes / bandwidth, and
close for what lies between two such lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sennit.cost.transfer import Transfer, bus_bytes
from sennit.ir.program import CollectiveKind

__all__ = ["CollectiveTimes", "by_size_class"]

Group = tuple[int, ...]
CollectiveTimes = Callable[[CollectiveKind, Group, int], Transfer | None]
"""What a collective of a group of devices lays on the wires, or None where the cluster's library decides. The bytes are
those of `cost/transfer.py`'s table. A compiled schedule, simulated chunk by chunk, comes in this way."""


def by_size_class(times: CollectiveTimes) -> CollectiveTimes:
    """The same times, asked for at powers of two and remembered, straight lines between them."""
    known: dict[tuple[CollectiveKind, Group, int], Transfer | None] = {}

    def at(kind: CollectiveKind, group: Group, size: int) -> Transfer | None:
        key = (kind, group, size)
        if key not in known:
            known[key] = times(kind, group, size)
        return known[key]

    def between(kind: CollectiveKind, group: Group, size: int) -> Transfer | None:
        if size < 1:
            return None
        below = 1 << (size.bit_length() - 1)
        low = at(kind, group, below)
        high = low if size == below else at(kind, group, 2 * below)
        if low is None or high is None:
            return None
        part = size / below - 1
        return replace(_mix(low, high, part), wire_bytes=bus_bytes(kind, len(group), size))

    return between


def _mix(low: Transfer, high: Transfer, part: float) -> Transfer:
    load = dict(low.load)
    other = dict(high.load)
    wires = sorted(load.keys() | other.keys())
    mixed = tuple((wire, (1 - part) * load.get(wire, 0.0) + part * other.get(wire, 0.0)) for wire in wires)
    latency = (1 - part) * low.latency + part * high.latency
    return replace(low, latency=latency, load=mixed, floor=(1 - part) * low.floor + part * high.floor)
