"""`DataParallel` on real gloo ranks: DDP's parameters to the last bit, whatever the strategy."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sennit.cluster.ranks_torch import GlooRanks

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        with GlooRanks(2) as running:
            yield running
        sys.modules.pop("strategies_for_tests", None)
        sys.modules.pop("ddp_cases_for_tests", None)


def test_any_strategy_trains_as_ddp_does(ranks: GlooRanks) -> None:
    from strategies_for_tests import compare

    for answers in ranks.call(compare, list(range(12))):
        assert {seed for seed, (equal, _) in answers.items() if not equal} == set()


def test_clipping_and_accumulation(ranks: GlooRanks) -> None:
    from strategies_for_tests import clip_and_accumulate

    for answers in ranks.call(clip_and_accumulate):
        assert answers == {"clip": pytest.approx(0.0, abs=1e-8), "no_sync": pytest.approx(0.0, abs=1e-8)}


def test_ranks_that_disagree_are_named(ranks: GlooRanks) -> None:
    from strategies_for_tests import disagree

    said = ranks.call(disagree)
    assert said == ["ranks [1] have another model or strategy than rank 0; nothing was run"] * 2


def test_misuse_is_told(ranks: GlooRanks) -> None:
    from strategies_for_tests import misuse

    for said in ranks.call(misuse):
        assert said[0] == "backward was called twice on one loss"
        assert said[1] == "argument 'tokens' is i64[2,8], but GPT was captured with i64[4,8]"
        assert said[2] == "optimizer.step takes no closure here"


def test_without_a_strategy_one_is_measured_and_searched_for(ranks: GlooRanks) -> None:
    from strategies_for_tests import measured

    (equal, mine), (also_equal, yours) = ranks.call(measured)
    assert equal
    assert also_equal
    assert mine == yours


@pytest.mark.parametrize("backend", [None, "sennit"])
def test_loops_that_people_write_end_in_ddps_bits(ranks: GlooRanks, backend: str | None) -> None:
    from ddp_cases_for_tests import as_ddp

    for answers in ranks.call(as_ddp, backend):
        assert {name: different for name, different in answers.items() if different} == {}


@pytest.mark.parametrize("backend", [None, "sennit"])
def test_rows_of_tables_travel_packed_and_end_in_ddps_bits(ranks: GlooRanks, backend: str | None) -> None:
    from ddp_cases_for_tests import tables

    for answers in ranks.call(tables, backend):
        assert {name: different for name, different in answers.items() if different} == {}


def test_a_step_tells_where_it_is(ranks: GlooRanks) -> None:
    from ddp_cases_for_tests import marked

    for models in ranks.call(marked):
        for stretches, count, made in models:
            starts, stops = [start for start, _ in stretches], [stop for _, stop in stretches]
            assert [*starts, count] == [0, *stops]  # one behind the other, over all operators
            assert made <= set(stops)


def test_frozen_and_unused_parameters(ranks: GlooRanks) -> None:
    from ddp_cases_for_tests import partly

    for said, different, results, still in ranks.call(partly):
        assert said == "2 of 6 parameters get no gradient from the loss: idle.weight, idle.bias"
        assert different == []
        assert results
        assert still


def test_what_cannot_be_is_refused(ranks: GlooRanks) -> None:
    from ddp_cases_for_tests import refused

    for mode, no_optimizer, algorithm, types in ranks.call(refused):
        assert mode == "BatchNorm2d is in evaluation mode and was not when the model was captured"
        assert no_optimizer.endswith("and there is no optimizer to do the updates there")
        assert algorithm.startswith("1 buckets of the strategy name an algorithm ('ring')")
        assert types.startswith("a bucket mixes element types: hidden.weight is torch.float32, head.weight")


def test_a_model_in_bfloat16_ends_in_ddps_bits(ranks: GlooRanks) -> None:
    from ddp_cases_for_tests import narrow

    assert [different for answer in ranks.call(narrow) for different in answer] == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling kernels for a CPU needs g++")
def test_compiled_groups_train_as_ddp_does_within_rounding(ranks: GlooRanks) -> None:
    from ddp_cases_for_tests import compiled

    for groups, worst in ranks.call(compiled):
        assert groups > 1
        assert worst < 1e-5


def test_buckets_travel_one_after_another(ranks: GlooRanks) -> None:
    """Two at once would share the link, and what the next step needs first would come late."""
    from ddp_cases_for_tests import out_of_turn

    assert ranks.call(out_of_turn) == [0, 0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are scheduled so on Linux only")
def test_all_threads_of_the_network_are_preferred_or_none(ranks: GlooRanks) -> None:
    """They yield to each other: one that is preferred alone takes the core, and a collective takes ten times as long."""
    from ddp_cases_for_tests import policies

    assert ranks.call(policies) == [1, 1]
