"""Where the source writes into memory that is there: never where somebody still looks at it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sennit.capture import capture
from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.plan import data_parallel, lower, propagate
from sennit.run.emit import emit_lane
from sennit.run.in_place import in_place
from sennit.run.threads import run_in_process

PROGRAM = """
program "p" {
  mesh m0 = dp=2
  lane all on 0-1 {
    param %w : f32[4,4] of %w on m0 "w"
    input %x : f32[4,4] of %x on m0 "x"
    STEPS
    result "y" %y
  }
}
"""


def writes(*steps: str) -> list[str]:
    made = [
        f"forward %{step.split()[0]} : f32[4,4] of %{step.split()[0]} on m0 = {step.split(' ', 1)[1]}" for step in steps
    ]
    program = Program.parse(PROGRAM.replace("STEPS", "\n    ".join(made)))
    return sorted(in_place(program.lanes[0]).writes)


def test_a_result_takes_the_memory_of_an_operand_that_is_read_no_more() -> None:
    assert writes("a aten.mm.default(%x, %w)", "b aten.mul.Tensor(%a, %x)", "y aten.mm.default(%b, %w)") == ["b"]


def test_the_second_operand_serves_too() -> None:
    assert writes("a aten.mm.default(%x, %w)", "b aten.add.Tensor(%x, %a)", "y aten.mm.default(%b, %w)") == ["b"]


@pytest.mark.parametrize(
    "steps",
    [
        ("a aten.mul.Tensor(%x, %w)", "y aten.mm.default(%a, %w)"),  # given
        ("a aten.mm.default(%x, %w)", "b aten.mul.Tensor(%a, %x)", "y aten.mm.default(%b, %a)"),  # read later
        (
            "a aten.mm.default(%x, %w)",
            "v aten.permute.default(%a, [1, 0])",
            "b aten.mul.Tensor(%a, %x)",
            "y aten.mm.default(%b, %v)",
        ),  # a view of it is read later
        ("a aten.mm.default(%x, %w)", "v aten.permute.default(%a, [1, 0])", "b aten.mul.Tensor(%a, %v)", "y aten.mm.default(%b, %w)"),  # by another view of itself
        ("a aten.mm.default(%x, %w)", "b aten.mul.Tensor(%a, %a)", "y aten.mm.default(%b, %w)"),
        ("a sennit.take(%x)", "b aten.mul.Tensor(%a, %x)", "y aten.mm.default(%b, %w)"),  # may be x itself
        ("y aten.mm.default(%x, %w)", "b aten.mul.Tensor(%y, %x)", "c aten.mm.default(%b, %w)"),  # returned
    ],
)  # fmt: skip
def test_nothing_is_overwritten_that_somebody_needs(steps: tuple[str, ...]) -> None:
    assert not writes(*steps)


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
def test_a_step_in_place_equals_eager(mesh: str) -> None:
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(4, 4, 8, dtype=torch.float64)
    program = lower(propagate(data_parallel(capture(model, (x,), name="twice"), Mesh.parse(mesh))))
    source = emit_lane(program, program.lanes[0])
    assert "aten.add_.Tensor" in source
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
