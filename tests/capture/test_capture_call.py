"""A call with its surroundings: nested arguments, several results, buffers, ties, constants, dropout; training and
inference.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sennit.capture import Captured, capture, capture_call
from sennit.errors import RunError
from sennit.ir.graph import Graph, OutputKind, Role
from sennit.ir.graph_numpy import run_graph
from sennit.testing.eager_torch import comparable


class Mixture(nn.Module):
    """One of everything that a signature has to carry."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.layer = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.table.weight
        self.dropout = nn.Dropout(0.25)
        self.weights: Tensor
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: dict[str, Any], *extra: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        self.steps += 1
        x = self.table(batch["tokens"]["ids"]) * self.weights + torch.tensor([0.5, -0.5, 1.5, 0.0], dtype=torch.float64)
        x = self.dropout(self.layer(self.norm(x)))
        q = x.unsqueeze(1)
        x = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1 if self.training else 0.0).squeeze(1) + extra[0]
        logits = self.out(x) * scale
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        penalty = (x**2).mean()
        return {"main": loss, "extra": {"penalty": penalty}, "hits": (logits.argmax(-1), None), "count": 3}


def sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(1)
    ids, labels = torch.randint(7, (3, 5)), torch.randint(7, (3, 5))
    return ({"tokens": {"ids": ids}, "labels": labels}, torch.randn(3, 5, 4, dtype=torch.float64)), {"scale": 0.5}


def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture().double()


