"""Local forms: operators on pieces whose positions matter. Their definitions, on numpy arrays.

A step of kind `sennit.NAME` that stands for a graph operator computes that operator on one device's pieces. Its
arguments are those of the operator; where the pieces lie follows from the layouts of the buffers that it reads and
writes, at the device's point. With I the global indices of a piece along a dim:

| form | reads | makes |
|---|---|---|
| `embedding(w, t)` | rows I of w | w[t] where t is in I, else 0: a pending sum |
| `embedding_dense_backward(g, t, n, ...)` | | rows I of the derivative: the terms with t in I |
| `gather(x, dim, t)` | x at I along dim | x[t] where t is in I, else 0: a pending sum |
| `scatter(x, dim, t, v)`, `scatter_add` | x at I along dim | x with v at t, for t in I |
| `arange(...)` | | its elements at I |
| `uniform(seed, number, shape, dtype, ...)` | | its elements at I, on every dim |
| `convolution(x, w, b, ...)` | x whole along spatial dims | outputs at I of the spatial dims |
| `convolution_backward(g, x, w, ...)` | g at I of the spatial dims | what these outputs add to each derivative: pending sums |
| `pack`, `parts`, `join` | | several tensors in one that travels (`flat_numpy.py`); they stand for no operator of the graph |

Dims that are split otherwise (samples, channels, ...) are as in the operator itself. `apply_form` is the oracle for
`run/local_forms.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sennit.errors import GraphError
from sennit.ir.aten_numpy import apply
from sennit.ir.convolution_numpy import convolution, convolution_backward
from sennit.ir.dtype import DType
from sennit.ir.flat_numpy import join, pack, parts
from sennit.ir.layout_numpy import Array
from sennit.ir.program import Buffer
from sennit.ir.random_numpy import uniform_at

__all__ = ["apply_form"]


def apply_form(
    kind: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reads: Sequence[Buffer],
    results: Sequence[Buffer],
    device: int,
) -> tuple[Array, ...]:
    """The results of one local form on `device`; `args` has arrays in place of references."""

    def held(buffer: Buffer, dim: int) -> Array:
        return buffer.layout.indices(dim % len(buffer.layout.shape), buffer.point(device))

    match kind.removeprefix("sennit."):
        case "embedding":
            return (_embedding(args[0], args[1], held(reads[0], 0)),)
        case "embedding_dense_backward":
            whole = apply("aten.embedding_dense_backward.default", args, kwargs)[0]
            return (whole[held(results[0], 0)],)
        case "gather":
            return (_gather(args[0], args[1], args[2], held(reads[0], args[1])),)
        case "scatter" | "scatter_add" as name:
            return (_scatter(name, args, held(results[0], args[1]), reads[0].layout.shape[args[1]]),)
        case "arange":
            overload = ("default", "start", "start_step")[len(args) - 1]
            return (apply(f"aten.arange.{overload}", args, kwargs)[0][held(results[0], 0)],)
        case "uniform":
            return (_uniform(args, [held(results[0], dim) for dim in range(len(results[0].layout.shape))]),)
        case "convolution":
            whole = convolution(*args)
            places = [held(results[0], dim) for dim in range(2, whole.ndim)]
            return (whole[_planes(places)],)
        case "convolution_backward":
            shape = reads[0].layout.shape
            spread = np.zeros((*args[0].shape[:2], *shape[2:]), args[0].dtype)
            places = [held(reads[0], dim) for dim in range(2, len(shape))]
            spread[_planes(places)] = args[0]
            return convolution_backward(spread, *args[1:])
        case "pack":
            return (pack(args[0], args[1], args[2]),)
        case "parts":
            return parts(args[0], [result.local_shape(device) for result in results])
        case "join":
            return join(args[0], args[1], args[2], [result.local_shape(device) for result in results])
        case _:
            raise GraphError(f"{kind} is no local form", fix="define it in ir/local_forms_numpy.py")


def _local(index: Array, held: Array) -> tuple[Array, Array]:
    """Where each global index lies in the piece, and whether it does."""
    at = np.searchsorted(held, index)
    inside = (at < len(held)) & (held[np.minimum(at, len(held) - 1)] == index)
    return np.where(inside, at, 0), inside


def _embedding(weight: Array, index: Array, held: Array) -> Array:
    at, inside = _local(index, held)
    return np.where(inside[..., None], weight[at], weight.dtype.type(0))


def _gather(x: Array, dim: int, index: Array, held: Array) -> Array:
    at, inside = _local(index, held)
    return np.where(inside, np.take_along_axis(x, at, dim), x.dtype.type(0))


def _scatter(name: str, args: Sequence[Any], held: Array, extent: int) -> Array:
    """The whole dim with the piece in its place, scattered into, and the piece taken out again."""
    x, dim, index, value = args
    whole = np.zeros((*x.shape[: dim % x.ndim], extent, *x.shape[dim % x.ndim + 1 :]), x.dtype)
    np.moveaxis(whole, dim, 0)[held] = np.moveaxis(x, dim, 0)
    kind = "aten.scatter_add.default" if name == "scatter_add" else "aten.scatter.value"
    if name == "scatter" and isinstance(value, np.ndarray):
        kind = "aten.scatter.src"
    return np.take(apply(kind, (whole, dim, index, value), {})[0], held, axis=dim)


def _planes(places: Sequence[Array]) -> tuple[Any, ...]:
    """All samples and channels, and the product of places."""
    return (slice(None), slice(None), *np.ix_(*places))


def _uniform(args: Sequence[Any], places: Sequence[Array]) -> Array:
    seed, number, shape, dtype, *piece = args
    assert isinstance(dtype, DType)
    return uniform_at(seed, number, shape, dtype, places, *piece)
