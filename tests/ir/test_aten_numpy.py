"""Every operator of the reference interpreter against torch itself, on fixed random data."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sennit.errors import GraphError
from sennit.ir.aten_numpy import apply, bind, known_kinds
from sennit.ir.dtype import DType
from sennit.ir.dtype_numpy import numpy_dtype, result_type
from sennit.ir.graph import Ref

Case = tuple[str, tuple[Any, ...], dict[str, Any]]


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = torch.bool if dtype is DType.BOOL else torch.from_numpy(np.zeros(0, numpy_dtype(dtype))).dtype
    return found


def to_torch(value: Any) -> Any:
    match value:
        case np.ndarray():
            return torch.from_numpy(np.ascontiguousarray(value).copy()).reshape(value.shape)
        case DType():
            return torch_dtype(value)
        case tuple():
            return [to_torch(part) for part in value]
        case _:
            return value


def by_torch(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[np.ndarray, ...]:
    function = operator.attrgetter(kind.removeprefix("aten."))(torch.ops.aten)
    result = function(*to_torch(args), **{name: to_torch(value) for name, value in kwargs.items()})
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(part.numpy() for part in results if part is not None)


class Data:
    """Seeded arrays: floats around zero, positive floats, integers, booleans."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def f(self, *shape: int, dtype: type = np.float64) -> np.ndarray:
        return np.asarray(self.rng.standard_normal(shape), dtype)

    def positive(self, *shape: int) -> np.ndarray:
        return np.asarray(self.rng.uniform(0.1, 3, shape))

    def i(self, high: int, *shape: int, dtype: type = np.int64) -> np.ndarray:
        return np.asarray(self.rng.integers(0, high, shape), dtype)

    def b(self, *shape: int) -> np.ndarray:
        return np.asarray(self.rng.integers(0, 2, shape), np.bool_)


def pointwise(d: Data) -> Iterator[Case]:
    for name in ("neg", "exp", "tanh", "erf", "sigmoid", "silu", "relu", "abs", "sign", "sin", "cos", "reciprocal"):
        yield f"aten.{name}.default", (d.f(2, 3),), {}
    for name in ("log", "sqrt", "rsqrt"):
        yield f"aten.{name}.default", (d.positive(2, 3),), {}
    yield "aten.exp.default", (d.i(4, 3),), {}
    yield "aten.exp.default", (d.f(),), {}
    for name in ("add", "sub"):
        yield f"aten.{name}.Tensor", (d.f(2, 3), d.f(3)), {}
        yield f"aten.{name}.Tensor", (d.f(2, 3), d.f(2, 1)), {"alpha": 2}
        yield f"aten.{name}.Scalar", (d.f(2, 3), 1.5), {}
    for name in ("mul", "div", "eq", "ne", "lt", "le", "gt", "ge"):
        yield f"aten.{name}.Tensor", (d.f(2, 3), d.f(2, 1)), {}
        yield f"aten.{name}.Tensor", (d.i(3, 5) + 1, d.i(3, 5) + 1), {}
        yield f"aten.{name}.Scalar", (d.i(3, 5), 2), {}
        yield f"aten.{name}.Scalar", (d.i(3, 5), 0.5), {}
    yield "aten.add.Tensor", (d.f(3, dtype=np.float32), d.f()), {}
    yield "aten.add.Tensor", (d.i(3, 3, dtype=np.int32), d.i(3)), {}
    yield "aten.mul.Tensor", (d.b(3), d.i(3, 3)), {}
    yield "aten.mul.Tensor", (d.f(3, dtype=np.float32), 0.5), {}
    yield "aten.rsub.Scalar", (d.f(3), 2), {}
    yield "aten.pow.Tensor_Scalar", (d.positive(3), 2.5), {}
    yield "aten.pow.Tensor_Scalar", (d.f(3), 3), {}
    yield "aten.pow.Tensor_Tensor", (d.positive(3), d.f(3)), {}
    for name in ("maximum", "minimum"):
        yield f"aten.{name}.default", (d.f(2, 3), d.f(3)), {}
    for name in ("logical_and", "logical_or"):
        yield f"aten.{name}.default", (d.b(2, 3), d.b(3)), {}
        yield f"aten.{name}.default", (d.i(2, 3), d.f(3)), {}
    yield "aten.logical_not.default", (d.b(4),), {}
    for name in ("bitwise_and", "bitwise_or"):
        yield f"aten.{name}.Tensor", (d.i(8, 3), d.i(8, 3)), {}
        yield f"aten.{name}.Tensor", (d.b(3), d.b(3)), {}
    yield "aten.bitwise_not.default", (d.b(3),), {}
    yield "aten.bitwise_not.default", (d.i(9, 3),), {}
    for kwargs in ({}, {"approximate": "none"}, {"approximate": "tanh"}):
        yield "aten.gelu.default", (d.f(3, 4),), kwargs
        yield "aten.gelu_backward.default", (d.f(3, 4), d.f(3, 4)), kwargs
    yield "aten.gelu.default", (d.f(5, dtype=np.float32),), {}
    yield "aten.tanh_backward.default", (d.f(3), np.tanh(d.f(3))), {}
    yield "aten.sigmoid_backward.default", (d.f(3), d.positive(3)), {}
    yield "aten.threshold_backward.default", (d.f(5), d.f(5), 0), {}
    yield "aten.where.self", (d.b(2, 3), d.f(2, 3), d.f()), {}
    yield "aten.where.self", (d.b(2, 3), d.f(2, 3, dtype=np.float32), d.f()), {}
    yield "aten.clamp.default", (d.f(6), -0.5, 0.5), {}
    yield "aten.clamp.default", (d.f(6),), {"max": 0}
    yield "aten.clamp.default", (d.i(9, 6), 3), {}
    yield "aten.masked_fill.Scalar", (d.f(2, 3), d.b(3), float("-inf")), {}


