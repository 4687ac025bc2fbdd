"""Folding: the graph that is unrolled from a few layers is the graph of the whole model; where layers differ, it is not
tried.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase as HypothesisPhase
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import Captured, capture_call
from sennit.capture.runs import find_runs
from sennit.ir.graph import Arg, Graph, Op, Ref, Value
from sennit.testing.families_torch import families


def renamed(graph: Graph) -> Graph:
    """The graph with values named by their place: equal for graphs that differ in names alone. Repeats are left out."""
    names = {item.value.name: f"in.{position}" for position, item in enumerate(graph.inputs)}

    def arg(value: Arg) -> Arg:
        match value:
            case Ref(name):
                return Ref(names[name])
            case tuple():
                return tuple(map(arg, value))
            case _:
                return value

    def value(item: Value) -> Value:
        return Value(names[item.name], item.type)

    ops: list[Op] = []
    for position, op in enumerate(graph.ops):
        args, kwargs = tuple(map(arg, op.args)), tuple((key, arg(part)) for key, part in op.kwargs)
        names.update((item.name, f"{position}.{place}") for place, item in enumerate(op.results))
        ops.append(replace(op, args=args, kwargs=kwargs, results=tuple(map(value, op.results))))
    inputs = tuple(replace(item, value=value(item.value)) for item in graph.inputs)
    outputs = tuple(replace(output, name=names[output.name]) for output in graph.outputs)
    return Graph(graph.name, inputs, tuple(ops), outputs)


def both(model: nn.Module, *args: object, training: bool = True, **kwargs: object) -> tuple[Captured, Captured]:
    return tuple(capture_call(model, args, kwargs, training=training, fold=fold) for fold in (True, False))  # type: ignore[return-value]


class Layer(nn.Module):
    def __init__(self, width: int, p: float, position: int, *, norm: bool) -> None:
        super().__init__()
        self.position = position
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        y: Tensor = self.dropout(torch.tanh(self.linear(self.norm(x)) * shared))
        return y


class Stack(nn.Module):
    """Layers with a shared value that needs a gradient, sums outside of the layers, and several passes."""

    def __init__(self, layers: int, *, passes: int = 1, p: float = 0.1, norm: bool = False, period: int = 1) -> None:
        super().__init__()
        self.passes = passes
        self.first = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList(Layer(6, p if (i + 1) % period == 0 else 0.0, i, norm=norm) for i in range(layers))
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, shared = self.first(x), torch.exp(self.scale)
        for _ in range(self.passes):
            for layer in self.layers:
                x = x + layer(x, shared)
        y: Tensor = self.last(x)
        return y.square().mean()


@settings(
    derandomize=True, deadline=None, max_examples=8, phases=[HypothesisPhase.generate]
)  # a capture is slow to shrink
@given(
    st.sampled_from([5, 6, 9, 11]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.integers(1, 2),
    st.booleans(),
)
def test_unrolled_is_captured(layers: int, passes: int, p: float, norm: bool, period: int, training: bool) -> None:
    model = Stack(layers, passes=passes, p=p, norm=norm, period=period)
    folded, whole = both(model, torch.randn(3, 4), training=training)
    assert str(renamed(folded.graph)) == str(renamed(whole.graph))
    units = layers // (period if p else 1)
    assert bool(folded.graph.repeats) == (units >= 5)
    assert Graph.parse(str(folded.graph)) == folded.graph
    for repeat in folded.graph.repeats:
        assert repeat.copies == repeat.units - 2
    if folded.graph.repeats:  # one for each pass, and the backward pass
        assert len(folded.graph.repeats) == (passes * (2 if training else 1))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "layers"), [("gpt2", 6), ("resnet", 7), pytest.param("t5", 6, marks=pytest.mark.slow)]
)
def test_families(name: str, layers: int) -> None:
    family = families()[name]
    if importlib.util.find_spec(family.library) is None:
        pytest.skip(f"{family.library} is not installed")
    sample = family.build(layers)
    folded, whole = both(sample.model, **sample.kwargs)
    assert folded.graph.repeats
    assert str(renamed(folded.graph)) == str(renamed(whole.graph))


def test_copies_are_equal_but_for_names() -> None:
    graph = capture_call(Stack(7), (torch.randn(3, 4),)).graph
    forward, backward = graph.repeats
    assert [op.module.split(".")[1] for op in graph.ops[forward.start : forward.end : forward.length]] == list("12345")
    assert [op.module.split(".")[1] for op in graph.ops[backward.start : backward.end : backward.length]] == list(
        "54321"
    )
    numbers = [op.args[1] for op in graph.ops if op.kind == "sennit.uniform"]
    assert numbers == list(range(7))


# ---- layers that are no copies ---------------------------------------------------------------------------------------


class Variant(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, shared = self.first(x), torch.exp(self.scale)
        for position, layer in enumerate(self.layers):
            x = self.step(position, layer, x, shared)
        y: Tensor = self.last(x)
        return y.square().mean()

    def step(self, position: int, layer: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
        raise NotImplementedError


class Taps(Variant):
    """Looks at positions that a shortened model does not have."""

    def step(self, position: int, layer: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
        y: Tensor = x + layer(x, shared)
        return y.relu() if position == 5 else y


class Depth(Variant):
    def step(self, position: int, layer: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
        y: Tensor = x + layer(x, shared) / len(self.layers)
        return y


class ByIndex(Variant):
    def forward(self, x: Tensor) -> Tensor:
        x, shared = self.first(x), torch.exp(self.scale)
        for position in range(8):
            x = x + self.layers[position](x, shared)
        y: Tensor = self.last(x)
        return y.square().mean()


class Collects(Variant):
    """Every layer's result is used at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x, shared = self.first(x), torch.exp(self.scale)
        found = []
        for layer in self.layers:
            x = x + layer(x, shared)
            found.append(x)
        y: Tensor = self.last(torch.stack(found).mean(0))
        return y.square().mean()


