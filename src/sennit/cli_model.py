"""The MODEL argument of the commands: a name of the catalogue, a folder of Hugging Face, or a function of yours.

    model    := source (":" option ("," option)*)?
    source   := NAME                        of the catalogue (`demo/models.py`): gpt, gpt2, bert-base, vgg19, ...
              | "family" "." NAME           a small model of the test suite, as family.llama
              | "hf" "." FOLDER             a folder with a config.json of a causal language model of transformers
              | MODULE ":" FUNCTION         or FILE.py ":" FUNCTION, which returns the model and what it is called with
    option   := ("layers" | "batch" | "tokens") "=" NUMBER | "dtype" "=" ("f32" | "bf16" | "f16" | "f64")

`layers`, `batch` and `tokens` change the sizes of catalogue models, the first two also those of families. A function
returns `(model, args)` with a tuple, or `(model, kwargs)` with a dict; the model's call returns its loss. With
`memory=False` a catalogue or family model is made on the meta device: its shapes are there and its weights are not,
which is all that planning and simulating look at.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sennit.errors import CaptureError

if TYPE_CHECKING:
    from sennit.demo.models import Module

__all__ = ["ModelSource", "Sample", "load_model", "parse_model"]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one call of the model is given."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The argument, read: `function` is of a module or file, and None for the other kinds."""

    name: str
    function: str | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    dtype: str | None = None


def load_model(text: str, *, memory: bool = True) -> tuple[Module, Sample]:
    """The model that the text names, and a sample call of it."""
    from sennit.demo.models import Sizes, accept, cast, named_model

    source = parse_model(text)
    if source.function is not None:
        model, called = accept(_function(source)(), f"{source.name}:{source.function}")
    else:
        model, called = named_model(source.name, Sizes(**dict(source.sizes)), memory=memory)
    if source.dtype is not None:
        model, called = cast(model, called, source.dtype)
    return model, Sample(called) if isinstance(called, tuple) else Sample((), called)


def parse_model(text: str) -> ModelSource:
    name, *rest = text.split(":")
    function: str | None = None
    if rest and "=" not in rest[0]:
        function, *rest = rest
    if not name or len(rest) > 1 or function == "":
        raise CaptureError(f"{text!r} names no model", fix="write NAME, NAME:batch=8,layers=2 or module:function")
    sizes: list[tuple[str, int]] = []
    dtype: str | None = None
    for option in rest[0].split(",") if rest else ():
        key, _, value = option.partition("=")
        if key in ("layers", "batch", "tokens") and value.isdecimal() and int(value) > 0:
            sizes.append((key, int(value)))
        elif key == "dtype" and value in ("f32", "bf16", "f16", "f64"):
            dtype = value
        else:
            raise CaptureError(
                f"{option!r} is no option of a model",
                where=repr(text),
                fix="use layers=N, batch=N, tokens=N or dtype=f32, bf16, f16, f64",
            )
    if function is not None and sizes:
        raise CaptureError(f"{text!r} gives sizes to a function", fix="let the function make the sizes that you want")
    return ModelSource(name, function, tuple(sizes), dtype)


def _function(source: ModelSource) -> Any:
    assert source.function is not None
    made = getattr(_module(source.name), source.function, None)
    if made is None:
        raise CaptureError(f"{source.name} has no {source.function!r}", fix="name a function that it defines")
    return made


def _module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
        if spec is None or spec.loader is None:
            raise CaptureError(f"there is no file {name}", fix="give the path of a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # so that what it defines can be pickled
        spec.loader.exec_module(module)
        return module
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a script's own folder stands there, not the one that it is run in
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not name.startswith(error.name):
            raise  # the module is there, and imports something that is not
        raise CaptureError(
            f"there is no module {name!r}", fix="install it, run where it lies, or give the path of its .py file"
        ) from error
