"""What one device does in each exchange and in each `sennit.take`, in local indices: found before the first step.

A *route* is one device's part of the table of transfers (`ir/program_exchange.py`): what it cuts from its piece of the
source for each taker, where it puts what each giver sends, and what it copies from itself. Micro-batches of an even
layout have the same route, for then an index's place in a piece does not depend on the time: it is found once for all
of them.

A region in local indices is cut and filled as slices where it is a box, else by indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sennit.ir.exchange import Transfer
from sennit.ir.graph import Ref
from sennit.ir.program import Buffer, Compute, Exchange, Lane, Program
from sennit.ir.program_exchange import Channel, Meeting, exchange_meetings, exchange_transfers, moves_alike
from sennit.ir.region import Region

__all__ = ["Parcel", "Route", "Routes", "cut", "paste", "routes_of"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes to a peer or comes from it: local indices of the piece here."""

    peer: int
    region: Region


@dataclass(frozen=True, slots=True)
class Route:
    """One device's part of an exchange.

    `kept` is what it copies from its piece of the source to its piece of the result; `shape` and `dtype` are those of
    the result, None where this device takes nothing.
    """

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    kept: tuple[Region, Region] | None
    shape: tuple[int, ...] | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Routes:
    """Of one device of a lane: routes, channels and numbers (the same on all ranks) by the label of the exchange, and
    what it takes, by the buffer taken; None is all of it.
    """

    of: Mapping[str, Route]
    channels: Mapping[str, Channel]
    numbers: Mapping[str, int]
    taken: Mapping[str, Region | None]


def routes_of(program: Program, lane: Lane, device: int) -> Routes:
    labels = [step.label for step in lane.steps if isinstance(step, Exchange)]
    meetings = exchange_meetings(program) if labels else {}
    tables: dict[object, tuple[Transfer, ...]] = {}
    found: dict[object, Route] = {}
    routes: dict[str, Route] = {}
    for label in labels:
        meeting = meetings[label]
        key = moves_alike(meeting.source, meeting.result)
        if key not in tables:
            tables[key] = exchange_transfers(meeting.source, meeting.result)
        # a lane that only gives has no piece of the result, though it may be on the other side in another exchange
        sides = (lane.name in meeting.givers, lane.name in meeting.takers)
        if (key, sides) not in found:
            found[key, sides] = _route(device, meeting, tables[key])
        routes[label] = found[key, sides]
    numbers = {label: number for number, label in enumerate(meetings) if label in routes}
    takes = [step for step in lane.steps if isinstance(step, Compute) and step.kind == "sennit.take"]
    buffers = lane.buffers() if takes else {}
    taken = {step.results[0].name: _taken(device, buffers, step) for step in takes}
    return Routes(routes, {label: meetings[label].channel for label in labels}, numbers, taken)


def _route(here: int, meeting: Meeting, table: tuple[Transfer, ...]) -> Route:
    source, result = meeting.source, meeting.result
    gives, takes = here in source.layout.mesh.devices, here in result.layout.mesh.devices
    have = source.layout.region(source.point(here)) if gives else None
    need = result.layout.region(result.point(here)) if takes else None
    sends, receives, kept = [], [], None
    for transfer in table:
        if transfer.sender == here == transfer.receiver:
            assert have is not None
            assert need is not None
            kept = (transfer.region.within(have), transfer.region.within(need))
        elif transfer.sender == here:
            assert have is not None
            sends.append(Parcel(transfer.receiver, transfer.region.within(have)))
        elif transfer.receiver == here:
            assert need is not None
            receives.append(Parcel(transfer.sender, transfer.region.within(need)))
    dtype: torch.dtype = getattr(torch, source.dtype.torch_name)
    return Route(tuple(sends), tuple(receives), kept, None if need is None else need.shape, dtype)


def _taken(device: int, buffers: Mapping[str, Buffer], step: Compute) -> Region | None:
    (arg,) = step.args
    assert isinstance(arg, Ref)
    source, result = buffers[arg.name], step.results[0]
    have, need = (buffer.layout.region(buffer.point(device)) for buffer in (source, result))
    return None if have == need else need.within(have)


def cut(x: Tensor, region: Region) -> Tensor:
    """The part of a piece at these local indices: a view where it is a box."""
    for dim, intervals in enumerate(region.dims):
        if len(intervals) == 1:
            (start, stop) = intervals[0]
            x = x if stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)
        else:
            x = x.index_select(dim, torch.from_numpy(region.indices()[dim]).to(x.device))
    return x


def paste(target: Tensor, region: Region, part: Tensor) -> None:
    """Put a part at these local indices of a piece."""
    if region.is_box:
        cut(target, region).copy_(part)
    else:
        target[tuple(torch.from_numpy(index).to(target.device) for index in np.ix_(*region.indices()))] = part
