"""Exchanges of a program: who meets in one, what it moves, and the rules that make it sound.

The lanes with a source hold one tensor together, under the layout A of their buffer; its mesh has exactly their
devices. The lanes with a result get it under the layout B of theirs, on a mesh of exactly their devices. Nothing else
ties the two meshes together. Each device of B ends with the indices of its region under B. Each index comes from the
device itself where it holds it under A, else from the holder that has sent least so far, the lowest of several
(`exchange.py`).

**Time.** Time axes are alike on both sides, and so are the times: an exchange moves one micro-batch, or what is
replicated in time, or one part of a sum over micro-batches. The entries of time axes therefore only bound the indices:
with S the indices at these times, the transfers are those of the space entries of A and B, within S.

**Rules**

| rule | says |
|---|---|
| label | each lane of `lanes` has exactly one exchange with the label, and they name the same lanes |
| sides | at least one lane gives, at least one takes, and each does one of them |
| one tensor | all buffers are of one tensor, type and shape, and at the same times of the same time axes |
| one layout | givers share one layout, takers share one; its mesh has their devices and no others |
| no reduction | neither layout is pending over a space axis |
| order | exchanges from the same devices to the same devices come in one order in all their lanes |

Given the rules, every index that a taker needs has a holder among the givers, and each taker's region is tiled exactly.
`check_tiling` does not rely on that: it looks at the table itself, which the ranks and the simulator use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from sennit.errors import ProgramError
from sennit.ir.exchange import Transfer, transfers
from sennit.ir.layout import Layout, Pending
from sennit.ir.mesh import Mesh, print_ranges
from sennit.ir.program import Buffer, Exchange, Lane, Program
from sennit.ir.program_site import Site, describe_lane, describe_times
from sennit.ir.region import Region

__all__ = [
    "Channel",
    "Meeting",
    "check_tiling",
    "exchange_meetings",
    "exchange_transfers",
    "match_exchanges",
    "moves_alike",
]

Channel = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Meeting:
    """One exchange, put together: the buffer that its givers share, that of its takers, and the step in each lane."""

    label: str
    source: Buffer
    result: Buffer
    givers: tuple[str, ...]
    takers: tuple[str, ...]
    steps: tuple[tuple[str, int], ...]  # (lane, step), in the order of the program's lanes

    @property
    def channel(self) -> Channel:
        """The devices that give and those that take."""
        given, taken = self.source.layout.mesh.devices, self.result.layout.mesh.devices
        return tuple(sorted(given)), tuple(sorted(taken))


def exchange_transfers(source: Buffer, result: Buffer) -> tuple[Transfer, ...]:
    """Who sends which indices of the whole tensor to whom, local copies among them: the same table on every rank."""
    return transfers(_in_space(source.layout), _in_space(result.layout), _at_times(source))


def _in_space(layout: Layout) -> Layout:
    """The layout without its time axes."""
    space = layout.mesh.in_space()
    return Layout(space, layout.shape, tuple(entry for entry in layout.entries if entry[0] in space))


def _at_times(buffer: Buffer) -> Region | None:
    """The indices that exist at the times of the buffer; None where no time axis splits it."""
    mesh = buffer.layout.mesh
    names = {axis.name for axis in mesh.time}
    entries = tuple(entry for entry in buffer.layout.entries if entry[0] in names and not isinstance(entry[1], Pending))
    if not entries:
        return None
    times = dict(buffer.times)
    alone = Layout(Mesh(mesh.time, (0,)), buffer.layout.shape, entries)
    return alone.region(tuple(times[axis.name][0] if axis.name in times else 0 for axis in mesh.time))


def check_tiling(source: Buffer, result: Buffer) -> None:
    """The transfers to each device are of indices that their senders have, and tile what the device needs exactly."""
    table: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in exchange_transfers(source, result):
        table[transfer.receiver].append(transfer)
    held = {device: source.layout.region(source.point(device)) for device in source.layout.mesh.devices}
    for device in result.layout.mesh.devices:
        needed, coming = result.layout.region(result.point(device)), table.pop(device, [])
        sound = all(needed.contains(item.region) and held[item.sender].contains(item.region) for item in coming)
        apart = all(one.region.intersect(other.region).size == 0 for one, other in combinations(coming, 2))
        if not sound or not apart or sum(item.region.size for item in coming) != needed.size:
            raise ProgramError(
                f"the transfers of {result.describe()} do not tile what device {device} needs, {needed}",
                where=f"an exchange from {source.describe()} on {source.layout.mesh} to {result.layout.mesh}",
                fix="report this: the table of an exchange is wrong",
            )
    assert not table  # nobody else receives


def moves_alike(source: Buffer, result: Buffer) -> object:
    """What tells two exchanges apart by what they move where: pieces of even layouts lie alike at all times."""
    is_even = source.layout.is_even and result.layout.is_even
    return source.layout, result.layout, source.dtype, None if is_even else source.times


def exchange_meetings(program: Program) -> dict[str, Meeting]:
    """Every exchange by its label. The program has passed the checker, or this raises as the checker would."""
    buffers = {lane.name: lane.buffers() for lane in program.lanes}
    return {meeting.label: meeting for meeting in match_exchanges(program, buffers)}


def match_exchanges(program: Program, buffers: Mapping[str, Mapping[str, Buffer]]) -> list[Meeting]:
    """All exchanges of a program; raises `ProgramError` for the first rule that one breaks."""
    found: dict[str, dict[str, int]] = {}  # label -> lane -> step
    names = {lane.name for lane in program.lanes}
    for lane in program.lanes:
        for index, step in enumerate(lane.steps):
            if isinstance(step, Exchange):
                _check_alone(Site(program, lane, index), step, names)
                mine = found.setdefault(step.label, {})
                if lane.name in mine:
                    raise Site(program, lane, index).error(
                        f"exchange {step.label!r} is twice in {describe_lane(lane)}: steps {mine[lane.name]} and {index}",
                        fix="give each exchange a label of its own",
                    )
                mine[lane.name] = index
    meetings = [_meet(program, label, steps, buffers) for label, steps in found.items()]
    _check_order(program, meetings)
    return meetings


def _check_alone(site: Site, step: Exchange, names: set[str]) -> None:
    """What one lane's step must say, whatever the others do."""
    if step.source is None and step.result is None:
        raise site.error(
            f"exchange {step.label!r} neither gives nor takes in {describe_lane(site.lane)}",
            fix=f"name what lane {site.lane.name!r} gives or takes, or remove it from the exchange",
        )
    if site.lane.name not in step.lanes or len(set(step.lanes)) != len(step.lanes):
        fault = f"names the lanes {', '.join(step.lanes)}"
        raise site.error(
            f"exchange {step.label!r} of {describe_lane(site.lane)} {fault}",
            fix=f"name each lane that takes part once, lane {site.lane.name!r} among them",
        )
    for name in step.lanes:
        if name not in names:
            raise site.error(
                f"exchange {step.label!r} is among lane {name!r}, which does not exist",
                fix=f"name lanes of the program: {', '.join(sorted(names))}",
            )


