"""The models of the network benchmarks: each returns its loss, and its batch has any number of rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 4096


class Convolutional(nn.Module):
    """Four convolutions with batch norm and two dense layers; most parameters are in the first dense layer."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256, 256)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.hidden, self.head = nn.Linear(1024, 4096), nn.Linear(4096, 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = images
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return F.cross_entropy(self.head(F.relu(self.hidden(x.flatten(1)))), labels)


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        mixed = F.dropout(weights, self.dropout, self.training) @ v
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = self.norm1(x + F.dropout(mixed, self.dropout, self.training))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training))


class Bert(nn.Module):
    """BERT's shape, small: post-norm encoder layers with dropout 0.1, masked tokens predicted through the tied
    embedding.
    """

    def __init__(self, width: int = 256, layers: int = 6, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.norm, self.transform, self.bias = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Parameter(torch.zeros(VOCABULARY)),
        )
        self.layers = nn.ModuleList(EncoderLayer(width, heads, 0.1) for _ in range(layers))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = F.dropout(self.norm(self.tokens(tokens) + self.positions(places)), 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(F.gelu(self.transform(x)), self.tokens.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Recurrent(nn.Module):
    """An LSTM language model of two layers, its cells written out."""

    def __init__(self, width: int = 512, embedding: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.width = width
        self.tokens, self.head = nn.Embedding(VOCABULARY, embedding), nn.Linear(width, VOCABULARY)
        sizes = [embedding] + [width] * (layers - 1)
        self.inputs = nn.ModuleList(nn.Linear(size, 4 * width) for size in sizes)
        self.hidden = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in sizes)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for inputs, hidden in zip(self.inputs, self.hidden, strict=True):
            gates_of, outputs = inputs(x), []
            state = memory = torch.zeros(tokens.shape[0], self.width)
            for step in range(tokens.shape[1]):
                enter, forget, new, leave = (gates_of[:, step] + hidden(state)).chunk(4, 1)
                memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(new)
                state = torch.sigmoid(leave) * torch.tanh(memory)
                outputs.append(state)
            x = torch.stack(outputs, 1)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def build(name: str, rank: int, batch: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    """The model, the same on all ranks, and this rank's batch."""
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(100 + rank)
    match name:
        case "gpt":
            from sennit.demo.gpt import GPT, GPTConfig, random_batch

            config = GPTConfig(vocabulary=VOCABULARY, context=64, width=256, heads=8, layers=6, tie_embeddings=False)
            return GPT(config), random_batch(config, batch, seed=rank)
        case "conv":
            images = torch.randn(batch, 3, 32, 32, generator=drawn)
            return Convolutional(), (images, torch.randint(100, (batch,), generator=drawn))
        case "bert":
            tokens = torch.randint(VOCABULARY, (batch, 64), generator=drawn)
            masked = torch.rand(batch, 64, generator=drawn) < 0.15
            return Bert(), (tokens, torch.where(masked, tokens, -100))
        case "lstm":
            tokens = torch.randint(VOCABULARY, (batch, 25), generator=drawn)
            return Recurrent(), (tokens[:, :-1], tokens[:, 1:])
        case _:
            raise SystemExit(f"there is no model {name!r}: gpt, conv, bert, lstm")
