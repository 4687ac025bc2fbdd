"""Eager torch, made comparable with a captured graph.

`Drawn(seed, step)` makes every random operator of eager torch draw what `sennit.uniform` draws, in the order in which
the model runs them: under it, eager dropout drops what a captured graph drops.

`Float64()` keeps a float64 model in float64 where its code asks for float32 (norms, softmax and losses of many
libraries do). Under it, a difference between two runs is a fault and not a rounding of float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sennit.run.random import uniform

__all__ = ["Float64", "comparable"]


@contextmanager
def comparable(seed: int = 0, step: int = 0) -> Iterator[None]:
    """Run eager torch as a captured graph does: the same draws, and attention in its mathematical form."""
    from torch._dispatch.python import enable_python_dispatcher

    # with the Python dispatcher, dropout is one operator on the CPU too, as it is when a model is captured
    with sdpa_kernel(SDPBackend.MATH), enable_python_dispatcher(), _Drawn(seed, step):
        yield


class _Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives its base class no types
    def __init__(self, seed: int, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = torch.tensor([seed, step])
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        match func:
            case aten.native_dropout.default:
                x, p, _ = args
                mask = self._uniform(x.shape, torch.float32, x.device) >= p
                return (x * mask) * (1 / (1 - p) if p < 1 else 0.0), mask
            case aten.rand_like.default:
                return self._uniform(args[0].shape, (kwargs or {}).get("dtype") or args[0].dtype, args[0].device)
            case aten.rand.default:
                dtype = (kwargs or {}).get("dtype") or torch.get_default_dtype()
                return self._uniform(args[0], dtype, (kwargs or {}).get("device"))
            case aten.bernoulli_.float:
                return args[0].copy_(self._uniform(args[0].shape, torch.float32, args[0].device) < args[1])
            case aten.uniform_.default:
                low, high = args[1:3] if len(args) > 2 else (0.0, 1.0)
                return args[0].copy_(self._uniform(args[0].shape, args[0].dtype, args[0].device) * (high - low) + low)
            case _ if torch.Tag.nondeterministic_seeded in func.tags:
                raise NotImplementedError(f"{func} has no fixed draw yet")
            case _:
                return func(*args, **(kwargs or {}))

    def _uniform(self, shape: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        number, self.number = self.number, self.number + 1
        return uniform(self.seed, number, tuple(shape), dtype, device=device)


class Float64(TorchFunctionMode):
    """Where code asks for float32, float64 is given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*(torch.float64 if arg is torch.float32 else arg for arg in args), **wide)
