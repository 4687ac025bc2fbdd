"""Training steps that are captured for labelling groups and for comparing fusions: families at sizes that people train
at, in float32 and bfloat16.

    python benchmarks/fuse/workloads.py --graphs FOLDER        # captures what is not there yet; needs transformers, no GPU

A graph goes by `model`, or `model size`, then its element type: `gpt2 wide bfloat16`. The first word is the model; data
is split by it. Two layers each, since layers repeat. A capture is a text file, so a machine without the libraries reads
what another wrote. `FRESH` are models that nobody looked at when rules and constants of estimators were chosen, and
that none is trained on.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))


FRESH = frozenset(("regnet", "mobilevit", "hiera", "timesformer"))


def models() -> dict[str, Any]:
    """Builders of (model, sample kwargs) whose result has a scalar loss."""
    return {
        "gpt2": lambda: language(
            "GPT2", "GPT2LMHeadModel", n_layer=2, n_embd=768, n_head=12, n_positions=512, vocab_size=16384
        ),
        "gpt2 wide": lambda: language(
            "GPT2", "GPT2LMHeadModel", batch=4, n_layer=2, n_embd=1600, n_head=25, n_positions=512, vocab_size=8192
        ),
        "llama": lambda: language(
            "Llama",
            "LlamaForCausalLM",
            num_hidden_layers=2,
            hidden_size=1024,
            intermediate_size=2816,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=16384,
        ),
        "mixtral": lambda: language(
            "Mixtral",
            "MixtralForCausalLM",
            batch=2,
            num_hidden_layers=2,
            hidden_size=512,
            intermediate_size=1024,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=8192,
            num_local_experts=4,
            experts_implementation="batched_mm",
        ),
        "t5": lambda: language(
            "T5",
            "T5ForConditionalGeneration",
            num_layers=2,
            d_model=768,
            d_ff=2048,
            num_heads=12,
            d_kv=64,
            vocab_size=16384,
            batch=4,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        "bert": lambda: language(
            "Bert",
            "BertForMaskedLM",
            num_hidden_layers=2,
            hidden_size=768,
            intermediate_size=3072,
            num_attention_heads=12,
            vocab_size=16384,
        ),
        "vit": lambda: vision(
            "ViT",
            "ViTForImageClassification",
            224,
            num_hidden_layers=2,
            hidden_size=768,
            intermediate_size=3072,
            num_attention_heads=12,
            image_size=224,
        ),
        "swin": lambda: vision(
            "Swin",
            "SwinForImageClassification",
            224,
            image_size=224,
            embed_dim=96,
            depths=[2, 2, 2, 2],
            num_heads=[3, 6, 12, 24],
        ),
        "resnet": lambda: vision("ResNet", "ResNetForImageClassification", 224, depths=[2, 2, 2, 2]),
        "evoformer": evoformer,
        "lstm": lambda: recurrent(batch=64, width=1024, steps=8, vocabulary=8192),
        "lstm small": lambda: recurrent(batch=20, width=650, steps=8, vocabulary=10000),
        "gpt2 small": lambda: language(
            "GPT2",
            "GPT2LMHeadModel",
            batch=2,
            tokens=256,
            n_layer=2,
            n_embd=384,
            n_head=6,
            n_positions=256,
            vocab_size=4096,
        ),
        "bert small": lambda: language(
            "Bert",
            "BertForMaskedLM",
            batch=4,
            tokens=128,
            num_hidden_layers=2,
            hidden_size=512,
            intermediate_size=2048,
            num_attention_heads=8,
            vocab_size=8192,
        ),
        "llama long": lambda: language(
            "Llama",
            "LlamaForCausalLM",
            batch=1,
            tokens=2048,
            num_hidden_layers=2,
            hidden_size=2048,
            intermediate_size=5632,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=4096,
        ),
        "vit small": lambda: vision(
            "ViT",
            "ViTForImageClassification",
            160,
            batch=8,
            num_hidden_layers=2,
            hidden_size=384,
            intermediate_size=1536,
            num_attention_heads=6,
            image_size=160,
        ),
        "resnet small": lambda: vision("ResNet", "ResNetForImageClassification", 128, batch=8, depths=[2, 2, 2, 2]),
        "regnet": lambda: vision(
            "RegNet",
            "RegNetForImageClassification",
            224,
            embedding_size=32,
            hidden_sizes=[64, 160, 384, 832],
            depths=[1, 2, 2, 1],
            groups_width=32,
        ),
        "mobilevit": lambda: vision(
            "MobileViT",
            "MobileViTForImageClassification",
            256,
            batch=16,
            image_size=256,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        ),
        "hiera": lambda: vision(
            "Hiera", "HieraForImageClassification", 224, batch=16, depths=[1, 1, 2, 1], image_size=[224, 224]
        ),
        "timesformer": lambda: vision(
            "Timesformer",
            "TimesformerForVideoClassification",
            112,
            batch=4,
            frames=(8,),
            image_size=112,
            num_frames=8,
            num_hidden_layers=2,
            hidden_dropout_prob=0.0,
        ),
    }


def language(
    config: str, model: str, *, batch: int = 8, tokens: int = 512, **options: Any
) -> tuple[Any, dict[str, Any]]:
    import torch

    from sennit.testing.families_torch import transformers_module

    transformers = transformers_module()
    made = getattr(transformers, f"{config}Config")(use_cache=False, attn_implementation="eager", **options)
    ids = torch.randint(0, made.vocab_size, (batch, tokens))
    return getattr(transformers, model)(made), {"input_ids": ids, "labels": ids}


def vision(
    config: str, model: str, size: int, *, batch: int = 32, frames: tuple[int, ...] = (), **options: Any
) -> tuple[Any, dict[str, Any]]:
    import torch

    from sennit.testing.families_torch import transformers_module

    transformers = transformers_module()
    made = getattr(transformers, f"{config}Config")(num_labels=1000, **options)
    images, labels = torch.randn(batch, *frames, 3, size, size), torch.randint(0, 1000, (batch,))
    return getattr(transformers, model)(made), {"pixel_values": images, "labels": labels}


def evoformer() -> tuple[Any, dict[str, Any]]:
    import torch

    from sennit.testing.evoformer_torch import AlphaFoldTrunk, EvoformerConfig

    config = EvoformerConfig(residues=128, sequences=64, msa_width=128, pair_width=64, heads=4, blocks=1, passes=1)
    residues = torch.randint(config.amino_acids - 1, (1, config.sequences, config.residues))
    distances = torch.randint(config.distance_bins, (1, config.residues, config.residues))
    return AlphaFoldTrunk(config), {"sequences": residues, "residues": residues, "distances": distances}


def recurrent(*, batch: int, width: int, steps: int, vocabulary: int) -> tuple[Any, dict[str, Any]]:
    """A language model of two LSTM layers, its steps written out one by one."""
    import torch
    from torch import nn

    class RecurrentModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
            self.head = nn.Linear(width, vocabulary)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            states = list(self.embedding(tokens).unbind(1))
            for cell in self.cells:
                hidden = memory = torch.zeros_like(states[0])
                for place, state in enumerate(states):
                    hidden, memory = cell(state, (hidden, memory))
                    states[place] = hidden
            logits = self.head(torch.stack(states, dim=1))
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    tokens = torch.randint(0, vocabulary, (batch, steps))
    return RecurrentModel(), {"tokens": tokens, "targets": tokens}


def root_of(name: str) -> str:
    """The model that a graph is of: `gpt2` for `gpt2 wide bfloat16`."""
    return name.split()[0]


def stored_graphs(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, graph) of every capture in a folder."""
    from sennit.ir.graph import Graph

    for path in sorted(folder.glob("*.graph")):
        yield path.stem.replace("_", " "), Graph.parse(path.read_text())


def capture_all(names: list[str], folder: Path) -> None:
    """Capture what the folder does not hold. A family that cannot be had is named and left out."""
    import torch

    from sennit.capture import capture

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            title = f"{name} {str(dtype).removeprefix('torch.')}"
            path = folder / f"{title.replace(' ', '_')}.graph"
            if path.exists():
                continue
            try:
                torch.manual_seed(0)
                model, kwargs = models()[name]()
                cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in kwargs.items()}
                start = time.perf_counter()
                graph = capture(model.to(dtype).train(), (), cast)
            except Exception:
                print(f"{title} is left out:\n{traceback.format_exc(limit=2)}", flush=True)
                continue
            path.write_text(str(graph))
            print(f"{title}: {len(graph.ops)} operators in {time.perf_counter() - start:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True)
    parser.add_argument("--families", nargs="*", default=list(models()))
    arguments = parser.parse_args()
    capture_all(arguments.families, arguments.graphs)


if __name__ == "__main__":
    main()
