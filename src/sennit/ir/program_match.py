"""Who communicates with whom: the transfers, collectives and exchanges of a program, put together into communications.

**Transfers.** The k-th send from lane A to lane B meets the k-th receive in B from A. Both must speak of the same
piece: tensor, type, layout entries, times, and device by device the same place on every axis that divides the tensor.
Equal coordinates on the axes with an entry mean equal regions and, on pending axes, the same part of the reduction.

**Collectives.** The devices of one group act together. A collective over some axes of a mesh joins the lanes that share
a group; where that is one lane, it is alone in its communication. Where it is several, each of them must have the same
sequence of collectives on that mesh and those axes, and the k-th ones meet. A device of the group that runs no lane
would never come.

**Exchanges** meet by their label (`program_exchange.py`).

Everything that takes part is in exactly one communication, or `match_communications` raises.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest

from sennit.errors import ProgramError
from sennit.ir.mesh import AxisKind, Mesh, Point
from sennit.ir.program import Buffer, Collective, Lane, Program, Receive, Send
from sennit.ir.program_exchange import match_exchanges
from sennit.ir.program_moves import covered_times
from sennit.ir.program_site import Site, describe_lane, describe_step, describe_times

__all__ = ["Communication", "Position", "match_communications"]

Buffers = dict[str, dict[str, Buffer]]  # by lane, then by name


@dataclass(frozen=True, slots=True)
class Position:
    """One step of one lane."""

    lane: str
    step: int


@dataclass(frozen=True, slots=True)
class Communication:
    """The steps that act together: a send and its receive, one collective in every lane that its groups join, or an
    exchange in each of its lanes."""

    participants: tuple[Position, ...]


def match_communications(program: Program) -> tuple[Communication, ...]:
    """Every send, receive, collective and exchange in its communication.

    Raises where one has no partner, or an unlike one. Each lane's own rules hold already: buffers exist, collectives
    name axes of their mesh.
    """
    buffers = {lane.name: lane.buffers() for lane in program.lanes}
    exchanges = [
        Communication(tuple(Position(lane, step) for lane, step in meeting.steps))
        for meeting in match_exchanges(program, buffers)
    ]
    return (*_match_transfers(program, buffers), *_match_collectives(program, buffers), *exchanges)


# ---- transfers -------------------------------------------------------------------------------------------------------


def _match_transfers(program: Program, buffers: Buffers) -> list[Communication]:
    lanes = {lane.name: lane for lane in program.lanes}
    sends: dict[tuple[str, str], list[int]] = defaultdict(list)  # by (sender, receiver)
    receives: dict[tuple[str, str], list[int]] = defaultdict(list)
    for lane in program.lanes:
        for index, step in enumerate(lane.steps):
            match step:
                case Send(to=to):
                    _check_peer(Site(program, lane, index), to, lanes)
                    sends[lane.name, to].append(index)
                case Receive(origin=origin):
                    _check_peer(Site(program, lane, index), origin, lanes)
                    receives[origin, lane.name].append(index)
    found: list[Communication] = []
    placed: set[tuple[str, str, int, int, tuple[str, ...]]] = set()  # what `_check_same_places` has passed
    for sender, receiver in dict.fromkeys([*sends, *receives]):
        pairs = zip_longest(sends[sender, receiver], receives[sender, receiver])
        for k, (send, receive) in enumerate(pairs):
            if send is None or receive is None:
                missing = receiver if receive is None else sender
                raise _unmatched(program, lanes[sender], lanes[receiver], send, receive, k, missing)
            sent = buffers[sender][_source(lanes[sender], send)]
            received = _result(lanes[receiver], receive)
            site = Site(program, lanes[receiver], receive)
            _check_same_piece(site, lanes[sender], k, sent, received)
            # a mesh lives as long as the program, so that no other gets its identity; its hash takes time per device
            axes = tuple(axis for axis, _ in sent.layout.entries)
            places = (sender, receiver, id(sent.layout.mesh), id(received.layout.mesh), axes)
            if places not in placed:
                _check_same_places(site, lanes[sender], sent, received)
                placed.add(places)
            found.append(Communication((Position(sender, send), Position(receiver, receive))))
    return found


def _source(lane: Lane, index: int) -> str:
    step = lane.steps[index]
    assert isinstance(step, Send)
    return step.source


def _result(lane: Lane, index: int) -> Buffer:
    step = lane.steps[index]
    assert isinstance(step, Receive)
    return step.result


def _check_peer(site: Site, peer: str, lanes: dict[str, Lane]) -> None:
    if peer == site.lane.name or peer not in lanes:
        names = ", ".join(name for name in lanes if name != site.lane.name) or "none"
        fault = "is this lane itself" if peer == site.lane.name else "does not exist"
        raise site.error(f"the peer lane {peer!r} {fault}", fix=f"name another lane of the program: {names}")


def _unmatched(
    program: Program, sender: Lane, receiver: Lane, send: int | None, receive: int | None, k: int, missing: str
) -> ProgramError:
    if send is not None:
        site, buffer = Site(program, sender, send), f"%{_source(sender, send)}"
        return site.error(
            f"send {k} of {buffer} from {describe_lane(sender)} has no receive in {describe_lane(receiver)}, "
            f"which receives {k} times from it",
            fix=f"add a receive of {buffer} to lane {missing!r}, or remove the send",
        )
    assert receive is not None
    buffer = f"%{_result(receiver, receive).name}"
    return Site(program, receiver, receive).error(
        f"receive {k} of {buffer} in {describe_lane(receiver)} has no send in {describe_lane(sender)}, "
        f"which sends {k} times to it",
        fix=f"add a send of {buffer} to lane {missing!r}, or remove the receive",
    )


def _check_same_piece(site: Site, sender: Lane, k: int, sent: Buffer, received: Buffer) -> None:
    """The k-th send and the k-th receive name the same tensor, type, entries and times."""
    facts: list[tuple[str, object, object]] = [
        ("tensor", f"%{sent.tensor}", f"%{received.tensor}"),
        ("element type", sent.dtype.value, received.dtype.value),
        ("shape", list(sent.layout.shape), list(received.layout.shape)),
        ("times", covered_times(sent), covered_times(received)),
        ("layout", sent.layout.entries, received.layout.entries),
    ]
    for name, here, there in facts:
        if here != there:
            if name in ("times", "layout"):
                here = describe_times(sent) if name == "times" else sent.layout
                there = describe_times(received) if name == "times" else received.layout
            raise site.error(
                f"receive {k} from lane {sender.name!r} expects %{received.name} of tensor %{received.tensor}, but send {k} of "
                f"{describe_lane(sender)} is %{sent.name} of tensor %{sent.tensor}: the {name} is {here} there and "
                f"{there} here",
                fix=f"receive in the order in which lane {sender.name!r} sends, with the {name} of what is sent",
            )


def _check_same_places(site: Site, sender: Lane, sent: Buffer, received: Buffer) -> None:
    """The i-th devices of both lanes hold the same piece: the same place on every axis with an entry."""
    receiver = site.lane
    if len(sender.devices) != len(receiver.devices):
        raise site.error(
            f"{describe_lane(sender)} sends %{sent.name} from {len(sender.devices)} devices to the "
            f"{len(receiver.devices)} of {describe_lane(receiver)}",
            fix="give both lanes as many devices, or reshard %" + sent.name + " to a layout that both lanes have",
        )
    here, there = sent.layout.mesh, received.layout.mesh
    for axis, _ in sent.layout.entries:
        if here.size(axis) != there.size(axis):
            raise site.error(
                f"%{sent.name} of tensor %{sent.tensor} lies on {axis}={here.size(axis)} in {describe_lane(sender)} and "
                f"%{received.name} on {axis}={there.size(axis)} in {describe_lane(receiver)}",
                fix="reshard to one layout before the send",
            )
    if here.axes == there.axes and here.devices == sender.devices and there.devices == receiver.devices:
        return  # congruent meshes, with the devices listed alike
    axes = [axis for axis, _ in sent.layout.entries if here.axis(axis).kind is AxisKind.SPACE]
    left, right = _coordinates(here), _coordinates(there)
    for one, other in zip(sender.devices, receiver.devices, strict=True):
        for axis in axes:
            a, b = left[one][here.index(axis)], right[other][there.index(axis)]
            if a != b:
                raise site.error(
                    f"device {one} sends its piece of tensor %{sent.tensor} at {axis}={a} to device {other}, which expects "
                    f"the piece at {axis}={b}: the regions differ ({describe_lane(sender)} to {describe_lane(receiver)})",
                    fix="list the devices of both lanes in the same order of coordinates",
                )


def _coordinates(mesh: Mesh) -> dict[int, Point]:
    """The space coordinate of each device; `Mesh.coordinate` would search the list for each."""
    space = Mesh(mesh.space, mesh.devices)
    return dict(zip(mesh.devices, space.points(), strict=True))


# ---- collectives -----------------------------------------------------------------------------------------------------


def _match_collectives(program: Program, buffers: Buffers) -> list[Communication]:
    runs: dict[tuple[Mesh, tuple[str, ...]], dict[str, list[int]]] = {}  # then by lane, in program order
    for lane in program.lanes:
        for index, step in enumerate(lane.steps):
            if isinstance(step, Collective):
                by_lane = runs.setdefault((step.result.layout.mesh, step.axes), defaultdict(list))
                by_lane[lane.name].append(index)
    found: list[Communication] = []
    for (mesh, axes), by_lane in runs.items():
        for together in _lanes_that_meet(program, mesh, axes, by_lane):
            found += _match_in(program, together, by_lane, buffers)
    return found


def _lanes_that_meet(
    program: Program, mesh: Mesh, axes: tuple[str, ...], by_lane: dict[str, list[int]]
) -> list[tuple[Lane, ...]]:
    """The lanes with these collectives, with those that they share a group with, directly or over others."""
    lane_of = {device: lane for lane in program.lanes for device in lane.devices}
    moving = {mesh.index(axis) for axis in axes}
    groups: dict[Point, list[int]] = defaultdict(list)
    for device, point in _coordinates(mesh).items():
        groups[tuple(-1 if i in moving else digit for i, digit in enumerate(point))].append(device)
    joined: dict[str, set[str]] = {}  # lane -> the set, shared by its members, of lanes it meets
    for devices in groups.values():
        names = list(dict.fromkeys(lane_of[device].name for device in devices if device in lane_of))
        absent = [device for device in devices if device not in lane_of]
        caller = next((name for name in names if by_lane.get(name)), None)
        if absent and caller is not None:
            lane = program.lane(caller)
            raise Site(program, lane, by_lane[caller][0]).error(
                f"the collective over {', '.join(axes)} of {describe_lane(lane)} waits for device {absent[0]}, which runs no lane",
                fix=f"use a mesh of devices that run, or add a lane for device {absent[0]}",
            )
        merged = {member for name in names for member in joined.get(name, {name})}
        for member in merged:
            joined[member] = merged
    sets = {id(members): members for name, members in joined.items() if by_lane.get(name)}
    return [tuple(lane for lane in program.lanes if lane.name in members) for members in sets.values()]


def _match_in(
    program: Program, lanes: tuple[Lane, ...], by_lane: dict[str, list[int]], buffers: Buffers
) -> list[Communication]:
    """Lanes that share groups have the same sequence of collectives on one mesh and the same axes."""
    longest = max(lanes, key=lambda lane: len(by_lane.get(lane.name, [])))
    found: list[Communication] = []
    for k, index in enumerate(by_lane[longest.name]):
        site, first = Site(program, longest, index), longest.steps[index]
        assert isinstance(first, Collective)
        participants: list[Position] = []
        for lane in lanes:
            mine = by_lane.get(lane.name, [])
            if k >= len(mine):
                raise site.error(
                    f"collective {k} over {', '.join(first.axes)}, {describe_step(first)} in {describe_lane(longest)}, has no "
                    f"partner in {describe_lane(lane)}, which runs {len(mine)} of them",
                    fix=f"add it to lane {lane.name!r}, or remove it from lane {longest.name!r}",
                )
            other = lane.steps[mine[k]]
            assert isinstance(other, Collective)
            pairs = (
                (buffers[longest.name][first.source], buffers[lane.name][other.source]),
                (first.result, other.result),
            )
            if first.kind is not other.kind or not all(_alike(a, b) for a, b in pairs):
                raise Site(program, lane, mine[k]).error(
                    f"collective {k} over {', '.join(first.axes)} is {describe_step(other)} of tensor %{other.result.tensor} "
                    f"here, and {describe_step(first)} of tensor %{first.result.tensor} in {describe_lane(longest)}",
                    fix="run the same collectives, on the same tensors, layouts and times, in the same order in both lanes",
                )
            participants.append(Position(lane.name, mine[k]))
        found.append(Communication(tuple(participants)))
    return found


def _alike(one: Buffer, other: Buffer) -> bool:
    return (one.tensor, one.dtype, one.layout, covered_times(one)) == (
        other.tensor,
        other.dtype,
        other.layout,
        covered_times(other),
    )
