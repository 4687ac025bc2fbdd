"""Timelines: their text, the rules of what can have happened, and what is computed from them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from marked_text import without_mark
from strategies import timelines

from sennit.errors import ParseError, TimelineError
from sennit.ir.timeline import Category, Event, Memory, MemoryKind, Origin, Timeline

# device 0 computes 0-4 and 6-8, reduces 3-6, and is idle in 8-10; device 1 computes 0-10
TIMELINE = Timeline(
    "step",
    Origin.SIMULATED,
    (
        Event(0, "compute", Category.COMPUTE, "forward", 0.0, 4.0),
        Event(0, "collective dp", Category.COLLECTIVE, "all_reduce", 3.0, 6.0, bytes=96, after=0),
        Event(0, "compute", Category.COMPUTE, "backward", 6.0, 8.0, after=1),
        Event(1, "compute", Category.COMPUTE, "all", 0.0, 10.0, bytes=4),
    ),
    (
        Memory(0, 0.0, ((MemoryKind.PARAMETERS, 100), (MemoryKind.ACTIVATIONS, 20))),
        Memory(0, 4.0, ((MemoryKind.PARAMETERS, 100),)),
        Memory(1, 0.0, ((MemoryKind.STAGING, 7),)),
    ),
)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(timelines())
def test_timelines_print_and_parse_back(timeline: Timeline) -> None:
    assert Timeline.parse(str(timeline)) == timeline


@settings(derandomize=True, deadline=None, max_examples=80)
@given(timelines())
def test_time_is_busy_or_idle(timeline: Timeline) -> None:
    for device in timeline.devices:
        busy = timeline.busy(device, *Category)
        assert busy + timeline.idle(device) == pytest.approx(timeline.span)
        hidden = timeline.busy(device, Category.COMPUTE) + timeline.exposed(device)
        assert hidden == pytest.approx(busy)


def test_what_is_computed_from_a_timeline() -> None:
    assert TIMELINE.devices == (0, 1)
    assert TIMELINE.span == 10.0
    assert TIMELINE.busy(0, Category.COMPUTE) == 6.0
    assert TIMELINE.exposed(0) == 2.0
    assert TIMELINE.idle(0) == 2.0
    assert TIMELINE.wire_bytes(0) == 96
    assert TIMELINE.wire_bytes() == 100
    assert TIMELINE.peak_memory(0) == 120
    assert TIMELINE.peak_memory(2) == 0
    assert [event.name for event in TIMELINE.critical_path()] == ["all"]
    shorter = Timeline("step", Origin.MEASURED, TIMELINE.events[:3])
    assert [event.name for event in shorter.critical_path()] == ["forward", "all_reduce", "backward"]
    assert Timeline("none", Origin.MEASURED, ()).span == 0.0


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([Event(0, "compute", Category.COMPUTE, "a", 2.0, 1.0)], "runs from 2.0 to 1.0 s"),
        ([Event(0, "compute", Category.COMPUTE, "a", -1.0, 1.0)], "runs from -1.0 to 1.0 s"),
        (
            [
                Event(0, "compute", Category.COMPUTE, "a", 0.0, 2.0),
                Event(0, "compute", Category.COMPUTE, "b", 1.0, 3.0),
            ],
            "'a' .* and 'b' .* overlap",
        ),
        ([Event(0, "compute", Category.COMPUTE, "a", 0.0, 1.0, after=1)], "event 0 'a' follows event 1"),
    ],
)
def test_what_cannot_have_happened_is_refused(events: list[Event], fault: str) -> None:
    with pytest.raises(TimelineError, match=fault):
        Timeline("t", Origin.MEASURED, tuple(events))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("simulated", "^guessed", "one of simulated, measured"),
        ('"compute" compute "forward"', '"compute" ^idle "forward"', "one of compute, collective"),
        ("0.0 to 4.0", "0.0 ^till 4.0", "'to'"),
        ("bytes 96", "bytes ^many", "an integer"),
        ("  event 1", "  ^happening 1", "an event or a memory line"),
        ("staging=7", "staging=^x", "an integer"),
    ],
)
def test_faults_are_found_where_they_stand(old: str, new: str, what: str) -> None:
    """`^` marks the place. A word that can be read but is not known is reported behind it."""
    good = str(TIMELINE)
    assert good.count(old) == 1
    text, line, column = without_mark(good.replace(old, new))
    with pytest.raises(ParseError) as caught:
        Timeline.parse(text)
    assert what in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.startswith(f"line {line}, column {column}, at ")
