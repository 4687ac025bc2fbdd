"""A captured graph against eager torch: every result, gradient and updated buffer, under the same draws."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sennit.capture import Captured, capture_call
from sennit.capture.signature import leaves
from sennit.ir.graph import OutputKind, Role
from sennit.testing.eager_torch import Float64, comparable
from sennit.testing.families_torch import Sample
from sennit.testing.graph_torch import run_graph_torch

__all__ = ["Compared", "compare", "eager_step", "state_of"]


@dataclass(frozen=True, slots=True)
class Compared:
    """The largest absolute difference of every output, by its key."""

    captured: Captured
    differences: Mapping[str, float]

    @property
    def inexact(self) -> dict[str, float]:
        return {key: value for key, value in self.differences.items() if value != 0}


def compare(sample: Sample, *, training: bool, seed: int = 5, step: int = 9) -> Compared:
    """Capture a model in float64, run the graph and the model on the same state, and compare all that comes out."""
    model = copy.deepcopy(sample.model).train(training)
    with Float64():
        captured = capture_call(model, (), sample.kwargs, training=training)
    ours = run_graph_torch(captured.graph, state_of(captured, model, sample.kwargs, seed, step))
    theirs = eager_step(captured, model, sample.kwargs, seed, step)
    if set(ours) != set(theirs):
        raise AssertionError(
            f"the graph returns {sorted(set(ours) - set(theirs))}, eager torch {sorted(set(theirs) - set(ours))}"
        )
    return Compared(captured, {key: float((ours[key].double() - theirs[key].double()).abs().max()) for key in ours})


def state_of(
    captured: Captured, model: nn.Module, kwargs: Mapping[str, object], seed: int, step: int
) -> dict[str, Tensor]:
    """A tensor for every input of the graph, by path, with tangents of one. Parameters and buffers are copies."""
    state = {path: tensor.detach().clone() for path, tensor in [*model.named_parameters(), *model.named_buffers()]}
    state |= {**captured.constants, **captured.signature.flatten((), kwargs), "seed": torch.tensor([seed, step])}
    types = {item.path: item.value.type for item in captured.graph.inputs if item.role is Role.TANGENT}
    return state | {path: torch.ones((), dtype=getattr(torch, of.dtype.torch_name)) for path, of in types.items()}


def eager_step(
    captured: Captured, model: nn.Module, kwargs: Mapping[str, object], seed: int, step: int
) -> dict[str, Tensor]:
    """What one eager step of the model gives, by the keys of the graph's outputs. It updates the model's buffers."""
    outputs = captured.graph.outputs
    losses = [output.key for output in outputs if output.kind is OutputKind.LOSS]
    with Float64(), comparable(seed, step), torch.set_grad_enabled(bool(losses)):
        result = model(**kwargs)
    tensors = [leaf for _, leaf in leaves(result, "") if isinstance(leaf, Tensor)]
    paths = [leaf.path for leaf in captured.signature.results if leaf.path is not None]
    found = dict(zip(paths, tensors, strict=True))
    if losses:
        torch.stack([found[key] for key in losses]).sum().backward()  # type: ignore[no-untyped-call]
    # a buffer that no operator changed is not an output, so it is not looked at
    updated = {output.key for output in outputs if output.kind is OutputKind.BUFFER}
    found |= {path: buffer for path, buffer in model.named_buffers() if path in updated}
    found |= {path: parameter.grad for path, parameter in model.named_parameters() if parameter.grad is not None}
    return {path: tensor.detach() for path, tensor in found.items()}
