"""An optimizer's step in parts: each parameter when its gradient has arrived, with the settings of the moment at which
the step was asked for.

    step = DeferredStep(optimizer)
    step.ask(waiting)          # optimizer.step(): update what is there now; `waiting` are parameters whose gradients are on their way
    step.update(parameters)    # some of them are there
    step.update_rows(...)      # some rows of one of them are there
    step.forget()              # a new backward pass begins: nothing is asked for

Between `ask` and `update` a scheduler may change learning rates; the update uses those of `ask`. Torch's optimizers
treat each parameter by itself, so a step in parts gives the bits of a step at once. An optimizer that looks at several
parameters together (one global norm, one step counter for a group) does not; with such a one use `across_steps=False`.

A parameter's gradient is gone after its update, as after `zero_grad`.

**Rows.** Torch's common optimizers treat each element by itself (`BY_ELEMENT`), so rows of a parameter can be updated
when they have come (`row_uses.py`): the optimizer gets a view of these rows as a parameter, whose state are views of
the parameter's state. What is one number for all of it (the count of steps) is the same for every block, and becomes
the parameter's with the last of them. An optimizer that makes its state in its first step makes it for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from sennit.errors import RunError

__all__ = ["BY_ELEMENT", "DeferredStep"]

BY_ELEMENT: frozenset[type[torch.optim.Optimizer]] = frozenset(
    (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
    )
)


class DeferredStep:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._plain: Callable[[], Any] = optimizer.step
        self._plain_zero: Callable[..., Any] = optimizer.zero_grad
        self._settings: list[dict[str, Any]] | None = None
        self._group_of: dict[int, int] = {}

    def replace(self, asked: Callable[[], None], *, before_zero: Callable[[], None]) -> None:
        """From now on `optimizer.step()` calls `asked`, and `optimizer.zero_grad()` calls `before_zero` first."""

        # with the marks that a scheduler left, which asks whether it is its own step
        @wraps(self._plain)
        def step(_: torch.optim.Optimizer, closure: Any = None) -> None:
            if closure is not None:
                raise RunError("optimizer.step takes no closure here", fix="call model, backward, step in this order")
            asked()

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            before_zero()
            self._plain_zero(set_to_none)

        # bound to the optimizer: schedulers take a step's function apart from what it is bound to
        self.optimizer.step = MethodType(step, self.optimizer)  # type: ignore[method-assign]
        self.optimizer.zero_grad = MethodType(zero_grad, self.optimizer)  # type: ignore[method-assign]

    def restore(self) -> None:
        self.optimizer.step = self._plain  # type: ignore[method-assign, assignment]
        self.optimizer.zero_grad = self._plain_zero  # type: ignore[method-assign]

    @property
    def has_hooks(self) -> bool:
        """Whether hooks run at each call of the optimizer's step."""
        held = self.optimizer
        return bool(held._optimizer_step_pre_hooks or held._optimizer_step_post_hooks)

    @property
    def is_asked(self) -> bool:
        return self._settings is not None

    def ask(self, waiting: Collection[int]) -> None:
        """Update every parameter that has a gradient, except those in `waiting` (by `id`), which come later."""
        groups = self.optimizer.param_groups
        self._settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._group_of = {id(p): place for place, group in enumerate(groups) for p in group["params"]}
        self.update([p for group in groups for p in group["params"] if p.grad is not None and id(p) not in waiting])

    def update(self, parameters: Sequence[Tensor]) -> None:
        assert self._settings is not None
        groups = self.optimizer.param_groups
        held = [dict(group) for group in groups]
        for group in groups:
            group["params"] = []
        for group, settings in zip(groups, self._settings, strict=False):  # others were added since
            group.update(settings)
        for parameter in parameters:
            if (place := self._group_of.get(id(parameter))) is not None:
                groups[place]["params"].append(parameter)
        try:
            self._plain()
        finally:
            for group, before in zip(groups, held, strict=True):
                group.update(before)
        for parameter in parameters:
            parameter.grad = None

    @property
    def is_by_element(self) -> bool:
        """Whether rows of a parameter may be updated by themselves.

        A class that is derived from one of torch's may do something else.
        """
        return type(self.optimizer) in BY_ELEMENT

    def has_state(self, parameter: Tensor) -> bool:
        """Whether its update makes no new state."""
        assert self._settings is not None
        place = self._group_of.get(id(parameter))  # None: the optimizer does not have it, and updates nothing
        is_without = isinstance(self.optimizer, torch.optim.SGD) and (
            place is None or self._settings[place]["momentum"] == 0
        )
        return is_without or bool(self.optimizer.state.get(parameter))

    def update_rows(self, parameter: Tensor, rows: slice, gradient: Tensor, *, is_last: bool) -> None:
        """Update these rows, which have this gradient. `is_last`: no others of this parameter follow."""
        part, whole = parameter.detach()[rows], self.optimizer.state.get(parameter, {})
        part.grad = gradient.view_as(part)
        self.optimizer.state[part] = {
            key: value[rows] if _is_of(parameter, value) else value.clone() if isinstance(value, Tensor) else value
            for key, value in whole.items()
        }
        self._group_of[id(part)] = self._group_of[id(parameter)]
        try:
            self.update([part])
        finally:
            del self._group_of[id(part)]
            after = self.optimizer.state.pop(part)
        if is_last:
            whole.update({key: value for key, value in after.items() if not _is_of(part, value)})

    def forget(self) -> None:
        self._settings = None


def _is_of(parameter: Tensor, value: Any) -> bool:
    """Whether this state has a number for each element."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
