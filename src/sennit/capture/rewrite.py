"""Graph to graph: operators taken apart where a plan splits a dim that they need whole.

One kernel is faster than its parts, so models are captured with these whole; a plan that splits the vocabulary, the
hidden dim of a norm, or the batch of a batch norm takes them apart first:

    graph = take_apart(graph, graph.select(kind="aten._log_softmax*"))      # both directions

| operator | parts | a split of the dim then costs |
|---|---|---|
| `_log_softmax` | s = x - max x; s - log sum exp s | a max and a sum of one number per row |
| its backward | g - exp(y) sum g | one sum per row |
| `_softmax` and its backward | exp s / sum exp s; y g - y sum(y g) | the same |
| `native_layer_norm` | c = x - sum x / n; h = c / sqrt(sum c² / n + eps); h w + b | two sums per row |
| its backward | (g w - sum(g w) / n - h sum(g w h) / n) / sqrt(...) | two sums per row |
| `_fused_rms_norm` and its backward | h = x / sqrt(sum x² / n + eps); h w | one sum per row each way |
| `all`, `any` | the least, the largest, of truths as numbers | one number per row |
| batch norm in training and its backward | as layer norm, over samples and positions | two sums per channel each way |

n is the size of the whole, a number in the graph; so a mean over pieces is the mean over the whole (batch norm becomes
synchronised). The parts take the place of the operator: same results, same names, same module, phase and sequence
number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from sennit.errors import PlanError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Graph, Op, Ref, Value

__all__ = ["take_apart"]


def take_apart(graph: Graph, ops: Iterable[Op]) -> Graph:
    """The same graph with these operators replaced by their parts."""
    chosen = {op.name for op in ops}
    types = graph.types()
    made: list[Op] = []
    for op in graph.ops:
        made += _parts_of(op, types) if op.name in chosen else [op]
    return replace(graph, ops=tuple(made), repeats=())


def _parts_of(op: Op, types: dict[str, TensorType]) -> list[Op]:
    table: dict[str, Callable[[_Parts], None]] = {
        "aten._log_softmax.default": _log_softmax,
        "aten._log_softmax_backward_data.default": _log_softmax_backward,
        "aten._softmax.default": _softmax,
        "aten._softmax_backward_data.default": _softmax_backward,
        "aten.native_layer_norm.default": _layer_norm,
        "aten.native_layer_norm_backward.default": _layer_norm_backward,
        "aten._fused_rms_norm.default": _rms_norm,
        "aten._fused_rms_norm_backward.default": _rms_norm_backward,
        "aten._native_batch_norm_legit_functional.default": _batch_norm,
        "aten.native_batch_norm_backward.default": _batch_norm_backward,
        "aten.all.dim": _truths,
        "aten.any.dim": _truths,
    }
    if op.kind not in table:
        raise PlanError(
            f"{op.kind} is not taken apart",
            where=op.describe(),
            fix=f"choose among {', '.join(kind.split('.')[1] for kind in table)}",
        )
    parts = _Parts(op, types)
    table[op.kind](parts)
    return parts.ops


@dataclass(slots=True)
class _Parts:
    """The parts of one operator in the making. Every method adds one and returns its value."""

    op: Op
    types: dict[str, TensorType]
    ops: list[Op] = field(default_factory=list)

    def read(self, position: int) -> Value | None:
        """The value at a position of the operator's arguments; None where none is given."""
        arg = self.op.args[position]
        return Value(arg.name, self.types[arg.name]) if isinstance(arg, Ref) else None

    def need(self, position: int) -> Value:
        value = self.read(position)
        assert value is not None
        return value

    def sizes(self, position: int) -> tuple[int, ...]:
        """A list of sizes or dims among the arguments."""
        arg = self.op.args[position]
        many = arg if isinstance(arg, tuple) else (arg,)
        return tuple(size for size in many if isinstance(size, int))

    def number(self, position: int) -> float:
        arg = self.op.args[position]
        assert isinstance(arg, (int, float))
        return arg

    def add_part(
        self, kind: str, args: Sequence[Arg], shape: tuple[int, ...], dtype: DType, cast: DType | None = None
    ) -> Value:
        value = Value(f"{self.op.name}.{kind.split('.')[1].strip('_')}{len(self.ops)}", TensorType(shape, dtype))
        kwargs: tuple[tuple[str, Arg], ...] = () if cast is None else (("dtype", cast),)
        new = replace(self.op, kind=kind, args=tuple(args), kwargs=kwargs, results=(value,))
        self.ops.append(new)
        return value

    def finish(self, *values: Value | None) -> None:
        """Name the last parts as the operator's results are named."""
        present = [value for value in values if value is not None]
        names: dict[str, Value] = {}
        for value, result in zip(present, self.op.results, strict=True):
            if value.name in names:  # one part is two results
                value = self.add_part("aten.clone.default", (Ref(value.name),), value.type.shape, value.type.dtype)
            names[value.name] = result

        def renamed(arg: Arg) -> Arg:
            if isinstance(arg, Ref) and arg.name in names:
                return Ref(names[arg.name].name)
            return tuple(map(renamed, arg)) if isinstance(arg, tuple) else arg

        self.ops = [
            replace(
                part, args=tuple(map(renamed, part.args)), results=tuple(names.get(v.name, v) for v in part.results)
            )
            for part in self.ops
        ]

    # ---- operators ---------------------------------------------------------------------------------------------------

    def binary(self, name: str, x: Value, y: Value | float) -> Value:
        shape = x.type.shape if not isinstance(y, Value) else _broadcast(x.type.shape, y.type.shape)
        return self.add_part(
            f"aten.{name}.Tensor", (Ref(x.name), Ref(y.name) if isinstance(y, Value) else y), shape, x.type.dtype
        )

    def unary(self, name: str, x: Value) -> Value:
        return self.add_part(f"aten.{name}.default", (Ref(x.name),), x.type.shape, x.type.dtype)

    def total(self, x: Value, dims: tuple[int, ...], *, keep: bool = True) -> Value:
        shape = _reduced(x.type.shape, dims, keep)
        return self.add_part("aten.sum.dim_IntList", (Ref(x.name), dims, keep), shape, x.type.dtype)

    def mean(self, x: Value, dims: tuple[int, ...]) -> Value:
        count = prod(x.type.shape[dim] for dim in dims)
        return self.binary("div", self.total(x, dims), float(count))

    def largest(self, x: Value, dims: tuple[int, ...]) -> Value:
        return self.add_part(
            "aten.amax.default", (Ref(x.name), dims, True), _reduced(x.type.shape, dims, True), x.type.dtype
        )

    def cast(self, x: Value, dtype: DType) -> Value:
        if x.type.dtype is dtype:
            return x
        return self.add_part("aten._to_copy.default", (Ref(x.name),), x.type.shape, dtype, cast=dtype)

    def view(self, x: Value, shape: tuple[int, ...]) -> Value:
        return self.add_part("aten.view.default", (Ref(x.name), shape), shape, x.type.dtype)


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(one), len(other))
    pairs = zip((1,) * (rank - len(one)) + one, (1,) * (rank - len(other)) + other, strict=True)
    return tuple(max(a, b) for a, b in pairs)


