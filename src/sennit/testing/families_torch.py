"""The model families that sennit must capture, plan and run: small, from the real libraries, unmodified.

`families()` maps a name to a builder. A builder takes the number of layers (of blocks, where layers come in blocks) and
gives a `Sample`: a model whose call with `kwargs` returns a scalar loss, alone or under `loss`. Dropout is on where the
family has it. Sizes are the least that keep the structure: grouped queries, two kinds of attention, windows that shift.

Three things differ from the defaults of the libraries, all through their own options:

- `use_cache=False`: a cache is for generation, and is no tensor;
- experts as `batched_mm`: the default loops over the experts that were hit, which is a branch on data;
- `encoder_layerdrop=decoder_layerdrop=0`: skipping a layer by chance is a branch on data too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sennit.capture.experts import experts_as_batch
from sennit.testing.evoformer_torch import AlphaFoldTrunk, EvoformerConfig

__all__ = ["Family", "Sample", "families", "transformers_module"]

VOCABULARY = 48
TOKENS = 8
BATCH = 4


@dataclass(frozen=True, slots=True)
class Sample:
    model: nn.Module
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """`layers` is the least number that shows all of the structure; `library` is the package that it needs."""

    library: str
    build: Callable[[int], Sample]
    layers: int = 2


def families() -> dict[str, Family]:
    """Every family by name."""
    return {
        "gpt2": Family("transformers", gpt2),
        "llama": Family("transformers", llama),
        "mixtral": Family("transformers", mixtral),
        "mixtral batch": Family("transformers", mixtral_batch),
        "t5": Family("transformers", t5),
        "mbart": Family("transformers", mbart),
        "bert": Family("transformers", bert),
        "vit": Family("transformers", vit),
        "swin": Family("transformers", swin),
        "resnet": Family("transformers", resnet),
        "timm vit": Family("timm", timm_vit),
        "timm swin": Family("timm", timm_swin),
        "timm resnet": Family("timm", timm_resnet),
        "evoformer": Family("torch", evoformer, layers=1),
    }


# ---- language --------------------------------------------------------------------------------------------------------


def gpt2(layers: int) -> Sample:
    config = _config("GPT2", n_layer=layers, n_embd=32, n_head=4, n_positions=TOKENS, vocab_size=VOCABULARY, **_IDS)
    return Sample(_model("GPT2LMHeadModel", config), _tokens())


def llama(layers: int) -> Sample:
    config = _config("Llama", num_hidden_layers=layers, intermediate_size=48, num_key_value_heads=2, **_IDS, **_WIDTHS)
    return Sample(_model("LlamaForCausalLM", config), _tokens())


def mixtral(layers: int) -> Sample:
    config = _config(
        "Mixtral",
        num_hidden_layers=layers,
        intermediate_size=24,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,  # with the loss that balances the experts
        router_jitter_noise=0.1,
        attention_dropout=0.1,
        **_IDS,
        **_WIDTHS,
    )
    config._experts_implementation = "batched_mm"
    # with a mask, the balancing loss counts tokens by addition; without one, by `bincount`, whose size depends on
    # values
    return Sample(_model("MixtralForCausalLM", config), {**_tokens(), **_padding()})


def mixtral_batch(layers: int) -> Sample:
    """The same, its experts one batched product over experts, without the loss that balances them."""
    transformers_module()
    registry = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    registry.register("batch", experts_as_batch)
    sample = mixtral(layers)
    model: Any = sample.model
    model.config._experts_implementation = "batch"
    model.config.output_router_logits = False
    return sample


def t5(layers: int) -> Sample:
    config = _config(
        "T5",
        num_layers=layers,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_heads=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        **_IDS,
    )
    return Sample(_model("T5ForConditionalGeneration", config), {**_tokens(), **_padding()})


def mbart(layers: int) -> Sample:
    config = _config(
        "MBart",
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        max_position_embeddings=TOKENS,
        vocab_size=VOCABULARY,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **_IDS,
    )
    return Sample(_model("MBartForConditionalGeneration", config), {**_tokens(), **_padding()})


def bert(layers: int) -> Sample:
    config = _config(
        "Bert", num_hidden_layers=layers, intermediate_size=64, max_position_embeddings=TOKENS, **_IDS, **_WIDTHS
    )
    return Sample(_model("BertForMaskedLM", config), {**_tokens(), **_padding()})


_WIDTHS = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}


def _tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=generator)
    labels = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=generator)
    labels[0, :3] = -100  # an uneven number of targets, so that a mean of means would be wrong
    return {"input_ids": tokens, "labels": labels}


def _padding() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1, TOKENS - 2 :] = 0
    return {"attention_mask": mask}


# ---- images ----------------------------------------------------------------------------------------------------------


def vit(layers: int) -> Sample:
    config = _config(
        "ViT",
        num_hidden_layers=layers,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return Sample(_model("ViTForImageClassification", config), _images("pixel_values", 16))


def swin(layers: int) -> Sample:
    config = _config(
        "Swin",
        depths=[layers, 2],  # every second layer shifts its windows
        embed_dim=16,
        num_heads=[2, 4],
        window_size=4,
        image_size=32,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        drop_path_rate=0.1,
    )
    return Sample(_model("SwinForImageClassification", config), _images("pixel_values", 32))


def resnet(layers: int) -> Sample:
    config = _config(
        "ResNet", depths=[layers, 2], embedding_size=8, hidden_sizes=[16, 32], layer_type="bottleneck", num_labels=5
    )
    return Sample(_model("ResNetForImageClassification", config), _images("pixel_values", 32))


def timm_vit(layers: int) -> Sample:
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": layers, "num_heads": 4, "num_classes": 5}
    model = _timm("VisionTransformer", **options, drop_rate=0.1, drop_path_rate=0.1, attn_drop_rate=0.1)
    return Sample(Classifier(model), _images("images", 16))


def timm_swin(layers: int) -> Sample:
    options = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depths": (layers, 2), "num_heads": (2, 4)}
    model = _timm("SwinTransformer", **options, window_size=4, num_classes=5, drop_rate=0.1, drop_path_rate=0.1)
    return Sample(Classifier(model), _images("images", 32))


def timm_resnet(layers: int) -> Sample:
    _allow_torchvision()
    block = importlib.import_module("timm.models.resnet").Bottleneck
    model = _timm("ResNet", block=block, layers=(layers, 1, 1, 1), channels=(4, 8, 8, 8), stem_width=8, num_classes=5)
    return Sample(Classifier(model), _images("images", 32))


class Classifier(nn.Module):
    """An image model that returns logits, with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


