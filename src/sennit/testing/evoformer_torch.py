"""An Evoformer stack with recycling, as in AlphaFold 2 (Jumper et al., 2021, supplement, algorithms 6 to 15 and 32).

Two representations of a protein of R residues with S aligned sequences: `msa` [batch, S, R, c_m] and `pair` [batch, R,
R, c_z]. A block updates one from the other:

    msa  += row attention (biased by the pair representation), column attention, transition
    pair += outer product mean of the msa, triangle multiplications (outgoing, incoming),
            triangle attentions (starting, ending node), transition

The stack runs several times; each pass starts from the inputs plus the normalised results of the pass before. All
passes but the last are without gradients: three forward passes to one backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

__all__ = ["AlphaFoldTrunk", "EvoformerConfig"]


@dataclass(frozen=True, slots=True)
class EvoformerConfig:
    residues: int = 6
    sequences: int = 4
    msa_width: int = 8
    pair_width: int = 8
    heads: int = 2
    blocks: int = 2
    passes: int = 3
    amino_acids: int = 23  # 20, unknown, gap, masked
    distance_bins: int = 8
    msa_dropout: float = 0.15
    pair_dropout: float = 0.25
    by_hand: bool = False  # attention as products and a softmax, as before there were kernels for it


class SharedDropout(nn.Module):
    """Dropout with one mask for all of a dim: whole rows or columns are dropped together."""

    def __init__(self, p: float, dim: int) -> None:
        super().__init__()
        self.p, self.dim = p, dim

    def forward(self, x: Tensor) -> Tensor:
        shape = [1 if dim == self.dim % x.ndim else size for dim, size in enumerate(x.shape)]
        return x * F.dropout(x.new_ones(shape), self.p, self.training)


class GatedAttention(nn.Module):
    """Attention along the last dim but one of x [..., n, width], with a gate on each head's output; `bias` [..., heads,
    n, n] is added to the logits.
    """

    def __init__(self, width: int, heads: int, *, by_hand: bool = False) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for layer in (self.query, self.key, self.value)
        )
        y = _by_hand(q, k, v, bias) if self.by_hand else F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out: Tensor = self.out(torch.sigmoid(self.gate(x)) * y.transpose(-2, -3).flatten(-2))
        return out


def _by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores if bias is None else scores + bias, dim=-1) @ v


class RowAttention(nn.Module):
    """Along residues, within each sequence; the pair representation says who attends to whom."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.msa_width)
        self.pair_norm = nn.LayerNorm(config.pair_width)
        self.pair_bias = nn.Linear(config.pair_width, config.heads, bias=False)
        self.attention = GatedAttention(config.msa_width, config.heads, by_hand=config.by_hand)

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        bias = self.pair_bias(self.pair_norm(pair)).permute(0, 3, 1, 2).unsqueeze(1)
        out: Tensor = self.attention(self.norm(msa), bias)
        return out