def run(
    captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The graph in numpy, on the state of a model, with tangents of one."""
    graph = captured.graph
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    state |= captured.signature.flatten(args, kwargs)
    state["seed"] = torch.tensor([5, 9])
    state |= {item.path: torch.ones((), dtype=torch.float64) for item in graph.inputs if item.role is Role.TANGENT}
    results = run_graph(graph, {item.value.name: state[item.path].detach().numpy() for item in graph.inputs})
    return {output.key: results[output.name] for output in graph.outputs}


def paths(graph: Graph, kind: Role | OutputKind) -> list[str]:
    items: list[Any] = [*graph.inputs, *graph.outputs]
    return [item.path for item in items if kind in (getattr(item, "role", None), getattr(item, "kind", None))]


def test_everything_has_its_path() -> None:
    args, kwargs = sample()
    captured = capture_call(mixture(), args, kwargs)
    graph = captured.graph
    assert Graph.parse(str(graph)) == graph
    assert paths(graph, Role.INPUT) == ["batch.tokens.ids", "batch.labels", "extra.0"]
    assert paths(graph, Role.BUFFER) == ["weights", "steps", "constant.0"]
    assert paths(graph, Role.TANGENT) == ["tangent.main", "tangent.extra.penalty"]
    assert paths(graph, Role.SEED) == ["seed"]
    assert paths(graph, OutputKind.LOSS) == ["main", "extra.penalty"]
    assert paths(graph, OutputKind.RESULT) == ["hits.0"]
    assert paths(graph, OutputKind.BUFFER) == ["steps"]
    assert "out.weight" not in paths(graph, Role.PARAM)  # tied
    assert sorted(paths(graph, OutputKind.GRADIENT)) == sorted(paths(graph, Role.PARAM))
    assert captured.constants["constant.0"].tolist() == [0.5, -0.5, 1.5, 0.0]


def test_training_equals_eager_with_dropout() -> None:
    args, kwargs = sample()
    model = mixture()
    captured = capture_call(model, args, kwargs)
    assert int(model.steps) == 0  # tracing runs nothing
    outputs = run(captured, copy.deepcopy(model), args, kwargs)
    with comparable(seed=5, step=9):
        eager = model(*args, **kwargs)
    (eager["main"] + eager["extra"]["penalty"]).backward()
    expected = {path: parameter.grad for path, parameter in model.named_parameters()}
    expected |= {"main": eager["main"], "extra.penalty": eager["extra"]["penalty"], "hits.0": eager["hits"][0]}
    expected |= {"steps": model.steps}
    assert set(expected) == set(outputs)
    for path, value in expected.items():
        assert value is not None
        np.testing.assert_allclose(outputs[path], value.detach().numpy(), rtol=1e-12, atol=1e-14, err_msg=path)


def test_the_result_is_rebuilt() -> None:
    args, kwargs = sample()
    captured = capture_call(mixture(), args, kwargs)
    values = {output.key: torch.tensor(float(i)) for i, output in enumerate(captured.graph.outputs)}
    rebuilt = captured.signature.rebuild(values)
    assert rebuilt == {
        "main": values["main"],
        "extra": {"penalty": values["extra.penalty"]},
        "hits": (values["hits.0"], None),
        "count": 3,
    }


def test_inference_has_no_backward() -> None:
    args, kwargs = sample()
    model = mixture()
    captured = capture_call(model, args, kwargs, training=False)
    assert model.training
    graph = captured.graph
    assert not any(op.phase.value == "backward" for op in graph.ops)
    assert {item.role for item in graph.inputs} == {Role.PARAM, Role.BUFFER, Role.INPUT}
    assert {output.kind for output in graph.outputs} == {OutputKind.RESULT, OutputKind.BUFFER}
    outputs = run(captured, copy.deepcopy(model), args, kwargs)
    with torch.no_grad(), comparable():
        eager = model.eval()(*args, **kwargs)
    np.testing.assert_allclose(outputs["main"], eager["main"].numpy(), rtol=1e-12)
    assert np.array_equal(outputs["hits.0"], eager["hits"][0].numpy())


def test_a_frozen_part_stays_frozen() -> None:
    args, kwargs = sample()
    model = mixture()
    model.dropout.eval()
    model.layer.requires_grad_(False)
    graph = capture_call(model, args, kwargs).graph
    drawn = [op for op in graph.ops if op.kind == "sennit.uniform"]
    assert len(drawn) == 1  # that of attention
    assert not [path for path in paths(graph, OutputKind.GRADIENT) if path.startswith("layer.")]
    assert not model.dropout.training


def test_buffers_that_are_written_without_gradients() -> None:
    """Means of a parameter and of activations, and a result of the same region."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
            self.register_buffer("of_weight", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("of_rows", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            rows = x * self.weight
            with torch.no_grad():
                self.of_weight.mul_(0.9).add_(self.weight)
                self.of_rows.mul_(0.5).add_(rows.mean(0))
                seen = rows.softmax(1)
            return {"loss": rows.pow(2).mean(), "rows": rows, "seen": seen, "mean": self.of_rows * 2}

    model, x = Mean(), torch.randn(4, 3, dtype=torch.float64)
    captured = capture_call(model, (x,))
    asks = {leaf.path: leaf.requires_grad for leaf in captured.signature.results}
    assert asks == {"loss": False, "rows": True, "seen": False, "mean": False}  # a loss has a gradient of its own
    outputs = run(captured, copy.deepcopy(model), (x,), {})
    eager = model(x)
    eager["loss"].backward()
    eager |= dict(model.named_buffers()) | {"weight": model.weight.grad}
    assert set(outputs) == set(eager)
    for path, value in eager.items():
        np.testing.assert_allclose(outputs[path], value.detach().numpy(), rtol=1e-12, err_msg=path)
    still = capture_call(model, (x,), training=False).signature.results
    assert not any(leaf.requires_grad for leaf in still)


def test_one_tensor_at_two_places() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return (x * self.weight + 2 * weight).sum()

    x = torch.randn(3)
    captured = capture_call(Two(), (x, x))
    assert paths(captured.graph, Role.INPUT) == ["x", "inputs.weight"]  # the parameter has the plain path
    assert set(captured.signature.flatten((x, x + 1))) == {"x", "inputs.weight"}
    assert captured.signature.results[0].path == captured.graph.outputs[0].key == "loss"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda args, kwargs: (args, {**kwargs, "scale": 2.0}), r"'scale' is 2.0, but Mixture was captured with 0.5"),
        (lambda args, kwargs: (args, {}), r"'scale' is 1.0, but Mixture was captured with 0.5"),
        (
            lambda args, kwargs: ((args[0],), kwargs),
            r"'extra.0' is None, but Mixture was captured with a tensor f64\[3,5,4\]",
        ),
        (lambda args, kwargs: ((args[0], args[1][:2]), kwargs), r"'extra.0' is f64\[2,5,4\], but .* with f64\[3,5,4\]"),
        (lambda args, kwargs: ((*args, args[1]), kwargs), r"'extra.1' is a tensor f64\[3,5,4\], but .* with None"),
        (
            lambda args, kwargs: (args, {**kwargs, "mask": args[1]}),
            r"'mask' is a tensor f64\[3,5,4\], but .* with None",
        ),
    ],
)
def test_another_call_is_refused(change: Any, message: str) -> None:
    args, kwargs = sample()
    captured = capture_call(mixture(), args, kwargs, training=False)
    assert set(captured.signature.flatten(args, {**kwargs, "mask": None})) == {
        "batch.tokens.ids",
        "batch.labels",
        "extra.0",
    }
    with pytest.raises(RunError, match=message):
        captured.signature.flatten(*change(args, kwargs))


@dataclass
class Answer:
    """What a model returns; torch.export leaves a field out that holds nothing."""

    loss: Tensor
    hidden: Tensor | None = None
    scores: Tensor | None = None


torch.export.register_dataclass(Answer)


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Answer:
        scores = self.linear(x)
        return Answer(scores.square().mean(), scores=scores)


def test_fields_of_a_result_that_hold_nothing() -> None:
    found = {output.path: output.kind for output in capture(Answering(), (torch.randn(2, 4),)).outputs}
    assert found["loss"] is OutputKind.LOSS
    assert "scores" in found
    assert "hidden" not in found