def _images(name: str, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, size, size, generator=generator, dtype=torch.float64)
    return {name: images, "labels": torch.randint(5, (BATCH,), generator=generator)}


# ---- proteins --------------------------------------------------------------------------------------------------------


def evoformer(layers: int) -> Sample:
    config = EvoformerConfig(blocks=layers)
    generator = torch.Generator().manual_seed(1)
    sizes = (2, config.sequences, config.residues)
    residues = torch.randint(config.amino_acids - 1, sizes, generator=generator)
    masked = torch.rand(sizes, generator=generator) < 0.3
    kwargs = {
        "sequences": residues.masked_fill(masked, config.amino_acids - 1),
        "residues": residues.masked_fill(~masked, -100),
        "distances": torch.randint(config.distance_bins, (2, config.residues, config.residues), generator=generator),
    }
    torch.manual_seed(0)
    return Sample(AlphaFoldTrunk(config).double(), kwargs)


# ---- libraries -------------------------------------------------------------------------------------------------------


def transformers_module() -> Any:
    """The `transformers` package."""
    _allow_torchvision()
    return importlib.import_module("transformers")


def _config(name: str, **options: Any) -> Any:
    return getattr(transformers_module(), f"{name}Config")(**options)


def _model(name: str, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers_module(), name)(config).double()
    return model.train()


def _timm(name: str, **options: Any) -> nn.Module:
    _allow_torchvision()
    torch.manual_seed(0)
    model: nn.Module = getattr(importlib.import_module("timm.models"), name)(**options)
    return model.double().train()


def _allow_torchvision() -> None:
    """Both libraries import torchvision. Where its compiled part was built for another torch, that import fails with
    "operator torchvision::nms does not exist": declare the operators, which no model here calls."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # what was imported before it failed
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