def _reduced(shape: tuple[int, ...], dims: tuple[int, ...], keep: bool) -> tuple[int, ...]:
    return tuple(1 if dim in dims else size for dim, size in enumerate(shape) if keep or dim not in dims)


# ---- softmax ---------------------------------------------------------------------------------------------------------


def _dim(parts: _Parts, position: int) -> tuple[int, ...]:
    rank = len(parts.op.results[0].type.shape)
    return tuple(dim % rank for dim in parts.sizes(position))


def _shifted(parts: _Parts) -> tuple[Value, Value, Value, tuple[int, ...]]:
    dims = _dim(parts, 1)
    x = parts.cast(parts.need(0), parts.op.results[0].type.dtype)  # half_to_float widens first
    shifted = parts.binary("sub", x, parts.largest(x, dims))
    grown = parts.unary("exp", shifted)
    return shifted, grown, parts.total(grown, dims), dims


def _log_softmax(parts: _Parts) -> None:
    shifted, _, total, _ = _shifted(parts)
    parts.finish(parts.binary("sub", shifted, parts.unary("log", total)))


def _softmax(parts: _Parts) -> None:
    _, grown, total, _ = _shifted(parts)
    parts.finish(parts.binary("div", grown, total))


def _log_softmax_backward(parts: _Parts) -> None:
    grad, y, dims = parts.need(0), parts.need(1), _dim(parts, 2)
    share = parts.binary("mul", parts.unary("exp", y), parts.total(grad, dims))
    parts.finish(parts.cast(parts.binary("sub", grad, share), parts.op.results[0].type.dtype))


