"""Branches on chance whose outcome is certain.

Some models skip a layer by chance in training: `if torch.rand([]) < self.layerdrop`. A branch on a value cannot be
traced. But a number in [0, 1) is never below 0 and always below 1, so with `layerdrop = 0`, which is the usual setting,
there is nothing to branch on. `Certain` gives Python's answer there, and leaves every other comparison to torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Certain"]


class Certain(TorchFunctionMode):
    """Answers comparisons of one number from `torch.rand` with a limit outside of (0, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if len(args) == 2 and self._is_drawn(args[0]) and isinstance(args[1], (int, float)):
            is_below = func in (torch.Tensor.lt, torch.Tensor.__lt__, torch.lt)
            if (is_below or func in (torch.Tensor.ge, torch.Tensor.__ge__, torch.ge)) and not 0 < args[1] < 1:
                return (args[1] >= 1) == is_below
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and isinstance(result, Tensor) and result.shape == ():
            self.drawn.append(weakref.ref(result))
        return result

    def _is_drawn(self, value: object) -> bool:
        return any(item() is value for item in self.drawn)
