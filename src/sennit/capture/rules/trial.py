"""A rule put to the test: an operator run on pieces, the pieces put together, and compared with the operator run on the
whole.

**Small shapes.** A rule's letters stand for any size, so they are tried at size 4 (two pieces of two, or of every other
element), and the dims without a letter at their own size. Letters with a local form keep their size, since what they
index does. The arguments of the small operator are those that `localize` gives for small results: trying a rule tries
`localize` too.

**Random data**, in float64, twice: normal numbers, and positive ones (logarithms and roots of negative numbers would be
NaN on both sides and prove nothing). Indices lie within what they index. Pending reads get parts that are random and
sum to the value: an operator that only works where all but one part is zero would fail.

`ways` is how a strategy's split is named whatever its stride; `largest_difference` tries one way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from sennit.capture.rules.localize import localize
from sennit.capture.rules.rule import Chunks, Letters, Listed, Reshape, Rule, Strategy, Types
from sennit.capture.rules.shape_check import call
from sennit.capture.rules.strategies import from_row, split_on
from sennit.ir.dtype import DType, TensorType
from sennit.ir.dtype_numpy import numpy_dtype
from sennit.ir.graph import Arg, Op, Ref, Value
from sennit.ir.layout import Layout, Reduction, Split
from sennit.ir.layout_numpy import Array, assemble, distribute
from sennit.ir.local_forms_numpy import apply_form
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer

__all__ = ["Way", "largest_difference", "small", "way_of"]

_SMALL = 4


@dataclass(frozen=True, slots=True)
class Way:
    """How an axis splits an operator, without stride: on a letter, by a row of a list, or pending through some reads.

    For rules that keep digits, the strategy itself.
    """

    letter: str | None = None
    row: int | None = None
    pending: Strategy | None = None
    digits: Strategy | None = None

    def __str__(self) -> str:
        if self.letter is not None:
            return f"split on {self.letter!r}"
        if self.row is not None:
            return f"split by row {self.row}"
        return f"with {self.pending or self.digits}"


def way_of(rule: Rule, strategy: Strategy) -> Way:
    """The way of a strategy that is not replication."""
    match rule:
        case Reshape() | Chunks():
            return Way(digits=strategy)
        case Letters():
            for entry, dims in zip((*strategy.reads, *strategy.results), (*rule.reads, *rule.results), strict=True):
                if isinstance(entry, Split) and (letter := dims[entry.dim]) is not None:
                    return Way(letter=letter)
            return Way(pending=strategy)
        case Listed(rows):
            for number, row in enumerate(rows):
                stride = next((e.stride for e in (*strategy.reads, *strategy.results) if isinstance(e, Split)), 1)
                if from_row(row, stride) == strategy:
                    return Way(row=number)
            raise AssertionError(strategy)


def largest_difference(op: Op, types: Types, rule: Rule, way: Way, size: int) -> float:
    """Between the operator on the whole and on pieces, relative to the largest value; infinite where the pieces do not
    even have the shapes of a piece. `size` is the number of pieces where two do not divide a dim."""
    if isinstance(rule, Reshape):
        assert way.digits is not None
        return _reshape_difference(rule, way.digits, size)
    op, types = small(op, types, rule)
    worst = 0.0
    for number, (strategy, pieces) in enumerate(_strategies(op, types, rule, way, size)):
        for seed in (0, 1):
            rng = np.random.default_rng([number, seed])
            worst = max(worst, _difference(op, types, strategy, pieces, rng, positive=seed == 1))
    return worst


# ---- small shapes ----------------------------------------------------------------------------------------------------


def small(op: Op, types: Types, rule: Rule) -> tuple[Op, dict[str, TensorType]]:
    """The same operator in float64, with every dim that the rule leaves free at a small size."""
    free = _free_dims(rule, [types[name] for name in op.reads], [value.type for value in op.results])

    def shrunk(position: int, item: TensorType) -> TensorType:
        shape = tuple(_SMALL if (position, dim) in free else size for dim, size in enumerate(item.shape))
        return TensorType(shape, _double(item.dtype))

    reads = {f"x{position}": shrunk(position, types[name]) for position, name in enumerate(op.reads)}
    results = tuple(
        Value(f"y{position}", shrunk(len(op.reads) + position, value.type)) for position, value in enumerate(op.results)
    )
    args, kwargs = localize(op, [value.type.shape for value in results])
    renamed = iter(range(len(op.reads)))
    args = tuple(_rename(arg, renamed) for arg in args)
    kwargs = tuple((key, _rename(arg, renamed)) for key, arg in kwargs)
    return replace(op, args=args, kwargs=kwargs, results=results, module="", line="", seq=None), reads


def _double(dtype: DType) -> DType:
    return DType.F64 if dtype.is_float else dtype


def _rename(arg: Arg, numbers: Iterator[int]) -> Arg:
    match arg:
        case Ref():
            return Ref(
                f"x{next(numbers)}"
            )  # a value that is read twice gets two tensors: parts of it may be laid out differently
        case tuple():
            return tuple(_rename(part, numbers) for part in arg)
        case DType():
            return _double(arg)
        case _:
            return arg


def _free_dims(rule: Rule, reads: Sequence[TensorType], results: Sequence[TensorType]) -> set[tuple[int, int]]:
    """The dims, by tensor and number, whose size does not matter."""
    match rule:
        case Letters():
            fixed = {letter for letter, _ in rule.forms}
            return {
                (position, dim)
                for position, dims in enumerate((*rule.reads, *rule.results))
                for dim, letter in enumerate(dims)
                if letter is not None and letter not in fixed
            }
        case Chunks(along, _, _):
            every = [*reads, *results]
            return {(p, dim) for p, item in enumerate(every) for dim in range(len(item.shape)) if dim != along}
        case Reshape() | Listed():
            return set()


def _strategies(op: Op, types: Types, rule: Rule, way: Way, size: int) -> list[tuple[Strategy, int]]:
    """The strategies of a way on the small operator, in blocks and in single elements, and in how many pieces."""
    match rule:
        case Letters() if way.letter is not None:
            extent = _extent(op, types, rule, way.letter)
            pieces = 2 if extent % 2 == 0 else size
            strides = dict.fromkeys((extent // pieces, 1))
            return [(split_on(rule, way.letter, stride), pieces) for stride in strides]
        case Listed(rows) if way.row is not None:
            shapes = [types[name].shape for name in op.reads] + [value.type.shape for value in op.results]
            row = rows[way.row]
            extents = [
                shape[d] for shape, d in zip(shapes, (*row.reads, *row.results), strict=True) if isinstance(d, int)
            ]
            pieces = 2 if all(extent % 2 == 0 for extent in extents) else size
            strides = dict.fromkeys((min(extents, default=pieces) // pieces, 1))
            return [(from_row(row, stride), pieces) for stride in strides if len(set(extents)) <= 1 or stride == 1]
        case Chunks(along) if way.digits is not None and _split_dim(way.digits) not in (None, along):
            split = [Split(_split_dim(way.digits) or 0, stride) for stride in (_SMALL // 2, 1)]
            return [(Strategy((e,) * len(op.reads), (e,) * len(op.results)), 2) for e in split]
        case _:
            return [(way.pending or way.digits or Strategy((), ()), size)]


def _split_dim(strategy: Strategy) -> int | None:
    """The dim that a strategy of `Chunks` splits: one and the same in all tensors."""
    return strategy.reads[0].dim if isinstance(strategy.reads[0], Split) else None


def _extent(op: Op, types: Types, rule: Letters, letter: str) -> int:
    shapes = [types[name].shape for name in op.reads] + [value.type.shape for value in op.results]
    return next(
        shape[dims.index(letter)]
        for dims, shape in zip((*rule.reads, *rule.results), shapes, strict=True)
        if letter in dims
    )


# ---- execution -------------------------------------------------------------------------------------------------------


def _difference(
    op: Op, types: Types, strategy: Strategy, size: int, rng: np.random.Generator, *, positive: bool
) -> float:
    mesh = Mesh.make({"axis": size})
    values = [_random(op, position, types, rng, positive) for position in range(len(op.reads))]
    whole = _run(op.kind, op.args, op.kwargs, values)
    reads = [
        Buffer(name, name, types[name].dtype, Layout.make(mesh, types[name].shape, {"axis": entry}))
        for name, entry in zip(op.reads, strategy.reads, strict=True)
    ]
    made = [
        Buffer(value.name, value.name, value.type.dtype, Layout.make(mesh, value.type.shape, {"axis": entry}))
        for value, entry in zip(op.results, strategy.results, strict=True)
    ]
    cut = [_cut(value, buffer.layout, rng) for value, buffer in zip(values, reads, strict=True)]
    args, kwargs = localize(op, [buffer.layout.local_shape() for buffer in made])
    pieces: list[dict[tuple[int, ...], Array]] = [{} for _ in made]
    for device, point in enumerate(mesh.points()):
        local = [parts[point] for parts in cut]
        if strategy.form is None:
            found = _run(op.kind, args, kwargs, local)
        else:
            bound = iter(local)
            call_args = [_bind(arg, bound) for arg in args]
            call_kwargs = {key: _bind(arg, bound) for key, arg in kwargs}
            found = list(apply_form(f"sennit.{strategy.form}", call_args, call_kwargs, reads, made, device))
        for parts, part, buffer in zip(pieces, found, made, strict=True):
            if part.shape != buffer.layout.local_shape():
                return float("inf")
            parts[point] = part
    return max(
        _relative(assemble(buffer.layout, parts), expected)
        for buffer, parts, expected in zip(made, pieces, whole, strict=True)
    )


def _run(kind: str, args: Sequence[Arg], kwargs: Sequence[tuple[str, Arg]], values: Sequence[Array]) -> list[Array]:
    tensors = iter([torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)) for value in values])
    with torch.no_grad():
        return [np.asarray(result) for result in call(kind, args, kwargs, tensors)]


def _bind(arg: Arg, values: Iterator[Array]) -> object:
    match arg:
        case Ref():
            return next(values)
        case tuple():
            return tuple(_bind(part, values) for part in arg)
        case _:
            return arg


def _relative(found: Array, expected: Array) -> float:
    if found.size == 0:
        return 0.0
    if found.dtype.kind != "f":
        return 0.0 if np.array_equal(found, expected) else float("inf")
    if not np.array_equal(np.isnan(found), np.isnan(expected)):
        return float("inf")
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    scale = max(1.0, float(np.abs(expected[finite]).max(initial=0.0)))
    return float(np.abs(found[finite] - expected[finite]).max(initial=0.0)) / scale


def _cut(value: Array, layout: Layout, rng: np.random.Generator) -> Mapping[tuple[int, ...], Array]:
    """The pieces of a value; the parts of a pending sum are random."""
    pieces = distribute(value, layout)
    for _, reduction in layout.pending:
        if reduction is Reduction.SUM and value.dtype.kind == "f":
            noise = rng.standard_normal(value.shape)
            first, second, *_ = pieces
            pieces[first], pieces[second] = np.asarray(pieces[first] + noise), np.asarray(pieces[second] - noise)
    return pieces


def _random(op: Op, position: int, types: Types, rng: np.random.Generator, positive: bool) -> Array:
    item = types[op.reads[position]]
    match item.dtype:
        case DType.BOOL:
            return np.asarray(rng.random(item.shape) < 0.5)
        case dtype if dtype.is_float:
            values = rng.uniform(0.1, 1.9, item.shape) if positive else rng.standard_normal(item.shape)
            return np.asarray(values, np.float64)
        case dtype:
            return np.asarray(rng.integers(0, _bound(op, position, types), item.shape), numpy_dtype(dtype))


def _bound(op: Op, position: int, types: Types) -> int:
    """One more than the largest integer that a read may hold: the size of what it indexes."""
    shapes = [types[name].shape for name in op.reads]
    match op.kind.split(".")[1], position:
        case "embedding", 1:
            return shapes[0][0]
        case "embedding_dense_backward", 1:
            return op.results[0].type.shape[0]
        case (("gather" | "scatter" | "scatter_add" | "scatter_reduce" | "index_select" | "index_add"), 1):
            dim = op.args[1]
            assert isinstance(dim, int)
            return shapes[0][dim]
        case (("index" | "index_put" | "_unsafe_index_put"), at) if at > 0:
            indices = op.args[1]
            assert isinstance(indices, tuple)
            dims = [dim for dim, index in enumerate(indices) if isinstance(index, Ref)]
            return shapes[0][dims[at - 1]] if at <= len(dims) else _SMALL
        case _:
            return min([extent for shape in shapes for extent in shape if extent], default=_SMALL)


def _reshape_difference(rule: Reshape, strategy: Strategy, size: int) -> float:
    """A view keeps a digit if every element has the same digit before and after: tried on elements of the actual
    shapes.
    """
    (before,), (after,) = strategy.reads, strategy.results
    if not isinstance(before, Split) or not isinstance(after, Split):
        return 0.0 if before == after else float("inf")
    total = prod(rule.source)
    if total <= 1 << 12:
        flat = np.arange(total)
    else:
        flat = np.random.default_rng(0).integers(0, total, 1 << 12)
    digits = [
        np.unravel_index(flat, shape)[entry.dim] // entry.stride % size
        for shape, entry in ((rule.source, before), (rule.target, after))
    ]
    return 0.0 if np.array_equal(digits[0], digits[1]) else float("inf")