def reductions(d: Data) -> Iterator[Case]:
    x = d.f(2, 3, 4)
    yield "aten.sum.default", (x,), {}
    yield "aten.sum.default", (d.b(5),), {}
    yield "aten.sum.default", (d.i(5, 4, dtype=np.int32),), {"dtype": DType.F64}
    for dims in ((0,), (0, -1), (1,), ()):
        yield "aten.sum.dim_IntList", (x, dims), {}
        yield "aten.sum.dim_IntList", (x, dims, True), {}
        yield "aten.amax.default", (x, dims, True), {}
    yield "aten.sum.dim_IntList", (d.i(4, 2, 3), (1,)), {"dtype": DType.F32}
    yield "aten.mean.dim", (x, (1, 2), True), {}
    yield "aten.mean.dim", (x, (-1,)), {}
    yield "aten.mean.dim", (d.i(3, 4), (0,)), {"dtype": DType.F64}
    yield "aten.mean.default", (x,), {}
    yield "aten.amin.default", (x, (1,)), {}
    yield "aten.any.dim", (d.b(3, 4), 1), {}
    yield "aten.any.dim", (d.b(3, 4), -1, True), {}
    yield "aten.any.default", (d.b(3),), {}
    yield "aten.all.default", (d.b(3),), {}
    yield "aten.all.dim", (d.b(3, 4), -1, True), {}
    yield "aten.argmax.default", (x, 1), {}
    yield "aten.argmax.default", (x, -1, True), {}
    yield "aten.argmax.default", (x,), {}
    yield "aten.cumsum.default", (d.i(5, 2, 4, dtype=np.int32), 1), {}


def products(d: Data) -> Iterator[Case]:
    yield "aten.mm.default", (d.f(3, 4), d.f(4, 5)), {}
    yield "aten.mm.default", (d.f(3, 4), d.f(4, 0)), {}
    yield "aten.bmm.default", (d.f(2, 3, 4), d.f(2, 4, 5)), {}
    yield "aten.mv.default", (d.f(3, 4), d.f(4)), {}
    yield "aten.dot.default", (d.f(4), d.f(4)), {}
    for kwargs in ({}, {"beta": 0.5, "alpha": 2}):
        yield "aten.addmm.default", (d.f(5), d.f(3, 4), d.f(4, 5)), kwargs
        yield "aten.baddbmm.default", (d.f(2, 3, 5), d.f(2, 3, 4), d.f(2, 4, 5)), kwargs


