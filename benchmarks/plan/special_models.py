"""The models of `special.py`, and how torch's own ways of cutting them see them: blocks to wrap, stages of a pipeline.

No dropout, float32. A case's name says its shape: the vocabulary of a T5, the image of a Swin, the width of an
Evoformer, the width of a GPT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

__all__ = ["CASES", "Case", "Pieces", "blocks", "build", "pieces"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a batch. `size` is the number in the case's name."""

    family: str
    size: int
    batch: int
    shape: str


CASES = {
    "t5-128k": Case("t5", 131072, 16, "2 + 2 layers of width 256, a vocabulary of 131,072, 16 x 32 tokens"),
    "t5-32k": Case("t5", 32768, 16, "2 + 2 layers of width 256, a vocabulary of 32,768, 16 x 32 tokens"),
    "t5-2k": Case("t5", 2048, 16, "2 + 2 layers of width 256, a vocabulary of 2,048, 16 x 32 tokens"),
    "swin-128": Case("swin", 128, 16, "2 + 6 blocks of width 64 and 128, windows of 16 x 16, 16 images of 128 x 128"),
    "swin-64": Case("swin", 64, 16, "2 + 6 blocks of width 64 and 128, windows of 8 x 8, 16 images of 64 x 64"),
    "evoformer-128": Case("evoformer", 128, 16, "4 blocks of width 128, 3 passes, 16 x 8 sequences of 16 residues"),
    "evoformer-32": Case("evoformer", 32, 16, "4 blocks of width 32, 3 passes, 16 x 8 sequences of 16 residues"),
    "gpt-256": Case("gpt", 256, 16, "8 layers of width 256, a vocabulary of 4,096, 16 x 128 tokens"),
}


def build(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """The model and the whole batch, the same in every process."""
    torch.manual_seed(0)
    match case.family:
        case "t5":
            return _t5(case)
        case "swin":
            return _swin(case)
        case "evoformer":
            return _evoformer(case)
        case "gpt":
            return _gpt(case)
    raise ValueError(case)


def _t5(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    from sennit.testing.families_torch import transformers_module

    library = transformers_module()
    config = library.T5Config(
        vocab_size=case.size, d_model=256, d_kv=64, d_ff=1024, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(1, case.size, (case.batch, 32))
    return library.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens.roll(1, 1)}


def _swin(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    from sennit.testing.families_torch import transformers_module

    transformers_module()  # clears the way for torchvision, which timm imports
    from timm.models.swin_transformer import SwinTransformer

    model = SwinTransformer(
        img_size=case.size, patch_size=4, embed_dim=64, depths=(2, 6), num_heads=(4, 8), window_size=case.size // 8, num_classes=16,
        drop_path_rate=0.0,
    )  # fmt: skip
    images = torch.randn(case.batch, 3, case.size, case.size)
    return Classifier(model), {"images": images, "labels": torch.randint(16, (case.batch,))}


def _evoformer(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    from sennit.testing.evoformer_torch import AlphaFoldTrunk, EvoformerConfig

    config = EvoformerConfig(
        residues=16, sequences=8, msa_width=case.size, pair_width=case.size, heads=4, blocks=4, msa_dropout=0.0, pair_dropout=0.0
    )  # fmt: skip
    rows = (case.batch, config.sequences, config.residues)
    return AlphaFoldTrunk(config), {
        "sequences": torch.randint(config.amino_acids, rows),
        "residues": torch.randint(config.amino_acids - 1, rows),
        "distances": torch.randint(config.distance_bins, (case.batch, config.residues, config.residues)),
    }


def _gpt(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    from sennit.demo.gpt import GPT, GPTConfig

    config = GPTConfig(
        vocabulary=4096, context=128, width=case.size, heads=8, layers=8, tie_embeddings=False
    )  # tied tables are more than torch's pipelining can cut
    tokens = torch.randint(config.vocabulary, (case.batch, config.context))
    return GPT(config), {"tokens": tokens, "targets": tokens.roll(1, 1)}


class Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


def blocks(case: Case, model: nn.Module) -> list[nn.Module]:
    """What FSDP2 wraps, and what is checkpointed."""
    match case.family:
        case "t5":
            return [*model.encoder.block, *model.decoder.block]
        case "swin":
            return [block for layer in model.model.layers for block in layer.blocks]
        case _:
            return [*model.blocks]


# ---- stages of torch.distributed.pipelining --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model as a sequence of eight modules, the argument that enters the first, and the one that the loss is computed
    with.
    """

    modules: list[nn.Module]
    enters: str
    target: str

    def stages(self, count: int) -> list[nn.Module]:
        each = len(self.modules) // count
        return [nn.Sequential(*self.modules[at : at + each]) for at in range(0, len(self.modules), each)]


def pieces(case: Case, model: nn.Module) -> Pieces:
    """Of a Swin and a GPT.

    A T5's table is read by three stages, and torch's pipelining has no shared parameters; an Evoformer runs its blocks
    three times, and no schedule there has a stage that runs several times.
    """
    if case.family == "gpt":
        inner = list(model.blocks)
        inner[0] = nn.Sequential(_Embedding(model), inner[0])
        inner[-1] = nn.Sequential(inner[-1], model.norm, model.head)
        return Pieces(inner, "tokens", "targets")
    assert case.family == "swin"
    swin = model.model
    first, second = swin.layers
    inner = [*first.blocks, *second.blocks]
    inner[0] = nn.Sequential(swin.patch_embed, first.downsample, inner[0])
    inner[2] = nn.Sequential(second.downsample, inner[2])
    inner[-1] = nn.Sequential(inner[-1], swin.norm, swin.head)
    return Pieces(inner, "images", "labels")


class _Embedding(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions

    def forward(self, tokens: Tensor) -> Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(where)
