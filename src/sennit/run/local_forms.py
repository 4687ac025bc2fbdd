"""Local forms in torch, and the source text that calls them. `ir/local_forms_numpy.py` defines what each computes.

A piece's positions along a dim are written as factors, major to minor: `rank.indices((2, "tp"), (8, None))` is a dim of
16 of which each device of `tp` holds eight neighbours; a number instead of an axis is a time, known when the source is
written. So the source is one text for all devices of a lane. Digits make positions arithmetic: no table of the dim is
built, and strided splits cost no more than blocks.

`LocalForms` is part of `run/rank.py`'s Rank; `emit_form` writes the call of a step, `emit_rows` that of an embedding's
gradient where it is added to a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sennit.ir.graph import Arg, refs
from sennit.ir.operators import is_local_form
from sennit.ir.program import Buffer, Compute
from sennit.ir.random_numpy import Steps
from sennit.run.random import uniform

__all__ = ["Indices", "LocalForms", "emit_form", "emit_rows"]

Factor = tuple[int, str | int | None]


@dataclass(frozen=True, slots=True)
class Indices:
    """Which global indices of a dim a piece holds: factors of the dim, major to minor, each at a coordinate or held
    whole.
    """

    factors: tuple[tuple[int, int | None], ...]

    @property
    def extent(self) -> int:
        return prod(size for size, _ in self.factors)

    def all(self, device: torch.device | None = None) -> Tensor:
        """The global indices, ascending."""
        found = torch.zeros(1, dtype=torch.int64, device=device)
        for size, at in self.factors:
            digits = torch.arange(size, device=device) if at is None else torch.tensor([at], device=device)
            found = (found[:, None] * size + digits[None, :]).flatten()
        return found

    def locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where global indices lie in the piece, 0 for those that do not, and whether they do.

        Indices outside the dim (ignored targets, which are masked later) lie nowhere.
        """
        inside = (index >= 0) & (index < self.extent)
        local, stride = torch.zeros_like(index), self.extent
        for size, at in self.factors:
            stride //= size
            digit = (index // stride) % size
            if at is None:
                local = local * size + digit
            else:
                inside = inside & (digit == at)
        return torch.where(inside, local, 0), inside

    def range(self) -> tuple[int, int]:
        """First and last index; the piece is what lies between where it is a block."""
        first = last = 0
        for size, at in self.factors:
            first, last = first * size + (at or 0), last * size + (size - 1 if at is None else at)
        return first, last


class LocalForms:
    """The forms as methods of a rank, which knows its coordinates."""

    coordinate: Mapping[str, int]
    torch_device: torch.device

    def indices(self, *factors: Factor) -> Indices:
        return Indices(tuple((size, self.coordinate[at] if isinstance(at, str) else at) for size, at in factors))

    def embedding(self, weight: Tensor, index: Tensor, *_: object, rows: Indices) -> Tensor:
        local, inside = rows.locate(index)
        found: Tensor = torch.ops.aten.embedding.default(weight, local)
        return found.masked_fill(~inside[..., None], 0)

    def embedding_dense_backward(
        self, grad: Tensor, index: Tensor, count: int, padding: int, scale: bool, *, rows: Indices
    ) -> Tensor:
        local, inside = rows.locate(index)
        inside = inside & (index != padding)
        held = prod(size for size, at in rows.factors if at is None)
        weight = grad.new_zeros((held + 1, grad.shape[-1]))  # the last row takes what lies elsewhere
        at = torch.where(inside, local, held).flatten()
        return weight.index_add_(0, at, grad.reshape(-1, grad.shape[-1]))[:held].contiguous()

    def add_rows(
        self, total: Tensor, grad: Tensor, index: Tensor, padding: int, fresh: bool, *, rows: Indices | None = None
    ) -> Tensor:
        """`total + embedding_dense_backward(grad, index, ...)`, which touches the rows of `index` alone."""
        inside = index != padding
        at = index
        if rows is not None:
            at, here = rows.locate(index)
            inside = inside & here
        # what is left out adds zeros to a row that is there
        terms = grad.masked_fill(~inside[..., None], 0).reshape(-1, grad.shape[-1])
        onto = total.clone() if fresh else total
        return onto.index_add_(0, torch.where(inside, at, 0).flatten(), terms)

    def gather(self, x: Tensor, dim: int, index: Tensor, *, places: Indices) -> Tensor:
        local, inside = places.locate(index)
        return torch.gather(x, dim, local).masked_fill(~inside, 0)

    def scatter(self, x: Tensor, dim: int, index: Tensor, value: Tensor | float, *, places: Indices) -> Tensor:
        wider, local = _with_room(x, dim, index, places)
        return wider.scatter_(dim, local, value).narrow(dim, 0, x.shape[dim]).contiguous()

    def scatter_add(self, x: Tensor, dim: int, index: Tensor, value: Tensor, *, places: Indices) -> Tensor:
        wider, local = _with_room(x, dim, index, places)
        return wider.scatter_add_(dim, local, value).narrow(dim, 0, x.shape[dim]).contiguous()

    def arange(self, *bounds: float, dtype: torch.dtype, places: Indices) -> Tensor:
        start = bounds[0] if len(bounds) > 1 else 0
        step = bounds[2] if len(bounds) > 2 else 1
        return (places.all(self.torch_device) * step + start).to(dtype)

    def uniform(
        self,
        seed: Tensor,
        number: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        steps: Steps | None = None,
        first: int = 0,
        *,
        places: Sequence[Indices],
    ) -> Tensor:
        return uniform(
            seed,
            number,
            shape,
            dtype,
            steps,
            first,
            indices=[part.all(self.torch_device) for part in places],
            device=self.torch_device,
        )

    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        *rest: object,
        places: Sequence[Indices],
    ) -> Tensor:
        """The window of the input that the outputs see, convolved without padding; then the outputs themselves, where
        they are no block.
        """
        window, spans = _window(x, weight, stride, padding, dilation, places)
        zero = [0] * len(padding)
        result: Tensor = torch.ops.aten.convolution.default(window, weight, bias, stride, zero, dilation, *rest)
        for dim, (part, (first, _)) in enumerate(zip(places, spans, strict=True), start=2):
            result = result.index_select(dim, part.all(x.device) - first)
        return result

    def convolution_backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias_sizes: Sequence[int] | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        mask: Sequence[bool],
        *,
        places: Sequence[Indices],
    ) -> tuple[Tensor, ...]:
        window, spans = _window(x, weight, stride, padding, dilation, places)
        spread = grad
        for dim, (part, (first, last)) in enumerate(zip(places, spans, strict=True), start=2):
            room = spread.new_zeros((*spread.shape[:dim], last - first + 1, *spread.shape[dim + 1 :]))
            spread = room.index_copy_(dim, part.all(x.device) - first, spread)
        found = torch.ops.aten.convolution_backward.default(
            spread, window, weight, bias_sizes, stride, [0] * len(padding), dilation, transposed, output_padding, groups, mask
        )  # fmt: skip
        results = []
        for position, part in enumerate(found):
            if mask[position]:
                results.append(_unwindow(part, x, stride, padding, spans) if position == 0 else part)
        return tuple(results)


