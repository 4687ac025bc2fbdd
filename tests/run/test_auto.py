"""`plan="auto"` on real ranks: three optimizer steps under whatever the search chose equal the unsplit model."""

from __future__ import annotations

from dataclasses import replace

import auto_work as work
import pytest
from parallelize_work import batches, gpt

from sennit.capture import capture
from sennit.cluster import load
from sennit.cluster.ranks_torch import GlooRanks
from sennit.errors import SennitError
from sennit.plan.search import Space, search
from sennit.testing.training_torch import Record, adamw, train_eager

ROUNDING = 1e-12


@pytest.fixture(scope="module")
def reference() -> Record:
    model = gpt()
    return train_eager(model, batches(), adamw(model))


def test_whatever_the_search_finds(two: GlooRanks, reference: Record) -> None:
    for record, _ in two.call(work.searched, None, {}):
        assert record.difference(reference) <= ROUNDING


def test_pins_reach_the_ranks(four: GlooRanks, reference: Record) -> None:
    pins = {
        "*": {"tp": 1, "pp": 2, "dp": 2, "size": 1, "zero": 2, "schedule": "zero-bubble-h1"},
        "blocks.0.*": {"co": 2},
        "blocks.1.*": {"keep": "none", "stage": 1},
    }
    for record, name in four.call(work.searched, "laptop:4", pins):
        assert "pp=2, dp=2, zero-bubble-h1, 4 micro-batches of 1, ZeRO-2" in name
        assert record.difference(reference) <= ROUNDING


def test_a_choice_that_was_saved(two: GlooRanks, reference: Record) -> None:
    graph = capture(gpt(), batches()[0][0])
    pins = {"*": {"pp": 2, "size": 2, "schedule": "interlaced"}}
    space = Space(tps=(1,), sizes=(2,))
    text = str(search(graph, load("laptop:2"), space=space, optimizer="adam", pins=pins).choice)
    for record in two.call(work.read, text):
        assert record.difference(reference) <= ROUNDING


def test_stages_with_different_numbers_of_replicas(four: GlooRanks, reference: Record) -> None:
    """Three stages on two ranks, one and one: the embedding, a block, a block and the head."""
    graph = capture(gpt(), batches()[0][0])
    pins = {"*": {"pp": 2, "size": 2, "schedule": "1f1b"}}
    choice = search(graph, load("laptop:2"), space=Space(tps=(1,), sizes=(2,)), optimizer="adam", pins=pins).choice
    first, second, *rest = (part for stage in choice.stages for part in stage)
    unequal = replace(choice, pp=3, lanes=(2, 1, 1), stages=((first,), (second,), tuple(rest)))
    for record in four.call(work.read, str(unequal)):
        assert record.difference(reference) <= ROUNDING


def test_a_contradiction_is_an_error_on_every_rank(two: GlooRanks) -> None:
    with pytest.raises(SennitError, match="contradict each other"):
        two.call(work.searched, None, {"blocks.0.*": {"stage": 1}, "blocks.1.*": {"stage": 0}})
