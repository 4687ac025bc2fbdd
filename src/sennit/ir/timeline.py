"""A timeline: what ran when on which device, and what memory was live. Simulated and measured ones are the same type.

    timeline := "timeline" STRING origin "{" event* sample* "}"
    origin   := "simulated" | "measured"
    event    := "event" DEVICE STRING category STRING start "to" stop ("bytes" INT)? ("after" INDEX)?    stream, then name
    sample   := "memory" DEVICE TIME category "=" BYTES (category "=" BYTES)*
    category of an event: "compute" | "collective" | "send" | "receive"
    category of memory:   "parameters" | "gradients" | "optimizer" | "activations" | "inputs" | "staging"

Times are in seconds from the start of the step. `after` is the event whose end let this one start: following it back
from the last event gives the critical path. Bytes are those that this device puts on the wire.

Events and memory are sequences: tuples, or the rows of `ir/event_rows.py`, which compare equal to the tuple of their
events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from sennit.errors import TimelineError
from sennit.ir.event import Category, Event, Memory, MemoryKind
from sennit.ir.event_rows import EventRows, MemoryRows
from sennit.ir.text import Scanner, quote

__all__ = ["Category", "Event", "Memory", "MemoryKind", "Origin", "Timeline"]

E = TypeVar("E", bound=Enum)


class Origin(Enum):
    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Timeline:
    name: str
    origin: Origin
    events: Sequence[Event]
    memory: Sequence[Memory] = ()

    def __post_init__(self) -> None:
        if isinstance(self.events, EventRows):
            return  # the simulator's own: its engine gives no task a start before the end of what it waits for
        last: dict[tuple[int, str], Event] = {}
        for event in sorted(self.events, key=lambda event: (event.start, event.stop)):
            if event.stop < event.start or event.start < 0:
                raise TimelineError(
                    f"event {event.name!r} runs from {event.start} to {event.stop} s", where=f"device {event.device}"
                )
            before = last.get((event.device, event.stream))
            if before is not None and event.start < before.stop:
                raise TimelineError(
                    f"events {before.name!r} (to {before.stop} s) and {event.name!r} (from {event.start} s) overlap",
                    where=f"device {event.device}, stream {event.stream!r}",
                )
            last[event.device, event.stream] = event
        for position, event in enumerate(self.events):
            if event.after is not None and not 0 <= event.after < len(self.events):
                raise TimelineError(
                    f"event {position} {event.name!r} follows event {event.after}, which does not exist"
                )

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(_devices(self.events) | _devices(self.memory)))

    def unlike(self, devices: Sequence[int]) -> tuple[int, ...]:
        """One of each set of these devices that are known to have done the same at the same times: what holds for it
        holds for all. In a timeline of single events, every device.
        """
        return self.events.unlike(devices) if isinstance(self.events, EventRows) else tuple(devices)

    @property
    def span(self) -> float:
        """Seconds from the start to the end of the last event."""
        if isinstance(self.events, EventRows):
            return float(self.events.stop.max(initial=0.0))
        return max((event.stop for event in self.events), default=0.0)

    def busy(self, device: int, *categories: Category) -> float:
        """Seconds in which at least one event of these categories runs on the device."""
        return _length(_union(self._intervals(device, categories)))

    def exposed(self, device: int) -> float:
        """Seconds in which the device communicates and does not compute."""
        compute = _union(self._intervals(device, (Category.COMPUTE,)))
        talk = _union(self._intervals(device, (Category.COLLECTIVE, Category.SEND, Category.RECEIVE)))
        return _length(talk) - _length(_intersection(compute, talk))

    def idle(self, device: int) -> float:
        """Seconds of the step in which the device neither computes nor communicates: the bubble."""
        return self.span - self.busy(device, *Category)

    def wire_bytes(self, device: int | None = None) -> int:
        """Bytes put on the wire by one device, or by all."""
        if isinstance(self.events, EventRows):
            return self.events.wire_bytes(device)
        return sum(event.bytes for event in self.events if device is None or event.device == device)

    def peak_memory(self, device: int) -> int:
        if isinstance(self.memory, MemoryRows):
            return self.memory.peak(device)
        return max((sample.total for sample in self.memory if sample.device == device), default=0)

    def critical_path(self) -> tuple[Event, ...]:
        """The chain of events that ends last, each waiting for the one before."""
        if not self.events:
            return ()
        position: int | None
        if isinstance(self.events, EventRows):
            position = self.events.last()
        else:
            position = max(range(len(self.events)), key=lambda i: self.events[i].stop)
        path: list[Event] = []
        while position is not None:
            path.append(self.events[position])
            position = path[-1].after
        return tuple(reversed(path))

    def _intervals(self, device: int, categories: tuple[Category, ...]) -> list[tuple[float, float]]:
        if isinstance(self.events, EventRows):
            return self.events.intervals(device, categories)
        return [(e.start, e.stop) for e in self.events if e.device == device and e.category in categories]

    def by_device(self) -> dict[int, list[Event]]:
        grouped: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            grouped[event.device].append(event)
        return dict(grouped)

    def __str__(self) -> str:
        lines = [f"timeline {quote(self.name)} {self.origin.value} {{"]
        for e in self.events:
            text = f"  event {e.device} {quote(e.stream)} {e.category.value} {quote(e.name)} {e.start!r} to {e.stop!r}"
            text += f" bytes {e.bytes}" if e.bytes else ""
            lines.append(text + (f" after {e.after}" if e.after is not None else ""))
        for sample in self.memory:
            live = " ".join(f"{kind.value}={size}" for kind, size in sample.live)
            lines.append(f"  memory {sample.device} {sample.time!r} {live}".rstrip())
        return "\n".join([*lines, "}"]) + "\n"

    @classmethod
    def read(cls, scanner: Scanner) -> Timeline:
        scanner.expect("timeline")
        name = scanner.string()
        origin = _enum(scanner, Origin)
        events: list[Event] = []
        memory: list[Memory] = []
        scanner.expect("{")
        while not scanner.accept("}"):
            if scanner.accept_word("event"):
                events.append(_read_event(scanner))
            elif scanner.accept_word("memory"):
                memory.append(_read_memory(scanner))
            else:
                raise scanner.expected("an event or a memory line")
        return cls(name, origin, tuple(events), tuple(memory))

    @classmethod
    def parse(cls, text: str) -> Timeline:
        return Scanner.whole(text, cls.read)


def _devices(items: Sequence[Event] | Sequence[Memory]) -> set[int]:
    if isinstance(items, (EventRows, MemoryRows)):
        return items.all_devices()
    return {item.device for item in items}


def _enum(scanner: Scanner, kind: type[E]) -> E:
    for member in kind:
        if scanner.accept_word(str(member.value)):
            return member
    raise scanner.expected("one of " + ", ".join(str(member.value) for member in kind))


def _read_event(scanner: Scanner) -> Event:
    device, stream, category, name = scanner.integer(), scanner.string(), _enum(scanner, Category), scanner.string()
    start = float(scanner.number())
    scanner.expect("to")
    stop = float(scanner.number())
    size = scanner.integer() if scanner.accept_word("bytes") else 0
    return Event(
        device, stream, category, name, start, stop, size, scanner.integer() if scanner.accept_word("after") else None
    )


def _read_memory(scanner: Scanner) -> Memory:
    device, time = scanner.integer(), float(scanner.number())
    live: list[tuple[MemoryKind, int]] = []
    while any(scanner.peek(kind.value + "=") for kind in MemoryKind):
        kind = _enum(scanner, MemoryKind)
        scanner.expect("=")
        live.append((kind, scanner.integer()))
    return Memory(device, time, tuple(live))


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _intersection(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            result.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in intervals)
