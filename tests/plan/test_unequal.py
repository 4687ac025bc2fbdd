"""Stages with different numbers of replicas: the cut is the best of all, the plan equals the serial step, the estimate
is near the simulation, the search finds one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import capture
from sennit.cluster import Cluster, load
from sennit.ir.graph import Graph
from sennit.kernels import in_buckets
from sennit.plan import lower, propagate
from sennit.plan.search import Choice, Keep, Kind, Space, mesh_of, planner_of, search
from sennit.plan.search.cut_unequal import cut_unequal
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.sim import optimizer, simulate_fully


def worst(seconds: dict[int, list[float]], runs: tuple[tuple[int, int, int], ...]) -> float:
    return max(sum(seconds[count][begin:end]) for begin, end, count in runs)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(2, 6), st.data())
def test_the_cut_is_the_best_of_all(units: int, stages: int, replicas: int, data: st.DataObject) -> None:
    counts = data.draw(st.sets(st.integers(1, 4), min_size=1, max_size=3))
    number = st.floats(0.1, 10.0)
    seconds = {count: data.draw(st.lists(number, min_size=units, max_size=units)) for count in counts}
    tried = [
        tuple(zip((0, *cuts), (*cuts, units), shared, strict=True))
        for cuts in combinations(range(1, units), stages - 1)
        for shared in product(sorted(counts), repeat=stages)
        if sum(shared) == replicas
    ]
    found = cut_unequal(seconds, stages, replicas)
    if not tried:
        assert found is None
        return
    assert found in tried
    assert worst(seconds, found) == pytest.approx(min(worst(seconds, runs) for runs in tried), rel=1e-5)


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Uneven(nn.Module):
    """A heavy layer and light ones."""

    def __init__(self, width: int, heavy: int, light: int, layers: int) -> None:
        super().__init__()
        inners = [heavy, *(light for _ in range(layers))]
        self.blocks = nn.ModuleList(Layer(width, inner) for inner in inners)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), wanted)


@pytest.fixture(scope="module")
def small() -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Uneven(8, 48, 16, 3).double()
    batch = (torch.randn(24, 8, dtype=torch.float64), torch.randint(5, (24,)))
    state = {**model.state_dict(), "x": batch[0], "wanted": batch[1], "tangent": torch.ones((), dtype=torch.float64)}
    model(*batch).backward()
    return capture(model, batch), state, {name: item.grad for name, item in model.named_parameters()}


def choice_of(graph: Graph, lanes: str, samples: int, stages: list[str], kind: Kind, tp: int = 1) -> Choice:
    """As a search prints it."""
    way = f"tp={tp}" if tp > 1 else "plain"
    lines = [f"  stage {number} : {parts}" for number, parts in enumerate(stages)]
    return Choice.parse(
        f'plan "{graph.name}" on "test" {{ batch 24 way "{way}" mesh pp={len(stages)},dp={lanes} '
        f"microbatch {samples} * {24 // samples} schedule {kind.value} 1 zero 0 " + " ".join(lines) + " "
        "simulated step 1.0 memory 1 bound 1.0 }"
    )


def items_of(graph: Graph) -> list[str]:
    """The names of the model's items, as a search on it has them."""
    space = Space(tps=(1,), sizes=(1,), keeps=(Keep.ALL,), zeros=(0,))
    found = search(graph, load("laptop:1"), space=space, optimizer="adam").choice
    return [str(part) for part in found.stages[0]]


CASES = [
    ("1+3", 6, Kind.ONE_F_ONE_B, 1),
    ("3+1", 6, Kind.ZERO_BUBBLE_H1, 1),
    ("2+1+1", 4, Kind.ONE_F_ONE_B, 1),
    ("1+2", 4, Kind.ONE_F_ONE_B, 2),
    ("1+2+4", 12, Kind.GPIPE, 1),
]


@pytest.mark.parametrize(("lanes", "samples", "kind", "tp"), CASES)
def test_the_step_is_the_serial_one(small, lanes: str, samples: int, kind: Kind, tp: int) -> None:
    graph, state, gradients = small
    items = items_of(graph)
    count = lanes.count("+") + 1
    stages = [", ".join(items[:2]), *items[2:count], ", ".join(items[count:])]
    choice = choice_of(graph, lanes, samples, stages, kind, tp)
    assert Choice.parse(str(choice)) == choice
    plan = planner_of(choice)(graph, mesh_of(choice))
    assert len(plan.mesh.devices) == tp * sum(choice.lanes)
    program = lower(propagate(plan))
    verify(program, plan.graph)
    made = run_in_process(program, state)
    for name, gradient in gradients.items():
        torch.testing.assert_close(made[name], gradient, rtol=1e-11, atol=1e-12)


def crowded(memory: float) -> Cluster:
    """Four devices of one node that hold so much each."""
    whole = load("dgx-h100")
    device = whole.device
    fields = {name: getattr(device, name) for name in device.__struct_fields__}
    size = type(device.memory)(
        **{**{n: getattr(device.memory, n) for n in device.memory.__struct_fields__}, "value": memory}
    )
    smaller = type(device)(**{**fields, "per_node": 4, "memory": size})
    return type(whole)(**{**{name: getattr(whole, name) for name in whole.__struct_fields__}, "device": smaller})


def test_a_search_gives_the_heavy_layer_more_devices() -> None:
    """One layer with three times the work of all others, which do not fit beside it: two stages, with as many replicas
    as their work asks for.
    """
    with torch.device("meta"):
        batch = (torch.zeros(49152, 1024), torch.zeros(49152, dtype=torch.int64))
        graph = capture(Uneven(1024, 24576, 4096, 2), batch)
    cluster = crowded(1.4e9)
    space = Space(tps=(1,), sizes=(1024, 3072), keeps=(Keep.ALL,), zeros=(0,), kinds=(Kind.ONE_F_ONE_B,))
    found = search(graph, cluster, space=space, optimizer="adam")
    choice = found.choice
    assert choice.lanes == (3, 1)
    assert "dp=3+1" in choice.title
    alike = search(graph, cluster, space=replace(space, unequal=False), optimizer="adam").choice
    assert choice.step < alike.step
    assert choice.bound <= choice.step
    plan = planner_of(choice)(graph, mesh_of(choice))
    program = lower(propagate(plan))
    verify(program, plan.graph)
    simulated = simulate_fully(in_buckets(program), cluster, optimizer=optimizer("adam")).timeline
    assert choice.step == pytest.approx(simulated.span, rel=0.15)
