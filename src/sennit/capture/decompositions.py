"""What torch takes apart while it traces, before anything is planned.

An operator is taken apart where its parts have rules and it has none (or a worse one), or where a part must be a tensor of
its own: the loss, so that its count of targets can be had before the first micro-batch. Everything else stays whole: one kernel
is faster than its parts, and what a plan needs in parts only where it splits it is rewritten later, by the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["decompositions"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that `torch_private.joint_graph` traces with: an operator to the function that is traced in its place."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    wanted: list[Any] = [aten.nll_loss_forward, aten.nll_loss_backward, aten._safe_softmax, aten.tril, aten.triu]
    wanted += [aten.split.Tensor, aten.t, aten.transpose.int]
    return dict(get_decompositions(wanted))