class Skips(Variant):
    """The second layer's result is used at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x, shared = self.first(x), torch.exp(self.scale)
        kept = x
        for position, layer in enumerate(self.layers):
            x = x + layer(x, shared)
            kept = x if position == 1 else kept
        y: Tensor = self.last(x + kept)
        return y.square().mean()


class Numbered(Variant):
    """A number of the layer is an attribute, and is computed with."""

    def step(self, position: int, layer: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
        y: Tensor = x + layer(x, shared) * layer.position
        return y


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Taps, "unit 5 of 'layers' is not like the others"),
        (Depth, "is not like the others"),
        (ByIndex, "cannot be checked: KeyError"),
        (Collects, "is not like the others"),
        (Skips, "reads one unit among many"),
        (Numbered, "is not like the others"),
    ],
)
def test_layers_that_differ_are_captured_one_by_one(
    make: Callable[..., nn.Module], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(8)
    assert [len(run.units) for run in find_runs(model)] == [8]
    with caplog.at_level(logging.INFO, logger="sennit"):
        folded, whole = both(model, torch.randn(3, 4))
    assert not folded.graph.repeats
    assert str(folded.graph) == str(whole.graph)
    assert why in caplog.text


def test_what_is_no_run() -> None:
    assert find_runs(Stack(4)) == ()  # too few
    tied = Stack(8)
    tied.layers[3].linear.weight = tied.layers[4].linear.weight
    assert find_runs(tied) == ()
    one = Stack(8)
    one.layers = nn.ModuleList([one.layers[0]] * 8)
    assert find_runs(one) == ()
    frozen = Stack(8)
    frozen.layers[3].linear.weight.requires_grad_(False)
    assert find_runs(frozen) == ()
    rates = Stack(8)
    for position, layer in enumerate(rates.layers):
        layer.dropout.p = 0.01 * position
    assert find_runs(rates) == ()


def test_a_model_is_as_it_was() -> None:
    model = Stack(8)
    before = [(path, id(tensor)) for path, tensor in model.named_parameters()]
    capture_call(model, (torch.randn(3, 4),))
    assert [(path, id(tensor)) for path, tensor in model.named_parameters()] == before
    assert not any(layer._forward_pre_hooks for layer in model.layers)
    model(torch.randn(3, 4)).backward()


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = Stack(6, norm=True)
    graph = capture_call(model, (torch.empty(3, 4, device="meta"),)).graph
    assert next(model.parameters()).device.type == "meta"
    assert str(renamed(graph)) == str(renamed(capture_call(Stack(6, norm=True), (torch.randn(3, 4),)).graph))
    on_cpu = capture_call(model, (torch.randn(3, 4),)).graph  # a sample may have memory, as samples do
    assert on_cpu == graph