def _with_room(x: Tensor, dim: int, index: Tensor, places: Indices) -> tuple[Tensor, Tensor]:
    """A copy with one more element along the dim, for what lies elsewhere, and local indices that send it there."""
    local, inside = places.locate(index)
    room = x.new_zeros((*x.shape[: dim % x.ndim], 1, *x.shape[dim % x.ndim + 1 :]))
    return torch.cat([x, room], dim), torch.where(inside, local, x.shape[dim])


def _window(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    places: Sequence[Indices],
) -> tuple[Tensor, list[tuple[int, int]]]:
    """The input that the outputs from the first to the last of `places` see, with zeros where it reaches over the edge."""
    spans = [part.range() for part in places]
    pads: list[int] = []
    for dim, (first, last) in enumerate(spans):
        low = first * stride[dim] - padding[dim]
        high = last * stride[dim] - padding[dim] + dilation[dim] * (weight.shape[2 + dim] - 1) + 1
        size = x.shape[2 + dim]
        start, end = min(max(low, 0), size), min(max(high, 0), size)
        x = x.narrow(2 + dim, start, end - start)
        pads = [start - low, high - end, *pads]
    return torch.nn.functional.pad(x, pads), spans


def _unwindow(
    part: Tensor, x: Tensor, stride: Sequence[int], padding: Sequence[int], spans: Sequence[tuple[int, int]]
) -> Tensor:
    """The derivative of taking the window: its values in their place, zeros elsewhere."""
    pads: list[int] = []
    for dim, (first, _) in enumerate(spans):
        low = first * stride[dim] - padding[dim]
        pads = [low, x.shape[2 + dim] - low - part.shape[2 + dim], *pads]  # negative numbers cut
    return torch.nn.functional.pad(part, pads)


