"""Which device sends which indices to which: the meaning of an exchange, and what it costs.

Per dim, every index has two labels (`labels.py`): the coordinates that hold it in the source, and those that hold it in
the result. A receiver needs all indices with its result labels. Their source labels cut them into *cells*, one for each
combination over the dims; the holders of a cell are the devices with its source labels, one or more where the source is
replicated. So

    transfers to e  =  { (one holder of c, e, c intersected with the result's region at e)  for each cell c that meets it }

and a device receives at most one region from each other device. A receiver that holds a cell takes its own copy;
otherwise the holder that sends least so far sends it, the lowest device of several. Receivers come in ascending order
of device, so every rank finds the same transfers. Neither even sizes nor a common mesh are needed.

A device holds one cell, so what the holders of a cell send is for that cell alone: W elements in transfers of at most z
over r holders. Least-loaded-first then loads no holder with more than W/r + z (1 - 1/r), and exactly ceil(n/r) z where
all n transfers of the cell, local copies among them, have one size. `traffic` counts with this, without making the
transfers.

Axes that are pending in both layouts keep their parts apart: a holder agrees with the receiver on their coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from sennit.errors import LayoutError
from sennit.ir.labels import AxisDigit, DimPairs, Integers, device_labels, digits_of, dim_pairs
from sennit.ir.layout import Layout
from sennit.ir.region import Interval, Region

__all__ = ["Count", "Traffic", "Transfer", "traffic", "transfers"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`sender` has these indices and `receiver` needs them; a local copy where the two are one device."""

    sender: int
    receiver: int
    region: Region


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an exchange moves between devices, in elements: all devices together, the busiest receiver, and a bound of
    the busiest sender (exact where transfers have one size); and the most messages that one device receives. `whole`
    says that every receiver has all from one device.
    """

    received: int
    most_received: int
    most_sent: int
    messages: int
    whole: bool


Count = Callable[[Layout, Layout], Traffic]
"""`traffic`, or something that remembers what it said."""


def transfers(source: Layout, result: Layout, region: Region | None = None) -> tuple[Transfer, ...]:
    """The transfers that give every device of `result` its indices, or those of them that lie in `region`."""
    _check(source, result)
    dims = [_Dim.of(source, result, dim, region) for dim in range(len(source.shape))]
    return tuple(_assign(source, result, dims))


def traffic(source: Layout, result: Layout) -> Traffic:
    """The same transfers, counted."""
    _check(source, result)
    senders, receivers = len(source.mesh.devices), len(result.mesh.devices)
    place = {device: position for position, device in enumerate(source.mesh.devices)}
    both = [(place[device], position) for position, device in enumerate(result.mesh.devices) if device in place]
    at_source = np.array([pair[0] for pair in both], dtype=np.int64)
    at_result = np.array([pair[1] for pair in both], dtype=np.int64)
    own = np.ones(len(both), dtype=np.int64)  # what a device has of what it needs
    size = np.ones(receivers, dtype=np.int64)
    cells = np.ones(receivers, dtype=np.int64)  # from how many places a receiver is served
    needers = np.ones(senders, dtype=np.int64)  # how many receivers a sender's cell meets
    held = np.ones(senders, dtype=np.int64)
    largest = np.ones(senders, dtype=np.int64)
    parts = prod(source.mesh.size(name) for name, _ in source.pending)
    holders, replicas = senders // parts, receivers // parts
    for dim, length in enumerate(source.shape):
        have, need = digits_of(source, dim), digits_of(result, dim)
        pairs = dim_pairs(length, have, need)
        mine, yours = _labels(source, have), _labels(result, need)
        own = own * pairs.overlap(mine[at_source], yours[at_result])
        by_source, by_result = pairs.pairs // pairs.needs, pairs.pairs % pairs.needs
        size = size * np.bincount(by_result, pairs.counts, pairs.needs).astype(np.int64)[yours]
        cells = cells * np.bincount(by_result, minlength=pairs.needs)[yours]
        needers = needers * np.bincount(by_source, minlength=pairs.haves)[mine]
        held = held * np.bincount(by_source, pairs.counts, pairs.haves).astype(np.int64)[mine]
        greatest = np.zeros(pairs.haves, dtype=np.int64)
        np.maximum.at(greatest, by_source, pairs.counts)
        largest = largest * greatest[mine]
        holders, replicas = holders // pairs.haves, replicas // pairs.needs
    received = size.copy()
    received[at_result] -= own
    messages = cells.copy()
    messages[at_result] -= own > 0
    messages[size == 0] = 0
    return Traffic(
        received=int(received.sum()),
        most_received=int(received.max(initial=0)),
        most_sent=_most_sent(source, at_source, own, held * replicas, needers * replicas, largest, holders),
        messages=int(messages.max(initial=0)),
        whole=bool((cells == 1).all()),
    )


def _most_sent(
    source: Layout,
    at_source: Integers,
    own: Integers,
    wanted: Integers,
    needers: Integers,
    largest: Integers,
    holders: int,
) -> int:
    """The bound of the module's docstring, for the busiest cell."""
    kept, keeping = np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=np.int64)
    kept[at_source], keeping[at_source] = own, own > 0
    if holders > 1:  # what all holders of one cell keep
        every = tuple(digit for dim in range(len(source.shape)) for digit in digits_of(source, dim))
        pending = tuple(AxisDigit(source.mesh.index(n), source.mesh.size(n), 1) for n, _ in source.pending)
        cell = _labels(source, every + pending)
        kept = np.bincount(cell, kept).astype(np.int64)[cell]
        keeping = np.bincount(cell, keeping).astype(np.int64)[cell]
    sent, count = wanted - kept, needers - keeping
    alike = sent == count * largest
    bound = np.where(alike, -(-count // holders) * largest, (sent + (holders - 1) * largest) // holders)
    return int(np.minimum(bound, sent).max(initial=0))


def _check(source: Layout, result: Layout) -> None:
    if source.shape != result.shape:
        raise LayoutError(
            f"an exchange from shape {list(source.shape)} to shape {list(result.shape)}", fix="use one shape"
        )
    if source.pending != result.pending or (source.pending and source.mesh != result.mesh):
        raise LayoutError(
            f"an exchange from {source} to {result} would have to reduce", fix="reduce first; an exchange only moves"
        )


def _labels(layout: Layout, digits: Sequence[AxisDigit]) -> Integers:
    return device_labels([axis.size for axis in layout.mesh.space], digits)


# ---- the transfers themselves ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dim:
    """One dim: the labels of each device, the indices of each pair of labels, and the source labels that meet a result
    label.
    """

    source_labels: list[int]
    result_labels: list[int]
    intervals: dict[tuple[int, int], tuple[Interval, ...]]
    meeting: dict[int, list[int]]

    @classmethod
    def of(cls, source: Layout, result: Layout, dim: int, region: Region | None) -> _Dim:
        have, need = digits_of(source, dim), digits_of(result, dim)
        pairs: DimPairs = dim_pairs(source.shape[dim], have, need)
        intervals = pairs.intervals()
        if region is not None:
            within = Region((region.dims[dim],))
            cut = {pair: within.intersect(Region((those,))).dims[0] for pair, those in intervals.items()}
            intervals = {pair: those for pair, those in cut.items() if those}
        meeting: dict[int, list[int]] = {}
        for mine, yours in sorted(intervals):
            meeting.setdefault(yours, []).append(mine)
        return cls(_labels(source, have).tolist(), _labels(result, need).tolist(), intervals, meeting)


def _assign(source: Layout, result: Layout, dims: Sequence[_Dim]) -> Iterator[Transfer]:
    parts_of_source, parts_of_result = _parts(source), _parts(result)
    holders: dict[tuple[int, ...], list[int]] = {}
    own: dict[int, tuple[int, ...]] = {}
    for position, device in enumerate(source.mesh.devices):
        key = (*(dim.source_labels[position] for dim in dims), parts_of_source[position])
        holders.setdefault(key, []).append(device)
        own[device] = key
    load = dict.fromkeys(source.mesh.devices, 0)
    for device, position in sorted((device, position) for position, device in enumerate(result.mesh.devices)):
        here = [dim.result_labels[position] for dim in dims]
        for cell in product(*(dim.meeting.get(label, ()) for dim, label in zip(dims, here, strict=True))):
            key = (*cell, parts_of_result[position])
            region = Region(
                tuple(dim.intervals[mine, yours] for dim, mine, yours in zip(dims, cell, here, strict=True))
            )
            sender = device
            if key != own.get(device):
                sender = min(holders[key], key=lambda holder: (load[holder], holder))
                load[sender] += region.size
            yield Transfer(sender, device, region)


def _parts(layout: Layout) -> list[int]:
    """Which part of a pending value each device has, in the order of `Mesh.devices`; 0 where nothing is pending."""
    pending = [AxisDigit(layout.mesh.index(name), layout.mesh.size(name), 1) for name, _ in layout.pending]
    return [int(label) for label in _labels(layout, pending)]
