"""The graph interpreter against torch autograd, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sennit.errors import GraphError
from sennit.ir.graph import Graph
from sennit.ir.graph_numpy import run_graph

# loss = sum(relu(x @ w + b)), forward and backward
LINEAR = """
graph "linear" {
  param %w : f64[3,4] "fc.weight"
  param %b : f64[4] "fc.bias"
  input %x : f64[2,3] "x"
  tangent %dloss : f64[] "tangent"
  forward %y : f64[2,4] = aten.addmm.default(%b, %x, %w) at "fc" "model.py:7" seq 1
  forward %r : f64[2,4] = aten.relu.default(%y) at "act" seq 2
  forward %loss : f64[] = aten.sum.default(%r)
  backward %dr : f64[2,4] = aten.expand.default(%dloss, [2, 4])
  backward %dy : f64[2,4] = aten.threshold_backward.default(%dr, %r, 0) at "act" seq 2
  backward %xt : f64[3,2] = aten.permute.default(%x, [1, 0]) at "fc" seq 1
  backward %dw : f64[3,4] = aten.mm.default(%xt, %dy) at "fc" seq 1
  backward %db : f64[4] = aten.sum.dim_IntList(%dy, [0], false, dtype=f64) at "fc" seq 1
  loss %loss
  gradient "fc.weight" %dw
  gradient "fc.bias" %db
}
"""


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"w": (3, 4), "b": (4,), "x": (2, 3)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()} | {"dloss": np.asarray(1.0)}


def test_forward_and_backward_equal_autograd() -> None:
    given = arrays()
    w, b, x = (torch.tensor(given[name], requires_grad=True) for name in "wbx")
    loss = torch.relu(x @ w + b).sum()
    loss.backward()
    result = run_graph(Graph.parse(LINEAR), given)
    assert list(result) == ["loss", "dw", "db"]
    for name, expected in (("loss", loss.detach()), ("dw", w.grad), ("db", b.grad)):
        assert expected is not None
        np.testing.assert_allclose(result[name], expected.numpy(), rtol=1e-14)


def test_several_results_and_tensor_lists() -> None:
    text = """
    graph "halves" {
      input %x : i32[4] "x"
      forward %a : i32[1], %b : i32[3] = aten.split_with_sizes.default(%x, [1, 3])
      forward %y : i32[4] = aten.cat.default([%b, %a])
      result "y" %y
      result "x" %x
    }
    """
    result = run_graph(Graph.parse(text), {"x": np.arange(4, dtype=np.int32)})
    assert {name: array.tolist() for name, array in result.items()} == {"y": [1, 2, 3, 0], "x": [0, 1, 2, 3]}


def test_a_wrong_declared_shape_names_the_operator() -> None:
    text = LINEAR.replace("%y : f64[2,4]", "%y : f64[2,5]")
    with pytest.raises(GraphError) as caught:
        run_graph(Graph.parse(text), arrays())
    assert str(caught.value) == (
        "%y is declared f64[2,5], and its array is float64[2, 4]\n"
        "  where: graph 'linear', aten.addmm.default %y in module 'fc' (model.py:7)"
    )


def test_a_wrong_declared_dtype_is_an_error() -> None:
    with pytest.raises(GraphError, match="%db is declared f32"):
        run_graph(Graph.parse(LINEAR.replace("%db : f64[4]", "%db : f32[4]")), arrays())


def test_a_wrong_number_of_results_is_an_error() -> None:
    text = LINEAR.replace("%r : f64[2,4] =", "%r : f64[2,4], %s : f64[2,4] =")
    with pytest.raises(GraphError, match="1 results where 2 are declared"):
        run_graph(Graph.parse(text), arrays())


def test_inputs_are_checked() -> None:
    given = arrays()
    with pytest.raises(GraphError, match=r"no array is given for %x\n.*input 'x'\n.*f64\[2,3\]"):
        run_graph(Graph.parse(LINEAR), {name: array for name, array in given.items() if name != "x"})
    with pytest.raises(GraphError, match=r"%x is declared f64\[2,3\], and its array is float32\[2, 3\]"):
        run_graph(Graph.parse(LINEAR), given | {"x": given["x"].astype(np.float32)})


def test_an_unknown_operator_is_named_with_its_place() -> None:
    with pytest.raises(GraphError, match=r"aten\.wat\.default has no numpy meaning\n.*model\.py:7.*\n.*add it"):
        run_graph(Graph.parse(LINEAR.replace("aten.addmm.default", "aten.wat.default")), arrays())
