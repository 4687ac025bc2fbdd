"""The workspace of the search against the whole graph: what it accepts, its line, what it says has changed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import load
from sennit.fuse.kernel_cost import Roofline
from sennit.fuse.kernel_set import KernelSet, Limits, is_legal
from sennit.fuse.model import Channel, Grouping, StepModel
from sennit.fuse.moves import fused_by_cost, fused_greedily


@pytest.fixture(scope="module")
def model(small_gpt) -> StepModel:
    return StepModel(small_gpt.graph, Roofline.of(small_gpt.graph, load("dgx-a100").device), Channel(5e-6, 1e-9, 1e-11))


def kernels_of(kernels: KernelSet) -> set[tuple[frozenset[int], frozenset[int]]]:
    return {(members, kernels.again.get(number, frozenset())) for number, members in kernels.members.items()}


def check_line(model: StepModel, kernels: KernelSet) -> None:
    """Every kernel stands behind all that it reads, and every operator is in one."""
    assert sorted(place for members in kernels.members.values() for place in members) == list(range(len(model.ops)))
    assert sorted(kernels.line) == sorted(kernels.members)
    assert all(kernels.line[place] == number for number, place in kernels.place_in_line.items())
    for number, members in kernels.members.items():
        inside = members | kernels.again.get(number, frozenset())
        for place in inside:
            for read in model.reads[place]:
                if read not in inside:
                    assert kernels.place_in_line[kernels.home[read]] < kernels.place_in_line[number]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_random_moves_keep_a_line_and_know_what_changed(model, seed: int) -> None:
    draw = random.Random(seed)
    kernels = KernelSet(model, fused_greedily(model, Limits(size=8)) if seed % 2 else Grouping(), Limits(size=12))
    before = kernels_of(kernels)
    kernels = kernels.copy()
    for _ in range(40):
        kernels.random_move(draw)
    check_line(model, kernels)
    after = kernels_of(kernels)
    assert (kernels.gone, kernels.new) == (before - after, after - before)
    assert kernels_of(KernelSet(model, kernels.grouping(), Limits())) == after


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_two_kernels_are_fused_exactly_if_an_order_is_left(model, seed: int) -> None:
    """Against the oracle: contract them and look for an order of the whole graph."""
    draw = random.Random(seed)
    kernels = KernelSet(model, Grouping(), Limits(size=10))
    for _ in range(draw.randrange(80)):
        kernels.random_move(draw, repeats=False)
    reader = draw.choice([place for place, reads in enumerate(model.reads) if reads])
    read = draw.choice(model.reads[reader])
    first, second = kernels.kernel(read)[0], kernels.kernel(reader)[0]
    if first == second:
        return
    union = first | second
    contracted = Grouping((kernels.grouping().groups - {first, second}) | {union})
    allowed = is_legal(model, union, kernels.limits) and model.order(contracted) is not None
    assert kernels.fuse(read, reader) is allowed
    check_line(model, kernels)


def test_fusing_by_cost_never_makes_the_kernels_longer(model) -> None:
    def seconds(grouping: Grouping) -> float:
        order = model.order(grouping)
        assert order is not None
        return sum(model.kernel_seconds(order, grouping))

    by_cost = fused_by_cost(model, Limits())
    assert seconds(by_cost) <= min(seconds(Grouping()), 1.02 * seconds(fused_greedily(model, Limits())))


def test_a_product_stays_alone_where_others_may_not_be_beside_it(model) -> None:
    grouping = fused_greedily(model, Limits(around_products=False))
    kinds = [{model.kind[place].value for place in group} for group in grouping.groups]
    assert all(kind <= {"product", "view"} for kind in kinds if "product" in kind)
    assert any("pointwise" in kind for kind in kinds)
