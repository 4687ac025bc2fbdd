"""Local forms in torch equal their numpy definitions, on every device, for any digits; and pieces put together are the
whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Phase, Ref
from sennit.ir.layout import Layout, Pending, Reduction, Split
from sennit.ir.layout_numpy import assemble, distribute
from sennit.ir.local_forms_numpy import apply_form
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Compute
from sennit.run.local_forms import Indices, LocalForms, emit_form

MESH = Mesh.parse("a=2,b=2")
MANY = settings(derandomize=True, deadline=None, max_examples=40)


@dataclass
class Stand(LocalForms):
    """A rank with coordinates and nothing else."""

    coordinate: dict[str, int]
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class Case:
    """A form on some reads, laid out so, with what it makes."""

    kind: str
    args: tuple[Arg, ...]
    values: dict[str, np.ndarray]
    reads: dict[str, dict[str, Any]]
    results: list[tuple[tuple[int, ...], dict[str, Any]]]
    kwargs: tuple[tuple[str, Arg], ...] = ()

    def buffers(self) -> dict[str, Buffer]:
        return {
            name: Buffer(name, name, _dtype(value), Layout.make(MESH, value.shape, self.reads[name]))
            for name, value in self.values.items()
        }

    def run(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The results put together, by the definition and by torch."""
        reads = self.buffers()
        made = [Buffer(f"y{i}", f"y{i}", DType.F64, Layout.make(MESH, *item)) for i, item in enumerate(self.results)]
        cut = {name: distribute(self.values[name], buffer.layout) for name, buffer in reads.items()}
        step = Compute(self.kind, self.args, self.kwargs, tuple(made), Phase.FORWARD, "", "y0")
        source = emit_form(step, reads, _write)
        pieces: tuple[list[dict], list[dict]] = ([{} for _ in made], [{} for _ in made])
        for device, point in enumerate(MESH.points()):
            local = {name: parts[point] for name, parts in cut.items()}
            arrays = apply_form(
                self.kind, [_array(a, local) for a in self.args], dict(self.kwargs), list(reads.values()), made, device
            )
            stand = Stand(dict(zip(MESH.names, point, strict=True)))
            tensors = {
                name: torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
                for name, value in local.items()
            }
            outcome = eval(source, {"torch": torch, "rank": stand, "v": tensors})
            outcome = outcome if isinstance(outcome, tuple) else (outcome,)
            for position, (array, tensor) in enumerate(zip(arrays, outcome, strict=True)):
                np.testing.assert_allclose(tensor.numpy(), array, 1e-12, 1e-12)
                pieces[0][position][point], pieces[1][position][point] = array, tensor.numpy()
        both = [[assemble(b.layout, parts) for b, parts in zip(made, side, strict=True)] for side in pieces]
        return both[0], both[1]


def _dtype(value: np.ndarray) -> DType:
    return DType.F64 if value.dtype.kind == "f" else DType.I64


def _array(arg: Arg, local: dict[str, np.ndarray]) -> Any:
    return local[arg.name] if isinstance(arg, Ref) else arg


def _write(arg: Arg) -> str:
    match arg:
        case Ref(name):
            return f"v[{name!r}]"
        case DType():
            return f"torch.{arg.torch_name}"
        case tuple():
            return "[" + ", ".join(map(_write, arg)) + "]"
        case _:
            return repr(arg)


def check(case: Case, expected: list[np.ndarray]) -> None:
    for made in case.run():
        for one, other in zip(made, expected, strict=True):
            np.testing.assert_allclose(one, other, 1e-12, 1e-12)


strides = st.sampled_from([1, 2, 4])
SUM = Pending(Reduction.SUM)


