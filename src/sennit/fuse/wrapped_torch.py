"""What `DataParallel` asks of a model and of a call before it runs anything, and what it leaves with the model.

A captured step has no autograd inside, no modules and no autocast: its casts are operators of the graph. What a user
does to the model and what would not happen in a step (a hook on a parameter, a parameter that is frozen later, another
autocast, another parameter in the place of one that was captured) is told here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.errors import RunError
from sennit.ir.strategy import Strategy

__all__ = ["Asked", "Setting", "check_inputs", "check_wrapped", "without_autocast"]


def check_wrapped(
    model: nn.Module, sample: object, strategy: object, optimizer: torch.optim.Optimizer | None = None
) -> None:
    where = f"sennit.DataParallel of {type(model).__name__}"
    if not dist.is_initialized():
        raise RunError(
            "there is no process group",
            fix="call torch.distributed.init_process_group first, or run the script under torchrun",
        )
    if not isinstance(sample, (tuple, Mapping)):
        raise RunError(
            f"the sample is a {type(sample).__name__}",
            where=where,
            fix="pass the arguments of a call: sample=(tokens, targets), or by name sample={'tokens': tokens}",
        )
    if strategy is not None and not isinstance(strategy, Strategy):
        raise RunError(
            f"the strategy is a {type(strategy).__name__}", where=where, fix="read its text with Strategy.parse(text)"
        )
    if not model.training:
        raise RunError("the model is in evaluation mode", where=where, fix="call model.train() first")
    named = dict(model.named_parameters())
    if empty := [path for path, parameter in named.items() if parameter.is_meta]:
        raise RunError(
            f"{len(empty)} of {len(named)} parameters are on the meta device: {', '.join(empty[:5])}",
            where=where,
            fix="give them memory and values first: model.to_empty(device='cpu'), then load a state or initialise them",
        )
    hooked = [path for path, p in named.items() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise RunError(
            f"{len(hooked)} of {len(named)} parameters have hooks, which would not run: {', '.join(hooked[:5])}",
            where=where,
            fix="remove them; change parameter.grad between backward and optimizer.step instead",
        )
    trained = {id(parameter) for parameter in named.values() if parameter.requires_grad}
    groups = [] if optimizer is None else optimizer.param_groups
    if groups and trained and trained.isdisjoint(id(parameter) for group in groups for parameter in group["params"]):
        raise RunError(
            f"the optimizer has none of the model's {len(trained)} trained parameters",
            where=where,
            fix="make it of this model, after all that gives the model other parameters (a copy, to_empty, "
            "load_state_dict with assign=True): torch.optim.AdamW(model.parameters())",
        )


def check_inputs(inputs: Mapping[str, Tensor]) -> None:
    for path, tensor in inputs.items():
        if tensor.requires_grad:
            raise RunError(
                f"the argument {path!r} requires a gradient, and none comes to it here: only the model's parameters train",
                fix="put what makes it into the model that is wrapped, or pass it without its gradient: .detach()",
            )


# a path, the dictionary and the key under which the model holds what is there, and what that was
_Place = tuple[str, Mapping[str, Any], str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a capture depends on beside the arguments: autocast, which modules and parameters the model has, and which
    of them train.
    """

    autocast: torch.dtype | None
    modules: tuple[_Place, ...]
    parameters: tuple[tuple[_Place, bool], ...]  # and whether it trains

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> Setting:
        modules, parameters = [], []
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            modules += [(prefix + key, module._modules, key, child) for key, child in module._modules.items()]
            parameters += [
                ((prefix + key, module._parameters, key, held), held is not None and held.requires_grad)
                for key, held in module._parameters.items()
            ]
        return cls(_autocast(device), tuple(modules), tuple(parameters))

    def check(self, device: torch.device) -> None:
        if (now := _autocast(device)) != self.autocast:
            raise RunError(
                f"the model is called {_shown(now)}, and was captured {_shown(self.autocast)}",
                fix="wrap the model as it is called: both inside `with torch.autocast(...)`, or neither",
            )
        for path, children, key, child in self.modules:
            if children.get(key) is not child:
                raise RunError(
                    f"module {path!r} is not the one that was captured, and would not be called",
                    fix="change modules before the model is wrapped; to change one later, wrap the model again",
                )
        for (path, parameters, key, captured), trained in self.parameters:
            parameter = parameters.get(key)
            # a frozen one may be another: its values are read where it is
            if parameter is not captured and (trained or parameter is None or captured is None):
                raise RunError(
                    f"parameter {path!r} is not the one that was captured, and would get no gradient",
                    fix="load values into the one that is there: load_state_dict (without assign=True), or copy_ under "
                    "torch.no_grad(); for another parameter, wrap the model again, with an optimizer that has it",
                )
            if parameter is not None and parameter.requires_grad != trained:
                raise RunError(
                    f"parameter {path!r} {'does not train' if trained else 'trains'} now, and "
                    f"{'did' if trained else 'did not'} when the model was captured",
                    fix="freeze parameters before the model is wrapped; to change it later, wrap the model again",
                )


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _shown(autocast: torch.dtype | None) -> str:
    return "without autocast" if autocast is None else f"with autocast to {autocast}"


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The operators of a graph as they are."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


class Asked:
    """A hook of the model that calls its wrapper. In a copy of the model, or one that was saved whole, it does
    nothing."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self.call = call

    def __call__(self, *_: Any) -> None:
        if self.call is not None:
            self.call()

    def __reduce__(self) -> tuple[type[Asked], tuple[()]]:
        return Asked, ()
