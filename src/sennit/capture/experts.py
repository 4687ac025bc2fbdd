"""Experts as one batched product: the form of a mixture of experts that can be split by experts, with static shapes.

With tokens x[t], experts e, and weights p[t, e] that are zero but for the chosen ones:

    y[t] = sum over e of p[t, e] * f(x[t]; e)        f: up, gate, down

All tokens go through all experts of a device, and p drops what was not chosen: with E experts on d devices, k of them
chosen, that is E / (d k) times the products that are needed. No token is dropped, no shape depends on data. Kernels
that sort tokens by expert do less work on one device; capture refuses them, because how many tokens an expert gets is a
branch on data.

**With a capacity.** `experts_by_capacity(groups=G, factor=f)` is the other form with static shapes (GShard, arXiv
2006.16668). The tokens lie in G groups of T; of each group an expert takes at most C = min(T, ceil(f k T / E)) tokens,
those that come first, each into a slot of its own:

    d[g, t, e, c] = 1 where token t of group g is the c-th that chose expert e        c < C
    z[e, g, c]    = sum over t of d[g, t, e, c] x[g, t]                                dispatch
    y[g, t]       = sum over e, c of d[g, t, e, c] p[g, t, e] f(z[e, g, c]; e)         combine

The products of experts are on f k tokens for each token, not on E. Where groups lie on devices and experts too, z goes
from one to the other by an all-to-all of the dispatched tokens, and the results come back by another. A token that
finds no slot is dropped by that expert, as in the paper; with f >= E / k none is. This is a property of the model, not
of the plan: the unsplit model drops the same ones.

Both are implementations for Hugging Face models, which let one be registered:

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    ALL_EXPERTS_FUNCTIONS.register("batch", sennit.capture.experts_as_batch)
    config._experts_implementation = "batch"
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from sennit.errors import CaptureError

__all__ = ["experts_as_batch", "experts_by_capacity"]

Experts = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def experts_as_batch(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Tokens [t, width], the experts chosen for each [t, k] and their weights [t, k] to tokens [t, width]."""
    outputs = _through(module, hidden_states.expand(module.num_experts, -1, -1))  # [e, t, width]
    chosen = top_k_index[..., None] == torch.arange(module.num_experts, device=top_k_index.device)  # [t, k, e]
    weights = torch.where(chosen, top_k_weights[..., None], 0).sum(1)  # [t, e]
    return (outputs * weights.T[..., None]).sum(0).to(hidden_states.dtype)


def experts_by_capacity(*, groups: int, factor: float) -> Experts:
    """The same with at most `factor` times the mean number of tokens for each expert, of each of `groups` equal groups
    of tokens (the samples of a batch, or parts of them).
    """
    if groups < 1 or factor <= 0:
        raise CaptureError(
            f"{groups} groups of tokens, a capacity factor of {factor}",
            fix="use at least one group, and a factor above 0",
        )

    def routed(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, width = hidden_states.shape
        each, experts, chosen = tokens // groups, module.num_experts, top_k_index.shape[-1]
        if tokens % groups:
            raise CaptureError(
                f"{tokens} tokens in {groups} groups",
                fix="use the number of samples, or a number that divides samples times positions",
            )
        slots = min(each, ceil(factor * chosen * each / experts))
        weights = _slots(top_k_index.view(groups, each * chosen), experts, slots)  # [g, t k, e, c]
        weights = weights.to(hidden_states.dtype).view(groups, each, chosen, experts * slots)
        combine = (weights * top_k_weights.view(groups, each, chosen, 1)).sum(2)  # [g, t, e c]
        sent = torch.bmm(weights.sum(2).transpose(1, 2), hidden_states.view(groups, each, width))  # [g, e c, width]
        sent = sent.view(groups, experts, slots, width).transpose(0, 1).reshape(experts, groups * slots, width)
        back = _through(module, sent).view(experts, groups, slots, width).transpose(0, 1)
        back = torch.bmm(combine, back.reshape(groups, experts * slots, width))
        return back.view(tokens, width).to(hidden_states.dtype)

    return routed


def _slots(index: Tensor, experts: int, slots: int) -> Tensor:
    """Which slot of which expert each choice [g, t k] takes, as ones: [g, t k, e, c]."""
    mine = index[..., None] == torch.arange(experts, device=index.device)
    place = torch.where(mine, mine.to(torch.int64).cumsum(1) - 1, -1)
    return place[..., None] == torch.arange(slots, device=index.device)


def _through(module: Any, x: Tensor) -> Tensor:
    """Tokens of each expert [e, n, width] through it."""
    hidden = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", x)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    return _linear(module, "down_proj", hidden)


def _linear(module: Any, name: str, x: Tensor) -> Tensor:
    weight = getattr(module, name)
    result = torch.bmm(x, weight if module.is_transposed else weight.transpose(1, 2))
    return result + getattr(module, f"{name}_bias")[:, None] if module.has_bias else result
