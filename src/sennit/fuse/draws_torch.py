"""Random operators that draw from torch's own generator, as the model would under DDP.

A captured graph draws `sennit.uniform`: numbers that are functions of a seed and a counter, so that a plan may split
them. Data parallelism splits no operator. There the model's own numbers are wanted: a run with DDP and one with
`DataParallel` that start from the same generator state drop the same elements. `with_torch_draws` rewrites

| captured | becomes |
|---|---|
| mask = uniform(...) >= p, of a dropout | `sennit.keep_mask(shape, p, dtype)`: what torch's dropout keeps of such elements |
| the same on a CPU, where only x * mask * 1/(1-p) read it | `noise = sennit.keep_noise(shape, p, dtype)`: 0 or 1/(1-p) |
| x * mask * 1/(1-p), forward and backward | on a CPU x * noise; else the same with the factor as eager torch rounds it |
| any other uniform | `sennit.rand(shape, dtype)`: torch.rand |

On a CPU eager torch draws `bernoulli_` in the input's type, divides by 1-p there and multiplies once; on a GPU it calls
`native_dropout`, whose factor is 1/(1-p), and which keeps other elements where they are of another type: a thread draws
for as many as it loads at once. A product with 0 or 1 is exact, so one product with the noise has the bits of one with
the mask and one with the factor, and costs a third of them: a mask of bools is first made numbers, each time. Dropout
and `torch.rand` then give DDP's bits. Other distributions (normal, randint) are right in distribution only: the capture
has taken them apart into arithmetic on uniform numbers.
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


def keep_mask(shape: Sequence[int], p: float, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    """Which elements dropout with probability p keeps."""
    if device.type == "cpu":
        return torch.empty(list(shape), dtype=dtype).bernoulli_(1 - p).bool()
    ones = torch.ones(list(shape), dtype=dtype, device=device)
    return torch.ops.aten.native_dropout.default(ones, p, True)[1]  # type: ignore[no-any-return]


def keep_noise(shape: Sequence[int], p: float, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    """What dropout with probability p multiplies by."""
    return torch.empty(list(shape), dtype=dtype, device=device).bernoulli_(1 - p).div_(1 - p)


def rand(shape: Sequence[int], dtype: torch.dtype, *, device: torch.device) -> Tensor:
    return torch.rand(list(shape), dtype=dtype, device=device)


DRAWS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"sennit.keep_mask": keep_mask, "sennit.keep_noise": keep_noise, "sennit.rand": rand}
)


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
    noises = _noises(graph, masks, readers) if device.type == "cpu" else {}
    kept = {op.name: mask for mask in noises for op in readers[mask]}
    ops = tuple(
        _with_noise(op, masks, noises, kept, readers) or _rewritten(op, masks, scaled, readers, device)
        for op in graph.ops
        if op.name not in hidden and op.name not in kept
    )
    inputs = tuple(item for item in graph.inputs if item.role is not Role.SEED)
    return replace(graph, ops=ops, inputs=inputs, repeats=() if ops != graph.ops else graph.repeats)


def _noises(graph: Graph, masks: Mapping[str, float], readers: Mapping[str, Sequence[Op]]) -> dict[str, DType]:
    """Masks that may be noise, with its element type: every reader is x * mask, and only a product with the factor
    reads that.
    """
    outputs = {output.name for output in graph.outputs}
    found: dict[str, DType] = {}
    for mask in masks:
        products = readers.get(mask, ())
        types = {op.results[0].type.dtype for op in products}
        if (
            len(types) == 1
            and mask not in outputs
            and all(_is_scaled(op, mask, readers) and op.name not in outputs for op in products)
        ):
            found[mask] = types.pop()
    return found


def _is_scaled(op: Op, mask: str, readers: Mapping[str, Sequence[Op]]) -> bool:
    match op, readers.get(op.name, ()):
        case (
            Op(kind="aten.mul.Tensor", args=(Ref(x), Ref(other))),
            [Op(kind="aten.mul.Tensor", args=(Ref(), float() | int())) as scaled],
        ):
            return other == mask and x != mask and scaled.results[0].type == op.results[0].type
        case _:
            return False


def _with_noise(
    op: Op,
    masks: Mapping[str, float],
    noises: Mapping[str, DType],
    kept: Mapping[str, str],
    readers: Mapping[str, Sequence[Op]],
) -> Op | None:
    """A draw of noise in place of a mask, x * noise in place of the product with the factor; None for other operators."""
    if op.name in noises:
        (value,) = op.results
        noise = replace(value, type=replace(value.type, dtype=noises[op.name]))
        args = (value.type.shape, masks[op.name], noises[op.name])
        return replace(op, kind="sennit.keep_noise", args=args, results=(noise,))
    match op.args:
        case (Ref(name), float() | int()) if name in kept:
            (product,) = [item for item in readers[kept[name]] if item.name == name]
            return replace(op, args=product.args)
        case _:
            return None


def _dropout(op: Op, readers: Mapping[str, Sequence[Op]]) -> tuple[str, float] | None:
    """(mask, p) where this draw is a dropout's: only `mask = drawn >= p` reads it, and something is multiplied by that."""
    match readers.get(op.name, ()):
        case [Op(kind="aten.ge.Scalar", args=(Ref(), float() as p)) as mask] if 0.0 < p < 1.0:
            is_factor = any(reader.kind == "aten.mul.Tensor" for reader in readers.get(mask.name, ()))
            return (mask.name, p) if is_factor else None
        case _:
            return None


def _rewritten(
    op: Op,
    masks: Mapping[str, float],
    scaled: Mapping[str, float],
    readers: Mapping[str, Sequence[Op]],
    device: torch.device,
) -> Op:
    if op.name in masks:
        dtype = next(kept.results[0].type.dtype for kept in readers[op.name] if kept.kind == "aten.mul.Tensor")
        return replace(op, kind="sennit.keep_mask", args=(op.results[0].type.shape, masks[op.name], dtype))
    if op.kind == "sennit.uniform":
        return replace(op, kind="sennit.rand", args=(op.results[0].type.shape, op.results[0].type.dtype))
    match op.args:
        case (Ref(name), float() | int()) if op.kind == "aten.mul.Tensor" and name in scaled and device.type == "cpu":
            return replace(op, args=(op.args[0], _eager_factor(scaled[name], op.results[0].type.dtype)))
        case _:
            return op


def _eager_factor(p: float, dtype: DType) -> float:
    return float(torch.ones((), dtype=torch_dtype(dtype)).div_(1 - p))