def views(d: Data) -> Iterator[Case]:
    x = d.f(4, 6)
    for name in ("view", "_unsafe_view", "reshape"):
        yield f"aten.{name}.default", (x, (2, -1, 3)), {}
    yield "aten.view.default", (d.f(1), ()), {}
    yield "aten.permute.default", (d.f(2, 3, 4), (2, 0, -2)), {}
    yield "aten.transpose.int", (d.f(2, 3, 4), -1, 0), {}
    yield "aten.t.default", (x,), {}
    yield "aten.t.default", (d.f(3),), {}
    yield "aten.expand.default", (d.f(3, 1), (2, -1, 4)), {}
    yield "aten.expand.default", (d.f(), (2, 3)), {}
    yield "aten.unsqueeze.default", (x, -1), {}
    yield "aten.squeeze.default", (d.f(1, 3, 1),), {}
    yield "aten.squeeze.dim", (d.f(1, 3, 1), 0), {}
    yield "aten.squeeze.dim", (d.f(1, 3, 1), 1), {}
    yield "aten.squeeze.dims", (d.f(1, 3, 1), (0, 1, -1)), {}
    for name in ("alias", "detach", "clone"):
        yield f"aten.{name}.default", (x,), {}
    yield "aten.split_with_sizes.default", (x, (1, 2, 3), -1), {}
    yield "aten.split.Tensor", (x, 4, 1), {}
    yield "aten.split.Tensor", (x, 2), {}
    yield "aten.cat.default", ((d.f(2, 3), d.f(2, 1)), -1), {}
    yield "aten.cat.default", ((d.f(2, dtype=np.float32), d.i(3, 2)),), {}
    yield "aten.stack.default", ((d.f(3), d.f(3)), 1), {}
    for where in ((), (1, 1, 4), (-1, -3, 9223372036854775807), (1, 0, 6, 2), (0, None, 3)):
        yield "aten.slice.Tensor", (x, *where), {}
    yield "aten.select.int", (x, -1, -2), {}
    yield "aten.select.int", (x, 0, 1), {}
    yield "aten.slice_backward.default", (d.f(4, 2), (4, 6), 1, 1, 3, 1), {}
    yield "aten.slice_backward.default", (d.f(2, 6), (4, 6), 0, -2, 9223372036854775807, 1), {}
    yield "aten.select_backward.default", (d.f(4), (4, 6), -1, 2), {}
    for name in ("tril", "triu"):
        yield f"aten.{name}.default", (x,), {}
        yield f"aten.{name}.default", (d.f(2, 3, 3), -1), {}
        yield f"aten.{name}.default", (d.b(3, 3),), {"diagonal": 1}


