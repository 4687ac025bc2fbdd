"""A captured graph as eager torch would run it on a device: with torch's own random numbers (`draws_torch.py`), and
attention as one kernel (`kernels/graph_attention.py`).

Whoever runs a step on its ranks, measures its operators or searches a strategy for it begins with this graph, so that
the operators of all three go by the same names.
"""

from __future__ import annotations

import torch

from sennit.fuse.draws_torch import with_torch_draws
from sennit.ir.graph import Graph
from sennit.kernels.graph_attention import with_fused_attention

__all__ = ["eager_graph"]


def eager_graph(graph: Graph, device: torch.device, *, fused_attention: bool = True) -> Graph:
    drawn = with_torch_draws(graph, device)
    return with_fused_attention(drawn, device.type) if fused_attention else drawn
