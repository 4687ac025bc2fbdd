"""A training run, whole: of the unsplit model in eager torch, and of the parallel one. What they show must be equal.

Differences are relative to the largest value of each tensor. A tensor may be nothing but rounding (the gradient of a
key's bias in attention is zero in exact arithmetic), so its scale is at least a thousandth of the largest value of all
tensors of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sennit.ir.graph import OutputKind
from sennit.run.full import whole
from sennit.run.module import ParallelModule
from sennit.testing.eager_torch import comparable

__all__ = ["Calls", "Record", "adamw", "sgd", "train_eager", "train_parallel", "whole_gradients"]

Calls = Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]


@dataclass
class Record:
    """What a training run showed, whole: losses, norms, the gradients of the last step, parameters and buffers at the
    end.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def cpu(self) -> Record:
        """The same, its tensors on the CPU."""
        gradients = {path: value.cpu() for path, value in self.gradients.items()}
        return Record(self.losses, self.norms, gradients, {path: value.cpu() for path, value in self.state.items()})

    def difference(self, other: Record) -> float:
        """The largest relative difference."""
        if set(self.gradients) != set(other.gradients) or set(self.state) != set(other.state):
            raise AssertionError(
                f"different tensors: {sorted(set(self.gradients) ^ set(other.gradients))}, "
                f"{sorted(set(self.state) ^ set(other.state))}"
            )
        numbers = {"losses": torch.tensor(self.losses), "norms": torch.tensor(self.norms)}
        others = {"losses": torch.tensor(other.losses), "norms": torch.tensor(other.norms)}
        kinds = ((numbers, others), (self.gradients, other.gradients), (self.state, other.state))
        return max(_difference(left, right) for left, right in kinds)


def _difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    largest = {path: float(value.double().abs().max()) for path, value in right.items() if value.numel()}
    floor = max(1e-3 * max(largest.values(), default=0.0), 1e-300)
    return max(
        (
            float((left[path].double() - right[path].double()).abs().max()) / max(scale, floor)
            for path, scale in largest.items()
        ),
        default=0.0,
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as people have them: no weight decay on vectors. A large epsilon, so that no rounding is blown up."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    loss: Tensor = result["loss"] if isinstance(result, dict) else result.loss
    return loss


def train_eager(
    model: nn.Module,
    calls: Calls,
    optimizer: torch.optim.Optimizer,
    mode: Callable[[int], AbstractContextManager[None]] = lambda step: comparable(0, step),
    max_norm: float = 1.0,
) -> Record:
    """The unsplit model in eager torch: what the parallel one must equal."""
    record = Record()
    for step, (args, kwargs) in enumerate(calls):
        with mode(step):
            loss = loss_of(model(*args, **kwargs))
            loss.backward()  # type: ignore[no-untyped-call]
        record.losses.append(loss.item())
        record.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        record.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    record.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return record


def train_parallel(
    model: ParallelModule,
    calls: Calls,
    optimizer: torch.optim.Optimizer,
    max_norm: float = 1.0,
) -> Record:
    """The same loop on a parallel model; clipping by the model, which knows its stages."""
    record = Record()
    for args, kwargs in calls:
        loss = loss_of(model(*args, **kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        record.losses.append(loss.item())
        record.norms.append(float(model.clip_grad_norm_(max_norm)))
        record.gradients = whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    record.state = model.full_state_dict()
    return record


def whole_gradients(model: ParallelModule) -> dict[str, Tensor]:
    """Every gradient, whole on every rank."""
    engine = model._engine
    found: dict[str, Tensor] = {}
    for slot in engine.slots:
        tensor = engine.tensors.get(slot.path)
        gradient = tensor.grad if tensor is not None else None
        assert gradient is None or isinstance(gradient, DTensor)
        if (OutputKind.GRADIENT, slot.path) in {(output.kind, output.path) for output in model.graph.outputs}:
            like = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
            found[slot.path] = whole(slot.path, gradient, like, model._homes, engine.device)
    return found
