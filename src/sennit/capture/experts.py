"""Experts as one batched product: the form of a mixture of experts that can be split by experts, with static shapes.

With tokens x[t], experts e, and weights p[t, e] that are zero but for the chosen ones:

    y[t] = sum over e of p[t, e] * f(x[t]; e)        f: up, gate, down

All tokens go through all experts of a device, and p drops what was not chosen: with E experts on d devices, k of them chosen, that is E / (d k)
times the products that are needed. No token is dropped, no shape depends on data. Kernels that sort tokens by expert do less work
on one device; capture refuses them, because how many tokens an expert gets is a branch on data.

`experts_as_batch` is an implementation for Hugging Face models, which let one be registered:

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    ALL_EXPERTS_FUNCTIONS.register("batch", sennit.capture.experts_as_batch)
    config._experts_implementation = "batch"
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["experts_as_batch"]


def experts_as_batch(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Tokens [t, width], the experts chosen for each [t, k] and their weights [t, k] to tokens [t, width]."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = _linear(module, name, hidden_states.expand(module.num_experts, -1, -1))
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    outputs = _linear(module, "down_proj", hidden)  # [e, t, width]
    chosen = top_k_index[..., None] == torch.arange(module.num_experts, device=top_k_index.device)  # [t, k, e]
    weights = torch.where(chosen, top_k_weights[..., None], 0).sum(1)  # [t, e]
    return (outputs * weights.T[..., None]).sum(0).to(hidden_states.dtype)


def _linear(module: Any, name: str, x: Tensor) -> Tensor:
    weight = getattr(module, name)
    result = torch.bmm(x, weight if module.is_transposed else weight.transpose(1, 2))
    return result + getattr(module, f"{name}_bias")[:, None] if module.has_bias else result
