"""The rows of a simulated timeline are the sequence of their events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from sim_programs import programs

from sennit.cluster import load
from sennit.ir.program import Program
from sennit.ir.timeline import Category, Timeline
from sennit.sim import simulate


@settings(derandomize=True, deadline=None, max_examples=40)
@given(programs())
def test_rows_answer_as_the_events_that_they_stand_for(program: Program) -> None:
    rows = simulate(program, load("dgx-a100"))
    plain = Timeline(rows.name, rows.origin, tuple(rows.events), tuple(rows.memory))
    assert plain == rows
    assert hash(plain) == hash(rows)
    assert Timeline.parse(str(rows)) == rows
    assert [rows.events[i] for i in range(-len(rows.events), 0)] == list(plain.events)
    assert rows.events[1:3] == plain.events[1:3]
    assert (rows.span, rows.devices, rows.wire_bytes()) == (plain.span, plain.devices, plain.wire_bytes())
    assert [e.stop for e in rows.critical_path()] == [e.stop for e in plain.critical_path()]
    for device in rows.devices:
        (like,) = [other for other in rows.unlike(rows.devices) if rows.unlike((other, device)) == (other,)]
        assert rows.exposed(like) == rows.exposed(device)
        for category in Category:
            assert rows.busy(device, category) == plain.busy(device, category)
        assert rows.exposed(device) == plain.exposed(device)
        assert rows.wire_bytes(device) == plain.wire_bytes(device)
        assert rows.peak_memory(device) == plain.peak_memory(device)


def test_an_event_beyond_the_last_is_an_error() -> None:
    program = Program.parse(
        'program "p" { mesh m0 = x=1 lane a on 0 { input %x : f32[4] of %x on m0 "x" forward %y : f32[4] of %y on m0 = aten.gelu.default(%x) } }'
    )
    events = simulate(program, load("dgx-a100")).events
    assert len(events) == 1
    with pytest.raises(IndexError, match="event 1 of 1"):
        events[1]
