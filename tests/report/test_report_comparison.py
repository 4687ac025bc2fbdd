from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from report_samples import timelines

from sennit.errors import PlanError, RunError
from sennit.ir.timeline import Category, Timeline
from sennit.report import Breakdown, Comparison, MeasuredRun, PlanResult, Verdict


@given(timelines())
@settings(derandomize=True, deadline=None, max_examples=80)
def test_breakdown_is_the_mean_of_the_timeline_and_sums_to_the_step(timeline: Timeline) -> None:
    parts = Breakdown.of(timeline)
    count = max(1, len(timeline.devices))
    assert parts.compute == pytest.approx(sum(timeline.busy(d, Category.COMPUTE) for d in timeline.devices) / count)
    exposed = sum(timeline.exposed(device) for device in timeline.devices) / count
    assert parts.exposed == pytest.approx(exposed, abs=1e-12)
    assert parts.idle == pytest.approx(sum(timeline.idle(d) for d in timeline.devices) / count, abs=1e-12)
    assert parts.step == pytest.approx(timeline.span)


def test_best_has_the_least_simulated_step_on_the_headline_cluster(comparison: Comparison) -> None:
    steps = {result.name: result.headline.step for result in comparison.results}
    assert comparison.best.name == min(steps, key=lambda name: steps[name]) == "data parallel"
    assert comparison.cluster == "2x8 H100"
    assert [result.name for result in comparison.ranked] == ["data parallel", "tensor parallel", "pipeline 1F1B"]


def test_why_names_what_helps_and_what_hurts(comparison: Comparison) -> None:
    assert comparison.why() == (
        "data parallel has the shortest simulated step on 2x8 H100, 2.24 ms: 256 us (10%) less than tensor parallel, "
        "because its devices spend 320 us in exposed communication on average instead of 1.92 ms, "
        "although they spend 1.92 ms computing instead of 576 us."
    )


def test_why_against_a_pipeline_names_the_bubble(comparison: Comparison) -> None:
    data, _, pipe = comparison.results
    assert (
        "because its devices spend 0 s idle on average instead of 614 us"
        in replace(comparison, results=(pipe, data)).why()
    )


def test_why_with_one_plan_with_equal_plans_and_with_a_wrong_one(comparison: Comparison) -> None:
    data = comparison.results[0]
    assert replace(comparison, results=(data,)).why().endswith("2.24 ms, and is the only plan compared.")
    twin = replace(data, name="twin")
    assert replace(comparison, results=(data, twin)).why().endswith("2.24 ms, the same as twin.")
    assert data.measured is not None
    wrong = replace(data, measured=replace(data.measured, max_difference=0.5))
    assert (
        replace(comparison, results=(wrong,))
        .why()
        .endswith("BUT its measured run does not equal the single-device run.")
    )


@pytest.mark.parametrize(
    ("difference", "bitwise", "verdict"),
    [
        (0.0, 9, Verdict.BITWISE),
        (0.0, 8, Verdict.ROUNDING),  # 0.0 and -0.0 differ by nothing, and in a bit
        (1e-6, 3, Verdict.ROUNDING),
        (1e-5, 3, Verdict.ROUNDING),
        (2e-5, 3, Verdict.DIFFERENT),
        (float("nan"), 3, Verdict.DIFFERENT),
    ],
)
def test_verdict(difference: float, bitwise: int, verdict: Verdict) -> None:
    assert MeasuredRun(4, "gloo", (1.0,), difference, "loss", 1e-5, bitwise, 9).verdict is verdict


def test_measured_step_is_the_median_and_the_error_has_a_sign(comparison: Comparison) -> None:
    result = comparison.results[0]
    assert result.measured is not None
    assert result.predicted is not None
    assert result.measured.step == 0.062
    assert result.error == pytest.approx((result.predicted.step - 0.062) / 0.062)
    assert replace(result, predicted=None).error is None
    assert replace(result, measured=None).error is None


def test_what_cannot_be_compared_is_refused(comparison: Comparison) -> None:
    with pytest.raises(PlanError, match="no plan to compare"):
        replace(comparison, results=())
    with pytest.raises(PlanError, match="was not simulated"):
        PlanResult("none", "", ())
    first, second, _ = comparison.results
    turned = replace(second, simulated=second.simulated[::-1])
    with pytest.raises(PlanError, match=r"different clusters: 2x8 H100, laptop"):
        replace(comparison, results=(first, turned))
    with pytest.raises(RunError, match="no measured step"):
        MeasuredRun(4, "gloo", (), 0.0, "loss", 1e-5, 9, 9)
