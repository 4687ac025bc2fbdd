"""Which device sends which indices to which: the meaning of an exchange, and what it costs.

Per dim, every index has two labels: the coordinates that hold it in the source, and those that hold it in the result. A
receiver needs all indices with its result label. Their source labels cut them into *cells*, one for each combination over
the dims; the holders of a cell are the devices with its source labels, one or more where the source is replicated. So

    transfers to e  =  { (one holder of c, e, c intersected with the result's region at e)  for each cell c that meets it }

and a device receives at most one region from each other device. A receiver that holds a cell takes its own copy; otherwise
the holder that sends least so far sends it, the lowest device of several. Receivers come in ascending order of device, so
every rank finds the same transfers.

This needs no even sizes and no common mesh: labels are computed from the definition `(i // stride) % size`, on units of
the greatest common divisor of all strides of a dim (a dim of a million rows in four blocks has four units).

Axes that are pending in both layouts keep their parts apart: a holder agrees with the receiver on their coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from sennit.errors import LayoutError
from sennit.ir.layout import Layout
from sennit.ir.region import Interval, Region

__all__ = ["Traffic", "Transfer", "traffic", "transfers"]

Labels = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`sender` has these indices and `receiver` needs them; a local copy where the two are one device."""

    sender: int
    receiver: int
    region: Region


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an exchange moves between devices, in elements: of all devices together, of the busiest receiver, of the busiest
    sender, and of the device for which the sum of both is greatest; and the most messages that one device receives.
    `whole` says that every receiver has all from one device."""

    received: int
    most_received: int
    most_sent: int
    most_staged: int
    messages: int
    whole: bool


def transfers(source: Layout, result: Layout, region: Region | None = None) -> tuple[Transfer, ...]:
    """The transfers that give every device of `result` its indices, or those of them that lie in `region`."""
    dims = _dims(source, result, region)
    return tuple(
        Transfer(sender, receiver, Region(tuple(dim.intervals[pair] for dim, pair in zip(dims, pairs, strict=True))))
        for sender, receiver, pairs, _ in _assign(source, result, dims)
    )


def traffic(source: Layout, result: Layout, region: Region | None = None) -> Traffic:
    """The same transfers, counted."""
    received: dict[int, int] = {}
    sent: dict[int, int] = {}
    messages: dict[int, int] = {}
    cells: dict[int, int] = {}
    for sender, receiver, _, size in _assign(source, result, _dims(source, result, region)):
        cells[receiver] = cells.get(receiver, 0) + 1
        if sender != receiver:
            received[receiver] = received.get(receiver, 0) + size
            sent[sender] = sent.get(sender, 0) + size
            messages[receiver] = messages.get(receiver, 0) + 1
    return Traffic(
        received=sum(received.values()),
        most_received=max(received.values(), default=0),
        most_sent=max(sent.values(), default=0),
        most_staged=max((received.get(d, 0) + sent.get(d, 0) for d in received.keys() | sent.keys()), default=0),
        messages=max(messages.values(), default=0),
        whole=all(count == 1 for count in cells.values()),
    )


# ---- labels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dim:
    """One dim: the labels of each device, and what source and result labels share.

    `meeting` maps a result label to the source labels that meet it and how many indices they share; `intervals` maps
    (source label, result label) to these indices."""

    source_labels: Sequence[int]
    result_labels: Sequence[int]
    meeting: Mapping[int, tuple[tuple[int, int], ...]]
    intervals: Mapping[tuple[int, int], tuple[Interval, ...]]


def _dims(source: Layout, result: Layout, region: Region | None) -> tuple[_Dim, ...]:
    if source.shape != result.shape:
        raise LayoutError(
            f"an exchange from shape {list(source.shape)} to shape {list(result.shape)}", fix="use one shape"
        )
    if source.pending != result.pending or (source.pending and source.mesh != result.mesh):
        raise LayoutError(
            f"an exchange from {source} to {result} would have to reduce", fix="reduce first; an exchange only moves"
        )
    return tuple(
        _dim(source, result, dim, None if region is None else region.dims[dim]) for dim in range(len(source.shape))
    )


def _dim(source: Layout, result: Layout, dim: int, within: tuple[Interval, ...] | None) -> _Dim:
    size = source.shape[dim]
    have, need = _digits(source, dim), _digits(result, dim)
    unit = gcd(*(stride for _, _, stride in have + need)) or max(size, 1)
    positions = np.arange(-(-size // unit), dtype=np.int64) * unit
    labels = _label(positions, have) * prod(p for _, p, _ in need) + _label(positions, need)
    edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(positions)] if size else [0]
    intervals: dict[tuple[int, int], list[Interval]] = {}
    results = prod(p for _, p, _ in need)
    for start, stop in zip(edges, edges[1:], strict=False):
        pair = divmod(int(labels[start]), results)
        intervals.setdefault(pair, []).append((start * unit, min(stop * unit, size)))
    if within is not None:
        intervals = {pair: cut for pair, those in intervals.items() if (cut := _cut(those, within))}
    meeting: dict[int, list[tuple[int, int]]] = {}
    for (mine, yours), those in sorted(intervals.items()):
        meeting.setdefault(yours, []).append((mine, sum(stop - start for start, stop in those)))
    return _Dim(
        _device_labels(source, have),
        _device_labels(result, need),
        {label: tuple(those) for label, those in meeting.items()},
        {pair: tuple(those) for pair, those in intervals.items()},
    )


def _digits(layout: Layout, dim: int) -> list[tuple[int, int, int]]:
    """Position of the axis in the mesh, its size and its stride, for the axes that split a dim."""
    return [(layout.mesh.index(digit.axis), digit.size, digit.stride) for digit in layout.digits(dim)]


def _label(positions: NDArray[np.int64], digits: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
    label = np.zeros_like(positions)
    for _, size, stride in digits:
        label = label * size + (positions // stride) % size
    return label


def _device_labels(layout: Layout, digits: Sequence[tuple[int, int, int]]) -> list[int]:
    """The label of each device of the mesh, in the order of `Mesh.devices`."""
    sizes = [axis.size for axis in layout.mesh.space]
    below = [prod(sizes[position + 1 :]) for position in range(len(sizes))]
    labels = [0] * len(layout.mesh.devices)
    for axis, size, _ in digits:
        step = below[axis]
        labels = [label * size + (device // step) % size for device, label in enumerate(labels)]
    return labels


def _cut(intervals: Sequence[Interval], within: Sequence[Interval]) -> list[Interval]:
    return [
        (max(a, c), min(b, d)) for a, b in intervals for c, d in within if max(a, c) < min(b, d)
    ]  # both ascend, so does this


# ---- who sends -------------------------------------------------------------------------------------------------------


def _assign(
    source: Layout, result: Layout, dims: Sequence[_Dim]
) -> Iterator[tuple[int, int, tuple[tuple[int, int], ...], int]]:
    """(sender, receiver, (source label, result label) per dim, elements) of every transfer."""
    parts_of_source, parts_of_result = _parts(source), _parts(result)
    holders: dict[Labels, list[int]] = {}
    own: dict[int, Labels] = {}
    for position, device in enumerate(source.mesh.devices):
        key = (*(dim.source_labels[position] for dim in dims), parts_of_source[position])
        holders.setdefault(key, []).append(device)
        own[device] = key
    load = dict.fromkeys(source.mesh.devices, 0)
    for device, position in sorted((device, position) for position, device in enumerate(result.mesh.devices)):
        part = parts_of_result[position]
        here = [dim.result_labels[position] for dim in dims]
        mine = own.get(device)
        for cell in product(*(dim.meeting.get(label, ()) for dim, label in zip(dims, here, strict=True))):
            key = (*(label for label, _ in cell), part)
            size = prod(count for _, count in cell)
            sender = device
            if key != mine:
                sender = min(holders[key], key=lambda holder: (load[holder], holder))
                load[sender] += size
            yield sender, device, tuple((label, there) for (label, _), there in zip(cell, here, strict=True)), size


def _parts(layout: Layout) -> list[int]:
    """Which part of a pending value each device has, in the order of `Mesh.devices`; 0 where nothing is pending."""
    return _device_labels(layout, [(layout.mesh.index(name), layout.mesh.size(name), 1) for name, _ in layout.pending])
