"""Results in the memory of an operand: only where nobody looks at it any more, with the values that fresh memory gives,
and less of it at the peak.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import capture
from sennit.ir.mesh import Mesh
from sennit.ir.program import Compute, Program
from sennit.plan import lower, propagate, zoo
from sennit.run import emit_lane, run_in_process
from sennit.run.memory import predicted_memory
from sennit.run.rank import OnMesh
from sennit.run.reuse import Reuses, reused

aten = torch.ops.aten

STEPS = """
program "who may take whose memory" {
  mesh m0 = dp=2
  lane both on 0-1 {
    param %w : f32[4,2] of %w on m0 "w"
BODY
  }
}
"""


def taken(body: str) -> dict[str, str]:
    """Result -> operand."""
    return {name: found.operand for name, found in found_in(body).taken.items()}


def found_in(body: str) -> Reuses:
    """A line `name:type = kind(args)` stands for a step of the forward pass; the type is f32[4,2] where none is given."""
    lines = []
    for line in body.strip().splitlines():
        if line.strip().startswith(("result", "all_reduce")):
            lines.append(f"    {line.strip()}")
            continue
        name, _, call = line.strip().partition(" = ")
        name, _, shape = name.partition(":")
        lines.append(f'    forward %{name} : {shape or "f32[4,2]"} of %{name} on m0 = {call} for %{name} ""')
    (lane,) = Program.parse(STEPS.replace("BODY", "\n".join(lines))).lanes
    return reused(lane)


def test_an_operand_that_dies_gives_its_memory() -> None:
    assert taken("""
        x = aten.clone.default(%w)
        y = aten.add.Tensor(%x, %w)
        z = aten.mul.Tensor(%w, %y)
        result "z" %z
    """) == {"y": "x", "z": "y"}


def test_through_views_that_are_all_of_it() -> None:
    assert taken("""
        x = aten.clone.default(%w)
        v:f32[2,4] = aten.permute.default(%x, [1, 0])
        y:f32[2,4] = aten.mul.Tensor(%v, 2.0)
        result "y" %y
    """) == {"y": "v"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('y = aten.add.Tensor(%w, %w)\nresult "y" %y', "a parameter is not ours"),
        ('x = aten.clone.default(%w)\ny = aten.add.Tensor(%x, %w)\nz = aten.relu.default(%x)\nresult "y" %y\nresult "z" %z', "read again by z"),
        ('x = aten.clone.default(%w)\ny = aten.add.Tensor(%x, %w)\nresult "y" %y\nresult "x" %x', "put out"),
        (
            'x = aten.clone.default(%w)\nv:f32[2,4] = aten.permute.default(%x, [1, 0])\ny = aten.mul.Tensor(%x, 2.0)\n'
            'u:f32[2,4] = aten.relu.default(%v)\nresult "y" %y\nresult "u" %u',
            "seen through a view later",
        ),
        (
            'x:f32[2,2] = aten.clone.default(%w)\nv:f32[2,2] = aten.permute.default(%x, [1, 0])\ny:f32[2,2] = aten.add.Tensor(%x, %v)\nresult "y" %y',
            "read in another order by the same step",
        ),
        (
            'x:f32[2] = aten.clone.default(%w)\nv:f32[4,2] = aten.expand.default(%x, [4, 2])\ny = aten.add.Tensor(%v, %w)\nresult "y" %y',
            "four rows in the memory of one",
        ),
        ('x:f32[2] = aten.clone.default(%w)\ny = aten.add.Tensor(%x, %w)\nresult "y" %y', "of another shape"),
        ('x:f64[4,2] = aten.clone.default(%w)\ny = aten.add.Tensor(%x, %w)\nresult "y" %y', "of another type"),
        ('x = sennit.take(%w)\ny = aten.add.Tensor(%x, %w)\nresult "y" %y', "may be the parameter itself"),
        (
            'x:f32[4,2]{sum:dp} = aten.clone.default(%w)\nall_reduce %r : f32[4,2] of %x on m0 = %x over dp\n'
            'y:f32[4,2]{sum:dp} = aten.mul.Tensor(%x, 2.0)\nresult "r" %r\nresult "y" %y',
            "a collective may still read it",
        ),
        (
            'x = aten.clone.default(%w)\nall:f32[4,2] = sennit.partial(%x)\ny = aten.mul.Tensor(%x, 2.0)\nu = aten.relu.default(%all)\nresult "y" %y\n'
            'result "u" %u',
            "a local move may have handed it on",
        ),
    ],
)  # fmt: skip
def test_it_keeps_its_memory(body: str, why: str) -> None:
    assert taken(body) == {}, why


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    dim=st.integers(0, 3),
    wide=st.sampled_from([1, 40, 300]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    turned=st.booleans(),
)
def test_gradients_are_the_same_in_the_memory_of_the_one_that_comes_in(
    shape: list[int], dim: int, wide: int, dtype: torch.dtype, turned: bool
) -> None:
    """The kernels are torch's, and this is what `reuse.py` believes of them."""
    dim %= len(shape)
    shape[-1] *= wide
    torch.manual_seed(0)
    y = torch.randn(shape, dtype=dtype).softmax(dim)
    grad = torch.randn(shape, dtype=dtype)
    if turned:  # what comes in lies otherwise in memory
        grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    softmax_gradient = OnMesh.softmax_gradient
    for fresh, in_place in (
        (aten._softmax_backward_data.default(grad, y, dim, dtype), lambda g: softmax_gradient(g, y, dim, dtype)),
        (aten.gelu_backward.default(grad, y), lambda g: aten.gelu_backward.grad_input(g, y, grad_input=g)),
        (aten.gelu.default(grad), lambda g: aten.gelu.out(g, out=g)),
        (aten.add.Tensor(y, grad, alpha=2), lambda g: aten.add.out(y, g, alpha=2, out=g)),
        (aten.div.Tensor(grad, 3.0), lambda g: aten.div.out(g, 3.0, out=g)),
    ):  # fmt: skip
        given_ = grad.clone()
        made = in_place(given_)
        assert made.data_ptr() == given_.data_ptr() or not given_.is_contiguous()
        assert torch.equal(made, fresh)


