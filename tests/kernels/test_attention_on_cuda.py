"""The attention kernels of CUDA on a GPU: against torch's own call with its gradients, and a whole program against
eager.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sennit.capture import capture
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.mesh import Mesh
from sennit.ir.program import Compute
from sennit.kernels import fuse_attention
from sennit.kernels.attention_calls_torch import CudaAttention
from sennit.plan import data_parallel, lower, propagate
from sennit.run.threads import run_in_process

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MASKS = ("none", "causal", "whole", "heads", "row")
KEYS = 37  # no multiple of what the kernels want of rows


def mask_of(name: str, lead: tuple[int, ...], queries: int) -> Tensor | None:
    match name:
        case "whole":
            return torch.randn(*lead, 4, queries, KEYS, device="cuda")
        case "heads":
            return torch.randn(4, queries, KEYS, device="cuda")
        case "row":
            return torch.randn(queries, 1, device="cuda")
        case _:
            return None


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lead", [(2,), (2, 3)])
def test_the_efficient_kernel_has_the_gradients_of_attention(lead: tuple[int, ...], name: str) -> None:
    torch.manual_seed(0)
    queries = KEYS if name == "causal" else 40
    q = torch.randn(*lead, 4, queries, 16, device="cuda")
    k, v = torch.randn(2, *lead, 4, KEYS, 16, device="cuda")
    mask, causal, scale = mask_of(name, lead, queries), name == "causal", 0.3
    attention = CudaAttention()
    out, *kept = attention.efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)
    g = torch.randn_like(out)
    wanted = [True, True, True, mask is not None]
    made = attention.efficient_attention_backward(g, q, k, v, mask, out, *kept, 0.0, wanted, causal, scale=scale)
    whole = None if mask is None else mask.expand(*q.shape[:-1], KEYS).double().requires_grad_()
    given = [x.double().requires_grad_() for x in (q, k, v)]
    scores = given[0] @ given[1].transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(queries, KEYS, device="cuda").triu(1).bool(), float("-inf"))
    if whole is not None:
        scores = scores + whole
    expected = scores.softmax(-1) @ given[2]
    expected.backward(g.double())
    wants = [expected.detach(), *(x.grad for x in given), *([] if whole is None else [whole.grad])]
    for found, want in zip((out, *made), wants, strict=True):
        assert want is not None
        torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=5e-3)  # products in tf32 pass


@pytest.mark.parametrize("causal", [False, True])
def test_the_narrow_kernel_has_the_gradients_of_attention(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
    attention = CudaAttention()
    out, *kept = attention.cudnn_attention(q, k, v, None, True, 0.0, causal, scale=0.2)
    g = torch.randn_like(out)
    made = attention.cudnn_attention_backward(
        g, q, k, v, out, *kept, None, None, None, None, None, 0.0, causal, scale=0.2
    )
    given = [x.float().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*given, is_causal=causal, scale=0.2)
    expected.backward(g.float())
    for found, want in zip((out, *made), (expected.detach(), *(x.grad for x in given)), strict=True):
        assert want is not None
        torch.testing.assert_close(found.float(), want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpt_on_a_gpu_equals_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=64, context=64, width=64, heads=4, layers=2)
    model: nn.Module = GPT(config).to("cuda", dtype)
    batch = tuple(item.cuda() for item in random_batch(config, 4))
    program = lower(propagate(data_parallel(capture(model, batch, name="GPT"), Mesh.parse("dp=2"))))
    fused = fuse_attention(program, "cuda")
    kernels = {s.kind for lane in fused.lanes for s in lane.steps if isinstance(s, Compute) and "dot_product" in s.kind}
    assert len(kernels) == 2  # forward and backward
    state = {path: item.detach() for path, item in model.named_parameters(remove_duplicate=False)}
    state |= {"tokens": batch[0], "targets": batch[1], "tangent": torch.ones((), dtype=dtype, device="cuda")}
    found = run_in_process(fused, state)
    loss = model(*batch)
    loss.backward()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(found["loss"].to(dtype), loss.detach(), **tolerance)
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[path].to(dtype), parameter.grad, **tolerance)
