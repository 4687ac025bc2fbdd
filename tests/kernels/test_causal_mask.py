"""Masks that are causal by their values are found, however they are written; no other mask is."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import capture, capture_call
from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Phase, Ref
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Compute, Lane, Program
from sennit.ir.program_check import check_program
from sennit.kernels import fuse_attention
from sennit.kernels.causal_mask import is_causal_mask
from sennit.kernels.lane_code import LaneCode
from sennit.plan import data_parallel, lower, pipeline, propagate
from sennit.run.threads import run_in_process
from sennit.testing.families_torch import transformers_module

TOKENS = 7
LEAST = torch.finfo(torch.float32).min

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install sennit[hf]"
)


def kernels(program: Program) -> list[Compute]:
    steps = [step for lane in program.lanes for step in lane.steps if isinstance(step, Compute)]
    return [step for step in steps if "scaled_dot_product" in step.kind]


def is_causal(step: Compute) -> bool:
    """The argument `is_causal` of each kernel's operator."""
    name = step.kind.split(".")[1]
    place = {
        "_scaled_dot_product_flash_attention_for_cpu": 4,
        "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
        "_scaled_dot_product_cudnn_attention": 6,
        "_scaled_dot_product_cudnn_attention_backward": 14,
        "_scaled_dot_product_efficient_attention": 6,
        "_scaled_dot_product_efficient_attention_backward": 11,
    }
    found = step.args[place[name]]
    assert isinstance(found, bool)
    return found


# ---- a library's GPT-2 -----------------------------------------------------------------------------------------------


def gpt2(dtype: torch.dtype) -> tuple[Any, Tensor]:
    library = transformers_module()
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 64}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = library.GPT2Config(use_cache=False, **sizes, **tokens, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    torch.manual_seed(0)
    return library.GPT2LMHeadModel(config).to(dtype).train(), torch.randint(0, 64, (8, 16))


PLANS: dict[str, Callable[[Any], Any]] = {
    "replicas": lambda graph: data_parallel(graph, Mesh.parse("dp=2")),
    "micro-batches": lambda graph: data_parallel(graph, Mesh.parse("dp=2;mb=2")),
    "stages": lambda graph: pipeline(graph, Mesh.parse("pp=2;mb=2"), layers=("transformer.h.0", "transformer.h.1")),
}


@needs_transformers
@pytest.mark.parametrize("plan", PLANS)
def test_the_library_s_gpt2_is_causal(plan: str) -> None:
    """It asks where packed sequences begin, for each sample of the batch; and sends the mask to the second stage."""
    model, ids = gpt2(torch.bfloat16)
    program = lower(propagate(PLANS[plan](capture_call(model, (), {"input_ids": ids, "labels": ids}).graph)))
    for device_type, name in (("cuda", "cudnn_attention"), ("cpu", "flash_attention_for_cpu")):
        fused = fuse_attention(program, device_type)
        check_program(fused)
        found = kernels(fused)
        assert len(found) == 4 * (1 if plan == "replicas" else 2)
        assert all(name in step.kind and is_causal(step) for step in found)


@needs_transformers
@pytest.mark.parametrize("plan", PLANS)
def test_the_library_s_gpt2_computes_the_same(plan: str) -> None:
    model, ids = gpt2(torch.float64)  # its loss is in f32
    program = lower(propagate(PLANS[plan](capture_call(model, (), {"input_ids": ids, "labels": ids}).graph)))
    fused = fuse_attention(program, "cpu")
    assert all(is_causal(step) for step in kernels(fused))
    state = {path: item.detach() for path, item in model.named_parameters(remove_duplicate=False)}
    state |= {"input_ids": ids, "labels": ids, "tangent.loss": torch.ones(())}
    written, found = run_in_process(program, state), run_in_process(fused, state)
    model(input_ids=ids, labels=ids).loss.backward()
    eager = {path: item.grad for path, item in model.named_parameters()}
    assert eager.keys() <= found.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, written[key], rtol=1e-5, atol=1e-7)
    for key, value in eager.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)


# ---- masks written by hand -------------------------------------------------------------------------------------------


def rows() -> Tensor:
    return torch.arange(TOKENS)[:, None]


def columns() -> Tensor:
    return torch.arange(TOKENS)[None, :]


def additive(allowed: Tensor, least: float = -torch.inf) -> Tensor:
    return torch.where(allowed, 0.0, least)