def indexing(d: Data) -> Iterator[Case]:
    yield "aten.embedding.default", (d.f(5, 3), d.i(5, 2, 4)), {}
    yield "aten.embedding.default", (d.f(5, 3), d.i(5, 2), 1), {}
    tokens = d.i(5, 2, 4)
    for padding in (-1, 2):
        for by_frequency in (False, True):
            yield "aten.embedding_dense_backward.default", (d.f(2, 4, 3), tokens, 5, padding, by_frequency), {}
    index = np.argsort(d.f(4, 3), axis=0)[:2]
    yield "aten.gather.default", (d.f(4, 3), 0, index), {}
    yield "aten.gather.default", (d.f(4, 3), -1, d.i(3, 2, 5)), {}
    yield "aten.scatter.value", (d.f(4, 3), 0, index, 2), {}
    yield "aten.scatter.value", (d.i(9, 4, 3), 1, d.i(3, 4, 1), -1.0), {}
    yield "aten.scatter.src", (d.f(4, 3), 0, index, d.f(3, 3)), {}
    yield "aten.scatter_add.default", (d.f(4, 3), 0, d.i(4, 6, 2), d.f(6, 3)), {}
    yield "aten.index.Tensor", (d.f(4, 3), (d.i(4, 5),)), {}
    yield "aten.index.Tensor", (d.f(4, 3, 5), (None, d.i(3, 2, 1), d.i(5, 2))), {}
    yield "aten.index.Tensor", (d.f(4, 3, 5), (d.i(4, 2), None, d.i(5, 2))), {}
    yield "aten.index.Tensor", (d.f(4, 3), (d.b(4),)), {}
    yield "aten.index_put.default", (d.f(4, 3), (np.array([2, 0]),), d.f(2, 3)), {}
    yield "aten.unbind.int", (d.f(4, 3), 1), {}
    yield "aten.roll.default", (d.f(4, 3), (1, -2), (0, 1)), {}
    yield "aten.flip.default", (d.f(4, 3), (0, 1)), {}
    for groups, stride, padding, dilation in (
        (1, (1, 1), (0, 0), (1, 1)),
        (1, (2, 1), (1, 2), (1, 2)),
        (2, (1, 2), (2, 0), (2, 1)),
    ):
        x, w = d.f(2, 4, 9, 8), d.f(6, 4 // groups, 3, 2)
        numbers = (stride, padding, dilation, False, (0, 0), groups)
        yield "aten.convolution.default", (x, w, d.f(6), *numbers), {}
        (y,) = by_torch("aten.convolution.default", (x, w, None, *numbers), {})
        yield "aten.convolution_backward.default", (d.f(*y.shape), x, w, (6,), *numbers, (True, True, True)), {}
    yield "aten.index_put.default", (d.f(4, 3), (d.i(4, 9),), d.f(9, 3), True), {}
    yield "aten.index_put.default", (d.f(4, 3), (None, d.i(3, 5)), d.f(4, 5), True), {}


def normalisation(d: Data) -> Iterator[Case]:
    x, masked = d.f(2, 3, 4), d.f(3, 3)
    masked[0, :] = -np.inf
    masked[1, 1:] = -np.inf
    for name in ("_softmax", "_log_softmax"):
        yield f"aten.{name}.default", (x, 1, False), {}
        yield f"aten.{name}.default", (x * 300, -1, False), {}
        yield f"aten.{name}.default", (masked, -1, False), {}
        yield f"aten.{name}_backward_data.default", (d.f(2, 3, 4), np.exp(x), -1, DType.F64), {}
    for sizes in ((4,), (3, 4)):
        weight, bias = d.f(*sizes), d.f(*sizes)
        yield "aten.native_layer_norm.default", (x, sizes, weight, bias, 1e-5), {}
        yield "aten.native_layer_norm.default", (x, sizes, None, None, 1e-5), {}
        rows = tuple(range(3 - len(sizes), 3))
        stats = x.mean(axis=rows, keepdims=True), 1 / np.sqrt(x.var(axis=rows, keepdims=True) + 1e-5)
        for mask in ((True, True, True), (True, False, True), (False, True, False)):
            yield "aten.native_layer_norm_backward.default", (d.f(2, 3, 4), x, sizes, *stats, weight, bias, mask), {}
        yield (
            "aten.native_layer_norm_backward.default",
            (d.f(2, 3, 4), x, sizes, *stats, None, None, (True, False, False)),
            {},
        )


def creation(d: Data) -> Iterator[Case]:
    for value in (2, 0.5, True):
        yield "aten.full.default", ((2, 3), value), {}
    yield "aten.full.default", ((), 1), {"dtype": DType.F16}
    yield "aten.full_like.default", (d.f(3), 7), {}
    yield "aten.full_like.default", (d.f(3), 7), {"dtype": DType.I32}
    for name in ("zeros", "ones"):
        yield f"aten.{name}.default", ((2, 3),), {}
        yield f"aten.{name}.default", ((2, 3),), {"dtype": DType.I64}
        yield f"aten.{name}_like.default", (d.i(3, 2),), {}
        yield f"aten.{name}_like.default", (d.i(3, 2),), {"dtype": DType.BOOL}
        yield f"aten.new_{name}.default", (d.f(2), (3, 1)), {}
    yield "aten.new_full.default", (d.f(2), (3,), 2), {"dtype": DType.U8}
    yield "aten.scalar_tensor.default", (2,), {}
    yield "aten.scalar_tensor.default", (float("-inf"),), {"dtype": DType.F64}
    yield "aten.arange.default", (5,), {}
    yield "aten.arange.default", (2.5,), {}
    yield "aten.arange.start", (2, 7), {"dtype": DType.I32}
    yield "aten.arange.start_step", (1, 8, 3), {}
    yield "aten.arange.start_step", (1, 2, 0.25), {"dtype": DType.F64}
    yield "aten._to_copy.default", (d.f(3),), {"dtype": DType.F32}
    yield "aten._to_copy.default", (d.b(3),), {"dtype": DType.I64}
    yield "aten.lift_fresh_copy.default", (d.f(3),), {}


FAMILIES = (pointwise, reductions, products, views, indexing, normalisation, creation)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_operator_equals_torch(family: Any, seed: int) -> None:
    for kind, args, kwargs in family(Data(seed)):
        mine, theirs = apply(kind, args, kwargs), by_torch(kind, args, kwargs)
        assert len(mine) == len(theirs), kind
        for left, right in zip(mine, theirs, strict=True):
            tolerance = 1e-12 if left.dtype == np.float64 else 1e-6
            assert isinstance(left, np.ndarray), kind
            assert (left.dtype, left.shape) == (right.dtype, right.shape), (kind, args, kwargs)
            np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance, err_msg=f"{kind} {args} {kwargs}")


