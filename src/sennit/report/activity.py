"""From a timeline to what a picture draws: rows of blocks.

An event says which stream it ran on, a program says what ran there. Per device and stream the program fixes the order
of steps, so the i-th event of a stream is the i-th step of it; frees leave no event, and views need not. Where the
counts still differ an event is matched by name instead: the name of the buffer that the step defines or sends. What is
matched by neither is drawn as plain compute or communication.

    activity := tone, micro-batch        forward | backward | compute | collective | send | receive
    block    := neighbouring events of one stream with the same activity, closer together than one can see
    row      := the blocks of one stream
    group    := devices whose rows look the same, folded into one: a data-parallel plan on 16 devices is one group

`groups` does all of it. `resolution` is the shortest time that can be seen; it bounds the number of blocks in a
picture.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from sennit.ir.graph import Phase
from sennit.ir.mesh import print_ranges
from sennit.ir.operators import is_view
from sennit.ir.program import (
    Buffer,
    Collective,
    Compute,
    Exchange,
    Free,
    Lane,
    Program,
    Receive,
    Send,
    Step,
    defines,
    reads,
    stream_of,
)
from sennit.ir.program_regions import is_all
from sennit.ir.timeline import Category, Event, Timeline
from sennit.report import units

__all__ = ["Block", "Group", "Row", "Tone", "groups"]


class Tone(Enum):
    """What a block shows; each has its own colour."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COMPUTE = "compute"
    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Block:
    tone: Tone
    microbatch: int | None
    start: float
    stop: float
    busy: float
    events: int
    bytes: int
    names: tuple[str, ...]

    @property
    def density(self) -> float:
        """The share of the block in which its events run; the rest are gaps too short to be drawn."""
        return min(1.0, self.busy / (self.stop - self.start)) if self.stop > self.start else 1.0

    def describe(self) -> str:
        """For the hover title: what it is, how long, how much, and the first few names."""
        what = self.tone.value + ("" if self.microbatch is None else f", micro-batch {self.microbatch}")
        text = f"{what}: {units.seconds(self.busy)} from {units.seconds(self.start)}"
        text += f" to {units.seconds(self.stop)}, {self.events} events" if self.events > 1 else ""
        text += f", {units.size(self.bytes)} on the wire" if self.bytes else ""
        return "\n".join([text, *self.names])


@dataclass(frozen=True, slots=True)
class Row:
    stream: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that do the same at the same time. The rows are those of the first; `spread` is the most that another's
    event starts or stops away from it, in seconds."""

    devices: tuple[int, ...]
    lane: str
    rows: tuple[Row, ...]
    spread: float

    @property
    def label(self) -> str:
        noun = "device" if len(self.devices) == 1 else "devices"
        return f"{noun} {print_ranges(self.devices)}"


@dataclass(frozen=True, slots=True)
class _Activity:
    tone: Tone
    microbatch: int | None
    name: str


def groups(
    timeline: Timeline, program: Program | None = None, *, resolution: float = 0.0, most_blocks: int = 4000
) -> tuple[Group, ...]:
    """The rows to draw, devices that look alike folded. Blocks grow coarser until there are `most_blocks` at most."""
    streams: dict[int, dict[str, list[Event]]] = {device: {} for device in timeline.devices}
    for event in sorted(timeline.events, key=lambda event: (event.start, event.stop)):
        streams[event.device].setdefault(event.stream, []).append(event)
    folded = _fold(streams, max(resolution, timeline.span * 2e-3))
    while True:
        result = tuple(_group(devices, streams[devices[0]], spread, program, resolution) for devices, spread in folded)
        drawn = sum(len(row.blocks) for group in result for row in group.rows)
        if drawn <= most_blocks or resolution >= timeline.span:
            return result
        resolution = max(resolution * 2, timeline.span * 1e-4)


def _fold(streams: Mapping[int, Mapping[str, Sequence[Event]]], apart: float) -> list[tuple[tuple[int, ...], float]]:
    """Devices with the same events on the same streams, at times no further than `apart` from the group's first."""
    found: list[tuple[list[int], float]] = []
    shapes: dict[object, list[int]] = defaultdict(list)
    for device, rows in streams.items():
        shape = tuple((stream, tuple(e.name for e in events)) for stream, events in sorted(rows.items()))
        for position in shapes[shape]:
            members, spread = found[position]
            distance = _distance(streams[members[0]], rows)
            if distance <= apart:
                found[position] = ([*members, device], max(spread, distance))
                break
        else:
            shapes[shape].append(len(found))
            found.append(([device], 0.0))
    return [(tuple(members), spread) for members, spread in found]


def _distance(left: Mapping[str, Sequence[Event]], right: Mapping[str, Sequence[Event]]) -> float:
    return max(
        (
            max(abs(a.start - b.start), abs(a.stop - b.stop))
            for stream, events in left.items()
            for a, b in zip(events, right[stream], strict=True)
        ),
        default=0.0,
    )