@MANY
@given(strides, st.integers(0, 1000))
def test_embedding(stride: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, index = rng.standard_normal((8, 4)), rng.integers(0, 8, (3, 5))
    values = {"w": weight, "t": index}
    layouts = {"w": {"a": Split(0, stride), "b": Split(1, 2)}, "t": {}}
    case = Case("sennit.embedding", (Ref("w"), Ref("t")), values, layouts, [((3, 5, 4), {"a": SUM, "b": Split(2, 2)})])
    check(case, [weight[index]])


@MANY
@given(strides, st.integers(-1, 7), st.integers(0, 1000))
def test_embedding_backward(stride: int, padding: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    grad, index = rng.standard_normal((4, 5, 3)), rng.integers(0, 8, (4, 5))
    expected = np.zeros((8, 3))
    np.add.at(expected, index[index != padding], grad[index != padding])
    layouts = {"g": {"b": Split(0, 2)}, "t": {"b": Split(0, 2)}}
    case = Case(
        "sennit.embedding_dense_backward",
        (Ref("g"), Ref("t"), 8, padding, False),
        {"g": grad, "t": index},
        layouts,
        [((8, 3), {"a": Split(0, stride), "b": SUM})],
    )
    check(case, [expected])


@MANY
@given(strides, st.integers(0, 1000))
def test_gather_and_scatter(stride: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, index, source = rng.standard_normal((4, 8)), rng.integers(0, 8, (4, 3)), rng.standard_normal((4, 3))
    split = {"a": Split(1, stride), "b": Split(0, 2)}
    rows = {"b": Split(0, 2)}
    gathered = Case(
        "sennit.gather",
        (Ref("x"), 1, Ref("t")),
        {"x": x, "t": index},
        {"x": split, "t": rows},
        [((4, 3), {"a": SUM, "b": Split(0, 2)})],
    )
    check(gathered, [np.take_along_axis(x, index, 1)])
    expected = x.copy()
    np.put_along_axis(expected, index, -1.0, 1)
    scattered = Case(
        "sennit.scatter",
        (Ref("x"), 1, Ref("t"), -1.0),
        {"x": x, "t": index},
        {"x": split, "t": rows},
        [((4, 8), split)],
    )
    check(scattered, [expected])
    added = x.copy()
    np.add.at(added, (np.arange(4)[:, None], index), source)
    case = Case(
        "sennit.scatter_add",
        (Ref("x"), 1, Ref("t"), Ref("s")),
        {"x": x, "t": index, "s": source},
        {"x": split, "t": rows, "s": rows},
        [((4, 8), split)],
    )
    check(case, [added])


@MANY
@given(strides, strides)
def test_positions_and_draws(one: int, other: int) -> None:
    from sennit.ir.random_numpy import uniform

    places = {"a": Split(0, one)}
    kwargs = (("dtype", DType.F64),)
    check(Case("sennit.arange", (3, 19, 2), {}, {}, [((8,), places)], kwargs), [np.arange(3.0, 19.0, 2.0)])
    seed = np.array([5, 9])
    layout = {"a": Split(0, one), "b": Split(1, other)}
    case = Case("sennit.uniform", (Ref("s"), 3, (8, 8), DType.F64), {"s": seed}, {"s": {}}, [((8, 8), layout)])
    check(case, [uniform(seed, 3, (8, 8), DType.F64)])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("split", [1, 2])
def test_convolution(stride: int, padding: int, dilation: int, split: int) -> None:
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal((2, 3, 11, 9)), rng.standard_normal((4, 3, 3, 2)), rng.standard_normal(4)
    numbers: tuple[Arg, ...] = ((stride, 1), (padding, 1), (dilation, 1), False, (0, 0), 1)
    as_lists = [list(part) if isinstance(part, tuple) else part for part in numbers]
    tensors = [torch.from_numpy(part) for part in (x, w, b)]
    y = torch.ops.aten.convolution.default(*tensors, *as_lists)
    if y.shape[2] % 2:
        x = x[:, :, : x.shape[2] - stride].copy()
        tensors[0] = torch.from_numpy(x)
        y = torch.ops.aten.convolution.default(*tensors, *as_lists)
    height = y.shape[2]
    digit = Split(2, height // 2 if split == 2 else 1)
    values = {"x": x, "w": w, "b": b}
    case = Case(
        "sennit.convolution",
        (Ref("x"), Ref("w"), Ref("b"), *numbers),
        values,
        {"x": {}, "w": {}, "b": {}},
        [(tuple(y.shape), {"a": digit})],
    )
    check(case, [y.numpy()])
    grad = rng.standard_normal(tuple(y.shape))
    expected = torch.ops.aten.convolution_backward.default(
        torch.from_numpy(grad), *tensors[:2], [4], *as_lists, [True, True, True]
    )
    case = Case(
        "sennit.convolution_backward",
        (Ref("g"), Ref("x"), Ref("w"), (4,), *numbers, (True, True, True)),
        {"g": grad, "x": x, "w": w},
        {"g": {"a": digit}, "x": {}, "w": {}},
        [(tuple(part.shape), {"a": SUM}) for part in expected],
    )
    check(case, [part.numpy() for part in expected])


def test_indices_outside_the_dim_lie_nowhere() -> None:
    local, inside = Indices(((2, 1), (4, None))).locate(torch.tensor([-100, 0, 4, 7, 8]))
    assert inside.tolist() == [False, False, True, True, False]
    assert local.tolist() == [0, 0, 0, 3, 0]