def _meet(
    program: Program, label: str, steps: Mapping[str, int], buffers: Mapping[str, Mapping[str, Buffer]]
) -> Meeting:
    lanes = [lane for lane in program.lanes if lane.name in steps]
    first = lanes[0]
    site, opening = Site(program, first, steps[first.name]), _step(first, steps)
    for name in opening.lanes:
        if name not in steps:
            raise site.error(
                f"exchange {label!r} waits for {describe_lane(program.lane(name))}, which never comes to it",
                fix=f"add exchange {label!r} to lane {name!r}, or leave the lane out in the others",
            )
    given: list[tuple[Lane, Buffer]] = []
    taken: list[tuple[Lane, Buffer]] = []
    for lane in lanes:
        step = _step(lane, steps)
        if set(step.lanes) != set(opening.lanes):
            raise Site(program, lane, steps[lane.name]).error(
                f"exchange {label!r} is among {', '.join(step.lanes)} here, and among {', '.join(opening.lanes)} in "
                f"{describe_lane(first)}",
                fix="name the same lanes in all of them",
            )
        if step.source is not None:
            given.append((lane, buffers[lane.name][step.source]))
        if step.result is not None:
            taken.append((lane, step.result))
    if not given or not taken:
        verb = "gives" if not given else "takes"
        raise site.error(
            f"no lane {verb} anything in exchange {label!r} among {', '.join(opening.lanes)}",
            fix="name the buffer in the lane that has it, and the result in the lane that needs it",
        )
    for side, verb in ((given, "give"), (taken, "take")):
        _check_side(program, label, steps, side, verb)
    _check_same_tensor(program, label, steps, given[0], taken[0])
    return Meeting(
        label,
        given[0][1],
        taken[0][1],
        tuple(lane.name for lane, _ in given),
        tuple(lane.name for lane, _ in taken),
        tuple((lane.name, steps[lane.name]) for lane in lanes),
    )


