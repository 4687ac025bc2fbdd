from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sennit.ir.timeline import Category, Event, Origin, Timeline
from sennit.report import Comparison, comparison_svg, timeline_svg
from sennit.report.canvas import axis_for
from sennit.report.charts import breakdown_svg, memory_svg, worst_device

SVG = "{http://www.w3.org/2000/svg}"


def letters(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def test_the_overview_names_every_plan_and_marks_one(comparison: Comparison) -> None:
    text = comparison_svg(comparison)
    picture = ElementTree.fromstring(text)
    names = letters(picture)
    for result in comparison.results:
        assert any(result.name in name for name in names)
    assert [name for name in names if "★" in name] == ["★ data parallel (best)"]
    assert names.count("2.24 ms simulated") == 1
    # it brings its own ground for both colour schemes and loads nothing
    assert "prefers-color-scheme: dark" in text
    assert 'class="ground"' in text
    assert text.count("http") == 1
    assert "href" not in text


def test_bars_lie_where_their_time_is(comparison: Comparison) -> None:
    picture = ElementTree.fromstring(
        timeline_svg(comparison.results[0].headline.timeline, comparison.results[0].headline.program)
    )
    forward = next(e for e in picture.iter(f"{SVG}rect") if "forward" in e.attrib["class"].split())
    backward = next(e for e in picture.iter(f"{SVG}rect") if "backward" in e.attrib["class"].split())
    span = comparison.results[0].headline.step
    assert float(forward.attrib["x"].rstrip("%")) == 0
    assert float(forward.attrib["width"].rstrip("%")) == pytest.approx(16 * 40e-6 / span * 100, rel=1e-3)
    assert float(backward.attrib["x"].rstrip("%")) == pytest.approx(16 * 40e-6 / span * 100, rel=1e-3)
    for rect in picture.iter(f"{SVG}rect"):
        if rect.attrib["x"].endswith("%"):
            assert float(rect.attrib["x"].rstrip("%")) + float(rect.attrib["width"].rstrip("%")) <= 100.2


def test_names_that_look_like_markup_are_letters(comparison: Comparison) -> None:
    event = Event(0, "<compute>", Category.COMPUTE, 'a<b>&"c"', 0.0, 1e-3)
    text = timeline_svg(Timeline("<script>", Origin.MEASURED, (event,)))
    assert any("<compute>" in name for name in letters(ElementTree.fromstring(text)))
    evil = replace(comparison.results[0], name="<script>alert(1)</script>")
    assert "<script" not in comparison_svg(replace(comparison, results=(evil,)))


def test_a_timeline_of_nothing_is_a_picture() -> None:
    ElementTree.fromstring(timeline_svg(Timeline("empty", Origin.SIMULATED, ())))


@pytest.mark.parametrize("span", [3e-7, 1e-6, 7.3e-5, 9.99e-4, 1e-3, 0.0421, 0.999, 1.0, 37.0])
def test_an_axis_has_few_round_ticks(span: float) -> None:
    axis = axis_for(span)
    assert 2 <= len(axis.ticks) <= 9
    assert axis.ticks[0] == 0
    assert max(axis.ticks) < span
    assert len({axis.label(tick) for tick in axis.ticks}) == len(axis.ticks)


def test_the_memory_chart_shows_the_worst_device_and_its_peak(comparison: Comparison) -> None:
    timeline = comparison.results[2].headline.timeline
    device = worst_device(timeline)
    assert device is not None
    assert timeline.peak_memory(device) == max(timeline.peak_memory(d) for d in timeline.devices)
    text = memory_svg(timeline)
    assert "peak 984 MiB" in text
    assert memory_svg(Timeline("none", Origin.SIMULATED, ())) == ""
    bars = breakdown_svg([(result.name, result.headline) for result in comparison.results], "data parallel")
    assert bars.count("★") == 1
    assert "idle 614 us" in bars


def test_what_is_mostly_gaps_is_pale() -> None:
    events = tuple(Event(0, "compute", Category.COMPUTE, "mm", i * 1e-6, i * 1e-6 + 0.25e-6) for i in range(10_000))
    picture = ElementTree.fromstring(timeline_svg(Timeline("sparse", Origin.SIMULATED, events)))
    (block,) = (e for e in picture.iter(f"{SVG}rect") if "block" in e.attrib["class"].split())
    assert block.attrib["style"] == "fill-opacity:0.25"
