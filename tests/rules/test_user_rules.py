"""Users' own operators: one decorator, certified like all others, forward and backward, in a real plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sennit
from sennit.capture import capture
from sennit.capture.rules import Letters, rule_of
from sennit.capture.rules.annotation import parse_annotation
from sennit.capture.rules.certify import Certifier
from sennit.errors import ParseError, PlanError
from sennit.ir.graph import Phase
from sennit.ir.layout import Reduction
from sennit.ir.mesh import Mesh
from sennit.plan import Plan, data_inputs, lower, propagate, transform
from sennit.plan.verify import verify
from sennit.run import run_in_process


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """A gated product y = x w * sigmoid(g), with its derivative as a second operator."""

    @sennit.rule("sennit_test::gated", "... k+, k+ n, n -> ... n")
    @torch.library.custom_op("sennit_test::gated", mutates_args=())
    def gated(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return x @ w * torch.sigmoid(g)

    @gated.register_fake
    def _(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], w.shape[1]))

    @sennit.rule("sennit_test::gated_backward", "... n+, ... k, k n+, n -> ... k")
    @torch.library.custom_op("sennit_test::gated_backward", mutates_args=())
    def gated_backward(grad: Tensor, x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return grad * torch.sigmoid(g) @ w.T

    @gated_backward.register_fake
    def _(grad: Tensor, x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return torch.empty_like(x)

    def setup(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, w, g = ctx.saved_tensors
        gate = torch.sigmoid(g)
        flat, rows = x.flatten(0, -2), (grad * gate).flatten(0, -2)
        slope = ((x @ w) * grad * gate * (1 - gate)).flatten(0, -2).sum(0)
        return torch.ops.sennit_test.gated_backward(grad, x, w, g), flat.T @ rows, slope

    gated.register_autograd(backward, setup_context=setup)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(16, 12))
        self.gate = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.sennit_test.gated(self.first(x).relu(), self.weight, self.gate).square().mean()


@pytest.mark.parametrize("letter", ["k", "n", "i0"])
def test_a_custom_operator_in_a_plan(letter: str) -> None:
    torch.manual_seed(0)
    model, x = Gated().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    graph = capture(model, (x,))
    mesh = Mesh.parse("dp=2,tp=2")
    plan = transform(Plan("mine", graph, mesh), data_inputs(graph), dim=0, axis="dp")
    if letter != "i0":
        plan = transform(
            plan, graph.select(kind="sennit_test.gated.default", phase=Phase.FORWARD), dim=letter, axis="tp"
        )
    program = lower(propagate(plan))
    certifier = Certifier()
    verify(program, graph, certifier=certifier)
    assert certifier.tried > 10
    state = {path: value.detach() for path, value in model.named_parameters()}
    tangents = {item.path: torch.ones((), dtype=torch.float64) for item in graph.inputs if item.role.value == "tangent"}
    outputs = run_in_process(program, {**state, "x": x, **tangents})
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(outputs["loss"], loss.detach(), rtol=1e-13, atol=1e-13)
    for path, value in model.named_parameters():
        torch.testing.assert_close(outputs[path], value.grad, rtol=1e-12, atol=1e-13)


def test_a_wrong_annotation_is_an_error_with_the_difference() -> None:
    @sennit.rule("sennit_test::shifted", "m n -> m n")  # wrong along n: values move from column to column
    @torch.library.custom_op("sennit_test::shifted", mutates_args=())
    def shifted(x: Tensor) -> Tensor:
        return x.roll(1, 1)

    @shifted.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    shifted.register_autograd(lambda ctx, grad: grad.roll(-1, 1))

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.sennit_test.shifted(x * self.weight).square().sum()

    graph = capture(Shift().double(), (torch.randn(4, 8, dtype=torch.float64),))
    op = graph.select(kind="sennit_test.shifted.default")
    right = transform(Plan("rows", graph, Mesh.parse("tp=2")), op, dim="m", axis="tp")
    verify(lower(propagate(right)), graph, certifier=Certifier())
    wrong = transform(Plan("columns", graph, Mesh.parse("tp=2")), op, dim="n", axis="tp")
    program = lower(propagate(wrong))
    with pytest.raises(PlanError) as caught:
        verify(program, graph, certifier=Certifier())
    message = str(caught.value)
    assert (
        "the rule of sennit_test.shifted.default is wrong: split on 'n', its pieces differ from the whole by" in message
    )
    assert "fix: correct the annotation in sennit.rule" in message


def test_annotations_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match=r"names 1 tensors that are read, and sennit_test::gated reads 3: x, w, g"):
        sennit.rule("sennit_test::gated", "m -> m")
    sennit.rule("sennit_test::gated", "... k+, k+ n, n -> ... n")
    with pytest.raises(PlanError, match=r"'gated' is no operator's name[\s\S]*'mylib::op'"):
        sennit.rule("gated", "m -> m")
    graph = capture(Gated().double(), (torch.randn(4, 6, 8, dtype=torch.float64),))
    (op,) = graph.select(kind="sennit_test.gated.default")
    sennit.rule("sennit_test::gated", "m k+, k+ n, n -> m n")  # the model calls it with three dims
    with pytest.raises(
        PlanError, match=r"does not fit sennit_test.gated.default: a tensor of shape \[4, 6, 16\] has 3 dims"
    ):
        rule_of(op, graph.types())
    sennit.rule("sennit_test::gated", "... k+, k+ n, n -> ... n")
    assert isinstance(rule_of(op, graph.types()), Letters)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n -> m n", r"letter 'k' is read and not returned[\s\S]*write k\+ if its pieces are summed"),
        ("m n+ -> m n", r"letter 'n' is reduced, and every result has it"),
        ("m -> m n", r"letter 'n' is returned and never read[\s\S]*use _"),
        ("m m -> m", r"letter 'm' occurs twice in one tensor"),
        ("m k+, k:max -> m", r"letter 'k' has two reductions"),
        ("m n", r"it has 0 arrows"),
        ("m k* -> m", r"'k\*' is no dim"),
    ],
)
def test_annotations_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse_annotation(text)


def test_the_grammar() -> None:
    letters = parse_annotation("... d, d -> ... d").letters([(2, 3, 4), (4,)], [(2, 3, 4)])
    assert letters.reads == (("i0", "i1", "d"), ("d",))
    letters = parse_annotation("m n:max, -> m").letters([(2, 3), ()], [(2,)])
    assert (letters.reads, letters.summed) == ((("m", "n"), ()), (("n", Reduction.MAX),))
    assert parse_annotation("... _, _ -> ... _").letters([(2, 3), (3,)], [(2, 3)]).letters == ("i0",)
    assert parse_annotation(" -> m".replace("m", "_")).letters([], [(3,)]).results == ((None,),)
