"""Blocks of five model families, as people write them, for the accuracy tables of docs/cluster.md.

`CASES` names each with its sizes; `make(case, device)` gives a module and its arguments. A module's result is a scalar,
so that a step is `module(*arguments).backward()` and `sennit.capture` takes the module as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

__all__ = ["CASES", "Case", "make"]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., tokens, heads * size] to [..., heads, tokens, size]."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).flatten(-2)


def scalar(x: Tensor) -> Tensor:
    return x.float().square().mean()


# ---- GPT -------------------------------------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


# ---- Llama -----------------------------------------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int, tokens: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * size, bias=False)
        self.v = nn.Linear(width, groups * size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        angle = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())

    def rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cosine + torch.cat((-right, left), -1) * self.sine  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q = self.rotate(split_heads(self.q(y), self.heads))
        k, v = self.rotate(split_heads(self.k(y), self.groups)), split_heads(self.v(y), self.groups)
        again = self.heads // self.groups
        k, v = k.repeat_interleave(again, 1), v.repeat_interleave(again, 1)
        x = x + self.o(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden, tokens) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return scalar(x)


# ---- Swin ------------------------------------------------------------------------------------------------------------


class SwinBlock(nn.Module):
    """Attention in windows of w x w tokens, shifted by half of one in every other block; no mask at the seam."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        w = self.window
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = y.unflatten(1, (height // w, w)).unflatten(3, (width // w, w)).transpose(2, 3).flatten(3, 4).flatten(0, 2)
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(y).chunk(3, -1))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + self.bias
        y = self.proj(join_heads(scores.softmax(-1) @ v))
        y = y.unflatten(1, (w, w)).unflatten(0, (batch, height // w, width // w)).transpose(2, 3)
        y = y.flatten(3, 4).flatten(1, 2)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Swin(nn.Module):
    """Stages of two blocks; between stages, patches of 2 x 2 merge and the width doubles."""

    def __init__(self, width: int, heads: int, window: int, stages: int) -> None:
        super().__init__()
        self.stages, self.merges = nn.ModuleList(), nn.ModuleList()
        for stage in range(stages):
            w, h = width << stage, heads << stage
            self.stages.append(nn.Sequential(SwinBlock(w, h, window, 0), SwinBlock(w, h, window, window // 2)))
            if stage < stages - 1:
                self.merges.append(nn.Sequential(nn.LayerNorm(4 * w), nn.Linear(4 * w, 2 * w, bias=False)))

    def forward(self, x: Tensor) -> Tensor:
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number < len(self.merges):
                x = x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).transpose(2, 3).flatten(3)
                x = self.merges[number](x)
        return scalar(x)


# ---- Evoformer -------------------------------------------------------------------------------------------------------


class GatedAttention(nn.Module):
    """Attention along the last but one dim, with a gate and, where given, a bias from the pair representation."""

    def __init__(self, width: int, heads: int, pair: int | None) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.bias = nn.Linear(pair, heads, bias=False) if pair is not None else None

    def forward(self, x: Tensor, pair: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(y).chunk(3, -1))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if self.bias is not None and pair is not None:
            scores = scores + self.bias(pair).permute(2, 0, 1)
        out: Tensor = self.out(join_heads(scores.softmax(-1) @ v) * self.gate(y).sigmoid())
        return out


class TriangleProduct(nn.Module):
    def __init__(self, width: int, outgoing: bool) -> None:
        super().__init__()
        self.outgoing = outgoing
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.parts, self.gates = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.out, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, z: Tensor) -> Tensor:
        y = self.norm1(z)
        left, right = (self.parts(y) * self.gates(y).sigmoid()).permute(2, 0, 1).chunk(2)
        if self.outgoing:
            both = left @ right.transpose(-1, -2)
        else:
            both = left.transpose(-1, -2) @ right
        out: Tensor = self.out(self.norm2(both.permute(1, 2, 0))) * self.gate(y).sigmoid()
        return out


def transition(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class EvoformerBlock(nn.Module):
    def __init__(self, width: int, pair: int) -> None:
        super().__init__()
        self.rows, self.columns = GatedAttention(width, 8, pair), GatedAttention(width, 8, None)
        self.outer_norm, self.outer_parts = nn.LayerNorm(width), nn.Linear(width, 64)
        self.outer = nn.Linear(32 * 32, pair)
        self.outgoing, self.incoming = TriangleProduct(pair, True), TriangleProduct(pair, False)
        self.starting, self.ending = GatedAttention(pair, 4, pair), GatedAttention(pair, 4, pair)
        self.more, self.more_pair = transition(width), transition(pair)

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        m = m + self.rows(m, z)
        m = m + self.columns(m.transpose(0, 1)).transpose(0, 1)
        m = m + self.more(m)
        left, right = self.outer_parts(self.outer_norm(m)).chunk(2, -1)
        sequences, residues, _ = left.shape
        product = left.flatten(1).t() @ right.flatten(1) / sequences
        product = product.unflatten(1, (residues, 32)).unflatten(0, (residues, 32)).transpose(1, 2)
        z = z + self.outer(product.flatten(2))
        z = z + self.outgoing(z)
        z = z + self.incoming(z)
        z = z + self.starting(z, z)
        z = z + self.ending(z.transpose(0, 1), z).transpose(0, 1)
        return m, z + self.more_pair(z)


class Evoformer(nn.Module):
    def __init__(self, width: int, pair: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EvoformerBlock(width, pair) for _ in range(layers))

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        for block in self.blocks:
            m, z = block(m, z)
        return scalar(m) + scalar(z)


# ---- ResNet ----------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.short: nn.Module = nn.Identity()
        if before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.short(x))


class ResNet(nn.Module):
    """ResNet-50 with `depths` blocks a stage."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        before = 64
        for stage, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(Bottleneck(before, 64 << stage, 2 if stage and not number else 1))
                before = 256 << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 1000)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))).float(), targets)


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """`sizes` are those of its family, in the order that `make` reads them."""

    name: str
    family: str
    batch: int
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    channels_last: bool = False


CASES = (
    # tokens, vocabulary, width, heads, layers
    Case("gpt 125M, 4 blocks", "gpt", 8, (1024, 50304, 768, 12, 4)),
    Case("gpt 1.3B, 2 blocks", "gpt", 4, (2048, 50304, 2048, 16, 2)),
    Case("gpt 6.7B, 1 block", "gpt", 2, (2048, 50304, 4096, 32, 1)),
    Case("gpt tiny, 2 blocks", "gpt", 2, (128, 1024, 256, 4, 2)),
    Case("gpt 125M in f32, 2 blocks", "gpt", 2, (1024, 50304, 768, 12, 2), torch.float32),
    # tokens, width, heads, groups, hidden, layers
    Case("llama 8B, 2 blocks", "llama", 1, (4096, 4096, 32, 8, 14336, 2)),
    Case("llama 1B, 2 blocks", "llama", 4, (2048, 2048, 32, 8, 8192, 2)),
    # side, width, heads, window, stages
    Case("swin T, 2 stages", "swin", 64, (56, 96, 3, 7, 2)),
    Case("swin B, 3 stages", "swin", 32, (56, 128, 4, 7, 3)),
    # sequences, residues, width, pair, layers
    Case("evoformer 128 x 256", "evoformer", 1, (128, 256, 256, 128, 1)),
    Case("evoformer 512 x 256", "evoformer", 1, (512, 256, 256, 128, 1)),
    # side, then blocks a stage
    Case("resnet 50 channels-last", "resnet", 64, (224, 3, 4, 6, 3), channels_last=True),
    Case("resnet 50", "resnet", 64, (224, 3, 4, 6, 3)),
    Case("resnet 26 in f32", "resnet", 32, (224, 2, 2, 2, 2), torch.float32),
)


def make(case: Case, device: torch.device | str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module on `device` and its arguments, with fixed seeds. On the meta device nothing is filled."""
    if str(device) != "meta":
        torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        if str(device) == "meta":
            return torch.empty(shape, device=device, dtype=case.dtype)
        # in pieces of the batch: a large float32 copy would be the peak of memory
        return torch.randn(shape, device=device, dtype=case.dtype)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=device) if prod(shape) else torch.empty(shape, device=device)

    module: nn.Module
    arguments: tuple[Tensor, ...]
    with torch.device(device):
        match case.family, case.sizes:
            case "gpt", (tokens, vocabulary, width, heads, layers):
                module = GPT(vocabulary, width, heads, layers)
                arguments = (integers(vocabulary, case.batch, tokens), integers(vocabulary, case.batch, tokens))
            case "llama", (tokens, width, heads, groups, hidden, layers):
                module = Llama(width, heads, groups, hidden, layers, tokens)
                arguments = (random(case.batch, tokens, width),)
            case "swin", (side, width, heads, window, stages):
                module = Swin(width, heads, window, stages)
                arguments = (random(case.batch, side, side, width),)
            case "evoformer", (sequences, residues, width, pair, layers):
                module = Evoformer(width, pair, layers)
                arguments = (random(sequences, residues, width), random(residues, residues, pair))
            case "resnet", (side, *depths):
                module = ResNet(tuple(depths))
                arguments = (random(case.batch, 3, side, side), integers(1000, case.batch))
            case _:
                raise ValueError(f"{case.name}: no family {case.family!r} with sizes {case.sizes}")
    module = module.to(case.dtype)
    if case.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        arguments = (arguments[0].contiguous(memory_format=torch.channels_last), *arguments[1:])
    return module, arguments