CAUSAL: dict[str, Callable[[Tensor], Tensor]] = {
    "keys not after the query": lambda x: columns() <= rows(),
    "not keys after the query": lambda x: ~(columns() > rows()),
    "each sample": lambda x: (columns() <= rows()).expand(x.shape[0], 1, TOKENS, TOKENS),
    "a window as wide as the sequence": lambda x: (columns() <= rows()) & (rows() - columns() < TOKENS),
    "a number in place of -inf": lambda x: additive(columns() <= rows(), LEAST),
    "shifted twice": lambda x: columns() + 1 < rows() + 2,
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a band": lambda x: (columns() <= rows()) & (rows() - columns() < 3),
    "one key more": lambda x: columns() <= rows() + 1,
    "one key less": lambda x: columns() < rows(),
    "the other way": lambda x: columns() >= rows(),
    "all": lambda x: columns() <= rows() + TOKENS,
    "with padding of the input": lambda x: (columns() <= rows()) & (x[:, None, None, :, 0] > 0),
    "values swapped": lambda x: torch.where(columns() <= rows(), -torch.inf, 0.0),
    "not far below zero": lambda x: additive(columns() <= rows(), -1e4),
    "not zero": lambda x: torch.where(columns() <= rows(), 1.0, -torch.inf),
    "two samples packed in a row": lambda x: (columns() <= rows()) & ((columns() < 4) == (rows() < 4)),
    "one sample differs": lambda x: columns() <= rows() + (torch.arange(x.shape[0]) // 3)[:, None, None, None],
}


class Attend(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask, self.q = mask, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, self.mask(x)).square().mean()


def kernels_with(mask: Callable[[Tensor], Tensor], device_type: str) -> list[Compute]:
    graph = capture(Attend(mask), (torch.randn(4, TOKENS, 8),), name="attend")
    return kernels(fuse_attention(lower(propagate(data_parallel(graph, Mesh.parse("dp=2")))), device_type))


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_are_found(name: str) -> None:
    found = kernels_with(CAUSAL[name], "cpu")
    assert len(found) == 2
    assert all(is_causal(step) and not dict(step.kwargs)["attn_mask"] for step in found)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_not(name: str) -> None:
    assert not any(is_causal(step) for step in kernels_with(OTHERS[name], "cuda"))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(-2, 2), st.sampled_from(("le", "lt", "ge", "gt", "eq", "ne")))
def test_a_comparison_is_causal_where_its_values_are(queries: int, keys: int, shift: int, compare: str) -> None:
    """Of all comparisons of positions, those that torch evaluates to the causal mask."""
    offsets = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    wanted = torch.equal(getattr(torch, compare)(offsets, shift), offsets <= 0)
    code = comparison(queries, keys, shift, compare)
    assert is_causal_mask(code, "mask", queries, keys) == wanted
    assert not is_causal_mask(code, "mask", queries, keys + 1)


def test_blocks_of_rows_are_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sennit.kernels.causal_mask.BLOCK", 12)
    assert is_causal_mask(comparison(9, 5, 0, "le"), "mask", 9, 5)
    assert not is_causal_mask(comparison(9, 5, 1, "le"), "mask", 9, 5)


def comparison(queries: int, keys: int, shift: int, compare: str) -> LaneCode:
    """where(j - i compared with a number, 0, -inf), on one device."""
    mesh = Mesh.parse("dp=1")
    steps: list[Compute] = []

    def step(name: str, kind: str, args: tuple[Arg, ...], dtype: DType, *shape: int) -> Ref:
        buffer = Buffer(name, name, dtype, Layout.make(mesh, shape))
        steps.append(Compute(f"aten.{kind}", args, (), (buffer,), Phase.FORWARD))
        return Ref(name)

    i = step("i", "unsqueeze.default", (step("a", "arange.default", (queries,), DType.I64, queries), -1), DType.I64, queries, 1)  # fmt: skip
    j = step("j", "unsqueeze.default", (step("b", "arange.default", (keys,), DType.I64, keys), 0), DType.I64, 1, keys)
    offsets = step("offsets", "sub.Tensor", (j, i), DType.I64, queries, keys)
    allowed = step("allowed", f"{compare}.Scalar", (offsets, shift), DType.BOOL, queries, keys)
    zero = step("zero", "scalar_tensor.default", (0.0,), DType.F32)
    never = step("never", "scalar_tensor.default", (-math.inf,), DType.F32)
    step("mask", "where.self", (allowed, zero, never), DType.F32, queries, keys)
    return LaneCode(Lane("only", mesh.devices, (), tuple(steps), ()))
