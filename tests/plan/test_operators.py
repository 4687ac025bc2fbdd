"""Splits of operators by linear program: as good as trying all, never dearer than the zoo's, bounded below, and lowered
to the serial step.
"""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.capture import capture, capture_call
from sennit.cluster import load
from sennit.demo.gpt import GPT, GPTConfig
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective
from sennit.plan import Plan, lower, propagate, zoo
from sennit.plan.search import operators
from sennit.plan.search.operators import AxisCost, choose_ops, choose_strategies, seconds_of
from sennit.plan.search.pairwise import Choices, Reader
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.testing.families_torch import families
from sennit.testing.family_parity_torch import build
from sennit.testing.random_plans import trained

MESH = Mesh.parse("tp=2")


# ---- the program -----------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_choices_cost_what_trying_all_finds(data):
    """Nodes in a row of random length, each of whose values some later nodes read; prices of options and of changes at
    random.
    """
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
    price = st.integers(0, 9)
    own = [[float(data.draw(price)) for _ in range(size)] for size in sizes]
    states = [[data.draw(st.integers(0, 2)) for _ in range(size)] for size in sizes]
    table = {(a, b): 0.0 if a == b else float(data.draw(price)) for a in range(3) for b in range(3)}
    edges = [
        (maker, reader, [data.draw(st.integers(0, 2)) for _ in range(sizes[reader])])
        for maker in range(len(sizes))
        for reader in range(maker + 1, len(sizes))
        if data.draw(st.booleans())
    ]
    program = Choices()
    for number, prices in enumerate(own):
        program.node(str(number), prices)
    for maker in range(len(sizes)):
        readers = [Reader(str(reader), tuple(wants)) for made, reader, wants in edges if made == maker]
        program.value(lambda a, b: table[a, b], str(maker), states[maker], readers)

    def total(chosen):
        paid = {(m, states[m][chosen[m]], wants[chosen[r]]) for m, r, wants in edges}
        return sum(own[n][c] for n, c in enumerate(chosen)) + sum(table[a, b] for _, a, b in paid)

    bound, found = program.run()
    value = total([found[str(number)] for number in range(len(sizes))])
    best = min(map(total, itertools.product(*map(range, sizes))))
    assert value == pytest.approx(best, abs=1e-6)
    assert bound <= value + 1e-6


class Pair(torch.nn.Module):
    """Two products, nothing trained: few enough operators to try all strategies of all of them."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.zeros(256, inner), requires_grad=False)
        self.down = torch.nn.Parameter(torch.zeros(inner, 256), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ self.up) @ self.down).sum() * self.scale


@pytest.mark.parametrize("inner", [512, 8192])
def test_a_small_graph_is_split_as_trying_all_says(inner: int) -> None:
    graph = capture(Pair(inner), (torch.zeros(512, 256),))
    cost = AxisCost(graph, load("dgx-h100"), 2)
    options = operators._Options(graph, "tp", cost, ())
    names, rows = zip(*options.ops.items(), strict=True)
    homes, entries = zip(*options.inputs.items(), strict=True)
    forward = [name for name, row in zip(names, rows, strict=True) if len(row) > 1]
    best = min(
        operators._seconds(
            graph,
            {name: row[0] for name, row in options.ops.items()} | dict(zip(forward, some, strict=True)),
            dict(zip(homes, places, strict=True)),
            cost,
        )
        for some in itertools.product(*(options.ops[name] for name in forward))
        for places in itertools.product(*entries)
    )
    found = choose_strategies(graph, "tp", cost)
    assert found.seconds == pytest.approx(best)
    assert found.bound <= found.seconds * (1 + 1e-6)


# ---- units of models -------------------------------------------------------------------------------------------------


def unit(name: str) -> Graph:
    if name == "gpt":
        config = GPTConfig(vocabulary=4096, context=512, width=2048, heads=16, layers=1)
        with torch.device("meta"):
            tokens = torch.zeros((4, config.context), dtype=torch.int64)
            return capture(GPT(config), (tokens, tokens))
    if importlib.util.find_spec(families()[name].library) is None:
        pytest.skip(f"{families()[name].library} is not installed")
    sample = build(name)
    return trained(capture_call(sample.model.train(), (), sample.kwargs, training=True).graph)


@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.parametrize("name", ["gpt", "t5", "swin"])
def test_never_dearer_than_the_zoo(name: str) -> None:
    graph = unit(name)
    cost = AxisCost(graph, load("dgx-h100"), 2)
    megatron = propagate(zoo.tensor_parallel(graph, MESH))
    plan, chosen = choose_ops(Plan("chosen", graph, MESH), "tp", cost, [megatron])
    assert chosen.bound <= chosen.seconds * (1 + 1e-6)
    assert chosen.seconds <= seconds_of(megatron, "tp", cost) * (1 + 1e-6)
    verify(lower(propagate(plan)), graph)


def test_megatron_is_found_by_its_costs_alone() -> None:
    """Nothing is known but the rules: columns, rows, the chunks of a fused weight, and the stream on the sequence come
    out.
    """
    graph = unit("gpt")
    cost = AxisCost(graph, load("dgx-h100"), 2)
    plan, chosen = choose_ops(Plan("chosen", graph, MESH), "tp", cost)
    named = {op.name: op for op in graph.ops}
    letters = {
        named[split.op].module: (split.letter, split.chunks)
        for split in chosen.splits
        if named[split.op].kind in _PRODUCTS
    }
    assert letters["blocks.0.attention.qkv"] == ("n", 3)
    assert letters["blocks.0.up"] == ("n", 1)
    assert letters["blocks.0.attention.proj"] == letters["blocks.0.down"] == ("k", 1)
    by_hand = propagate(zoo.tensor_parallel(graph, MESH, sequence=True))
    lowered = propagate(plan)
    assert seconds_of(lowered, "tp", cost) <= 1.02 * seconds_of(by_hand, "tp", cost)
    (lane,) = lower(lowered).lanes
    kinds = {step.kind.value for step in lane.steps if isinstance(step, Collective)}
    assert "reduce_scatter" in kinds


_PRODUCTS = ("aten.mm.default", "aten.addmm.default")


@pytest.mark.usefixtures("single_core")
def test_a_chosen_plan_equals_the_serial_step(small_gpt) -> None:
    cost = AxisCost(small_gpt.graph, load("laptop:2"), 2)
    plan, chosen = choose_ops(Plan("chosen", small_gpt.graph, MESH), "tp", cost)
    seeded, _ = choose_ops(Plan("chosen", small_gpt.graph, MESH), "tp", AxisCost(small_gpt.graph, load("dgx-h100"), 2))
    assert chosen.seconds > 0
    for each in (plan, seeded):
        program = lower(propagate(each))
        verify(program, each.graph)
        assert max(small_gpt.differences(run_in_process(program, small_gpt.state)).values()) <= 1e-13
