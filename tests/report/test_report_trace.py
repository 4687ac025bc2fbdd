from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from report_samples import timelines

from sennit.ir.timeline import Category, Event, Memory, MemoryKind, Origin, Timeline
from sennit.report import Comparison, trace_events, write_trace


def tracks(entries: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X":
            found[entry["pid"], entry["tid"]].append(entry)
    return found


def assert_no_overlap(entries: list[dict[str, Any]]) -> None:
    for events in tracks(entries).values():
        # as a viewer holds them: whole nanoseconds, got by cutting and by rounding
        for to_nanoseconds in (lambda us: int(us * 1000), lambda us: round(us * 1000)):
            end = 0
            for event in sorted(events, key=lambda e: (e["ts"], e["dur"])):
                start = to_nanoseconds(event["ts"])
                assert start >= end, event
                end = start + to_nanoseconds(event["dur"])


def test_the_file_reads_back_whole(comparison: Comparison, tmp_path: Path) -> None:
    runs = [run.timeline for result in comparison.results for run in result.simulated]
    path = tmp_path / "new" / "trace.json.gz"
    write_trace(path, runs)
    document = json.loads(gzip.decompress(path.read_bytes()))
    entries = document["traceEvents"]
    slices = [entry for entry in entries if entry["ph"] == "X"]
    assert len(slices) == sum(len(timeline.events) for timeline in runs)
    assert_no_overlap(entries)
    processes = [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"]
    assert len(processes) == len(set(processes)) == 3 * 16 + 3 * 4
    assert "pipeline 1F1B on 2x8 H100 (simulated): device 15" in processes
    assert {entry["cat"] for entry in slices} == {category.value for category in Category}
    assert sum(entry.get("args", {}).get("bytes", 0) for entry in slices) == sum(t.wire_bytes() for t in runs)
    # threads belong to one process each, and every track has a name
    assert len({tid for _, tid in tracks(entries)}) == len(tracks(entries))
    named = {(entry["pid"], entry["tid"]) for entry in entries if entry["name"] == "thread_name"}
    assert named == set(tracks(entries))
    assert [p.name for p in path.parent.iterdir()] == ["trace.json.gz"]


def test_the_same_timelines_give_the_same_bytes(comparison: Comparison, tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_trace(tmp_path / name, [comparison.best.headline.timeline])
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_arrows_go_from_a_send_to_its_receive(comparison: Comparison) -> None:
    entries: list[dict[str, Any]] = list(trace_events([comparison.results[2].headline.timeline]))
    starts = {entry["id"]: entry for entry in entries if entry["ph"] == "s"}
    ends = {entry["id"]: entry for entry in entries if entry["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 8 * 8  # eight transfers between eight pairs of devices
    at = {(e["pid"], e["tid"], e["ts"]): e["cat"] for e in entries if e["ph"] == "X"}
    for number, start in starts.items():
        assert at[start["pid"], start["tid"], start["ts"]] == "send"
        assert at[ends[number]["pid"], ends[number]["tid"], ends[number]["ts"]] == "receive"


def test_a_counter_falls_to_zero_when_a_kind_is_gone() -> None:
    memory = (
        Memory(0, 0.0, ((MemoryKind.PARAMETERS, 100), (MemoryKind.STAGING, 7))),
        Memory(0, 1e-3, ((MemoryKind.PARAMETERS, 100),)),
    )
    event = Event(0, "compute", Category.COMPUTE, "mm", 0.0, 2e-3)
    entries = list(trace_events([Timeline("t", Origin.MEASURED, (event,), memory)]))
    counters = [(entry["ts"], entry["args"]) for entry in entries if entry["ph"] == "C"]
    assert counters == [
        (0.0, {"parameters": 100, "staging": 7, "total": 107}),
        (1000.0, {"parameters": 100, "staging": 0, "total": 100}),
    ]


@given(timelines())
@settings(derandomize=True, deadline=None, max_examples=80)
def test_no_overlap_whatever_the_times(timeline: Timeline) -> None:
    assert_no_overlap(list(trace_events([timeline, timeline])))