def _step(lane: Lane, steps: Mapping[str, int]) -> Exchange:
    step = lane.steps[steps[lane.name]]
    assert isinstance(step, Exchange)
    return step


def _check_side(
    program: Program, label: str, steps: Mapping[str, int], side: list[tuple[Lane, Buffer]], verb: str
) -> None:
    """The lanes of one side hold one tensor together: alike buffers, on a mesh of their devices, nothing to reduce."""
    first_lane, first = side[0]
    for lane, buffer in side:
        site = Site(program, lane, steps[lane.name])
        if _facts(buffer) != _facts(first) or buffer.layout != first.layout:
            raise site.error(
                f"lanes {verb} different things in exchange {label!r}: {_words(first)} in {describe_lane(first_lane)}, and "
                f"{_words(buffer)} here",
                fix=f"{verb} one tensor, under one layout, at the same times in all of these lanes",
            )
        space = [axis for axis, _ in buffer.layout.pending if axis in {a.name for a in buffer.layout.mesh.space}]
        if space:
            raise site.error(
                f"exchange {label!r} would have to reduce %{buffer.name} of tensor %{buffer.tensor}, "
                f"{buffer.layout}, over {', '.join(space)}",
                fix=f"all_reduce or reduce_scatter it over {', '.join(space)} first: an exchange only moves",
            )
    mine = {device for lane, _ in side for device in lane.devices}
    wanted = set(first.layout.mesh.devices)
    if mine != wanted:
        site = Site(program, first_lane, steps[first_lane.name])
        absent, extra = tuple(sorted(wanted - mine)), tuple(sorted(mine - wanted))
        fault = f"devices {print_ranges(absent)} of it {verb} nothing" if absent else ""
        fault += " and " if absent and extra else ""
        fault += f"devices {print_ranges(extra)} are not of it" if extra else ""
        raise site.error(
            f"%{first.name} of tensor %{first.tensor} lies on mesh {first.layout.mesh} in exchange {label!r}, and {fault}",
            fix=f"let the lanes of all devices of the mesh {verb} their pieces, and no others",
        )


def _check_same_tensor(
    program: Program, label: str, steps: Mapping[str, int], given: tuple[Lane, Buffer], taken: tuple[Lane, Buffer]
) -> None:
    (giver, source), (taker, result) = given, taken
    if _facts(source) != _facts(result):
        raise Site(program, taker, steps[taker.name]).error(
            f"exchange {label!r} takes {_words(result)} here, and {describe_lane(giver)} gives {_words(source)}",
            fix="take the tensor that is given, with its type, shape, time axes and times",
        )


def _facts(buffer: Buffer) -> tuple[object, ...]:
    """What both sides have in common."""
    layout, times = buffer.layout, dict(buffer.times)
    time = [
        (axis.name, axis.size, entry) for axis in layout.mesh.time if (entry := layout.entry(axis.name)) is not None
    ]
    covered = {axis: frozenset(at) for axis, at in times.items()}
    return buffer.tensor, buffer.dtype, layout.shape, tuple(sorted(time, key=str)), tuple(sorted(covered.items()))


def _words(buffer: Buffer) -> str:
    return f"{buffer.dtype.value}{buffer.layout} of tensor %{buffer.tensor} on mesh {buffer.layout.mesh}, {describe_times(buffer)}"


def _check_order(program: Program, meetings: list[Meeting]) -> None:
    """Exchanges between the same devices come in one order: on some networks messages are told apart by nothing else."""
    between: dict[tuple[str, str, Channel], list[tuple[int, int, str]]] = defaultdict(list)
    for meeting in meetings:
        steps = dict(meeting.steps)
        for giver, taker in product(meeting.givers, meeting.takers):
            if giver != taker:
                between[giver, taker, meeting.channel].append((steps[giver], steps[taker], meeting.label))
    for (giver, taker, _), order in between.items():
        order.sort()
        for (_, before, sooner), (here, after, later) in pairwise(order):
            if after < before:
                raise Site(program, program.lane(giver), here).error(
                    f"{describe_lane(program.lane(giver))} gives in exchange {sooner!r} before {later!r}, and "
                    f"{describe_lane(program.lane(taker))} takes in {later!r} (step {after}) before {sooner!r} (step {before})",
                    fix=f"run exchanges {sooner!r} and {later!r} in the same order in both lanes",
                )
