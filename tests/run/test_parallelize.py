"""`sennit.parallelize` against the unsplit model: an unchanged loop, its state, its checkpoints, and its errors."""

from __future__ import annotations

import functools
import sys

import parallelize_work as work
import pytest
import torch
from parallelize_work import batches, gpt
from torch import Tensor

from sennit.cluster.ranks_torch import GlooRanks
from sennit.testing.eager_torch import comparable
from sennit.testing.training_torch import Record, adamw, sgd, train_eager

ROUNDING = 1e-12


@functools.cache
def reference(optimizer: str) -> Record:
    model = gpt()
    return train_eager(model, batches(), {"adamw": adamw, "sgd": sgd}[optimizer](model))


@pytest.mark.parametrize(("plan", "optimizer"), [("data", "adamw"), ("tensor", "adamw"), ("pipeline", "sgd")])
def test_three_steps(plan: str, optimizer: str, four: GlooRanks) -> None:
    answers = four.call(work.train_gpt, plan, optimizer)
    for record, _, _ in answers:
        assert record.difference(reference(optimizer)) <= ROUNDING
    # replicas agree to the last bit
    first = answers[0][0]
    assert all(torch.equal(first.state[path], record.state[path]) for record, _, _ in answers for path in first.state)
    everything = [name for name, _ in gpt().named_parameters()]
    names = [names for _, names, _ in answers]
    if plan == "pipeline":
        assert "blocks.0.up.weight" in names[0]
        assert "blocks.0.up.weight" not in names[3]
        assert "tokens.weight" in names[0]  # tied to the head, which is on the last stage
        assert "tokens.weight" in names[3]
        assert set(names[0]) | set(names[3]) == set(everything)
    else:
        assert names[0] == everything


@pytest.mark.parametrize("plan", ["tensor", "pipeline"])
def test_accumulation(plan: str, four: GlooRanks) -> None:
    model, calls = gpt(), batches()[:2]
    with comparable():
        for args, _ in calls:
            (model(*args) / 2).backward()
    for found in four.call(work.accumulate, plan):
        assert set(found) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            assert torch.allclose(found[name], parameter.grad, rtol=1e-11, atol=1e-13), name


@pytest.mark.skipif(sys.platform != "linux", reason="a child compiles on Linux alone")
def test_compiled_in_a_child_and_here(four: GlooRanks) -> None:
    """The same bits, the same program and source to look at, the same bookkeeping; and nothing is left of the child."""
    for found in four.call(work.both_ways):
        (gradients, seen, left), (here, seen_here, left_here) = found["child"], found["here"]
        assert gradients
        assert all(torch.equal(gradients[path], here[path]) for path in here)
        assert seen == seen_here
        assert left == left_here
        assert found["children"] == 0


def test_mistakes(four: GlooRanks) -> None:
    for said in four.call(work.misuse):
        assert said["second backward"].startswith("backward was called a second time on one forward call")
        assert said["changed shape"].startswith("argument 'tokens' is i64[4,12], but GPT was captured with i64[8,12]")
        assert said["changed type"].startswith("argument 'tokens' is i32[8,12], but GPT was captured with i64[8,12]")
        assert said["wrong device"].startswith("argument 'tokens' is on meta, and the model on cpu")
        assert said["part of the model"].startswith("a part of a parallel model cannot be called alone")
        assert "unexpected: nonsense" in said["unknown name"]
        assert said["wrong shape"].startswith("norm.weight has shape [3], and the model's is [32]")


def test_what_parallelize_refuses(four: GlooRanks) -> None:
    for rank, said in enumerate(four.call(work.refused)):
        assert said["world"].startswith("mesh dp=8 has 8 devices (0-7), and there are 4 ranks")
        assert said["differs"].startswith("the ranks did not compile the model alike: ranks 2-3 differ from rank 0")
        failed = "input 'tokens.weight' of shape"
        expected = failed if rank == 1 else f"rank 1 could not compile the model: PlanError: {failed}"
        assert said["fails"].startswith(expected)
        divided = "integer division or modulo by zero"
        expected = divided if rank == 3 else f"rank 3 could not compile the model: ZeroDivisionError: {divided}"
        assert said["bug"].startswith(expected)
        assert said["devices"].startswith("the model is on 2 devices: cpu, meta")
        assert said["result"].startswith("the model returns no 'logits'")


@pytest.mark.parametrize("plan", ["tensor", "pipeline"])
def test_evaluation_and_state(plan: str, four: GlooRanks) -> None:
    model = gpt()
    args = batches()[0][0]
    with comparable():
        before = model(*args)
        before.backward()
    sgd(model).step()
    with comparable():
        after = model(*args)
    for found_before, found_after, full, single in four.call(work.evaluate, plan):
        assert abs(found_before - before.item()) <= ROUNDING
        assert abs(found_after - after.item()) <= ROUNDING
        expected: dict[str, Tensor] = model.state_dict()
        assert set(full) == set(expected) == set(single)
        for name, value in expected.items():
            assert torch.allclose(full[name], value, rtol=1e-11, atol=1e-13), name
            assert torch.equal(full[name], single[name])


def test_each_rank_is_given_its_part(four: GlooRanks) -> None:
    model, (args, _) = gpt(), batches()[0]
    with comparable():
        loss = model(*args)
    assert all(abs(found - loss.item()) <= ROUNDING for found in four.call(work.parts_of_the_batch))


def test_checkpoints_move_between_plans(four: GlooRanks, two: GlooRanks, tmp_path) -> None:
    saved = {plan: four.call(work.save, plan, str(tmp_path / plan)) for plan in ("tensor", "pipeline")}
    for record in saved["pipeline"]:
        assert record.difference(saved["tensor"][0]) <= ROUNDING
    loads = [
        (four, "pipeline", "tensor"),  # strided pieces into stages
        (four, "tensor", "pipeline"),
        (two, "two devices, pipeline", "tensor"),
        (two, "two devices, tensor", "pipeline"),
    ]
    for ranks, plan, origin in loads:
        for record, steps in ranks.call(work.load, plan, str(tmp_path / origin)):
            assert steps == 2
            assert record.difference(saved[origin][0]) <= ROUNDING


@pytest.mark.parametrize("plan", ["data", "pipeline"])
def test_memory(plan: str, four: GlooRanks) -> None:
    for text, predicted, measured, parameters in four.call(work.memory, plan):
        assert text.splitlines()[0].endswith("at the peak      at most     measured")
        assert parameters > 0
        assert 0.7 * predicted <= measured <= 1.3 * predicted
