"""Whether an operator with local arguments makes results of the local shapes: run on tensors without data, and
compared.

An argument that names a size of the whole often runs without complaint on a piece: `slice_backward` and `new_zeros`
make what they are told. So the arguments that `localize` gives, or that a program holds, are tried here before anything
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sennit.errors import PlanError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Ref
from sennit.ir.program import Compute

__all__ = ["ShapeCheck", "call", "operator_of"]


def operator_of(kind: str) -> Any:
    """The torch operator of a kind such as `aten.mm.default`."""
    namespace, name, overload = kind.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def call(kind: str, args: Sequence[Arg], kwargs: Sequence[tuple[str, Arg]], tensors: Iterator[Any]) -> tuple[Any, ...]:
    """The results of an operator that are there; `tensors` take the places of references, in order."""
    # a piece may lie differently in memory than the whole did, so a view may have to copy
    kind = "aten.reshape.default" if kind in ("aten.view.default", "aten._unsafe_view.default") else kind
    result = operator_of(kind)(
        *(_bind(arg, tensors) for arg in args), **{key: _bind(arg, tensors) for key, arg in kwargs}
    )
    many = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(part for part in many if part is not None)


def _bind(arg: Arg, tensors: Iterator[Any]) -> Any:
    match arg:
        case Ref():
            return next(tensors)
        case tuple():
            return [_bind(part, tensors) for part in arg]
        case DType():
            return getattr(torch, arg.torch_name)
        case _:
            return arg


class ShapeCheck:
    """Remembers what it tried: layers repeat."""

    def __init__(self) -> None:
        self.tried: set[tuple[object, ...]] = set()

    def check(self, step: Compute, reads: Sequence[TensorType], results: Sequence[TensorType], where: str) -> None:
        """Raise `PlanError` unless the step makes these local types from those."""
        key = (step.kind, _blank(step.args), _blank(step.kwargs), tuple(reads), tuple(results))
        if key in self.tried:
            return
        tensors = [
            torch.empty(item.shape, dtype=getattr(torch, item.dtype.torch_name), device="meta") for item in reads
        ]
        wanted = [str(item) for item in results]
        try:
            with torch.device("meta"):
                made = call(step.kind, step.args, step.kwargs, iter(tensors))
        except Exception as error:  # torch raises many kinds; each one means that these arguments do not fit
            raise PlanError(
                f"{step.kind} for %{step.op} cannot be computed on pieces {', '.join(map(str, reads))}: {error}",
                where=where,
                fix="split it otherwise, or give it a rule that fits",
            ) from error
        found = [f"{_name_of(part.dtype)}[{','.join(map(str, part.shape))}]" for part in made]
        if [_form(part.shape, part.dtype) for part in made] != [
            _form(item.shape, getattr(torch, item.dtype.torch_name)) for item in results
        ]:
            raise PlanError(
                f"{step.kind} for %{step.op} makes pieces {', '.join(found)} from {', '.join(map(str, reads)) or 'nothing'}, where "
                f"its layout has {', '.join(wanted)}",
                where=where,
                fix=f"its arguments {list(step.args)} name sizes of the whole: give those of the piece",
            )
        self.tried.add(key)


def _form(shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], bool]:
    """What must agree.

    Which float an operator keeps its statistics in depends on the device, which has none of these tensors.
    """
    return tuple(shape), dtype.is_floating_point


def _blank(arg: Any) -> object:
    if isinstance(arg, Ref):
        return Ref
    return tuple(map(_blank, arg)) if isinstance(arg, tuple) else (type(arg), arg)


def _name_of(dtype: torch.dtype) -> str:
    for name in DType:
        if getattr(torch, name.torch_name) is dtype:
            return name.value
    return str(dtype)
