"""Random operators that draw from torch's own generator, as the model would under DDP.

A captured graph draws `sennit.uniform`: numbers that are functions of a seed and a counter, so that a plan may split them. Data parallelism splits no operator. There the model's own
numbers are wanted: a run with DDP and one with `DataParallel` that start from the same generator state drop the same elements. `with_torch_draws` rewrites

| captured | becomes |
|---|---|
| mask = uniform(...) >= p, of a dropout | `sennit.keep_mask(shape, p)`: what torch's dropout keeps |
| x * mask * 1/(1-p), forward and backward | the same with the factor as eager torch rounds it |
| any other uniform | `sennit.rand(shape, dtype)`: torch.rand |

On a CPU eager torch computes the mask by `bernoulli_` in the input's type and divides it by 1-p there; on a GPU it calls `native_dropout`, whose factor is 1/(1-p). Dropout and `torch.rand` then give DDP's
bits. Other distributions (normal, randint) are right in distribution only: the capture has taken them apart into arithmetic on uniform numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from sennit.capture.element_types import torch_dtype
from sennit.ir.dtype import DType
from sennit.ir.graph import Graph, Op, Ref, Role

__all__ = ["DRAWS", "with_torch_draws"]


def keep_mask(shape: Sequence[int], p: float, *, device: torch.device) -> Tensor:
    """Which elements dropout with probability p keeps."""
    if device.type == "cpu":
        return torch.empty(list(shape)).bernoulli_(1 - p).bool()
    return torch.ops.aten.native_dropout.default(torch.ones(list(shape), device=device), p, True)[1]  # type: ignore[no-any-return]


def rand(shape: Sequence[int], dtype: torch.dtype, *, device: torch.device) -> Tensor:
    return torch.rand(list(shape), dtype=dtype, device=device)


DRAWS: Mapping[str, Callable[..., Tensor]] = MappingProxyType({"sennit.keep_mask": keep_mask, "sennit.rand": rand})


def with_torch_draws(graph: Graph, device: torch.device) -> Graph:
    """The graph with `sennit.keep_mask` and `sennit.rand` in place of `sennit.uniform`, and without its seed."""
    readers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.reads:
            readers.setdefault(name, []).append(op)
    masks: dict[str, float] = {}  # the mask of a dropout -> its p
    for op in graph.ops:
        if op.kind == "sennit.uniform" and (found := _dropout(op, readers)) is not None:
            masks[found[0]] = found[1]
    hidden = {name for mask in masks for op in graph.ops if op.name == mask for name in op.reads}
    scaled = {
        kept.name: masks[mask] for mask in masks for kept in readers.get(mask, ()) if kept.kind == "aten.mul.Tensor"
    }
    ops = tuple(_rewritten(op, masks, scaled, device) for op in graph.ops if op.name not in hidden)
    inputs = tuple(item for item in graph.inputs if item.role is not Role.SEED)
    return replace(graph, ops=ops, inputs=inputs, repeats=() if ops != graph.ops else graph.repeats)


def _dropout(op: Op, readers: Mapping[str, Sequence[Op]]) -> tuple[str, float] | None:
    """(mask, p) where this draw is a dropout's: only `mask = drawn >= p` reads it."""
    match readers.get(op.name, ()):
        case [Op(kind="aten.ge.Scalar", args=(Ref(), float() as p)) as mask] if 0.0 < p < 1.0:
            return mask.name, p
        case _:
            return None


def _rewritten(op: Op, masks: Mapping[str, float], scaled: Mapping[str, float], device: torch.device) -> Op:
    if op.name in masks:
        return replace(op, kind="sennit.keep_mask", args=(op.results[0].type.shape, masks[op.name]))
    if op.kind == "sennit.uniform":
        return replace(op, kind="sennit.rand", args=(op.results[0].type.shape, op.results[0].type.dtype))
    match op.args:
        case (Ref(name), float() | int()) if op.kind == "aten.mul.Tensor" and name in scaled and device.type == "cpu":
            return replace(op, args=(op.args[0], _eager_factor(scaled[name], op.results[0].type.dtype)))
        case _:
            return op


def _eager_factor(p: float, dtype: DType) -> float:
    return float(torch.ones((), dtype=torch_dtype(dtype)).div_(1 - p))
