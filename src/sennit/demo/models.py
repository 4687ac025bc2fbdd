"""Models by name, at the sizes that people train, with a sample of what they are called with.

The commands take these names.

`catalogue()` maps a name to its builder. Every builder takes the number of layers, the batch and the tokens (or None
for its own), and gives a model that returns a scalar loss, alone or as `loss`, with the keyword arguments of one call.
Weights are random. Those with `transformers` in the second column need that package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sennit.demo.gpt import GPT, GPTConfig
from sennit.errors import CaptureError
from sennit.testing.families_torch import families, transformers_module

__all__ = ["Entry", "Module", "Sizes", "accept", "cast", "catalogue", "named_model"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """None is the model's own."""

    layers: int | None = None
    batch: int | None = None
    tokens: int | None = None


Module = nn.Module
Built = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Entry:
    summary: str
    build: Callable[[Sizes], Built]
    library: str = "torch"


def catalogue() -> dict[str, Entry]:
    return {
        "gpt": Entry("the demo's GPT: 6 layers, width 256", _gpt),
        "vgg19": Entry("convolutions and three large linear layers, images of 224", _vgg19),
        "rnnlm": Entry("two LSTM layers of 1500, 20 steps", _rnnlm),
        "gpt2": Entry("12 layers, width 768", _gpt2(12, 768), "transformers"),
        "gpt2-xl": Entry("48 layers, width 1600", _gpt2(48, 1600), "transformers"),
        "llama-1b": Entry("16 layers, width 2048, grouped queries", _llama, "transformers"),
        "bert-base": Entry("12 layers, width 768", _bert(12, 768), "transformers"),
        "bert-large": Entry("24 layers, width 1024", _bert(24, 1024), "transformers"),
        "t5-base": Entry("12 + 12 layers, width 768", _t5, "transformers"),
        "vit-base": Entry("12 layers, width 768, images of 224", _vit, "transformers"),
        "resnet50": Entry("50 layers, images of 224", _resnet50, "transformers"),
    }


def named_model(name: str, sizes: Sizes, *, memory: bool = True) -> Built:
    """A model of the catalogue, of the test suite (`family.NAME`), or of a folder (`hf.FOLDER`); without `memory` on
    the meta device.
    """
    with torch.device("cpu" if memory else "meta"):
        if name.startswith("family."):
            found = families()
            if (family := found.get(name.removeprefix("family."))) is None:
                raise CaptureError(f"there is no family {name!r}", fix=f"use one of {', '.join(found)}")
            if sizes.tokens is not None:
                raise CaptureError(
                    f"{name} has a length of its own", fix="leave out tokens=, or name a catalogue model"
                )
            sample = family.build(sizes.layers or family.layers)
            return sample.model, _with_batch(sample.kwargs, sizes.batch)
        if name.startswith("hf."):
            return _folder(name.removeprefix("hf."), sizes)
        entry = catalogue().get(name)
        if entry is None:
            raise CaptureError(
                f"there is no model {name!r}",
                fix=f"use one of {', '.join(catalogue())}, family.NAME, hf.FOLDER, or module:function",
            )
        return entry.build(sizes)


def _with_batch(called: Mapping[str, Any], batch: int | None) -> dict[str, Any]:
    """The same call of so many samples: those that are there, as often as it takes.

    The batch is the first dim that most arguments share.
    """
    tensors = [value for value in called.values() if isinstance(value, Tensor) and value.dim()]
    if batch is None or not tensors:
        return dict(called)
    held = Counter(len(value) for value in tensors).most_common(1)[0][0]

    def of(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or len(value) != held:
            return value
        return torch.cat([value] * ceil(batch / held))[:batch]

    return {key: of(value) for key, value in called.items()}


def cast(model: nn.Module, called: Any, dtype: str) -> tuple[nn.Module, Any]:
    """The model and what it is called with in one floating type."""
    kind = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]

    def of(value: Any) -> Any:
        return value.to(kind) if isinstance(value, Tensor) and value.is_floating_point() else value

    changed = tuple(map(of, called)) if isinstance(called, tuple) else {key: of(item) for key, item in called.items()}
    return model.to(kind), changed


def accept(found: object, where: str) -> tuple[nn.Module, Any]:
    """What a user's function returned, if it is a model and its arguments."""
    match found:
        case (nn.Module() as model, (tuple() | dict()) as called):
            return model, called
        case _:
            raise CaptureError(
                f"{where} returned {type(found).__name__}",
                fix="return (model, args) with a tuple, or (model, kwargs) with a dict",
            )


# ---- torch alone -----------------------------------------------------------------------------------------------------


