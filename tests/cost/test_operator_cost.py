from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import Basis, load
from sennit.cost import Product, efficiency, operator_cost, products, weakest
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Phase, Ref
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Compute

MESH = Mesh.make({"x": 1})
H200 = load("h200x8").device
LAPTOP = load("laptop").device


def step(
    kind: str, inputs: dict[str, tuple[int, ...]], result: tuple[int, ...], *more: Arg, dtype: DType = DType.BF16
) -> tuple[Compute, dict[str, TensorType]]:
    buffer = Buffer("out", "out", dtype, Layout(MESH, result))
    types = {name: TensorType(shape, dtype) for name, shape in inputs.items()}
    types["out"] = TensorType(result, dtype)
    return Compute(kind, (*map(Ref, inputs), *more), (), (buffer,), Phase.FORWARD), types


@pytest.mark.parametrize(
    ("kind", "inputs", "result", "more", "flops"),
    [
        ("aten.mm.default", {"a": (8, 16), "b": (16, 4)}, (8, 4), (), 2 * 8 * 16 * 4),
        ("aten.addmm.default", {"c": (4,), "a": (8, 16), "b": (16, 4)}, (8, 4), (), 2 * 8 * 16 * 4),
        ("aten.bmm.default", {"a": (3, 8, 16), "b": (3, 16, 4)}, (3, 8, 4), (), 3 * 2 * 8 * 16 * 4),
        ("aten.baddbmm.default", {"c": (3, 8, 4), "a": (3, 8, 16), "b": (3, 16, 4)}, (3, 8, 4), (), 3 * 2 * 8 * 16 * 4),
        ("aten.linear.default", {"a": (2, 8, 16), "b": (4, 16)}, (2, 8, 4), (), 2 * 16 * 16 * 4),
        ("aten.mv.default", {"a": (8, 16), "b": (16,)}, (8,), (), 2 * 8 * 16),
        ("aten.convolution.default", {"x": (2, 3, 10, 10), "w": (6, 3, 3, 3)}, (2, 6, 8, 8), (), 2 * 2 * 64 * 6 * 27),
        (
            "aten.convolution_backward.default",
            {"g": (2, 6, 8, 8), "x": (2, 3, 10, 10), "w": (6, 3, 3, 3)},
            (2, 3, 10, 10),
            ((True, True, False),),
            2 * (2 * 2 * 64 * 6 * 27),
        ),
        (
            "aten._scaled_dot_product_flash_attention.default",
            {"q": (2, 4, 128, 64), "k": (2, 4, 128, 64), "v": (2, 4, 128, 64)},
            (2, 4, 128, 64),
            (),
            4 * 8 * 128 * 128 * 64,
        ),
        ("aten.gelu.default", {"a": (8, 16)}, (8, 16), (), 0),
    ],
)
def test_flops(
    kind: str, inputs: dict[str, tuple[int, ...]], result: tuple[int, ...], more: tuple[Arg, ...], flops: int
) -> None:
    assert sum(item.flops for item in products(*step(kind, inputs, result, *more))) == flops


def test_a_view_costs_nothing() -> None:
    assert operator_cost(*step("aten.view.default", {"a": (8, 16)}, (128,)), H200).seconds == 0.0


def test_what_is_bound_by_memory_moves_its_bytes() -> None:
    cost = operator_cost(*step("aten.add.Tensor", {"a": (4096, 4096), "b": (4096, 4096)}, (4096, 4096)), H200)
    rate = H200.bandwidth.value * H200.bandwidth_efficiency.value
    assert cost.seconds == pytest.approx(3 * 2 * 4096**2 / rate + H200.launch.value)
    assert "bytes at" in cost.source


def test_a_look_up_does_not_read_the_whole_table() -> None:
    wide = operator_cost(*step("aten.embedding.default", {"w": (50000, 64), "i": (8,)}, (8, 64)), H200)
    small = operator_cost(*step("aten.embedding.default", {"w": (8, 64), "i": (8,)}, (8, 64)), H200)
    assert wide.seconds == small.seconds


def test_a_cost_rests_on_its_weakest_figure() -> None:
    assert weakest(Basis.MEASURED, Basis.DATA_SHEET) is Basis.DATA_SHEET
    assert weakest(Basis.MEASURED, Basis.ESTIMATED) is Basis.ESTIMATED
    product = step("aten.mm.default", {"a": (64, 64), "b": (64, 64)}, (64, 64))
    assert operator_cost(*product, H200).basis is Basis.DATA_SHEET
    assert operator_cost(*product, LAPTOP).basis is Basis.ESTIMATED
    assert "data sheet" in str(operator_cost(*product, H200))


def test_products_on_h200_are_near_what_was_measured() -> None:
    """All products of benchmarks/sim/h200.json, good and bad; docs/cluster.md names the bad ones."""
    path = Path(__file__).parents[2] / "benchmarks" / "sim" / "h200.json"
    rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["op"] == "mm"]
    errors = []
    for row in rows:
        m, n, k = row["m"], row["n"], row["k"]
        dtype = DType.F32 if row["dtype"] == "torch.float32" else DType.BF16
        cost = operator_cost(*step("aten.mm.default", {"a": (m, k), "b": (k, n)}, (m, n), dtype=dtype), H200)
        errors.append(abs(cost.seconds / row["seconds"] - 1))
    assert len(errors) == 34
    assert median(errors) < 0.15


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 8))
def test_efficiency_is_a_fraction_of_that_of_a_large_product(m: int, n: int, k: int, batch: int) -> None:
    for device in (H200, LAPTOP):
        assert 0 < efficiency(Product(m, n, k, batch), device) <= device.matmul.efficiency.value


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 2048), st.integers(1, 2048), st.integers(1, 2048))
def test_a_product_is_never_faster_than_its_roofline(m: int, n: int, k: int) -> None:
    cost = operator_cost(*step("aten.mm.default", {"a": (m, k), "b": (k, n)}, (m, n)), H200)
    peak = H200.peak.of(DType.BF16)
    assert peak is not None
    assert cost.seconds >= 2 * m * n * k / peak.value
    assert cost.seconds >= 2 * (m * k + k * n + m * n) / H200.bandwidth.value
