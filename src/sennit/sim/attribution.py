"""What a timeline's time went to: exposed communication by what was waited for, the critical path by what lies on it.

**Exposed** is the time in which a device communicates and does not compute. Where several transfers run then, the one
that ends last is what is waited for: its stream gets the interval. The parts sum to `timeline.exposed(device)`.

**The critical path** has no gaps in a simulated timeline, so its parts sum to the span.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from sennit.ir.event import Category, Event, MemoryKind
from sennit.ir.event_rows import EventRows, MemoryRows
from sennit.ir.timeline import Timeline

__all__ = ["Part", "critical_parts", "exposed_parts", "peak_by_kind"]


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds that went to one stream, and the events that took most of them, the longest first."""

    stream: str
    seconds: float
    events: tuple[tuple[str, float], ...]


def exposed_parts(timeline: Timeline, device: int) -> tuple[Part, ...]:
    """Exposed communication of a device by stream, the greatest first."""
    mine = _of_device(timeline, device)
    busy = sorted((e.start, e.stop) for e in mine if e.category is Category.COMPUTE and e.stop > e.start)
    talk = [e for e in mine if e.category is not Category.COMPUTE and e.stop > e.start]
    spent: dict[str, dict[str, float]] = {}
    # latest first: what an event covers up to its own end and nobody later has covered is waited for because of it
    covered = float("inf")
    for event in sorted(talk, key=lambda e: (e.stop, e.start), reverse=True):
        stop = min(event.stop, covered)
        if event.start >= stop:
            continue
        seconds = (stop - event.start) - _overlap(busy, event.start, stop)
        covered = min(covered, event.start)
        if seconds > 0:
            names = spent.setdefault(event.stream, {})
            names[event.name] = names.get(event.name, 0.0) + seconds
    return _parts(spent)


def critical_parts(timeline: Timeline) -> tuple[Part, ...]:
    """The critical path by stream, the greatest first."""
    spent: dict[str, dict[str, float]] = {}
    for event in timeline.critical_path():
        names = spent.setdefault(event.stream, {})
        names[event.name] = names.get(event.name, 0.0) + event.stop - event.start
    return _parts(spent)


def peak_by_kind(timeline: Timeline, device: int) -> dict[MemoryKind, int]:
    """What is live on a device when most is."""
    if isinstance(timeline.memory, MemoryRows):
        best: dict[MemoryKind, int] = {}
        for track in timeline.memory.tracks:
            if device in track.devices and len(track.times):
                row = track.live[int(track.live.sum(axis=1).argmax())].tolist()
                found = {kind: size for kind, size in zip(MemoryKind, row, strict=True) if size}
                best = max(best, found, key=lambda live: sum(live.values()))
        return best
    samples = [sample for sample in timeline.memory if sample.device == device]
    return dict(max(samples, key=lambda sample: sample.total).live) if samples else {}


def _of_device(timeline: Timeline, device: int) -> list[Event]:
    if isinstance(timeline.events, EventRows):
        return timeline.events.of_device(device)
    return [event for event in timeline.events if event.device == device]


def _overlap(busy: list[tuple[float, float]], start: float, stop: float) -> float:
    """Seconds of [start, stop] inside sorted intervals that do not overlap: those of one stream."""
    total = 0.0
    position = max(0, bisect_left(busy, (start, start)) - 1)
    while position < len(busy) and busy[position][0] < stop:
        total += max(0.0, min(stop, busy[position][1]) - max(start, busy[position][0]))
        position += 1
    return total


def _parts(spent: dict[str, dict[str, float]]) -> tuple[Part, ...]:
    def part(stream: str, names: dict[str, float]) -> Part:
        return Part(stream, sum(names.values()), _largest(names.items()))

    return tuple(sorted((part(*item) for item in spent.items()), key=lambda item: (-item.seconds, item.stream)))


def _largest(items: Iterable[tuple[str, float]], count: int = 5) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(items, key=lambda item: (-item[1], item[0]))[:count])