def _group(
    devices: tuple[int, ...],
    streams: Mapping[str, Sequence[Event]],
    spread: float,
    program: Program | None,
    resolution: float,
) -> Group:
    lane = None
    if program is not None and devices[0] in program.devices:
        lane = program.lane_of(devices[0])
    ordered = sorted(streams, key=lambda stream: (stream != "compute", stream))
    rows = []
    for stream in ordered:
        events = streams[stream]
        activities = [_plain(event) for event in events] if lane is None else _activities(lane, stream, events)
        rows.append(Row(stream, tuple(_blocks(events, activities, resolution))))
    return Group(devices, "" if lane is None else lane.name, tuple(rows), spread)


def _activities(lane: Lane, stream: str, events: Sequence[Event]) -> list[_Activity]:
    buffers = lane.buffers()
    steps = [step for step in lane.steps if stream_of(step) == stream and not isinstance(step, Free)]
    timed = [step for step in steps if not (isinstance(step, Compute) and _is_look(step, buffers))]
    for candidates in (timed, steps):
        if len(candidates) == len(events):
            return [_of_step(event, step, buffers) for event, step in zip(events, candidates, strict=True)]
    named: dict[str, Step] = {}
    for step in steps:
        sent = isinstance(step, (Send, Exchange)) and not defines(step)
        for name in reads(step) if sent else [buffer.name for buffer in defines(step)]:
            named.setdefault(name, step)
    result = []
    for event in events:
        found = named.get(event.name.removeprefix("%"))
        result.append(_plain(event) if found is None else _of_step(event, found, buffers))
    return result


def _is_look(step: Compute, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a step makes nothing but another name."""
    if step.kind == "sennit.take":
        return is_all(buffers[reads(step)[0]], step.results[0])
    return is_view(step.kind)


def _plain(event: Event) -> _Activity:
    match event.category:
        case Category.COMPUTE:
            tone = Tone.COMPUTE
        case Category.COLLECTIVE:
            tone = Tone.COLLECTIVE
        case Category.SEND:
            tone = Tone.SEND
        case Category.RECEIVE:
            tone = Tone.RECEIVE
    return _Activity(tone, None, event.name)


def _of_step(event: Event, step: Step, buffers: Mapping[str, Buffer]) -> _Activity:
    match step:
        case Compute(kind=kind, results=results, phase=phase, module=module):
            tone = Tone.FORWARD if phase is Phase.FORWARD else Tone.BACKWARD
            return _Activity(tone, _microbatch(results[0]), f"{kind} in {module}" if module else kind)
        case Collective(kind=collective, result=result, axes=axes):
            return _Activity(Tone.COLLECTIVE, None, f"{collective.value} over {', '.join(axes)} -> %{result.name}")
        case Send(source, to):
            return _Activity(Tone.SEND, _microbatch(buffers[source]), f"send %{source} to {to}")
        case Receive(result, origin):
            return _Activity(Tone.RECEIVE, _microbatch(result), f"receive %{result.name} from {origin}")
        case Exchange(label, given, taken, lanes):
            moved = taken if given is None else buffers[given]
            tone = Tone.RECEIVE if given is None else Tone.SEND if taken is None else Tone.COLLECTIVE
            at = None if moved is None else _microbatch(moved)
            return _Activity(tone, at, f"exchange {label} among {', '.join(lanes)}")
        case Free():
            return _plain(event)


def _microbatch(buffer: Buffer) -> int | None:
    """The last of the times that a buffer covers: a gradient summed over micro-batches 0 to 2 is made with number 2."""
    return max(buffer.times[0][1]) if buffer.times else None


def _blocks(events: Sequence[Event], activities: Sequence[_Activity], resolution: float) -> Iterable[Block]:
    """Join neighbours of the same activity with gaps under the resolution.

    Communication is joined only where it is itself too short to be seen, so that every visible transfer stays one
    block.
    """
    run: list[int] = []

    def joins(position: int) -> bool:
        last, this = events[run[-1]], events[position]
        a, b = activities[run[-1]], activities[position]
        if (a.tone, a.microbatch) != (b.tone, b.microbatch) or this.start - last.stop > resolution:
            return False
        if a.tone in (Tone.FORWARD, Tone.BACKWARD, Tone.COMPUTE):
            return True
        return this.stop - this.start <= resolution and last.stop - last.start <= resolution

    for position in range(len(events)):
        if run and not joins(position):
            yield _block([events[i] for i in run], [activities[i] for i in run])
            run = []
        run.append(position)
    if run:
        yield _block([events[i] for i in run], [activities[i] for i in run])


def _block(events: Sequence[Event], activities: Sequence[_Activity], most_names: int = 4) -> Block:
    seconds: defaultdict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    for event, activity in zip(events, activities, strict=True):
        seconds[activity.name] += event.stop - event.start
        times[activity.name] += 1
    longest = sorted(seconds, key=lambda name: -seconds[name])[:most_names]
    names = [name if times[name] == 1 else f"{times[name]} x {name}" for name in longest]
    if len(seconds) > most_names:
        names.append(f"and {len(seconds) - most_names} more")
    return Block(
        activities[0].tone,
        activities[0].microbatch,
        events[0].start,
        events[-1].stop,
        sum(event.stop - event.start for event in events),
        len(events),
        sum(event.bytes for event in events),
        tuple(names),
    )
