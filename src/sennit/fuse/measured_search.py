"""Estimates that are unsure, replaced by measurements where the search leans on them.

An estimator says how far off it may be (`Estimate.deviation`). Measuring every kernel that a search asks about would
take days; measuring those that its answers consist of takes seconds:

    1. search, and keep the best few strategies
    2. of their kernels, measure one of each structure whose deviation is `least` or more, the widest first, `most` at a time
    3. forget what the search remembered, and search again, until nothing is unsure or `rounds` are over

An estimate that was too low made its strategy one of the best: exactly those are found out, and an error in the other
direction costs a strategy that was not looked at. What was measured stays known (`KnownCost.learn`), for this search
and for whoever compares strategies behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sennit.fuse.compare import group_numbers
from sennit.fuse.known_cost import KnownCost, Question
from sennit.fuse.model import Grouping, StepModel
from sennit.fuse.search import Found, SearchOptions, search
from sennit.ir.strategy import Strategy

__all__ = ["Learned", "Measure", "Remeasure", "learn_unsure", "questions_of", "search_measured"]

Measure = Callable[
    [Sequence[Question]], Sequence[float | None]
]  # seconds of kernels; None for one that cannot be measured


@dataclass(frozen=True, slots=True)
class Remeasure:
    """Which kernels are measured: those whose deviation (of the logarithm of their time) is `least` or more, of the
    `keep` best strategies.
    """

    least: float = 0.07
    most: int = 64
    rounds: int = 3
    keep: int = 4


@dataclass(frozen=True, slots=True)
class Learned:
    """A kernel with what was estimated and what was measured, in seconds."""

    question: Question
    estimated: float
    measured: float


def search_measured(
    model: StepModel,
    cost: KnownCost,
    measure: Measure,
    options: SearchOptions | None = None,
    how: Remeasure | None = None,
    *,
    name: str = "joint",
    start: Sequence[Grouping] = (),
) -> tuple[Found, tuple[Learned, ...]]:
    """The best strategy found, with every kernel of it measured that was unsure; and what was measured.

    `cost` is the model's.
    """
    assert model.cost is cost, "what is learned must be what the model asks"
    how = how or Remeasure()
    options = replace(options or SearchOptions(), keep=how.keep)
    learned: list[Learned] = []
    found = search(model, options, name=name, start=start)
    for turn in range(how.rounds):
        strategies = [found.strategy, *(strategy for strategy, _ in found.others)]
        new = learn_unsure(model, cost, measure, strategies, how)
        if not new:
            break
        learned += new
        seeds = [*start, *(group_numbers(model, strategy) for strategy in strategies)]
        found = search(model, replace(options, seed=options.seed + turn + 1), name=name, start=seeds)
    return found, tuple(learned)


def learn_unsure(
    model: StepModel, cost: KnownCost, measure: Measure, strategies: Sequence[Strategy], how: Remeasure | None = None
) -> list[Learned]:
    """Measure the unsure kernels of these strategies."""
    how = how or Remeasure()
    asked = [question for strategy in strategies for question in questions_of(model, strategy)]
    cost.estimate_all(asked)
    unsure = cost.unsure(asked, how.least)[: how.most]
    before = [item.seconds for item in cost.estimate_all(unsure)]
    learned = []
    for question, estimated, seconds in zip(unsure, before, measure(unsure) if unsure else (), strict=True):
        if seconds is not None:
            cost.learn(*question, seconds)
            learned.append(Learned(question, estimated, seconds))
        else:
            cost.trust(*question)
    model.forget()
    return learned


def questions_of(model: StepModel, strategy: Strategy) -> list[Question]:
    """The kernels of a strategy."""
    grouping = group_numbers(model, strategy)
    order = model.order(grouping)
    assert order is not None
    repeats = grouping.repeats()
    return [model.question(kernel, repeats.get(kernel, frozenset())) for kernel in order]
