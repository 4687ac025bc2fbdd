"""`sennit.parallelize` on models of other kinds: nested arguments, several losses, master weights, loss scaling, moved
parameters.
"""

from __future__ import annotations

import parallelize_models as models
import pytest
import torch
import torch.distributed as dist
from parallelize_models import TwoLosses, batch, two_losses
from torch import Tensor

from sennit.cluster.ranks_torch import GlooRanks

ROUNDING = 1e-12


def close(found: dict[str, Tensor], model: torch.nn.Module, factor: float = 1.0, rtol: float = 1e-11) -> None:
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], factor * gradient, rtol=rtol, atol=rtol * float(gradient.abs().max())), name


def test_nested_arguments_and_several_losses(two: GlooRanks) -> None:
    model = two_losses()
    expected = model(batch(), weight=0.5)
    (expected["one"] + expected["two"]).backward()
    for made, gradients, said in two.call(models.structures):
        assert all(torch.allclose(made[key], value, rtol=1e-12) for key, value in expected.items())
        close(gradients, model, 3.0)
        assert said["unequal"].startswith("the losses have different upstream gradients (one: 1, two: 2)")
        assert said["number"].startswith("argument 'weight' is 0.25, but TwoLosses was captured with 0.5")


def test_one_of_two_losses(two: GlooRanks) -> None:
    model = two_losses()
    model(batch())["two"].backward()
    for gradients in two.call(models.one_of_two_losses):
        assert not gradients.pop("first.weight").any()
        assert not gradients.pop("first.bias").any()
        close(gradients, model)


@pytest.mark.parametrize("how", ["dtype", "autocast"])
def test_bfloat16(how: str, two: GlooRanks) -> None:
    torch.manual_seed(1)
    model = TwoLosses()
    expected = model(batch(dtype=torch.float32))
    (expected["one"] + expected["two"]).backward()
    for loss, gradients in two.call(models.master_weights if how == "dtype" else models.autocast):
        assert torch.allclose(loss.float(), expected["one"], rtol=0.02)
        close(gradients, model, rtol=0.05)
        # it did compute in bfloat16
        assert not torch.allclose(gradients["first.weight"], model.first.weight.grad, rtol=1e-4, atol=0)


def test_loss_scaling_over_stages(two: GlooRanks) -> None:
    model = two_losses()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        made = model(batch())
        (made["one"] + made["two"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for scales, moved, state in two.call(models.scaled):
        assert scales == [1024.0, 512.0, 512.0]
        assert moved == [True, False, True]
        for name, value in model.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-11, atol=1e-13), name


def test_a_model_without_values(two: GlooRanks) -> None:
    for state in two.call(models.without_values):
        assert all(torch.equal(state[name], value) for name, value in two_losses().state_dict().items())


def test_other_shapes(two: GlooRanks) -> None:
    expected = [two_losses()(batch(rows))["one"].item() for rows in (8, 4, 8)]
    for found in two.call(models.other_shapes):
        assert found == pytest.approx(expected, rel=ROUNDING)


def test_parameters_move_for_evaluation(four: GlooRanks) -> None:
    expected = two_losses()(batch())["one"].item()
    for trained, evaluated in four.call(models.moved_for_evaluation):
        assert trained == pytest.approx(expected, rel=ROUNDING)
        assert evaluated == pytest.approx(expected, rel=ROUNDING)


def test_alone() -> None:
    assert not dist.is_initialized()
    try:
        found, state = models.alone()
    finally:
        dist.destroy_process_group()
    assert found == pytest.approx(two_losses()(batch())["one"].item(), rel=ROUNDING)
    assert set(state) == set(two_losses().state_dict())
