"""The numpy meaning of the ATen operators that a captured model uses, forward and backward.

`apply(kind, args, kwargs)` computes one operator: args as in `ir/graph.py`, with an array in place of each `Ref`. It is
the oracle for every faster executor, so each operator is written as its definition, not for speed. Three rules hold
throughout:

- **Element types** follow torch, not numpy: see `dtype_numpy.result_type`.
- **Results are tuples.** A result that `output_mask` leaves out is left out of the tuple, as it is of `Op.results`.
- **Nothing is written in place.** A result may share memory with an argument.

Operators are grouped by family; a family is a function that returns its table. To add an operator, write its definition
with the parameters of its ATen schema and enter it in the table of its family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sennit.errors import GraphError
from sennit.ir.convolution_numpy import convolution, convolution_backward
from sennit.ir.dtype import DType
from sennit.ir.dtype_numpy import numpy_dtype, result_type
from sennit.ir.graph import Arg, Ref
from sennit.ir.layout_numpy import Array
from sennit.ir.random_numpy import uniform

__all__ = ["apply", "bind", "known_kinds"]

Shape = Sequence[int]
Family = Mapping[str, Callable[..., Any]]


def apply(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Array, ...]:
    """The results of one operator on arrays, Python numbers, strings, `DType`s and tuples of them."""
    for family in _families():
        operator = family().get(kind)
        if operator is not None:
            break
    else:
        raise GraphError(f"operator {kind} has no numpy meaning", fix="add it to its family in ir/aten_numpy.py")
    storage = ("device", "layout", "pin_memory", "memory_format", "non_blocking")  # where values lie, not what they are
    values = {name: value for name, value in kwargs.items() if name not in storage}
    try:
        with np.errstate(all="ignore"):  # infinities and NaN are values, as in torch: a masked softmax meets both
            result = operator(*args, **values)
    except (IndexError, TypeError, ValueError) as error:
        given = ", ".join(str(list(arg.shape)) if isinstance(arg, np.ndarray) else repr(arg) for arg in args)
        raise GraphError(f"{kind} cannot be computed on ({given}): {error}") from error
    return tuple(map(np.asarray, result)) if isinstance(result, (tuple, list)) else (np.asarray(result),)


def known_kinds() -> frozenset[str]:
    """Every operator that `apply` computes."""
    return frozenset(kind for family in _families() for kind in family())


def _families() -> tuple[Callable[[], Family], ...]:
    return _pointwise, _reductions, _products, _views, _indexing, _normalisation, _creation


def bind(arg: Arg, arrays: Mapping[str, Array]) -> Any:
    """An argument with arrays in place of the values that it names."""
    match arg:
        case Ref(name):
            return arrays[name]
        case tuple():
            return tuple(bind(part, arrays) for part in arg)
        case _:
            return arg


def _cast(dtype: DType | None, default: np.dtype[Any] | type) -> np.dtype[Any]:
    return np.dtype(default) if dtype is None else numpy_dtype(dtype)


def _float(*operands: Any) -> np.dtype[Any]:
    """The result type of an operator whose results are floats whatever it is given."""
    dtype = result_type(*operands)
    return dtype if dtype.kind == "f" else np.dtype(np.float32)


# ---- pointwise -------------------------------------------------------------------------------------------------------


def _pointwise() -> Family:
    def binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def of(x: Any, y: Any) -> Any:
            dtype = result_type(x, y)
            return function(np.asarray(x, dtype), np.asarray(y, dtype))

        return of

    def scaled(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def of(x: Any, y: Any, alpha: float = 1) -> Any:
            dtype = result_type(x, y)
            return function(np.asarray(x, dtype), np.asarray(y, dtype) * dtype.type(alpha))

        return of

    def unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda x: np.asarray(function(x.astype(_float(x)))).astype(_float(x))

    table: dict[str, Callable[..., Any]] = {
        f"aten.{name}.default": unary(function)
        for name, function in (
            ("exp", np.exp),
            ("log", np.log),
            ("tanh", np.tanh),
            ("erf", _erf),
            ("sqrt", np.sqrt),
            ("rsqrt", lambda x: 1 / np.sqrt(x)),
            ("reciprocal", lambda x: 1 / x),
            ("sigmoid", _sigmoid),
            ("silu", lambda x: x * _sigmoid(x)),
            ("sin", np.sin),
            ("cos", np.cos),
        )
    }
    for name, compare in (
        ("eq", np.equal),
        ("ne", np.not_equal),
        ("lt", np.less),
        ("le", np.less_equal),
        ("gt", np.greater),
        ("ge", np.greater_equal),
        ("mul", np.multiply),
    ):
        table[f"aten.{name}.Tensor"] = table[f"aten.{name}.Scalar"] = binary(compare)
    for overload in ("Tensor", "Scalar"):
        table[f"aten.add.{overload}"] = scaled(np.add)
        table[f"aten.sub.{overload}"] = scaled(np.subtract)
        table[f"aten.div.{overload}"] = _divide
    others: Family = {
        "aten.rsub.Scalar": lambda x, y, alpha=1: np.asarray(y, result_type(x, y)) - x * result_type(x, y).type(alpha),
        "aten.pow.Tensor_Scalar": binary(np.power),
        "aten.pow.Tensor_Tensor": binary(np.power),
        "aten.maximum.default": binary(np.maximum),
        "aten.minimum.default": binary(np.minimum),
        "aten.bitwise_and.Tensor": binary(np.bitwise_and),
        "aten.bitwise_or.Tensor": binary(np.bitwise_or),
        "aten.bitwise_not.default": np.invert,
        "aten.logical_and.default": np.logical_and,
        "aten.logical_or.default": np.logical_or,
        "aten.logical_not.default": np.logical_not,
        "aten.neg.default": np.negative,
        "aten.abs.default": np.abs,
        "aten.sign.default": np.sign,
        "aten.relu.default": lambda x: np.maximum(x, x.dtype.type(0)),
        "aten.gelu.default": _gelu,
        "aten.gelu_backward.default": _gelu_backward,
        "aten.tanh_backward.default": lambda grad, y: grad * (1 - y * y),
        "aten.sigmoid_backward.default": lambda grad, y: grad * y * (1 - y),
        "aten.threshold_backward.default": lambda grad, x, threshold: np.where(
            x <= threshold, grad.dtype.type(0), grad
        ),
        "aten.where.self": lambda condition, x, y: np.asarray(np.where(condition, x, y)).astype(result_type(x, y)),
        "aten.clamp.default": _clamp,
        "aten.masked_fill.Scalar": lambda x, mask, value: np.where(mask, x.dtype.type(value), x),
    }
    return {**table, **others}


def _divide(x: Any, y: Any) -> Array:
    dtype = _float(x, y)
    return np.asarray(np.divide(np.asarray(x, dtype), np.asarray(y, dtype)))


def _clamp(x: Array, low: float | None = None, high: float | None = None, **bounds: float | None) -> Array:
    low, high = bounds.get("min", low), bounds.get("max", high)  # the schema's names are those of builtins
    dtype = result_type(x, *(bound for bound in (low, high) if bound is not None))
    x = x.astype(dtype)
    if low is not None:
        x = np.maximum(x, dtype.type(low))
    return x if high is None else np.minimum(x, dtype.type(high))


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x)).astype(x.dtype)


def _gelu(x: Array, approximate: str = "none") -> Array:
    return np.asarray(x * _gelu_weight(x, approximate)[0])


def _gelu_backward(grad: Array, x: Array, approximate: str = "none") -> Array:
    weight, slope = _gelu_weight(x, approximate)
    return np.asarray(grad * (weight + x * slope))


def _gelu_weight(x: Array, approximate: str) -> tuple[Array, Array]:
    """The w(x) of gelu(x) = x w(x), and its derivative: the normal distribution function, or a tanh close to it."""
    if approximate == "none":
        return 0.5 * (1 + _erf(x * math.sqrt(0.5))), np.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    scale = math.sqrt(2 / math.pi)
    bent = np.tanh(scale * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + bent), 0.5 * (1 - bent * bent) * scale * (1 + 3 * 0.044715 * x * x)


# ---- reductions ------------------------------------------------------------------------------------------------------


def _reductions() -> Family:
    return {
        "aten.sum.default": lambda x, dtype=None: _sum(x, None, False, dtype),
        "aten.sum.dim_IntList": _sum,
        "aten.mean.default": lambda x, dtype=None: _mean(x, None, False, dtype),
        "aten.mean.dim": _mean,
        "aten.amax.default": lambda x, dim=(), keepdim=False: np.max(x, axis=_dims(dim), keepdims=keepdim),
        "aten.amin.default": lambda x, dim=(), keepdim=False: np.min(x, axis=_dims(dim), keepdims=keepdim),
        "aten.any.default": np.any,
        "aten.any.dim": lambda x, dim, keepdim=False: np.any(x, axis=dim, keepdims=keepdim),
        "aten.all.default": np.all,
        "aten.all.dim": lambda x, dim, keepdim=False: np.all(x, axis=dim, keepdims=keepdim),
        "aten.argmax.default": lambda x, dim=None, keepdim=False: np.argmax(x, axis=dim, keepdims=keepdim),
        "aten.cumsum.default": lambda x, dim, dtype=None: np.cumsum(x, axis=dim, dtype=_sum_type(x, dtype)),
    }


def _dims(dims: int | Shape | None) -> tuple[int, ...] | None:
    """The dims of a reduction: none named means all."""
    return ((dims,) if isinstance(dims, int) else tuple(dims or ())) or None


def _sum_type(x: Array, dtype: DType | None) -> np.dtype[Any]:
    return _cast(dtype, x.dtype if x.dtype.kind == "f" else np.int64)


def _sum(x: Array, dim: Shape | None, keepdim: bool = False, dtype: DType | None = None) -> Any:
    return np.sum(x, axis=_dims(dim), keepdims=keepdim, dtype=_sum_type(x, dtype))


def _mean(x: Array, dim: Shape | None, keepdim: bool = False, dtype: DType | None = None) -> Any:
    return np.mean(x, axis=_dims(dim), keepdims=keepdim, dtype=_cast(dtype, x.dtype))


# ---- matrix products -------------------------------------------------------------------------------------------------


def _products() -> Family:
    def added(c: Array, a: Array, b: Array, beta: float = 1, alpha: float = 1) -> Any:
        return a.dtype.type(beta) * c + a.dtype.type(alpha) * (a @ b)

    return {
        "aten.mm.default": np.matmul,
        "aten.bmm.default": np.matmul,
        "aten.dot.default": np.dot,
        "aten.mv.default": np.matmul,
        "aten.addmm.default": added,
        "aten.baddbmm.default": added,
        "aten.convolution.default": convolution,
        "aten.convolution_backward.default": convolution_backward,
    }


# ---- views: the same elements under another shape --------------------------------------------------------------------


def _views() -> Family:
    def same(x: Array) -> Array:
        return x

    return {
        "aten.view.default": np.reshape,
        "aten._unsafe_view.default": np.reshape,
        "aten.reshape.default": np.reshape,
        "aten.permute.default": np.transpose,
        "aten.transpose.int": np.swapaxes,
        "aten.t.default": np.transpose,
        "aten.expand.default": _expand,
        "aten.unsqueeze.default": np.expand_dims,
        "aten.squeeze.default": np.squeeze,
        "aten.squeeze.dim": lambda x, dim: _squeeze(x, (dim,)),
        "aten.squeeze.dims": lambda x, dim: _squeeze(x, dim),
        "aten.alias.default": same,
        "aten.detach.default": same,
        "aten.clone.default": np.copy,
        "aten.split_with_sizes.default": _split_with_sizes,
        "aten.split.Tensor": lambda x, size, dim=0: np.split(x, range(size, x.shape[dim], size), axis=dim),
        "aten.cat.default": lambda xs, dim=0: np.concatenate([x.astype(result_type(*xs)) for x in xs], axis=dim),
        "aten.stack.default": lambda xs, dim=0: np.stack(xs, axis=dim),
        "aten.unbind.int": lambda x, dim=0: list(np.moveaxis(x, dim, 0)),
        "aten.roll.default": lambda x, shifts, dims: np.roll(x, shifts, dims),
        "aten.flip.default": np.flip,
        "aten.slice.Tensor": lambda x, *where, **named: x[_slice(x.ndim, *where, **named)],
        "aten.select.int": lambda x, dim, index: x[_at(x.ndim, dim, index)],
        "aten.slice_backward.default": lambda grad, sizes, *where: _embed(grad, sizes, _slice(len(sizes), *where)),
        "aten.select_backward.default": lambda grad, sizes, *where: _embed(grad, sizes, _at(len(sizes), *where)),
        "aten.tril.default": lambda x, diagonal=0: np.tril(x, diagonal),
        "aten.triu.default": lambda x, diagonal=0: np.triu(x, diagonal),
    }


def _expand(x: Array, size: Shape, implicit: bool = False) -> Array:
    """A size of -1 keeps that of the dim; new dims stand in front."""
    old = (1,) * (len(size) - x.ndim) + x.shape
    return np.broadcast_to(x, tuple(kept if new == -1 else new for kept, new in zip(old, size, strict=True)))


def _squeeze(x: Array, dims: Shape) -> Array:
    return np.squeeze(x, axis=tuple(dim for dim in dims if x.ndim and x.shape[dim] == 1))


def _split_with_sizes(x: Array, sizes: Shape, dim: int = 0) -> list[Array]:
    return np.split(x, np.cumsum(sizes)[:-1], axis=dim)


def _at(ndim: int, dim: int, index: Any) -> tuple[Any, ...]:
    return (slice(None),) * (dim % ndim) + (index,)


def _slice(ndim: int, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> tuple[Any, ...]:
    return _at(ndim, dim, slice(start, end, step))


def _embed(grad: Array, sizes: Shape, where: tuple[Any, ...]) -> Array:
    """The derivative of taking a part: the gradient in its place, zero elsewhere."""
    whole = np.zeros(sizes, grad.dtype)
    whole[where] = grad
    return whole


# ---- indexing --------------------------------------------------------------------------------------------------------


def _indexing() -> Family:
    return {
        "aten.embedding.default": lambda weight, indices, *_: weight[indices],
        "aten.embedding_dense_backward.default": _embedding_backward,
        "aten.gather.default": lambda x, dim, index, sparse_grad=False: x[_along(index, dim)],
        "aten.scatter.value": lambda x, dim, index, value: _put(x, _along(index, dim), x.dtype.type(value), False),
        "aten.scatter.src": lambda x, dim, index, src: _put(x, _along(index, dim), _head(src, index), False),
        "aten.scatter_add.default": lambda x, dim, index, src: _put(x, _along(index, dim), _head(src, index), True),
        "aten.index.Tensor": lambda x, indices: x[_indices(indices)],
        "aten.index_put.default": lambda x, indices, values, accumulate=False: _put(
            x, _indices(indices), values, accumulate
        ),
    }


def _along(index: Array, dim: int) -> tuple[Array, ...]:
    """For each element of `index` its own coordinates, with that of `dim` replaced by the element."""
    own: list[Array] = list(np.indices(index.shape, sparse=True))
    own[dim] = index
    return tuple(own)


def _head(src: Array, index: Array) -> Array:
    return src[tuple(slice(size) for size in index.shape)]


def _indices(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _put(x: Array, where: tuple[Any, ...], values: Any, accumulate: bool) -> Array:
    result = x.copy()
    if accumulate:
        np.add.at(result, where, values)
    else:
        result[where] = values
    return result


def _embedding_backward(grad: Array, indices: Array, rows: int, padding: int, scale_by_frequency: bool) -> Array:
    weight = np.zeros((rows, grad.shape[-1]), grad.dtype)
    kept = indices != padding
    if scale_by_frequency:
        grad = grad / np.bincount(indices.ravel(), minlength=rows)[indices][..., None].astype(grad.dtype)
    np.add.at(weight, indices[kept], grad[kept])
    return weight


# ---- normalisation ---------------------------------------------------------------------------------------------------


def _normalisation() -> Family:
    return {
        "aten._softmax.default": lambda x, dim, half_to_float=False: np.exp(_log_softmax(x, dim)),
        "aten._softmax_backward_data.default": lambda grad, y, dim, dtype: (
            y * (grad - (grad * y).sum(axis=dim, keepdims=True))
        ).astype(numpy_dtype(dtype)),
        "aten._log_softmax.default": lambda x, dim, half_to_float=False: _log_softmax(x, dim),
        "aten._log_softmax_backward_data.default": lambda grad, y, dim, dtype: (
            grad - np.exp(y) * grad.sum(axis=dim, keepdims=True)
        ).astype(numpy_dtype(dtype)),
        "aten.native_layer_norm.default": _layer_norm,
        "aten.native_layer_norm_backward.default": _layer_norm_backward,
    }


def _log_softmax(x: Array, dim: int) -> Array:
    shifted = x - x.max(axis=dim, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=dim, keepdims=True)))


def _layer_norm(
    x: Array, normalized: Shape, weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    dims = tuple(range(x.ndim - len(normalized), x.ndim))
    mean = x.mean(axis=dims, keepdims=True)
    rstd = 1 / np.sqrt(x.var(axis=dims, keepdims=True) + x.dtype.type(eps))
    result = (x - mean) * rstd
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, rstd


def _layer_norm_backward(
    grad: Array,
    x: Array,
    normalized: Shape,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    output_mask: Sequence[bool],
) -> tuple[Array, ...]:
    """With h = (x - mean) rstd and g = grad * weight: rstd (g - mean(g) - h mean(g h)), sum(grad h), sum(grad)."""
    dims = tuple(range(x.ndim - len(normalized), x.ndim))
    rows = tuple(range(x.ndim - len(normalized)))
    scaled = (x - mean) * rstd
    inner = grad if weight is None else grad * weight
    along = scaled * (inner * scaled).mean(axis=dims, keepdims=True)
    results = (
        rstd * (inner - inner.mean(axis=dims, keepdims=True) - along),
        (grad * scaled).sum(axis=rows),
        grad.sum(axis=rows),
    )
    return tuple(result for result, wanted in zip(results, output_mask, strict=True) if wanted)


# ---- creation --------------------------------------------------------------------------------------------------------


def _creation() -> Family:
    def number_type(value: bool | int | float) -> np.dtype[Any]:
        return result_type(value)

    def like(fill: float) -> Callable[..., Any]:
        return lambda x, dtype=None: np.full(x.shape, fill, _cast(dtype, x.dtype))

    def sized(fill: float) -> Callable[..., Any]:
        return lambda size, dtype=None: np.full(size, fill, _cast(dtype, np.float32))

    return {
        "aten.full.default": lambda size, value, dtype=None: np.full(size, value, _cast(dtype, number_type(value))),
        "aten.full_like.default": lambda x, value, dtype=None: np.full(x.shape, value, _cast(dtype, x.dtype)),
        "aten.zeros.default": sized(0),
        "aten.ones.default": sized(1),
        "aten.zeros_like.default": like(0),
        "aten.ones_like.default": like(1),
        "aten.new_zeros.default": lambda x, size, dtype=None: np.zeros(size, _cast(dtype, x.dtype)),
        "aten.new_ones.default": lambda x, size, dtype=None: np.ones(size, _cast(dtype, x.dtype)),
        "aten.new_full.default": lambda x, size, value, dtype=None: np.full(size, value, _cast(dtype, x.dtype)),
        "aten.scalar_tensor.default": lambda value, dtype=None: np.asarray(value, _cast(dtype, np.float32)),
        "aten.arange.default": lambda end, dtype=None: _arange(0, end, 1, dtype),
        "aten.arange.start": lambda start, end, dtype=None: _arange(start, end, 1, dtype),
        "aten.arange.start_step": lambda start, end, step=1, dtype=None: _arange(start, end, step, dtype),
        "aten._to_copy.default": lambda x, dtype=None: x.astype(_cast(dtype, x.dtype)),
        "aten.lift_fresh_copy.default": np.copy,
        "sennit.uniform": uniform,
    }


def _arange(start: float, end: float, step: float, dtype: DType | None) -> Array:
    return np.arange(start, end, step).astype(_cast(dtype, result_type(start, end, step)))
