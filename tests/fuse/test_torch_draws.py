"""Draws of a captured step that become torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sennit.capture.trace import capture
from sennit.fuse.draws_torch import keep_mask, with_torch_draws
from sennit.ir.dtype import DType


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.head(x), 0.3).float().sum()


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, DType.BF16), (torch.float32, DType.F32)])
def test_a_mask_is_drawn_for_elements_of_the_type_that_is_dropped(dtype: torch.dtype, expected: DType) -> None:
    """On a GPU which elements are kept depends on their type."""
    graph = capture(Dropped().to(dtype), (torch.ones(4, 8, dtype=dtype),))
    drawn = with_torch_draws(graph, torch.device("cuda"))
    assert [op.args for op in drawn.ops if op.kind == "sennit.keep_mask"] == [((4, 3), 0.3, expected)]


class Chosen(Dropped):
    def forward(self, x: Tensor) -> Tensor:
        made = self.head(x)
        return torch.where(torch.rand_like(made) >= 0.3, made, -made).sum()


def test_a_draw_that_nothing_is_multiplied_by_is_no_dropout() -> None:
    drawn = with_torch_draws(capture(Chosen(), (torch.ones(4, 8),)), torch.device("cpu"))
    assert [op.kind for op in drawn.ops if op.kind.startswith("sennit.")] == ["sennit.rand"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_mask_is_what_dropout_keeps(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    for shape in ((4, 3), (7, 64), (128, 256)):
        torch.manual_seed(3)
        expected = functional.dropout(torch.ones(shape, dtype=dtype, device=device), 0.3) != 0
        torch.manual_seed(3)
        assert torch.equal(keep_mask(shape, 0.3, dtype, device=torch.device(device)), expected)
