"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: the Chrome JSON format, gzipped.

    one process per (timeline, device)     named "<timeline> (simulated): device 3"
    one thread per stream of the device    compute first
    "X" complete events                    name, category, ts and dur in microseconds, bytes as args
    "s" and "f" flow arrows                from the event that let another one start to that one, where they are on
                                           different devices
    "C" counters                           live memory by kind, in bytes

**No overlap, whoever reads it.** Viewers hold times as whole nanoseconds and get there by rounding or by cutting the
product `microseconds * 1000` of floating point numbers; either can make two neighbours overlap by one nanosecond, and
then the viewer stacks or drops one. So each time is rounded to an eighth of a microsecond: that is exact in binary and
a whole number of nanoseconds (125), and rounding keeps order. The exact times are in the text of the timeline.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec

from sennit.ir.timeline import MemoryKind, Timeline
from sennit.report.file import write_whole

__all__ = ["trace_events", "write_trace"]

Entry = dict[str, object]


def write_trace(path: Path | str, timelines: Sequence[Timeline]) -> None:
    """Write one `.json.gz` file with every timeline in it. The same timelines give the same bytes."""
    document = {"displayTimeUnit": "ms", "traceEvents": list(trace_events(timelines))}
    write_whole(Path(path), gzip.compress(msgspec.json.encode(document), compresslevel=6, mtime=0))


def trace_events(timelines: Sequence[Timeline]) -> Iterator[Entry]:
    """The entries of the trace, timeline by timeline."""
    # process 0 means the idle task to some viewers, and a thread that shares its process's number its main thread
    processes, threads, arrows = count(1), count(100_001), count(1)
    for timeline in timelines:
        process = {device: next(processes) for device in timeline.devices}
        for device, pid in process.items():
            title = f"{timeline.name} ({timeline.origin.value}): device {device}"
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        tracks = sorted({(e.device, e.stream != "compute", e.stream) for e in timeline.events})
        thread = {(device, stream): next(threads) for device, _, stream in tracks}
        for (device, stream), tid in thread.items():
            place = {"pid": process[device], "tid": tid}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": stream}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}
        yield from _slices(timeline, process, thread)
        yield from _arrows(timeline, process, thread, arrows)
        yield from _counters(timeline, process)


def _slices(timeline: Timeline, process: dict[int, int], thread: dict[tuple[int, str], int]) -> Iterator[Entry]:
    for event in timeline.events:
        start, stop = _microseconds(event.start), _microseconds(event.stop)
        entry: Entry = {
            "ph": "X",
            "name": event.name,
            "cat": event.category.value,
            "pid": process[event.device],
            "tid": thread[event.device, event.stream],
            "ts": start,
            "dur": stop - start,
        }
        if event.bytes:
            entry["args"] = {"bytes": event.bytes}
        yield entry


def _arrows(
    timeline: Timeline, process: dict[int, int], thread: dict[tuple[int, str], int], numbers: Iterator[int]
) -> Iterator[Entry]:
    for event in timeline.events:
        if event.after is None:
            continue
        cause = timeline.events[event.after]
        if cause.device == event.device:
            continue
        number = next(numbers)
        for end, moment, extra in ((cause, "s", {}), (event, "f", {"bp": "e"})):
            place = {"pid": process[end.device], "tid": thread[end.device, end.stream], "ts": _microseconds(end.start)}
            yield {"ph": moment, "name": "lets start", "cat": "after", "id": number, **place, **extra}


def _counters(timeline: Timeline, process: dict[int, int]) -> Iterator[Entry]:
    # a viewer keeps the last value of a counter: a kind that a sample leaves out is written as 0
    seen = {kind for sample in timeline.memory for kind, _ in sample.live}
    kinds = [kind for kind in MemoryKind if kind in seen]
    for sample in timeline.memory:
        live = dict(sample.live)
        args = {kind.value: live.get(kind, 0) for kind in kinds}
        yield {
            "ph": "C",
            "name": "live bytes",
            "pid": process[sample.device],
            "ts": _microseconds(sample.time),
            "args": {**args, "total": sample.total},
        }


def _microseconds(time: float) -> float:
    """To the nearest eighth: exact in binary, and a whole number of nanoseconds."""
    return round(time * 8e6) / 8