# ---- source ----------------------------------------------------------------------------------------------------------


def emit_form(step: Compute, buffers: Mapping[str, Buffer], write: Callable[[Arg], str], rank: str = "rank") -> str:
    """The call of a step's local form; `write` writes an argument, `rank` is the name of this rank on the step's mesh."""
    read = [buffers[name] for name in refs((*step.args, *(arg for _, arg in step.kwargs)))]
    name = step.kind.removeprefix("sennit.")
    parts = [write(arg) for arg in step.args] + [f"{key}={write(arg)}" for key, arg in step.kwargs]
    match name:
        case "embedding":
            parts.append(f"rows={_factors(read[0], 0, rank)}")
        case "embedding_dense_backward":
            parts.append(f"rows={_factors(step.results[0], 0, rank)}")
        case "gather" | "scatter" | "scatter_add":
            dim = step.args[1]
            assert isinstance(dim, int)
            parts.append(f"places={_factors(read[0], dim % len(read[0].layout.shape), rank)}")
        case "arange":
            parts.append(f"places={_factors(step.results[0], 0, rank)}")
            if not any(key == "dtype" for key, _ in step.kwargs):
                parts.append(f"dtype=torch.{step.results[0].dtype.torch_name}")
        case "uniform":
            parts.append(f"places={_all_factors(step.results[0], 0, rank)}")
        case "convolution":
            parts.append(f"places={_all_factors(step.results[0], 2, rank)}")
        case "convolution_backward":
            parts.append(f"places={_all_factors(read[0], 2, rank)}")
        case _:
            raise AssertionError(f"no local form {step.kind}")  # the proof refuses it before
    return f"{rank}.{name}({', '.join(parts)})"


def emit_rows(step: Compute, total: str, fresh: bool, write: Callable[[Arg], str], rank: str) -> str:
    """The call that adds the gradient of an embedding to a sum."""
    grad, index, _, padding, _ = step.args
    parts = [total, write(grad), write(index), write(padding), f"fresh={fresh}"]
    if is_local_form(step.kind):
        parts.append(f"rows={_factors(step.results[0], 0, rank)}")
    return f"{rank}.add_rows({', '.join(parts)})"


def _factors(buffer: Buffer, dim: int, rank: str) -> str:
    times = {axis: covered[0] for axis, covered in buffer.times}
    factors = buffer.layout.factors(dim)
    found = [f"({factor.size}, {times.get(factor.axis or '', factor.axis)!r})" for factor in factors]
    return f"{rank}.indices({', '.join(found)})"


def _all_factors(buffer: Buffer, first: int, rank: str) -> str:
    return "[" + ", ".join(_factors(buffer, dim, rank) for dim in range(first, len(buffer.layout.shape))) + "]"
