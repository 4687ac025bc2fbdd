"""Training scripts as people write them for DDP: DDP's bits with waits in the next step, or an error that says what to
change."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sennit.cluster.ranks_torch import GlooRanks
from sennit.errors import RunError
from sennit.fuse.tune_torch import Tuning

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        with GlooRanks(2) as running:
            yield running
        sys.modules.pop("habits_for_tests", None)
        sys.modules.pop("ddp_cases_for_tests", None)


def test_what_reads_gradients_and_parameters_finds_ddps(ranks: GlooRanks) -> None:
    from habits_for_tests import as_ddp

    for answers in ranks.call(as_ddp):
        assert {name: different for name, different in answers.items() if different} == {}


def test_torchs_lstm_trains_as_under_ddp_within_rounding(ranks: GlooRanks) -> None:
    from habits_for_tests import recurrent

    assert max(ranks.call(recurrent)) < 1e-6


def test_autocast_around_the_call_is_that_of_the_capture(ranks: GlooRanks) -> None:
    from habits_for_tests import autocast

    for different, said in ranks.call(autocast):
        assert different == []
        assert said == "the model is called without autocast, and was captured with autocast to torch.bfloat16"


def test_what_a_step_would_leave_out_is_refused(ranks: GlooRanks) -> None:
    from habits_for_tests import refused

    for said in ranks.call(refused):
        assert said == [
            "the sample is a list",
            "the strategy is a str",
            "the model is in evaluation mode",
            "6 of 6 parameters are on the meta device: first.weight, first.bias, second.weight, second.bias, head.weight",
            "1 of 6 parameters have hooks, which would not run: first.weight",
            "the optimizer has none of the model's 6 trained parameters",
            "the argument 'images' requires a gradient, and none comes to it here: only the model's parameters train",
            "parameter 'first.weight' does not train now, and did when the model was captured",
        ]


def test_a_parameter_in_the_place_of_one_that_was_captured_is_refused(ranks: GlooRanks) -> None:
    from habits_for_tests import exchanged

    other = "is not the one that was captured, and would"
    for said, still in ranks.call(exchanged):
        assert said == [
            f"parameter 'first.bias' {other} get no gradient",
            f"parameter 'third.weight' {other} get no gradient",
            f"parameter 'head.bias' {other} get no gradient",
            f"parameter 'head.weight' {other} get no gradient",
            "parameter 'frozen.weight' trains now, and did not when the model was captured",
            f"module 'second' {other} not be called",
        ]
        assert still == [""] * 4


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"turns": -1}, "turns is -1"),
        ({"turns": 2.5}, "turns is 2.5"),
        ({"steps": 0}, "steps is 0"),
        ({"most": 0}, "most is 0"),
        ({"sizes": ()}, r"sizes is \(\)"),
        ({"sizes": (1 << 20, 0)}, r"sizes is \(1048576, 0\)"),
        ({"sizes": 1 << 20}, "sizes is 1048576"),
        ({"sample_bytes": -1}, "sample_bytes is -1"),
        ({"compilations": -1}, "compilations is -1"),
    ],
)
def test_tuning_with_senseless_numbers_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(RunError, match=what):
        Tuning(**given)


def test_only_the_loss_trains_and_a_gradient_of_another_result_is_refused(ranks: GlooRanks) -> None:
    from habits_for_tests import results

    for asks, different, said in ranks.call(results):
        assert asks == [(True, True)] * 4 + [(False, False)] * 6
        assert different == []
        assert said == [
            *(
                f"the backward pass came to the result {name!r}, and only the loss that the model returns trains here"
                for name in ("logits", "all.0", "all.1.0")
            ),
            "",
        ]


def test_hooks_schedulers_and_copies(ranks: GlooRanks) -> None:
    from habits_for_tests import beside

    for calls, warned, equal, said in ranks.call(beside):
        assert calls == 2
        assert warned == []
        assert equal
        assert said == "the gradient of 'first.weight' is read after it is gone"


@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_all_ranks_is_from_when_all_have_ended_the_one_before_until_all_have_ended_it(
    ranks: GlooRanks, seed: int
) -> None:
    from habits_for_tests import together

    draw = random.Random(seed)
    own = [[draw.uniform(0.1, 2.0) for _ in range(7)] for _ in range(2)]
    ends = [max(sum(of_rank[: step + 1]) for of_rank in own) for step in range(7)]
    for found in ranks.call(together, own):
        assert found == pytest.approx([end - before for before, end in pairwise([0.0, *ends])])
        assert sum(found) == pytest.approx(max(map(sum, own)))


def test_ranks_that_are_ahead_in_turns_take_no_longer_together(ranks: GlooRanks) -> None:
    from habits_for_tests import together

    for found in ranks.call(together, [[1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]]):
        assert found == [2.0, 1.0, 2.0, 1.0]  # 6 seconds; the greater of each step would be 8
