"""The written form and the kernel form of one program compute the same; and so does eager torch, bit for bit where it
runs the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import Phase as Part
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import capture
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.graph import Phase
from sennit.ir.mesh import Mesh
from sennit.ir.program import Compute, Program
from sennit.ir.program_check import check_program
from sennit.kernels import fuse_attention
from sennit.kernels.attention_calls_torch import CudaAttention
from sennit.plan import data_parallel, lower, pipeline, propagate, tensor_parallel
from sennit.plan.recompute import recompute
from sennit.plan.zoo import zero
from sennit.run.threads import run_in_process

MASKS = ("none", "causal", "keys", "rows", "heads", "band", "by position", "trained", "of three dims")


@dataclass(frozen=True)
class Case:
    heads: int
    shared: int  # heads of the query that one head of key and value serves
    queries: int
    keys: int
    width: int
    mask: str
    scale: float | None
    half: bool
    again: bool  # computed again in the backward pass
    mesh: str

    @property
    def is_fused(self) -> bool:
        return self.mask not in ("trained", "of three dims")


class Cross(nn.Module):
    """Attention of one sequence to another, with all that the call can be given."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, inner = case, case.heads * case.width
        self.q, self.out = nn.Linear(12, inner), nn.Linear(inner, 12)
        self.k, self.v = nn.Linear(12, inner // case.shared), nn.Linear(12, inner // case.shared)
        self.bias = nn.Parameter(torch.linspace(-1, 1, case.queries * case.keys).view(case.queries, case.keys))

    def mask(self, x: Tensor, y: Tensor) -> Tensor | None:
        case = self.case
        match case.mask:
            case "keys":
                return y[:, None, None, :, 0] > -0.5
            case "rows":  # some rows see no key
                return (x[:, None, :, :1] > 0) & (y[:, None, None, :, 0] > -1)
            case "heads":
                return torch.arange(case.heads, dtype=x.dtype)[None, :, None, None] * y[:, None, None, :, 1]
            case "band":
                near = torch.arange(case.queries)[:, None] - torch.arange(case.keys)[None, :]
                return (near >= 0) & (near < 3)
            case "by position":
                return -torch.arange(case.keys, dtype=x.dtype)[None, :] * 0.1
            case "trained":
                return self.bias
            case "of three dims":
                return torch.arange(case.heads, dtype=x.dtype)[:, None, None] * y[0, None, None, :, 1]
            case _:
                return None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            layer(item).unflatten(-1, (-1, self.case.width)).transpose(1, 2)
            for layer, item in ((self.q, x), (self.k, y), (self.v, y))
        )
        made = F.scaled_dot_product_attention(
            q, k, v, self.mask(x, y), is_causal=self.case.mask == "causal", scale=self.case.scale, enable_gqa=self.case.shared > 1
        )  # fmt: skip
        # a weight of its own for each element, so that gradients of all of them differ
        out = self.out(made.transpose(1, 2).flatten(2))
        return (out * torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype).view(out.shape[1:])).square().mean()


cases = st.builds(
    Case,
    heads=st.sampled_from((2, 4)),
    shared=st.sampled_from((1, 1, 2)),
    queries=st.integers(3, 9),
    keys=st.integers(3, 9),
    width=st.sampled_from((3, 4, 8)),
    mask=st.sampled_from(MASKS),
    scale=st.sampled_from((None, 0.125, 0.3, 1.0)),
    half=st.sampled_from((False, False, False, True)),
    again=st.booleans(),
    mesh=st.sampled_from(("dp=1", "dp=2", "dp=1;mb=2", "dp=2;mb=2")),
)


def kinds(program: Program) -> list[str]:
    steps = [step for lane in program.lanes for step in lane.steps if isinstance(step, Compute)]
    return [step.kind.split(".")[1] for step in steps if "scaled_dot_product" in step.kind]


def scores_sized(program: Program, elements: int) -> int:
    steps = [step for lane in program.lanes for step in lane.steps if isinstance(step, Compute)]
    return sum(step.kind == "aten._softmax.default" and step.results[0].type.elements == elements for step in steps)


# a capture takes a second: a failing case is small as it is, and is not made smaller
@settings(derandomize=True, deadline=None, max_examples=12, phases=(Part.explicit, Part.generate))
@given(case=cases)
def test_the_kernel_computes_what_was_written(case: Case) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case.half else torch.float64
    model = Cross(case).to(dtype)
    x, y = torch.randn(4, case.queries, 12, dtype=dtype), torch.randn(4, case.keys, 12, dtype=dtype)
    plan = data_parallel(capture(model, (x, y), name="cross"), Mesh.parse(case.mesh))
    if case.again:
        plan = recompute(plan, plan.graph.select("*", phase=Phase.FORWARD))
    program = lower(propagate(plan))
    fused = fuse_attention(program, "cpu")
    check_program(fused)
    # the first of two forward passes needs no gradient of the mask
    assert bool(kinds(fused)) == (case.is_fused or (case.mask == "trained" and case.again))
    assert case.is_fused != bool(scores_sized(fused, 4 * case.heads * case.queries * case.keys))
    state = {
        **{path: item.detach() for path, item in model.named_parameters()},
        "x": x,
        "y": y,
        "tangent": torch.ones((), dtype=dtype),
    }
    written, found = run_in_process(program, state), run_in_process(fused, state)
    loss = model(x, y)
    loss.backward()
    eager = {"loss": loss.detach(), **{path: item.grad for path, item in model.named_parameters()}}
    tolerance = {"rtol": 0.05, "atol": 0.02} if case.half else {"rtol": 1e-12, "atol": 1e-14}
    for key, value in found.items():
        torch.testing.assert_close(value, written[key], **tolerance)
        torch.testing.assert_close(value, eager[key].to(value.dtype), **tolerance)