def test_a_step_with_reuse_is_the_serial_step(small_gpt) -> None:
    program = lower(propagate(zoo.co_shard(small_gpt.graph, Mesh.parse("dp=2"), pieces=2)))
    (lane,) = program.lanes
    found = reused(lane).taken
    kinds = {step.kind for step in lane.steps if isinstance(step, Compute) and step.results[0].name in found}
    assert "aten._softmax_backward_data.default" in kinds
    source = emit_lane(program, lane)
    assert sum(source.count(f"{kind}(") for kind in {item.kind for item in found.values()}) == len(found)
    assert max(small_gpt.differences(run_in_process(program, small_gpt.state)).values()) <= 1e-13


def test_the_prediction_counts_that_memory_once(small_gpt, monkeypatch) -> None:
    program = lower(propagate(zoo.data_parallel(small_gpt.graph, Mesh.parse("dp=2"))))
    once = sum(predicted_memory(program, 0)[0].values())
    monkeypatch.setattr("sennit.run.memory.reused", lambda lane: Reuses({}, frozenset()))
    assert once < sum(predicted_memory(program, 0)[0].values())


def test_a_copy_that_views_alone_read_is_left_out() -> None:
    body = """
        x = aten.relu.default(%w)
        t:f32[2,4] = aten.permute.default(%x, [1, 0])
        c:f32[2,4] = aten.clone.default(%t)
        v:f32[8] = aten.view.default(%c, [8])
        y:f32[8] = aten.mul.Tensor(%v, 2.0)
        RESULTS
    """
    assert found_in(body.replace("RESULTS", 'result "y" %y')).spared == {"c"}
    assert taken(body.replace("RESULTS", 'result "y" %y')) == {"y": "v"}
    assert taken(body.replace("RESULTS", 'result "y" %y\nresult "x" %x')) == {}
    assert not found_in(body.replace("RESULTS", 'result "y" %y\nresult "c" %c')).spared


class Twice(nn.Module):
    """Residual streams, views of one storage, sums and products that could be taken in place wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            h = self.a(x)
            left, right = h.chunk(2, -1)
            x = x + self.b(torch.nn.functional.gelu(h) * h) * left + right.expand(2, *right.shape)[1]
        return (x * x.transpose(0, 1).contiguous().transpose(0, 1)).sum()


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2", "dp=1;mb=2"])
def test_a_step_with_reuse_equals_eager(mesh: str) -> None:
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(4, 4, 8, dtype=torch.float64)
    program = lower(propagate(zoo.data_parallel(capture(model, (x,), name="twice"), Mesh.parse(mesh))))
    source = emit_lane(program, program.lanes[0])
    assert "aten.add.out" in source
    assert "aten.gelu_backward.grad_input" in source
    state = {path: item.detach().clone() for path, item in model.named_parameters()}
    one = torch.ones((), dtype=torch.float64)
    found = run_in_process(program, {**state, "x": x.clone(), "tangent": one})
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-12, atol=0)
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(found[path], parameter.grad, rtol=1e-12, atol=1e-13)
        assert torch.equal(state[path], parameter.detach())
