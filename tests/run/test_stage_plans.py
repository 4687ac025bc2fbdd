"""Stages that share devices, on gloo processes: an unchanged training loop, evaluation, state, checkpoints under other
plans.
"""

from __future__ import annotations

import functools

import parallelize_models as models
import parallelize_work as work
import pytest
import torch
from parallelize_work import batches, gpt
from stage_plans import STAGE_PLANS

from sennit.cluster.ranks_torch import GlooRanks
from sennit.testing.eager_torch import comparable
from sennit.testing.training_torch import Record, adamw, sgd, train_eager

ROUNDING = 1e-12


@functools.cache
def reference() -> Record:
    model = gpt()
    return train_eager(model, batches(), adamw(model))


@pytest.mark.parametrize("plan", STAGE_PLANS)
def test_three_steps(plan: str, four: GlooRanks) -> None:
    """Losses, norms, gradients and parameters of three steps with clipping equal those of the unsplit model."""
    answers = four.call(work.train_shared, plan)
    for record, _, _ in answers:
        assert record.difference(reference()) <= ROUNDING
    first = answers[0][0]
    assert all(torch.equal(first.state[path], record.state[path]) for record, _, _ in answers for path in first.state)
    names = [set(names) for _, names, _ in answers]
    assert set.union(*names) == {name for name, _ in gpt().named_parameters()}
    if plan == "interlaced":  # the embedding is one tensor over all devices, the blocks are on their own
        assert all("tokens.weight" in here for here in names)
        assert ["blocks.0.up.weight" in here for here in names] == [True, True, False, False]
        assert "m0 = rank.on(0)" in answers[0][2]
        assert "rank.exchange(" in answers[0][2]


@pytest.mark.parametrize("plan", ["interlaced", "unequal"])
def test_evaluation_and_state(plan: str, four: GlooRanks) -> None:
    model, (args, _) = gpt(), batches()[0]
    with comparable():
        before = model(*args)
        before.backward()
    sgd(model).step()
    with comparable():
        after = model(*args)
    for found_before, found_after, full, single in four.call(work.evaluate, plan):
        assert abs(found_before - before.item()) <= ROUNDING
        assert abs(found_after - after.item()) <= ROUNDING
        for name, value in model.state_dict().items():
            assert torch.allclose(full[name], value, rtol=1e-11, atol=1e-13), name
            assert torch.equal(full[name], single[name])


def test_checkpoints_move_between_plans(four: GlooRanks, two: GlooRanks, tmp_path) -> None:
    saved = {plan: four.call(work.save, plan, str(tmp_path / plan)) for plan in ("interlaced", "chimera")}
    for ranks, plan, origin in [
        (four, "chimera", "interlaced"),
        (four, "interlaced", "chimera"),
        (two, "two devices, tensor", "interlaced"),
    ]:
        for record, steps in ranks.call(work.load, plan, str(tmp_path / origin)):
            assert steps == 2
            assert record.difference(saved[origin][0]) <= ROUNDING


def test_memory(four: GlooRanks) -> None:
    for _, predicted, measured, parameters in four.call(work.memory, "interlaced"):
        assert parameters > 0
        assert 0.7 * predicted <= measured <= 1.3 * predicted


@pytest.mark.parametrize("mesh", ["pp=2;mb=2", "dp=2;mb=2"])
def test_results_of_micro_batches_come_whole(mesh: str, two: GlooRanks) -> None:
    expected = models.two_losses()(models.batch())["prediction"]
    for found in two.call(models.results_of_microbatches, mesh):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
