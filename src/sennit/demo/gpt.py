"""A small GPT as people write it: nothing in it knows that it will be split.

The demo, the tests and the README use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

__all__ = ["GPT", "Block", "GPTConfig", "SelfAttention", "random_batch"]


@dataclass(frozen=True, slots=True)
class GPTConfig:
    vocabulary: int = 512
    context: int = 64
    width: int = 128
    heads: int = 8
    layers: int = 4
    tie_embeddings: bool = True


class SelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Tokens and targets in, mean cross-entropy out; targets of -100 are ignored."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_batch(config: GPTConfig, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and targets; an uneven tenth of the targets is ignored, so that means of means would be wrong."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocabulary, (batch, config.context), generator=generator)
    targets = torch.randint(config.vocabulary, (batch, config.context), generator=generator)
    ignored = torch.rand(batch, config.context, generator=generator) < 0.2 * torch.rand(batch, 1, generator=generator)
    return tokens, targets.masked_fill(ignored, -100)
