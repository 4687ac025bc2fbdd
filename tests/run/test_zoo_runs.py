"""Plans of the zoo on real ranks: three steps equal the unsplit model, dropout on."""

from __future__ import annotations

import functools
import importlib.util

import example_work
import pytest
import zoo_work as work
from parallelize_work import batches, gpt

from sennit.cluster.ranks_torch import GlooRanks
from sennit.testing.family_parity_torch import family_reference, family_run
from sennit.testing.training_torch import Record, adamw, train_eager

ROUNDING = 1e-12


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install sennit[hf]"
)
@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.parametrize(("name", "how"), [("gpt2", "co-shard"), ("mixtral batch", "experts")])
def test_three_steps_of_families(name: str, how: str, two: GlooRanks) -> None:
    reference = family_reference(name)
    for run in two.call(family_run, name, how):
        assert run.record.difference(reference) <= ROUNDING


@functools.cache
def reference() -> Record:
    model = gpt()
    return train_eager(model, batches(), adamw(model))


@pytest.mark.parametrize("plan", ["ZeRO-1", "pipeline, ZeRO-2", "tensor, ZeRO-3"])
def test_three_steps_with_adamw(plan: str, four: GlooRanks) -> None:
    for record in four.call(work.train, plan):
        assert record.difference(reference()) <= ROUNDING


def test_memory_falls(four: GlooRanks) -> None:
    """As measured, not only as predicted."""
    predicted, measured, standing = (
        dict(zip(plans, kinds, strict=True))
        for plans in [("data", "ZeRO-1", "ZeRO-2", "ZeRO-3", "co-shard")]
        for kinds in zip(*(four.call(work.memory, plan)[0] for plan in plans), strict=True)
    )
    assert standing["ZeRO-1"] == standing["ZeRO-2"] == standing["ZeRO-3"] <= standing["data"] / 4 + 100
    assert measured["ZeRO-2"] < measured["ZeRO-1"]
    assert measured["ZeRO-3"] < measured["ZeRO-2"]
    assert measured["co-shard"] < 0.9 * measured["data"]
    for plan, bytes_ in measured.items():
        assert 0.8 * predicted[plan] <= bytes_ <= 1.2 * predicted[plan], plan


def test_the_example_prints_every_plan() -> None:
    lines = example_work.run_example(0, "plan_zoo").splitlines()
    held = {line[:32].strip(): float(line.split()[-2]) for line in lines[1:]}
    assert len(held) == 10
    assert held["ZeRO-3"] < held["ZeRO-2"] < held["ZeRO-1"] < held["data parallel"]
    assert held["co-shard in 4"] < 0.7 * held["data parallel"]
