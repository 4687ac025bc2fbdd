"""`DataParallel` on GPUs, with NCCL between the ranks: DDP's parameters to the last bit, as on gloo."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sennit.cluster.ranks_torch import NcclRanks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(scope="module")
def ranks() -> Iterator[NcclRanks]:
    """Two, where there are two GPUs or NCCL lets two ranks share one; else one."""
    alone = torch.cuda.device_count() < 2 and torch.cuda.nccl.version() < (2, 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        with NcclRanks(1 if alone else 2, timeout=250.0) as running:
            yield running
        sys.modules.pop("strategies_for_tests", None)
        sys.modules.pop("ddp_cases_for_tests", None)


def test_any_strategy_trains_as_ddp_does(ranks: NcclRanks) -> None:
    from strategies_for_tests import compare

    for answers in ranks.call(compare, list(range(6))):
        assert {seed: worst for seed, (equal, worst) in answers.items() if not equal} == {}


def test_clipping_and_accumulation(ranks: NcclRanks) -> None:
    from strategies_for_tests import clip_and_accumulate

    for answers in ranks.call(clip_and_accumulate):
        assert answers == {"clip": pytest.approx(0.0, abs=1e-7), "no_sync": pytest.approx(0.0, abs=1e-7)}


def test_without_a_strategy_one_is_measured_and_searched_for(ranks: NcclRanks) -> None:
    from strategies_for_tests import measured

    answers = ranks.call(measured)
    assert all(equal for equal, _ in answers)
    assert len({text for _, text in answers}) == 1


def test_loops_that_people_write_end_in_ddps_bits(ranks: NcclRanks) -> None:
    from ddp_cases_for_tests import as_ddp

    for answers in ranks.call(as_ddp):
        assert {name: different for name, different in answers.items() if different} == {}


def test_a_model_in_bfloat16_ends_in_ddps_bits(ranks: NcclRanks) -> None:
    from ddp_cases_for_tests import narrow

    assert [different for answer in ranks.call(narrow) for different in answer] == []


def test_compiled_groups_train_as_ddp_does_within_rounding(ranks: NcclRanks) -> None:
    from ddp_cases_for_tests import compiled

    for groups, worst in ranks.call(compiled):
        assert groups > 1
        assert worst < 1e-4
