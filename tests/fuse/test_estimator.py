"""Costs of kernels: by stages, by the network, remembered and measured."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import load
from sennit.errors import RunError
from sennit.fuse.boosted_trees import BoostedTrees, Forests
from sennit.fuse.compiled_cost import Compiled
from sennit.fuse.costs_torch import choose_cost
from sennit.fuse.estimator_torch import GraphNetwork, LearnedCost, NetworkConfig, save_networks
from sennit.fuse.features import features_of
from sennit.fuse.kernel_cost import Estimate, Roofline, Staged
from sennit.fuse.known_cost import KnownCost
from sennit.fuse.measure_torch import measure_step
from sennit.fuse.model import Channel, StepModel
from sennit.fuse.moves import Limits, fused_greedily
from sennit.fuse.operator_class import Class, classify
from sennit.fuse.signature import signature
from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel

TEXT = """graph "group" {
  input %x : bf16[512,1024] "x"
  input %w : bf16[1024,2048] "w"
  input %b : bf16[2048] "b"
  forward %half : bf16[512,1024] = aten.mul.Tensor(%x, 0.5)
  forward %mm : bf16[512,2048] = aten.mm.default(%half, %w)
  forward %view : bf16[8,64,2048] = aten.view.default(%mm, [8, 64, 2048])
  forward %add : bf16[8,64,2048] = aten.add.Tensor(%view, %b)
  forward %gelu : bf16[8,64,2048] = aten.gelu.default(%add)
  result "gelu" %gelu
}"""


@pytest.fixture(scope="module")
def group() -> Graph:
    return Graph.parse(TEXT)


@pytest.fixture(scope="module")
def staged(group) -> Staged:
    return Staged.of(group, load("h200x8").device)


@pytest.fixture(scope="module")
def learned(staged) -> LearnedCost:
    torch.manual_seed(0)
    return LearnedCost(staged, [GraphNetwork(NetworkConfig(16, 2, 2)) for _ in range(2)])


def test_stages_are_what_is_before_a_product_the_product_and_what_is_behind(group, staged) -> None:
    seconds = staged.estimate(Kernel(group.ops), frozenset(["gelu"])).seconds
    half, mm, view, *behind = group.ops
    alone = staged.alone(half) + staged.alone(mm)
    device = load("h200x8").device
    moved = 2 * (512 * 2048 * 2) + 2048 * 2  # in and out, and the bias
    tail = moved / (device.bandwidth.value * device.bandwidth_efficiency.value) + device.launch.value
    assert seconds == pytest.approx(alone + tail)
    assert staged.estimate(Kernel((view,)), frozenset(["view"])) == Estimate(0.0)
    assert seconds < sum(staged.alone(op) for op in (half, mm, *behind))


def test_operators_are_told_apart(group) -> None:
    kinds = [classify(op, group.types()) for op in group.ops]
    assert kinds == [Class.POINTWISE, Class.PRODUCT, Class.VIEW, Class.POINTWISE, Class.POINTWISE]


def test_many_kernels_get_the_answers_that_each_gets_alone(group, learned) -> None:
    questions = [
        (Kernel(group.ops[start:stop]), frozenset([group.ops[stop - 1].name]))
        for start in range(5)
        for stop in range(start + 1, 6)
    ]
    together = learned.estimate_all(questions)
    for question, found in zip(questions, together, strict=True):
        alone = learned.estimate(*question)
        assert found.seconds == pytest.approx(alone.seconds, rel=1e-4)
        assert found.deviation == pytest.approx(alone.deviation, rel=1e-3)
    assert together[questions.index((Kernel((group.ops[2],)), frozenset(["view"])))] == Estimate(0.0)


def test_weights_go_to_a_file_and_back(group, staged, learned, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    save_networks(learned.networks, path)
    again = LearnedCost.load(path, staged)
    question = (Kernel(group.ops), frozenset(["gelu"]))
    assert again.estimate(*question).seconds == pytest.approx(learned.estimate(*question).seconds, rel=0.02)
    found = torch.load(path, weights_only=True)
    torch.save({**found, "node_width": 3}, path)
    with pytest.raises(RunError, match="was trained on 3"):
        LearnedCost.load(path, staged)


def test_features_have_a_row_for_each_input_and_operator(group, staged) -> None:
    found = features_of(Kernel(group.ops), frozenset(["gelu"]), staged)
    assert found.nodes.shape[0] == 3 + 5
    assert found.edges.tolist() == [[0, 3], [1, 4], [3, 4], [4, 5], [2, 6], [5, 6], [6, 7]] or len(found.edges) == 7
    assert found.staged > 0
    assert found.roofline > 0
    assert found.compiled > 0


def test_an_untrained_network_says_what_the_parts_say(group, staged, learned) -> None:
    question = (Kernel(group.ops), frozenset(["gelu"]))
    assert learned.estimate(*question).seconds == pytest.approx(Compiled(staged).estimate(*question).seconds)


def stump(feature: int, threshold: float, low: float, high: float) -> BoostedTrees:
    return BoostedTrees(
        0.25,
        np.array([0]),
        np.array([feature, -1, -1]),
        np.array([threshold, 0.0, 0.0]),
        np.array([1, 0, 0]),
        np.array([2, 0, 0]),
        np.array([0.0, low, high]),
    )


def test_trees_count_three_quarters_and_their_disagreement_widens_the_deviation(
    group, staged, learned, tmp_path: Path
) -> None:
    question = (Kernel(group.ops), frozenset(["gelu"]))
    alone = learned.estimate(*question)
    other = stump(0, 1e9, 5.0, 5.0)
    doubt = 0.2
    spread = stump(0, 1e9, math.log(doubt) - 0.25, 7.0)
    # every group goes to the left; none was measured
    trees = Forests(other, stump(0, 1e9, 0.35, 7.0), other, spread)
    both = LearnedCost(staged, learned.networks, trees).estimate(*question)
    assert both.seconds == pytest.approx(alone.seconds * math.exp(0.75 * 0.6), rel=1e-5)
    assert both.deviation == pytest.approx(math.sqrt(alone.deviation * doubt + 0.3**2), rel=1e-5)
    path = tmp_path / "weights.pt"
    save_networks(learned.networks, path, trees)
    again = LearnedCost.load(path, staged).estimate(*question)
    assert (again.seconds, again.deviation) == (
        pytest.approx(both.seconds, rel=0.02),
        pytest.approx(both.deviation, rel=0.02),
    )


@settings(derandomize=True, deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_trees_walk_as_one_row_at_a_time_would(seed: int) -> None:
    draw = np.random.default_rng(seed)
    feature, threshold, left, right, value, roots = [], [], [], [], [], []

    def grow(depth: int) -> int:
        here = len(feature)
        is_leaf = depth == 0 or draw.random() < 0.3
        feature.append(-1 if is_leaf else int(draw.integers(4)))
        threshold.append(float(draw.normal()))
        value.append(float(draw.normal()) if is_leaf else 0.0)
        left.append(here)
        right.append(here)
        if not is_leaf:
            left[here] = grow(depth - 1)
            right[here] = grow(depth - 1)
        return here

    for _ in range(3):
        roots.append(grow(4))
    trees = BoostedTrees(0.5, *map(np.array, (roots, feature, threshold, left, right, value)))
    rows = draw.normal(size=(17, 4)).astype(np.float32)

    def walk(row, node: int) -> float:
        while feature[node] >= 0:
            node = left[node] if row[feature[node]] <= threshold[node] else right[node]
        return value[node]

    wanted = [0.5 + sum(walk(row, root) for root in roots) for row in rows]
    assert trees.predict(rows) == pytest.approx(wanted)
    other = stump(int(draw.integers(4)), 0.0, -1.0, 2.0)
    mean = BoostedTrees.mean([trees, other, other]).predict(rows)
    assert mean == pytest.approx((trees.predict(rows) + 2 * other.predict(rows)) / 3)


class Counting:
    def __init__(self) -> None:
        self.asked = 0

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        self.asked += 1
        return Estimate(1.0, 0.1 * len(kernel.body))


def test_a_structure_is_asked_once_and_a_measurement_comes_first(group) -> None:
    estimator = Counting()
    cost = KnownCost(group.types(), estimator, {})
    add, gelu = (Kernel((group.ops[3],)), frozenset(["add"])), (Kernel((group.ops[4],)), frozenset(["gelu"]))
    pair = (Kernel(group.ops[3:]), frozenset(["gelu"]))
    assert [item.seconds for item in cost.estimate_all([add, gelu, add, pair])] == [1.0] * 4
    assert estimator.asked == 3
    assert cost.unsure([add, gelu, pair], 0.15) == [pair]
    cost.learn(*pair, 0.25)
    assert cost.estimate(*pair) == Estimate(0.25)
    assert not cost.unsure([add, gelu, pair], 0.15)


def test_a_step_is_measured_by_structure_and_its_times_are_used(small_gpt) -> None:
    graph = small_gpt.graph
    state = {item.path: torch.zeros(item.value.type.shape) for item in graph.inputs}
    for item in graph.inputs:
        if not item.value.type.dtype.is_float:
            state[item.path] = torch.zeros(item.value.type.shape, dtype=torch.int64)
        else:
            state[item.path] = state[item.path].double()
    found = measure_step(graph, state, torch.device("cpu"), rounds=2)
    signatures = {item.signature for item in found}
    assert len(signatures) < len(graph.ops) / 2  # layers repeat
    assert all(0 < item.quantiles[0] <= item.seconds <= item.quantiles[4] for item in found)
    measured = {item.signature: item.seconds for item in found}
    chosen = choose_cost(graph, load("laptop").device, measured)
    model = StepModel(graph, chosen.cost, Channel(0.0, 0.0))
    types = graph.types()
    for single in model.single:
        key = signature(*model.question(single), types)
        if key in measured:
            assert model.estimate(single).seconds == measured[key]
    assert "measured kernels" in chosen.source
    group = max(fused_greedily(model, Limits()).groups, key=len)
    assert model.estimate(group).seconds > 0


def test_the_weights_that_ship_are_close_on_groups_that_were_measured() -> None:
    """Not a test of what was not seen: that is benchmarks/fuse/train_estimator.py.

    This catches features that changed after training.
    """
    import gzip
    import json

    device = load("h200x8").device
    data = Path(__file__).parents[2] / "benchmarks" / "fuse" / "data" / "h200_groups.jsonl.gz"
    if not data.is_file():
        pytest.skip("the measured groups are in the repository, not in the package")
    with gzip.open(data, "rt") as lines:
        rows = [json.loads(text) for number, text in enumerate(lines) if number % 180 == 0]
    chosen = choose_cost(Graph.parse(rows[0]["graph"]), device)
    assert "trained on groups" in chosen.source
    shipped = chosen.cost.estimator
    assert isinstance(shipped, LearnedCost)
    errors = []
    for row in rows:
        graph = Graph.parse(row["graph"])
        staged = Staged(Roofline.of(graph, device), shipped.staged.costs)
        written = frozenset(output.name for output in graph.outputs)
        seconds = LearnedCost(staged, shipped.networks, shipped.trees).estimate(Kernel(graph.ops), written).seconds
        errors.append(abs(seconds - row["seconds"]) / row["seconds"])
    assert sorted(errors)[len(errors) // 2] < 0.12
