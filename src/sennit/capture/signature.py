"""What a captured model is called with and what it returns: between Python's structures and tensors by path.

A call `model(*args, **kwargs)` holds tensors at *leaves*, inside tuples, lists, dicts and data classes. A leaf goes by
its path: the parameter's name in `forward`, then keys and positions, joined by dots (`input_ids`, `batch.labels`,
`args.0`). All other leaves (None, numbers, strings) were built into the graph, so a later call must have the same.

- `Signature.flatten(args, kwargs)`: the tensors of a call by path, checked against the capture;
- `Signature.rebuild(values)`: what the model returns, from tensors by path.

A path that is also the path of a parameter or a buffer, or one of sennit's own (`seed`, `tangent`), gets a prefix:
`inputs.` or `result.`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sennit.capture.element_types import dtype_of
from sennit.errors import CaptureError, RunError
from sennit.ir.dtype import TensorType

__all__ = ["BuiltIn", "ResultLeaf", "Signature", "argument_paths", "leaves", "result_paths", "type_of"]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A leaf that is no tensor: its value is part of the graph."""

    value: object


@dataclass(frozen=True, slots=True)
class ResultLeaf:
    """One leaf of what the model returns, in order: a tensor by its path, or a value that is always the same.

    `requires_grad`: a tensor that does so when the model itself returns it in training, and that is no loss.
    """

    path: str | None
    value: object = None
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    model: str  # the name of the model's class, for messages
    forward: inspect.Signature
    arguments: Mapping[str, TensorType | BuiltIn]
    renamed: Mapping[str, str]  # a leaf's path -> the path that it goes by in the graph, where they differ
    results: tuple[ResultLeaf, ...]
    assemble: Callable[[list[object]], object]  # the leaves of the result to the result

    def flatten(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """The tensors of a call by their path in the graph."""
        try:
            given = dict(bound_leaves(self.forward, args, kwargs or {}))
        except CaptureError as error:
            raise RunError(error.what, fix="call the model as it was captured") from error
        found: dict[str, Tensor] = {}
        for path in [*self.arguments, *(path for path in given if path not in self.arguments)]:
            captured, value = self.arguments.get(path, BuiltIn(None)), given.get(path)
            if isinstance(captured, BuiltIn):
                self._check_built_in(path, captured.value, value)
            else:
                found[self.renamed.get(path, path)] = self._checked(path, captured, value)
        return found

    def rebuild(self, values: Mapping[str, Tensor]) -> object:
        """What the model returns, with tensors from `values` by path."""
        return self.assemble([leaf.value if leaf.path is None else values[leaf.path] for leaf in self.results])

    def _check_built_in(self, path: str, captured: object, value: object) -> None:
        if isinstance(value, Tensor) or value != captured:
            what = f"a tensor {type_of(value)}" if isinstance(value, Tensor) else repr(value)
            raise RunError(
                f"argument {path!r} is {what}, but {self.model} was captured with {captured!r}",
                fix="capture the model again with the arguments that it is called with",
            )

    def _checked(self, path: str, captured: TensorType, value: object) -> Tensor:
        if not isinstance(value, Tensor):
            raise RunError(
                f"argument {path!r} is {value!r}, but {self.model} was captured with a tensor {captured}",
                fix="pass a tensor of that type",
            )
        if type_of(value) != captured:
            raise RunError(
                f"argument {path!r} is {type_of(value)}, but {self.model} was captured with {captured}",
                fix="call it with the shapes and types that it was captured with, or capture it again",
            )
        return value


def type_of(tensor: Tensor) -> TensorType:
    if not all(isinstance(size, int) for size in tensor.shape):
        raise CaptureError(
            f"a tensor of shape {list(tensor.shape)}, whose size depends on values",
            fix="give every tensor a fixed size: pad, or mask instead of selecting",
        )
    return TensorType(tuple(tensor.shape), dtype_of(tensor.dtype))


def argument_paths(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf of a call by path, those that `forward` has defaults for included."""
    return dict(bound_leaves(inspect.signature(model.forward), args, kwargs))


def bound_leaves(
    forward: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    try:
        bound = forward.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"the arguments do not fit forward{forward}: {error}") from error
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        if forward.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from leaves(value, "")
        else:
            yield from leaves(value, name)


def result_paths(result: object, taken: set[str]) -> tuple[str, ...]:
    """The path of every leaf of what the model returns, in order."""
    paths = []
    for path, _ in leaves(result, ""):
        path = path or "result"
        paths.append(f"result.{path}" if path in taken else path)
    return tuple(paths)


def leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """What a structure holds, with paths, in the order in which torch flattens it."""

    def join(key: object) -> str:
        return f"{path}.{key}" if path else str(key)

    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, join(key))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for key, part in zip(value._fields, value, strict=True):
            yield from leaves(part, join(key))
    elif isinstance(value, (tuple, list)):
        for position, part in enumerate(value):
            yield from leaves(part, join(position))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, torch.Tensor):
        for item in dataclasses.fields(value):
            yield from leaves(getattr(value, item.name), join(item.name))
    else:
        yield path, value
