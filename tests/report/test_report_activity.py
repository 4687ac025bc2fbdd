from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from report_samples import timelines

from sennit.ir.program import Compute, Step
from sennit.ir.timeline import Timeline
from sennit.report import Comparison
from sennit.report.activity import Tone, groups


def test_1f1b_reads_as_its_schedule(comparison: Comparison) -> None:
    run = comparison.results[2].headline
    first, second = groups(run.timeline, run.program, resolution=1e-9)
    assert (first.label, first.lane) == ("devices 0-7", "stage0")
    assert (second.label, second.lane) == ("devices 8-15", "stage1")

    def schedule(group: int) -> str:
        row = (first, second)[group].rows[0]
        assert row.stream == "compute"
        return " ".join(f"{block.tone.name[0]}{block.microbatch}" for block in row.blocks)

    assert schedule(0) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert schedule(1) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert [row.stream for row in first.rows] == ["compute", "collective dp", "receive stage1", "send stage1"]
    assert [block.microbatch for block in first.rows[3].blocks] == [0, 1, 2, 3]


def test_devices_that_do_the_same_are_one_group(comparison: Comparison) -> None:
    run = comparison.results[0].headline
    (only,) = groups(run.timeline, run.program)
    assert only.devices == tuple(range(16))
    assert only.spread == 0
    late = tuple(
        replace(e, start=e.start + 5e-7, stop=e.stop + 5e-7) if e.device == 3 else e for e in run.timeline.events
    )
    (still,) = groups(replace(run.timeline, events=late), run.program)
    assert still.spread == pytest.approx(5e-7)
    late = tuple(
        replace(e, start=e.start + 5e-4, stop=e.stop + 5e-4) if e.device == 3 else e for e in run.timeline.events
    )
    apart = groups(replace(run.timeline, events=late), run.program)
    assert [group.label for group in apart] == ["devices 0-2,4-15", "device 3"]


def test_views_leave_no_event(comparison: Comparison) -> None:
    run = comparison.results[2].headline
    lanes = []
    for lane in run.program.lanes:
        steps: list[Step] = []
        for step in lane.steps:
            steps.append(step)
            if isinstance(step, Compute):
                view = replace(step.results[0], name=step.results[0].name + "_view")
                steps.append(replace(step, kind="aten.permute.default", results=(view,)))
        lanes.append(replace(lane, steps=tuple(steps)))
    program = replace(run.program, lanes=tuple(lanes))
    # names that say nothing about buffers, as a simulator may choose them
    named = tuple(replace(event, name=f"some {event.category.value}") for event in run.timeline.events)
    assert [
        [(block.tone, block.microbatch) for block in row.blocks]
        for group in groups(replace(run.timeline, events=named), program, resolution=1e-9)
        for row in group.rows
    ] == [
        [(block.tone, block.microbatch) for block in row.blocks]
        for group in groups(run.timeline, run.program, resolution=1e-9)
        for row in group.rows
    ]


def test_events_are_found_by_name_where_some_steps_left_none(comparison: Comparison) -> None:
    run = comparison.results[2].headline
    kept = tuple(replace(e, after=None) for e in run.timeline.events if "attention1" not in e.name)
    first, _ = groups(replace(run.timeline, events=kept), run.program, resolution=1e-3)
    assert [block.tone for block in first.rows[0].blocks][:2] == [Tone.FORWARD, Tone.FORWARD]
    assert [block.microbatch for block in first.rows[0].blocks][:2] == [0, 1]


def test_without_a_program_compute_is_just_compute(comparison: Comparison) -> None:
    (group,) = groups(comparison.results[1].headline.timeline)
    assert {block.tone for row in group.rows for block in row.blocks} == {Tone.COMPUTE, Tone.COLLECTIVE}


def test_a_picture_has_no_more_blocks_than_asked(comparison: Comparison) -> None:
    run = comparison.results[1].headline
    assert (
        sum(len(row.blocks) for group in groups(run.timeline, run.program, most_blocks=20) for row in group.rows) <= 20
    )


@given(timelines())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_blocks_lose_no_event_and_no_byte(timeline: Timeline) -> None:
    for resolution in (0.0, 1e-6, 1.0):
        found = groups(timeline, resolution=resolution)
        assert sorted(d for group in found for d in group.devices) == list(timeline.devices)
        for group in found:
            blocks = [block for row in group.rows for block in row.blocks]
            events = timeline.by_device()[group.devices[0]]
            assert sum(block.events for block in blocks) == len(events)
            assert sum(block.bytes for block in blocks) == sum(event.bytes for event in events)
            assert sum(block.busy for block in blocks) == pytest.approx(sum(e.stop - e.start for e in events))
            for row in group.rows:
                for before, after in zip(row.blocks, row.blocks[1:], strict=False):
                    assert before.stop <= after.start


def test_a_block_knows_how_much_of_it_are_gaps(comparison: Comparison) -> None:
    run = comparison.results[1].headline
    (group,) = groups(run.timeline, run.program, resolution=1e-3)
    forward, backward = group.rows[0].blocks
    assert forward.density == pytest.approx(16 * 12e-6 / (forward.stop - forward.start))
    assert backward.density < 0.5
    assert "16 events" in forward.describe()