def _gpt(sizes: Sizes) -> Built:
    batch, tokens = sizes.batch or 8, sizes.tokens or 128
    config = GPTConfig(
        vocabulary=8192, context=tokens, width=256, heads=8, layers=sizes.layers or 6, tie_embeddings=False
    )
    ids = torch.zeros((batch, tokens), dtype=torch.int64)
    return GPT(config), {"tokens": ids, "targets": ids}


class _VGG(nn.Module):
    def __init__(self, last: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        channels = 3
        for width, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, last)):
            for _ in range(count):
                parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            parts.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*parts)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images).flatten(1)), labels)


def _vgg19(sizes: Sizes) -> Built:
    batch = sizes.batch or 32
    return _VGG(sizes.layers or 4), {
        "images": torch.zeros(batch, 3, 224, 224),
        "labels": torch.zeros(batch, dtype=torch.int64),
    }


class _Recurrent(nn.Module):
    """LSTM layers with their steps written out, so that each is an operator that can be placed and fused."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states = list(self.embedding(tokens).unbind(1))
        for cell in self.cells:
            hidden = memory = torch.zeros_like(states[0])
            for place, state in enumerate(states):
                hidden, memory = cell(state, (hidden, memory))
                states[place] = hidden
        logits = self.head(torch.stack(states, dim=1))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _rnnlm(sizes: Sizes) -> Built:
    ids = torch.zeros((sizes.batch or 20, sizes.tokens or 20), dtype=torch.int64)
    return _Recurrent(10_000, 1500, sizes.layers or 2), {"tokens": ids, "targets": ids}


# ---- transformers ----------------------------------------------------------------------------------------------------


def _transformers() -> Any:
    try:
        return transformers_module()
    except ImportError as error:
        raise CaptureError("this model needs the package transformers", fix='pip install "sennit[hf]"') from error


def _made(config: str, model: str, **options: Any) -> nn.Module:
    library = _transformers()
    found: nn.Module = getattr(library, model)(getattr(library, f"{config}Config")(**options))
    return found


def _folder(folder: str, sizes: Sizes) -> Built:
    library = _transformers()
    try:
        config = library.AutoConfig.from_pretrained(folder)
    except OSError as error:
        raise CaptureError(
            f"{folder!r} has no configuration: {error}", fix="name a folder with a config.json"
        ) from error
    config.use_cache = False
    if sizes.layers is not None:
        config.num_hidden_layers = sizes.layers
    model: nn.Module = library.AutoModelForCausalLM.from_config(config)
    return model, _words(sizes, 4, 256)


def _words(sizes: Sizes, batch: int, tokens: int) -> dict[str, Any]:
    ids = torch.zeros((sizes.batch or batch, sizes.tokens or tokens), dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def _pictures(sizes: Sizes, batch: int) -> dict[str, Any]:
    count = sizes.batch or batch
    return {"pixel_values": torch.zeros(count, 3, 224, 224), "labels": torch.zeros(count, dtype=torch.int64)}


def _gpt2(layers: int, width: int) -> Callable[[Sizes], Built]:
    def build(sizes: Sizes) -> Built:
        options = {"n_layer": sizes.layers or layers, "n_embd": width, "n_head": width // 64, "use_cache": False}
        model: Any = _made("GPT2", "GPT2LMHeadModel", **options)
        model.loss_type = "ForCausalLM"  # which its name does not say, and the library warns of that
        return model, _words(sizes, 8, 512)

    return build


def _llama(sizes: Sizes) -> Built:
    model = _made(
        "Llama",
        "LlamaForCausalLM",
        num_hidden_layers=sizes.layers or 16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32_000,
        use_cache=False,
    )
    return model, _words(sizes, 4, 1024)


def _bert(layers: int, width: int) -> Callable[[Sizes], Built]:
    def build(sizes: Sizes) -> Built:
        model = _made(
            "Bert",
            "BertForMaskedLM",
            num_hidden_layers=sizes.layers or layers,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=width // 64,
        )
        return model, _words(sizes, 16, 128)

    return build


def _t5(sizes: Sizes) -> Built:
    model = _made(
        "T5",
        "T5ForConditionalGeneration",
        num_layers=sizes.layers or 12,
        d_model=768,
        d_ff=3072,
        num_heads=12,
        d_kv=64,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return model, _words(sizes, 8, 256)


def _vit(sizes: Sizes) -> Built:
    model = _made("ViT", "ViTForImageClassification", num_hidden_layers=sizes.layers or 12, num_labels=1000)
    return model, _pictures(sizes, 32)


def _resnet50(sizes: Sizes) -> Built:
    model = _made("ResNet", "ResNetForImageClassification", depths=[3, 4, sizes.layers or 6, 3], num_labels=1000)
    return model, _pictures(sizes, 32)
