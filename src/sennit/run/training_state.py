"""Model and optimizer for `torch.distributed.checkpoint`: saved on one plan, loaded under another, with another number
of ranks.

    dcp.save({"app": TrainingState(model, optimizer)}, checkpoint_id=folder)
    dcp.load({"app": TrainingState(other_model, other_optimizer)}, checkpoint_id=folder)

An optimizer numbers its parameters, and in a pipeline each stage has numbers of its own. So its state goes by name,
flat: `state.NAME.exp_avg` and `param_groups.NAME.lr`, the keys that torch's `get_optimizer_state_dict` has with
`flatten_optimizer_state_dict`. Tensors that are like their parameter lie like it, and are saved in blocks
(`run/homes.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sennit.errors import RunError
from sennit.run.homes import Home, fill, plain
from sennit.run.module import ParallelModule

__all__ = ["TrainingState", "load_optimizer_state", "optimizer_state"]


class TrainingState:
    """What a run needs to go on: parameters and buffers, the optimizer's state, the number of steps. All ranks."""

    def __init__(self, model: ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.model.state_dict(), "step_count": self.model.step_count}
        if self.optimizer is not None:
            _make_state(self.optimizer)
            state["optimizer"] = optimizer_state(self.model, self.optimizer)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.model.step_count = int(state["step_count"])
        if self.optimizer is not None:
            load_optimizer_state(self.model, self.optimizer, state["optimizer"])


def optimizer_state(model: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer of `model.parameters()`, by name."""
    names = _names(model, optimizer)
    state: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            home = model.home(name)
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"state.{name}.{key}"] = plain(value, home.layout) if isinstance(value, DTensor) else value
            for key, value in group.items():
                if key != "params":
                    state[f"param_groups.{name}.{key}"] = value
    return state


def load_optimizer_state(model: ParallelModule, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse. Options of a group are those saved for its first parameter."""
    names = _names(model, optimizer)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[parameter]
                for key, value in optimizer.state.get(parameter, {}).items():
                    saved = _saved(state, f"state.{name}.{key}")
                    optimizer.state[parameter][key] = _loaded(value, saved, model.home(name))
            for key in group:
                if key != "params" and group["params"]:
                    group[key] = _saved(state, f"param_groups.{names[group['params'][0]]}.{key}")


def _loaded(value: Any, saved: Any, home: Home) -> Any:
    if isinstance(value, DTensor) and isinstance(saved, Tensor):
        fill(value, saved, home.layout, dist.get_rank())
        return value
    if isinstance(value, Tensor) and isinstance(saved, Tensor):
        return value.copy_(saved)
    return saved


def _saved(state: dict[str, Any], key: str) -> Any:
    if key not in state:
        raise RunError(
            f"the checkpoint has no {key!r}", fix="load it into the kind of optimizer that it was saved from"
        )
    return state[key]


def _names(model: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise RunError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the model's",
                    fix="make the optimizer of model.parameters(), after parallelize",
                )
    return names


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that has made no step make its state, so that there is something to load into: a step of zero
    gradients and zero rate, which changes no parameter.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in gradients:
        parameter.grad = gradient