class ColumnAttention(nn.Module):
    """Along sequences, at each residue."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.msa_width)
        self.attention = GatedAttention(config.msa_width, config.heads, by_hand=config.by_hand)

    def forward(self, msa: Tensor) -> Tensor:
        out: Tensor = self.attention(self.norm(msa).transpose(1, 2)).transpose(1, 2)
        return out


class Transition(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(self.norm(x))))
        return out


class OuterProductMean(nn.Module):
    """What residues i and j have in common over the sequences."""

    def __init__(self, config: EvoformerConfig, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.msa_width)
        self.left = nn.Linear(config.msa_width, width)
        self.right = nn.Linear(config.msa_width, width)
        self.out = nn.Linear(width * width, config.pair_width)

    def forward(self, msa: Tensor) -> Tensor:
        msa = self.norm(msa)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(msa), self.right(msa)) / msa.shape[1]
        out: Tensor = self.out(outer.flatten(-2))
        return out


class TriangleMultiplication(nn.Module):
    """Update edge ij from the edges ik and jk (outgoing) or ki and kj (incoming), for all k."""

    def __init__(self, width: int, *, outgoing: bool) -> None:
        super().__init__()
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm = nn.LayerNorm(width)
        self.left, self.left_gate = nn.Linear(width, width), nn.Linear(width, width)
        self.right, self.right_gate = nn.Linear(width, width), nn.Linear(width, width)
        self.out_norm = nn.LayerNorm(width)
        self.out, self.out_gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pair: Tensor) -> Tensor:
        pair = self.norm(pair)
        left = torch.sigmoid(self.left_gate(pair)) * self.left(pair)
        right = torch.sigmoid(self.right_gate(pair)) * self.right(pair)
        edges = torch.einsum(self.equation, left, right)
        out: Tensor = torch.sigmoid(self.out_gate(pair)) * self.out(self.out_norm(edges))
        return out


class TriangleAttention(nn.Module):
    """Edge ij attends to the edges ik (starting) or kj (ending), biased by the third edge of the triangle."""

    def __init__(self, width: int, heads: int, *, starting: bool, by_hand: bool = False) -> None:
        super().__init__()
        self.starting = starting
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Linear(width, heads, bias=False)
        self.attention = GatedAttention(width, heads, by_hand=by_hand)

    def forward(self, pair: Tensor) -> Tensor:
        pair = self.norm(pair if self.starting else pair.transpose(1, 2))
        out: Tensor = self.attention(pair, self.bias(pair).permute(0, 3, 1, 2).unsqueeze(1))
        return out if self.starting else out.transpose(1, 2)


class EvoformerBlock(nn.Module):
    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        width = config.pair_width
        self.row = RowAttention(config)
        self.column = ColumnAttention(config)
        self.msa_transition = Transition(config.msa_width)
        self.outer = OuterProductMean(config)
        self.outgoing = TriangleMultiplication(width, outgoing=True)
        self.incoming = TriangleMultiplication(width, outgoing=False)
        self.starting = TriangleAttention(width, config.heads, starting=True, by_hand=config.by_hand)
        self.ending = TriangleAttention(width, config.heads, starting=False, by_hand=config.by_hand)
        self.pair_transition = Transition(width)
        self.row_dropout = SharedDropout(config.msa_dropout, 1)
        self.pair_row_dropout = SharedDropout(config.pair_dropout, 1)
        self.pair_column_dropout = SharedDropout(config.pair_dropout, 2)

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        msa = msa + self.row_dropout(self.row(msa, pair))
        msa = msa + self.column(msa)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer(msa)
        pair = pair + self.pair_row_dropout(self.outgoing(pair))
        pair = pair + self.pair_row_dropout(self.incoming(pair))
        pair = pair + self.pair_row_dropout(self.starting(pair))
        pair = pair + self.pair_column_dropout(self.ending(pair))
        return msa, pair + self.pair_transition(pair)


class AlphaFoldTrunk(nn.Module):
    """Embedding, recycled Evoformer, and the two losses that need no structure module: masked residues and distances."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.passes = config.passes
        self.msa = nn.Embedding(config.amino_acids, config.msa_width)
        self.left = nn.Embedding(config.amino_acids, config.pair_width)
        self.right = nn.Embedding(config.amino_acids, config.pair_width)
        self.msa_again = nn.LayerNorm(config.msa_width)
        self.pair_again = nn.LayerNorm(config.pair_width)
        self.blocks = nn.ModuleList(EvoformerBlock(config) for _ in range(config.blocks))
        self.residue_head = nn.Linear(config.msa_width, config.amino_acids)
        self.distance_head = nn.Linear(config.pair_width, config.distance_bins)

    def stack(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            msa, pair = block(msa, pair)
        return msa, pair

    def forward(self, sequences: Tensor, residues: Tensor, distances: Tensor) -> dict[str, Tensor]:
        """`sequences` [batch, S, R] with some residues masked, `residues` what they were, `distances` [batch, R, R] in
        bins.
        """
        msa = self.msa(sequences)
        first = sequences[:, 0]
        pair = self.left(first).unsqueeze(2) + self.right(first).unsqueeze(1)
        last_msa, last_pair = torch.zeros_like(msa), torch.zeros_like(pair)
        for turn in range(self.passes):
            with torch.set_grad_enabled(torch.is_grad_enabled() and turn == self.passes - 1):
                start = torch.cat([msa[:, :1] + self.msa_again(last_msa[:, :1]), msa[:, 1:]], dim=1)
                last_msa, last_pair = self.stack(start, pair + self.pair_again(last_pair))
        masked = F.cross_entropy(self.residue_head(last_msa).flatten(0, -2), residues.flatten())
        distogram = F.cross_entropy(self.distance_head(last_pair).flatten(0, -2), distances.flatten())
        return {"loss": masked + 0.3 * distogram, "masked": masked, "distogram": distogram}