@pytest.mark.parametrize("split", ["batch", "heads"])
def test_pieces_of_batch_and_heads_have_the_bits_of_the_whole(split: str) -> None:
    """The kernel computes each sample and head by itself, so a split changes nothing."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    torch.manual_seed(0)
    q, k, v, g = torch.randn(4, 2, 4, 70, 16)
    part = (slice(1, 2), slice(None)) if split == "batch" else (slice(None), slice(1, 3))
    out, kept = attend(q, k, v, 0.0, True)
    made = differentiate(g, q, k, v, out, kept, 0.0, True)
    of_part, kept_part = attend(q[part], k[part], v[part], 0.0, True)
    made_part = differentiate(g[part], q[part], k[part], v[part], of_part, kept_part, 0.0, True)
    for whole, piece in zip((out, *made), (of_part, *made_part), strict=True):
        assert torch.equal(whole[part], piece)


CONFIG = GPTConfig(vocabulary=64, context=24, width=32, heads=4, layers=2)


@pytest.fixture(scope="module")
def gpt() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return GPT(CONFIG).double(), random_batch(CONFIG, 8)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "zero bubble", "zero 3", "recompute"])
def test_plans_of_a_gpt_equal_eager(name: str, gpt: tuple[nn.Module, tuple[Tensor, Tensor]]) -> None:
    model, batch = gpt
    graph = capture(model, batch, name="GPT")
    layers = ("blocks.0", "blocks.1")
    match name:
        case "tensor":
            plan = tensor_parallel(graph, Mesh.parse("dp=1,tp=2"), qkv="*.qkv", column="*.up", row="*.proj|*.down")
        case "pipeline":
            plan = pipeline(graph, Mesh.parse("pp=2;mb=4"), layers=layers)
        case "zero bubble":
            plan = pipeline(graph, Mesh.parse("pp=2;mb=4"), layers=layers, schedule="zero bubble H1")
        case "zero 3":
            plan = zero(graph, Mesh.parse("dp=2"), level=3)
        case _:
            plan = data_parallel(graph, Mesh.parse("dp=2"))
            plan = recompute(plan, plan.graph.select("blocks.0|blocks.0.*", phase=Phase.FORWARD))
    fused = fuse_attention(lower(propagate(plan)), "cpu")
    check_program(fused)
    assert not scores_sized(fused, 8 * 4 * 24 * 24)
    assert sum("backward" in kind for kind in kinds(fused)) == 2 * (4 if "mb" in str(plan.mesh) else 1)
    state = {path: item.detach() for path, item in model.named_parameters(remove_duplicate=False)}
    found = run_in_process(
        fused, {**state, "tokens": batch[0], "targets": batch[1], "tangent": torch.ones((), dtype=torch.float64)}
    )
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-12, atol=0)
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[path], parameter.grad, rtol=1e-12, atol=1e-15)


def test_heads_that_serve_several_are_not_repeated() -> None:
    case = Case(4, 2, 6, 6, 4, "causal", None, False, False, "dp=1")
    x = torch.randn(4, 6, 12)
    program = lower(propagate(data_parallel(capture(Cross(case), (x, x), name="cross"), Mesh.parse("dp=1"))))
    fused = fuse_attention(program, "cpu")
    kernels = [s for s in fused.lanes[0].steps if isinstance(s, Compute) and "scaled_dot_product" in s.kind]
    buffers = fused.lanes[0].buffers()
    assert [buffers[arg.name].type.shape for arg in kernels[0].args[:3]] == [(4, 4, 6, 4), (4, 2, 6, 4), (4, 2, 6, 4)]
    assert [item.type.shape for item in kernels[1].results] == [(4, 4, 6, 4), (4, 2, 6, 4), (4, 2, 6, 4)]
    assert not any(len(item.type.shape) == 5 for item in buffers.values())


@pytest.mark.parametrize("lead", [(2,), (2, 3)])
def test_calls_of_the_cuda_kernels_have_the_shapes_of_their_operators(lead: tuple[int, ...]) -> None:
    """On meta tensors: no GPU is needed, and no value is computed."""
    attention = CudaAttention()
    q, k = torch.empty(*lead, 4, 10, 16, device="meta"), torch.empty(*lead, 4, 7, 16, device="meta")
    for mask in (None, torch.empty(4, 10, 7, device="meta"), torch.empty(10, 1, device="meta")):
        out, *kept = attention.efficient_attention(q, k, k, mask, True, 0.0, False, scale=0.25)
        wanted = [True, True, True, mask is not None]
        made = attention.efficient_attention_backward(out, q, k, k, mask, out, *kept, 0.0, wanted, False, scale=0.25)
        assert [item.shape for item in made][:3] == [q.shape, k.shape, k.shape]
        assert [item.shape for item in made][3:] == ([(*lead, 4, 10, 7)] if mask is not None else [])
    q, k = q.bfloat16(), k.bfloat16()
    out, *kept = attention.cudnn_attention(q, k, k, None, True, 0.0, True, scale=0.25)
    made = attention.cudnn_attention_backward(
        out, q, k, k, out, *kept, None, None, None, None, None, 0.0, True, scale=0.25
    )
    assert [item.shape for item in (out, *made)] == [q.shape, q.shape, k.shape, k.shape]
