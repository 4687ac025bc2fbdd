"""Kernels whose estimate is unsure are measured where the search leans on them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sennit.fuse.compare import group_numbers
from sennit.fuse.kernel_cost import Estimate
from sennit.fuse.known_cost import KnownCost, Question
from sennit.fuse.measure_groups_torch import GroupTimer
from sennit.fuse.measured_search import Remeasure, learn_unsure, questions_of, search_measured
from sennit.fuse.model import Channel, Grouping, StepModel
from sennit.fuse.search import SearchOptions, search
from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel

TEXT = """graph "chain" {
  input %x : f32[64,64] "x"
  forward %a : f32[64,64] = aten.mul.Tensor(%x, 0.5)
  forward %b : f32[64,64] = aten.exp.default(%a)
  forward %c : f32[64,64] = aten.add.Tensor(%b, 1.0)
  forward %d : f32[64,64] = aten.tanh.default(%c)
  result "d" %d
}"""
OPTIONS = SearchOptions(seconds=5.0, patience=60, tensors=False, across_steps=False)


class Optimist:
    """Believes that everything fused is free, and says that it does not know."""

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        size = len(kernel.body)
        return Estimate(1.0 if size == 1 else 0.1, 0.01 if size == 1 else 0.5)


@pytest.fixture
def model() -> StepModel:
    graph = Graph.parse(TEXT)
    return StepModel(graph, KnownCost(graph.types(), Optimist(), {}), Channel(0.0, 0.0))


def truth(questions: Sequence[Question]) -> list[float | None]:
    """Groups with `exp` inside are slow."""
    return [
        3.0 * len(kernel.body) if any("exp" in op.kind for op in kernel.body) else 0.5 * len(kernel.body)
        for kernel, _ in questions
    ]


def test_what_is_found_rests_on_measurements(model) -> None:
    blind = search(model, OPTIONS)
    assert any(len(group.ops) == 4 for group in blind.strategy.groups)
    found, learned = search_measured(model, model.cost, truth, OPTIONS, Remeasure(rounds=8))
    assert learned
    assert not model.cost.unsure(questions_of(model, found.strategy), 0.15)
    groups = group_numbers(model, found.strategy).groups
    assert not any(1 in group for group in groups)  # operator 1 is exp
    assert frozenset({2, 3}) in groups
    assert found.seconds == pytest.approx(3.0)  # a and b alone by the estimate, c and d together as measured


def test_nothing_is_measured_where_everything_is_sure(model) -> None:
    def refuse(questions: Sequence[Question]) -> list[float | None]:
        raise AssertionError("asked to measure")

    learned = learn_unsure(model, model.cost, refuse, [model.strategy("none", Grouping(), ())])
    assert learned == []


def test_what_cannot_be_measured_is_asked_once(model) -> None:
    asked: list[int] = []

    def cannot(questions: Sequence[Question]) -> list[float | None]:
        asked.append(len(questions))
        return [None] * len(questions)

    whole = model.strategy("whole", Grouping(frozenset([frozenset(range(4))])), ())
    for _ in range(3):
        assert learn_unsure(model, model.cost, cannot, [whole]) == []
    assert asked == [1]


def test_a_group_is_timed_on_a_cpu(model) -> None:
    timer = GroupTimer(model.graph, torch.device("cpu"), rounds=3, compiled=False)
    whole = model.question(frozenset(range(4)))
    (seconds,) = timer([whole])
    assert seconds is not None
    assert seconds > 0
    (record,) = timer.measured
    assert record.seconds == seconds
    assert record.samples == 3
    strategy = model.strategy("whole", Grouping(frozenset([frozenset(range(4))])), ())
    (learned,) = learn_unsure(model, model.cost, timer, [strategy])
    assert learned.estimated == pytest.approx(0.1)
    assert model.estimate(frozenset(range(4))) == Estimate(learned.measured)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")
def test_a_group_is_compiled_and_timed_on_a_gpu(model) -> None:
    timer = GroupTimer(model.graph, torch.device("cuda"), rounds=3)
    (seconds,) = timer([model.question(frozenset(range(4)))])
    assert seconds is not None
    assert 1e-7 < seconds < 1e-3
    assert timer.measured[0].compiled