def test_every_operator_of_the_tables_is_tested() -> None:
    aten = {kind for kind in known_kinds() if not kind.startswith("sennit.")}  # those have tests of their own
    assert aten == {kind for family in FAMILIES for kind, _, _ in family(Data(0))}


def test_arguments_are_not_written() -> None:
    for family in FAMILIES:
        for kind, args, kwargs in family(Data(2)):
            for arg in args:
                if isinstance(arg, np.ndarray):
                    arg.flags.writeable = False
            apply(kind, args, kwargs)


def test_storage_options_mean_nothing() -> None:
    (result,) = apply("aten.clone.default", (np.ones(2),), {"memory_format": "contiguous"})
    assert result.tolist() == [1, 1]


def test_unknown_operator_says_where_to_add_it() -> None:
    with pytest.raises(GraphError, match=r"aten\.fft\.default has no numpy meaning\n  fix: add it .*aten_numpy\.py"):
        apply("aten.fft.default", (), {})


def test_misfit_shapes_are_named() -> None:
    with pytest.raises(GraphError, match=r"aten\.mm\.default cannot be computed on \(\[2, 3\], \[2, 3\]\)"):
        apply("aten.mm.default", (np.ones((2, 3)), np.ones((2, 3))), {})


def test_bf16_is_refused() -> None:
    with pytest.raises(GraphError, match="numpy has no bf16"):
        apply("aten._to_copy.default", (np.ones(2),), {"dtype": DType.BF16})


def test_bind_replaces_references_at_any_depth() -> None:
    x, y = np.zeros(1), np.ones(1)
    bound = bind((Ref("x"), ((Ref("y"), None), 2)), {"x": x, "y": y})
    assert bound[0] is x
    assert bound[1][0][0] is y
    assert bound[1][1] == 2


def test_promotion_equals_torch() -> None:
    dtypes = [numpy_dtype(dtype) for dtype in DType if dtype is not DType.BF16]
    operands: list[Any] = [np.ones(shape, dtype) for dtype in dtypes for shape in ((2,), ())] + [True, 2, 0.5]
    for left in operands:
        for right in operands:
            expected = torch.result_type(to_torch(left), to_torch(right))
            mine = torch.from_numpy(np.zeros(0, result_type(left, right))).dtype
            assert mine == expected, (left, right)
