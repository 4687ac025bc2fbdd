"""What a step of a block allocates and frees, traced on torch's meta device: no GPU, no values, the real autograd.

`Recorder` sees every operator, as in profile_h200.py, and which storages were gone before it. `peak` replays that with
the rounding of a caching allocator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from blocks import Case, make
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ["traced_peak"]

GRAIN = 512  # bytes: kMinBlockSize of torch's caching allocator


class Recorder(TorchDispatchMode):
    """`live` and `most`: bytes of storages, each rounded up, that steps have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.live = self.most = 0

    def note(self, value: torch.Tensor, counts: bool = True) -> None:
        storage = value.untyped_storage()
        if storage._cdata in self.known:
            return
        size = -(-storage.nbytes() // GRAIN) * GRAIN if counts else 0
        self.known[storage._cdata] = (StorageWeakRef(storage), size)
        self.live += size
        self.most = max(self.most, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for key in [key for key, (reference, _) in self.known.items() if reference.expired()]:
            self.live -= self.known.pop(key)[1]
        result = func(*args, **(kwargs or {}))
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor):
                self.note(value)
        return result


class FusedNorm(torch.autograd.Function):
    """What the kernel for RMS norm makes and keeps: the result, and a factor in f32 for each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """On the meta device torch takes attention and RMS norm apart; on a GPU it calls one kernel for each, which keeps
    neither scores nor squares."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
        aten = torch.ops.aten
        if q.dtype is torch.float32:
            return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]  # type: ignore[no-any-return]
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]  # type: ignore[no-any-return]

    def rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor, eps: float | None) -> torch.Tensor:
        return FusedNorm.apply(x, weight)  # type: ignore[no-any-return]

    originals = F.scaled_dot_product_attention, F.rms_norm
    F.scaled_dot_product_attention, F.rms_norm = attention, rms_norm  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.rms_norm = originals


def traced_peak(case: Case) -> int:
    """Bytes that a step of the case needs beyond its parameters, buffers and arguments."""
    module, arguments = make(case, "meta")
    recorder = Recorder()
    for value in (*module.parameters(), *module.buffers(), *arguments):
        recorder.note(value, counts=False)
    with cuda_kernels(), recorder:
        module(*arguments).backward()
    return recorder.most
