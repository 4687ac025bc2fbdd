"""A gradient that is still on its way, as what stands at `parameter.grad` until it is there.

    parameter.grad = Awaited(path, parameter, WeakMethod(owner.flush))
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)      # calls `flush`, and goes on with the gradient

Whoever looks at `parameter.grad` between the backward pass and `optimizer.step()` must not find the gradients that
happen to be there: a norm over some of them is wrong and nobody is told. The placeholder has no values. Every function
of torch that is called with one waits for all gradients first, and gets the parameter's gradient in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sennit.errors import RunError

__all__ = ["Awaited"]


class Awaited(Tensor):
    """Made once for a parameter, and set anew in each step. `flush` is a weak reference to what waits for every
    gradient: a parameter does not keep its wrapper."""

    path: str
    parameter: nn.Parameter
    flush: Callable[[], Callable[[], None] | None]

    @staticmethod
    def __new__(cls, path: str, parameter: nn.Parameter, flush: Callable[[], Callable[[], None] | None]) -> Awaited:
        made: Awaited = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.path, made.parameter, made.flush = path, parameter, flush
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*tree_map(_there, args), **tree_map(_there, dict(kwargs or {})))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def _there(value: Any) -> Any:
    """What stands for this argument: the gradient, once it is there."""
    if not isinstance(value, Awaited):
        return value
    held = value.__dict__  # not by attribute: torch's own would come here again
    parameter: nn.Parameter = held["parameter"]
    if parameter.grad is value and (flush := held["flush"]()) is not None:
        flush()
    if parameter.grad is None or isinstance(parameter.grad, Awaited):
        raise RunError(
            f"the gradient of {held['path']!r} is read after it is gone",
            fix="read parameter.grad between backward and optimizer.step, or keep a copy: parameter.grad.clone()",
        )
    return parameter.grad