def _softmax_backward(parts: _Parts) -> None:
    grad, y, dims = parts.need(0), parts.need(1), _dim(parts, 2)
    scaled = parts.binary("mul", grad, y)
    share = parts.binary("mul", y, parts.total(scaled, dims))
    parts.finish(parts.cast(parts.binary("sub", scaled, share), parts.op.results[0].type.dtype))


def _truths(parts: _Parts) -> None:
    x = parts.need(0)
    (dim,) = parts.sizes(1)
    keep = len(parts.op.results[0].type.shape) == len(x.type.shape)
    numbers = parts.cast(x, DType.F32)  # which every backend reduces, unlike truths
    dims = (dim % len(x.type.shape),)
    name = "amin" if ".all." in parts.op.kind else "amax"
    shape = _reduced(x.type.shape, dims, keep)
    found = parts.add_part(f"aten.{name}.default", (Ref(numbers.name), dims, keep), shape, DType.F32)
    parts.finish(parts.add_part("aten.ne.Scalar", (Ref(found.name), 0), shape, DType.BOOL))


# ---- normalisation ---------------------------------------------------------------------------------------------------


def _split_dims(parts: _Parts, position: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leading dims and the normalised ones."""
    normalised = len(parts.sizes(position))
    return tuple(range(rank - normalised)), tuple(range(rank - normalised, rank))


def _scaled(parts: _Parts, x: Value, weight: Value | None, bias: Value | None) -> Value:
    x = x if weight is None else parts.binary("mul", x, weight)
    return x if bias is None else parts.binary("add", x, bias)


def _deviation(parts: _Parts, centred: Value, dims: tuple[int, ...], eps: float) -> Value:
    """One over the root of the mean square."""
    square = parts.mean(parts.binary("mul", centred, centred), dims)
    return parts.unary("rsqrt", parts.binary("add", square, eps))


def _layer_norm(parts: _Parts) -> None:
    x = parts.need(0)
    _, dims = _split_dims(parts, 1, len(x.type.shape))
    mean = parts.mean(x, dims)
    centred = parts.binary("sub", x, mean)
    rstd = _deviation(parts, centred, dims, parts.number(4))
    result = _scaled(parts, parts.binary("mul", centred, rstd), parts.read(2), parts.read(3))
    parts.finish(result, mean, rstd)


def _layer_norm_backward(parts: _Parts) -> None:
    grad, x, mean, rstd, weight = parts.need(0), parts.need(1), parts.need(3), parts.need(4), parts.read(5)
    rows, dims = _split_dims(parts, 2, len(x.type.shape))
    unit = parts.binary("mul", parts.binary("sub", x, mean), rstd)
    mask = parts.op.args[7]
    assert isinstance(mask, tuple)
    parts.finish(*_norm_gradients(parts, grad, unit, rstd, weight, (rows, dims), mask, centred=True))


def _norm_gradients(
    parts: _Parts,
    grad: Value,
    unit: Value,
    rstd: Value,
    weight: Value | None,
    dims: tuple[tuple[int, ...], tuple[int, ...]],
    mask: Sequence[Arg],
    *,
    centred: bool,
) -> list[Value | None]:
    """The gradients of input, weight and bias:

    `dims` are those that weights are summed over, and those that were normalised.
    """
    rows, normalised = dims
    image = weights = bias = None
    if mask[0]:
        inner = grad if weight is None else parts.binary("mul", grad, weight)
        along = parts.binary("mul", unit, parts.mean(parts.binary("mul", inner, unit), normalised))
        rest = parts.binary("sub", inner, parts.mean(inner, normalised)) if centred else inner
        image = parts.binary("mul", parts.binary("sub", rest, along), rstd)
    if mask[1]:
        weights = parts.total(parts.binary("mul", grad, unit), rows, keep=False)
    if len(mask) > 2 and mask[2]:
        bias = parts.total(grad, rows, keep=False)
    return [image, weights, bias]


def _rms_norm(parts: _Parts) -> None:
    x = parts.need(0)
    _, dims = _split_dims(parts, 1, len(x.type.shape))
    eps = parts.op.args[3]
    if not isinstance(eps, (int, float)):
        raise PlanError(
            "_fused_rms_norm without eps is not taken apart", where=parts.op.describe(), fix="give the norm an eps"
        )
    rstd = _deviation(parts, x, dims, eps)
    parts.finish(_scaled(parts, parts.binary("mul", x, rstd), parts.read(2), None), rstd)


def _rms_norm_backward(parts: _Parts) -> None:
    grad, x, rstd, weight = parts.need(0), parts.need(1), parts.need(3), parts.read(4)
    split = _split_dims(parts, 2, len(x.type.shape))
    mask = parts.op.args[5]
    assert isinstance(mask, tuple)
    unit = parts.binary("mul", x, rstd)
    parts.finish(*_norm_gradients(parts, grad, unit, rstd, weight, split, mask, centred=False))


def _channel(parts: _Parts, value: Value | None, rank: int) -> Value | None:
    """A value per channel, to be broadcast against samples and positions."""
    if value is None:
        return None
    return parts.view(value, (1, *value.type.shape, *(1,) * (rank - 2)))


def _batch_norm(parts: _Parts) -> None:
    x, running_mean, running_var = parts.need(0), parts.need(3), parts.need(4)
    training, momentum, eps = parts.op.args[5], parts.number(6), parts.number(7)
    if training is not True:
        raise PlanError(
            "batch norm outside training needs no statistics of the batch",
            where=parts.op.describe(),
            fix="leave it whole",
        )
    rank, channels = len(x.type.shape), x.type.shape[1]
    dims = (0, *range(2, rank))
    mean = parts.mean(x, dims)
    centred = parts.binary("sub", x, mean)
    variance = parts.mean(parts.binary("mul", centred, centred), dims)
    rstd = parts.unary("rsqrt", parts.binary("add", variance, eps))
    scaled = _scaled(
        parts,
        parts.binary("mul", centred, rstd),
        _channel(parts, parts.read(1), rank),
        _channel(parts, parts.read(2), rank),
    )
    count = prod(x.type.shape[dim] for dim in dims)

    def moved(old: Value, new: Value) -> Value:
        kept = parts.binary("mul", old, 1 - momentum)
        return parts.binary("add", kept, parts.binary("mul", parts.view(new, (channels,)), momentum))

    unbiased = parts.binary("mul", variance, count / (count - 1))
    parts.finish(
        scaled,
        parts.view(mean, (channels,)),
        parts.view(rstd, (channels,)),
        moved(running_mean, mean),
        moved(running_var, unbiased),
    )


def _batch_norm_backward(parts: _Parts) -> None:
    grad, x = parts.need(0), parts.need(1)
    rank = len(x.type.shape)
    if parts.op.args[7] is not True:
        raise PlanError(
            "batch norm outside training needs no statistics of the batch",
            where=parts.op.describe(),
            fix="leave it whole",
        )
    mean, rstd = _channel(parts, parts.need(5), rank), _channel(parts, parts.need(6), rank)
    assert mean is not None
    assert rstd is not None
    unit = parts.binary("mul", parts.binary("sub", x, mean), rstd)
    dims = (0, *range(2, rank))
    mask = parts.op.args[9]
    assert isinstance(mask, tuple)
    weight = _channel(parts, parts.read(2), rank)
    parts.finish(*_norm_gradients(parts, grad, unit, rstd, weight, (dims, dims), mask, centred=True))
