from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sennit.capture import capture
from sennit.cluster import load
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.dtype import DType
from sennit.ir.graph import OutputKind, Phase, Ref, Role
from sennit.ir.mesh import Mesh
from sennit.ir.program import Compute, Program
from sennit.ir.program_check import check_program
from sennit.plan import data_parallel, lower, pipeline, propagate, tensor_parallel
from sennit.plan.recompute import recompute
from sennit.sim import fuse_attention, simulate

TOKENS, WIDTH, HEADS = 40, 32, 4


class Attention(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = x + self.proj(self.attend(q, k, v).transpose(-2, -3).flatten(-2))
        return out


class Model(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(attend) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def everywhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


class Biased(nn.Module):
    """A trained mask, the same in all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1.0, 1.0, HEADS * TOKENS * TOKENS).view(1, HEADS, TOKENS, TOKENS))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)


def model_of(attend: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Model(attend).to(dtype), torch.randn(4, TOKENS, WIDTH, dtype=dtype)


@cache
def program_of(attend: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Program:
    model, x = model_of(attend, dtype)
    return lower(propagate(data_parallel(capture(model, (x,), name="attention"), Mesh.parse("dp=1"))))


def kernels(program: Program) -> list[Compute]:
    steps = [step for lane in program.lanes for step in lane.steps if isinstance(step, Compute)]
    return [step for step in steps if "scaled_dot_product" in step.kind]


# ---- the oracle: both programs computed, with the kernels by their mathematics ---------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return torch.softmax(scores, -1) @ v


def computed(program: Program, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a program on one device, by path."""
    (lane,) = program.lanes
    values: dict[str, Tensor] = {}
    for item in lane.inputs:
        values[item.buffer.name] = torch.ones(()) if item.role is Role.TANGENT else known[item.path]

    def value(arg: Any) -> Any:
        match arg:
            case Ref(name=name):
                return values[name]
            case DType():
                return getattr(torch, arg.torch_name)
            case tuple():
                return [value(item) for item in arg]
            case _:
                return arg

    for step in lane.steps:
        if not isinstance(step, Compute):
            continue
        args = [value(arg) for arg in step.args]
        found: Any
        if step.kind.endswith("attention.default"):
            found = (attention(*args[:3], args[6], args[3]), None, None, None)
        elif step.kind.endswith("attention_backward.default"):
            q, k, v, bias = args[1:5]
            given = (q, k, v) if bias is None else (q, k, v, bias.expand(*q.shape[:-1], k.shape[-2]))
            _, found = torch.autograd.functional.vjp(
                lambda q, k, v, bias=None, causal=args[11]: attention(q, k, v, causal, bias), given, args[0]
            )
        elif step.kind in ("aten.alias.default", "aten.clone.default"):
            found = args[0].contiguous()  # a kernel has written the first so, programs mean the second so
        else:
            space, name, overload = step.kind.split(".")
            function = getattr(getattr(getattr(torch.ops, space), name), overload)
            found = function(*args, **{key: value(item) for key, item in step.kwargs})
        results = found if isinstance(found, (tuple, list)) else (found,)
        values |= {buffer.name: result for buffer, result in zip(step.results, results, strict=False)}
    return {f"{item.kind.value} {item.path}": values[item.name] for item in lane.outputs}


@pytest.mark.parametrize("attend", [causal, everywhere])
def test_a_fused_program_computes_the_same(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    program = program_of(attend)
    fused = fuse_attention(program)
    check_program(fused)
    assert [step.kind.split(".")[1] for step in kernels(fused)] == [
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
    ]
    model, x = model_of(attend, torch.float32)
    known = {**{path: item.detach() for path, item in model.named_parameters()}, "x": x}
    wanted, found = computed(program, known), computed(fused, known)
    assert wanted.keys() == found.keys()
    for path, tensor in wanted.items():
        torch.testing.assert_close(found[path], tensor, rtol=1e-4, atol=1e-6)


def test_a_trained_mask_gets_its_gradient() -> None:
    model, x = Model(Biased()), torch.randn(4, TOKENS, WIDTH)
    program = lower(propagate(data_parallel(capture(model, (x,), name="attention"), Mesh.parse("dp=1"))))
    fused = fuse_attention(program)
    check_program(fused)
    assert ["backward" in step.kind for step in kernels(fused)] == [False, False, True, True]
    assert [len(step.results) for step in kernels(fused)][2:] == [4, 4]
    assert all(isinstance(step.args[4 if "backward" in step.kind else 3], Ref) for step in kernels(fused))
    known = {**{path: item.detach() for path, item in model.named_parameters()}, "x": x}
    wanted, found = computed(program, known), computed(fused, known)
    for path, tensor in wanted.items():
        torch.testing.assert_close(found[path], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trained_mask", [False, True])
def test_attention_that_is_computed_again_is_found_again(trained_mask: bool) -> None:
    model, x = Model(Biased() if trained_mask else causal), torch.randn(4, TOKENS, WIDTH)
    plan = data_parallel(capture(model, (x,), name="attention"), Mesh.parse("dp=1"))
    for number in range(2):
        inside = plan.graph.select(f"blocks.{number}|blocks.{number}.*", phase=Phase.FORWARD)
        plan = recompute(plan, inside)
    program = lower(propagate(plan))
    fused = fuse_attention(program)
    check_program(fused)
    assert ["backward" in step.kind for step in kernels(fused)].count(False) == 4  # two, and two again
    size = 4 * HEADS * TOKENS * TOKENS
    stored = [
        step for step in fused.lanes[0].steps if isinstance(step, Compute) and step.kind == "aten._softmax.default"
    ]
    assert not stored
    left = [item for item in fused.lanes[0].buffers().values() if item.type.elements == size]
    assert bool(left) == trained_mask  # the gradient of the mask, before it is summed
    known = {**{path: item.detach() for path, item in model.named_parameters()}, "x": x}
    wanted, found = computed(program, known), computed(fused, known)
    for path, tensor in wanted.items():
        torch.testing.assert_close(found[path], tensor, rtol=1e-4, atol=1e-6)


def test_kernels_read_what_the_model_made_in_its_own_type() -> None:
    fused = fuse_attention(program_of(causal, torch.bfloat16))
    buffers = fused.lanes[0].buffers()
    for step in kernels(fused):
        assert "_scaled_dot_product_cudnn_attention" in step.kind
        named = [buffers[arg.name] for arg in step.args if isinstance(arg, Ref)]
        own = [item for item in named if item.name.rpartition(".")[2] not in ("logsumexp", "seed", "offset")]
        assert [item.dtype for item in own] == [DType.BF16] * (5 if "backward" in step.kind else 3)
        assert all(item.type.shape == (4, HEADS, TOKENS, WIDTH // HEADS) for item in (*named[:3], *step.results[:1]))


def test_no_scores_are_left() -> None:
    program = program_of(causal)
    size = 4 * HEADS * TOKENS * TOKENS
    assert any(item.type.elements == size for item in program.lanes[0].buffers().values())
    assert not any(item.type.elements == size for item in fuse_attention(program).lanes[0].buffers().values())


def test_attention_that_a_model_writes_by_hand_stays() -> None:
    program = program_of(by_hand)
    assert fuse_attention(program) == program


def test_split_heads_and_stages_are_found_too() -> None:
    config = GPTConfig(vocabulary=64, context=40, width=32, heads=4, layers=2)
    torch.manual_seed(0)
    graph = capture(GPT(config), random_batch(config, 4), name="GPT")
    plan = tensor_parallel(graph, Mesh.parse("dp=1,tp=2"), qkv="*.qkv", column="*.up", row="*.proj|*.down")
    assert len(kernels(fuse_attention(lower(propagate(plan))))) == 4
    stages = pipeline(graph, Mesh.parse("pp=2;mb=2"), layers=("blocks.0", "blocks.1"))
    assert len(kernels(fuse_attention(lower(propagate(stages))))) == 8  # of two blocks and two micro-batches


def test_it_takes_less_time_and_memory() -> None:
    program = program_of(causal, torch.bfloat16)
    plain, fused = (simulate(item, load("h200x8")) for item in (program, fuse_attention(program)))
    assert fused.span < plain.span
    assert fused.peak_memory(0) < plain.peak_memory(0)


def test_outputs_stay() -> None:
    program = program_of(causal)
    outputs = fuse_attention(program).lanes[0].outputs
    assert outputs == program.lanes[0].outputs
    assert sum(item.kind is OutputKind.GRADIENT for item in outputs) == 8
