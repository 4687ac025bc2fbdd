"""Strategies: text, checker, legality of moves, and what the search finds on a GPT."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import load
from sennit.errors import PlanError
from sennit.fuse.kernel_cost import Roofline
from sennit.fuse.model import Channel, Grouping, StepModel
from sennit.fuse.moves import Limits, fused_greedily, has_detour, random_move
from sennit.fuse.search import SearchOptions, search
from sennit.ir.graph import Graph, OutputKind, Phase
from sennit.ir.strategy import Bucket, Group, Part, Reduce, Strategy, WaitAt
from sennit.ir.strategy_check import check_strategy, kernels

NAMES = st.text("abz019_.~", min_size=1, max_size=5)
PARTS = st.builds(Part, st.text(max_size=6), st.none() | st.tuples(st.integers(0, 9), st.integers(10, 20)))
GROUPS = st.builds(Group, st.lists(NAMES, min_size=1, max_size=3).map(tuple), st.lists(NAMES, max_size=2).map(tuple))
BUCKETS = st.builds(
    Bucket,
    st.lists(PARTS, min_size=1, max_size=3).map(tuple),
    st.sampled_from(WaitAt),
    st.sampled_from(Reduce),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.builds(Strategy, st.text(max_size=5), st.lists(GROUPS, max_size=3).map(tuple), st.lists(BUCKETS).map(tuple)))
def test_text_and_back(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy


@pytest.fixture(scope="module")
def model(small_gpt) -> StepModel:
    device = load("dgx-a100").device
    return StepModel(
        small_gpt.graph,
        Roofline.of(small_gpt.graph, device),
        Channel(latency=5e-6, per_byte=1e-9, update_per_byte=1e-11),
    )


def every_gradient(model: StepModel) -> tuple[Bucket, ...]:
    return (Bucket(tuple(Part(path) for path, _, _ in model.gradients)),)


def test_without_groups_the_kernels_are_the_operators(model) -> None:
    found = kernels(Strategy("none"), model.graph)
    assert [kernel.body for kernel in found] == [(op,) for op in model.graph.ops]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_random_moves_give_strategies_that_the_checker_accepts(model, seed: int) -> None:
    draw = random.Random(seed)
    grouping = fused_greedily(model, Limits()) if seed % 2 else Grouping()
    for _ in range(60):
        grouping = random_move(model, grouping, draw, Limits(size=12)) or grouping
    strategy = model.strategy("random", grouping, every_gradient(model))
    check_strategy(strategy, model.graph)
    order = model.order(grouping)
    assert order is not None
    ours = [frozenset(model.ops[place].name for place in kernel) for kernel in order]
    assert ours == [frozenset(op.name for op in kernel.ops) for kernel in kernels(strategy, model.graph)]


def test_a_detour_behind_both_kernels_is_found() -> None:
    """%a and %b may not be one kernel: %between waits for it, the kernel of %late waits for %between, and %b for that
    kernel.
    """
    text = """graph "detour" {
      input %x : f32[4] "x"
      forward %early : f32[4] = aten.neg.default(%x)
      forward %a : f32[4] = aten.exp.default(%x)
      forward %b : f32[4] = aten.add.Tensor(%a, %early)
      forward %between : f32[4] = aten.neg.default(%a)
      forward %late : f32[4] = aten.exp.default(%between)
      result "b" %b
      result "late" %late
    }"""
    graph = Graph.parse(text)
    device = load("dgx-a100").device
    model = StepModel(graph, Roofline.of(graph, device), Channel(0.0, 0.0))
    kernel = frozenset((0, 4))  # %early and %late
    home = dict.fromkeys(kernel, kernel)
    assert has_detour(model, home, frozenset((1,)), frozenset((2,)))
    assert not has_detour(model, {}, frozenset((1,)), frozenset((2,)))


def test_the_search_is_deterministic_and_beats_its_seeds(model) -> None:
    options = SearchOptions(patience=10, seconds=30)
    first, again = search(model, options), search(model, options)
    assert first == again
    check_strategy(first.strategy, model.graph)
    alone = search(model, SearchOptions(operators=False, tensors=False, across_steps=False))
    tensors = search(model, SearchOptions(operators=False, across_steps=False))
    assert first.full_overlap <= first.seconds <= tensors.seconds <= alone.seconds


def test_faults_are_named(model) -> None:
    ops = model.graph.ops
    forward = [op.name for op in ops if op.phase is Phase.FORWARD]
    backward = [op.name for op in ops if op.phase is Phase.BACKWARD]
    whole = every_gradient(model)

    def refuse(match: str, *groups: Group, buckets: tuple[Bucket, ...] = whole) -> None:
        with pytest.raises(PlanError, match=match):
            check_strategy(Strategy("wrong", groups, buckets), model.graph)

    refuse("no operator of the graph", Group(("nobody",)))
    refuse("is in two groups", Group((forward[0],)), Group((forward[0],)))
    refuse("mixes forward and backward", Group((forward[0], backward[0])))
    refuse("wait for each other", Group((forward[0], forward[-1])))
    refuse("nothing in the group reads", Group((forward[0],), again=(forward[-1],)))
    path = next(output.path for output in model.graph.outputs if output.kind is OutputKind.GRADIENT)
    refuse("has no gradient", buckets=(Bucket((Part("nothing"),)),))
    refuse("communicated twice", buckets=(*whole, Bucket((Part(path),))))
    refuse("are in no bucket", buckets=(Bucket((Part(path),)),))
    size = model.elements[path]
    rest = tuple(part for part in whole[0].parts if part.path != path)
    refuse("not at all", buckets=(Bucket((*rest, Part(path, (1, size)))),))
    check_strategy(
        Strategy("cut", (), (Bucket((*rest, Part(path, (0, 1)))), Bucket((Part(path, (1, size)),)))), model.graph
    )
