"""Rows of profile_h200.py as steps of a program: the same cost functions then see what was measured.

Shapes of results are not in the rows; torch finds them on its meta device, without a GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Phase, Ref
from sennit.ir.layout import Layout
from sennit.ir.memory_order import MemoryOrder
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Compute

__all__ = ["Call", "Reader"]

Row = dict[str, Any]
NAMES = {getattr(torch, item.torch_name): item for item in DType}


@dataclass(frozen=True, slots=True)
class Call:
    """One operator on the types of its arguments, and how those lie in memory that do not lie plainly."""

    step: Compute
    types: dict[str, TensorType]
    orders: dict[str, MemoryOrder]


class Reader:
    """`call` remembers what it made: layers repeat."""

    def __init__(self) -> None:
        self.mesh = Mesh.make({"x": 1})
        self.known: dict[str, Call | None] = {}

    def call(self, op: str, args: list[Any], kwargs: Row | None = None, causal: bool | None = None) -> Call | None:
        """None for what torch cannot do on the meta device."""
        key = json.dumps([op, args, kwargs, causal])
        if key not in self.known:
            try:
                self.known[key] = self._call(op, args, kwargs or {}, causal)
            except (NotImplementedError, RuntimeError, ValueError, KeyError, TypeError):
                self.known[key] = None
        return self.known[key]

    def _call(self, op: str, args: list[Any], kwargs: Row, causal: bool | None) -> Call:
        types: dict[str, TensorType] = {}
        orders: dict[str, MemoryOrder] = {}
        keeps_order = op == "aten.clone.default" and "memory_format" not in kwargs

        def named(value: Any) -> Arg:
            match value:
                case {"t": dtype, "s": shape}:
                    name = f"a{len(types)}"
                    types[name] = TensorType(tuple(shape), DType(dtype if dtype != "u64" else "i64"))
                    order = _order(shape, value.get("d"))
                    if order is not None and not (keeps_order and order.dense):
                        orders[name] = order
                    return Ref(name)
                case list():
                    return tuple(named(part) for part in value)
                case dict():
                    return None
                case _:
                    return value  # type: ignore[no-any-return]

        terms = tuple(named(value) for value in args)
        if causal is not None:
            terms = (*terms, causal)
        results = [
            Buffer(f"r{number}", f"r{number}", item.dtype, Layout(self.mesh, item.shape))
            for number, item in enumerate(self._results(op, args, kwargs, causal))
        ]
        types |= {buffer.name: buffer.type for buffer in results}
        return Call(Compute(op, terms, (), tuple(results), Phase.FORWARD), types, orders)

    def _results(self, op: str, args: list[Any], kwargs: Row, causal: bool | None) -> list[TensorType]:
        if "attention" in op:  # its statistics are small, and CUDA's kernels have no meta form here
            backward = op.split(".")[1].endswith("backward")
            query = args[1] if backward else args[0]
            item = TensorType(tuple(query["s"]), DType(query["t"]))
            return [item] * (3 if backward else 1)
        space, name, overload = op.split(".")
        function = getattr(getattr(getattr(torch.ops, space), name), overload)
        options = {key: _meta(value) for key, value in kwargs.items()}
        if "device" in options:
            options["device"] = torch.device("meta")
        found = function(*[_meta(value) for value in args], **options)
        return [
            TensorType(tuple(item.shape), NAMES[item.dtype])
            for item in tree_flatten(found)[0]
            if isinstance(item, torch.Tensor) and item.dtype in NAMES
        ]


def _order(shape: list[int], strides: list[int] | None) -> MemoryOrder | None:
    """None where the elements lie plainly."""
    if strides is None or not shape:
        return None
    # a dim of one element lies anywhere: it takes the stride that its place would have
    real = list(strides)
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            real[dim] = real[dim + 1] * shape[dim + 1] if dim + 1 < len(shape) else 1
    dims = tuple(sorted(range(len(shape)), key=lambda dim: (-real[dim], dim)))
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    order = MemoryOrder(dims, extent == prod(shape))
    return None if order.is_plain else order


def _meta(value: Any) -> Any:
    match value:
        case {"t": dtype, "s": shape}:
            kind = torch.uint64 if dtype == "u64" else getattr(torch, DType(dtype).torch_name)
            strides = value.get("d")
            if strides is None:
                return torch.empty(shape, dtype=kind, device="meta")
            return torch.empty_strided(shape, strides, dtype=kind, device="meta")
        case {"dtype": name}:
            return getattr(torch, DType(name).torch_name)
        case {"float": text}:
            return float(text)
        case {"device": _}:
            return torch.device("meta")
        case {"other": str(text)} if text.startswith("torch."):
            return getattr(torch, text.removeprefix("torch."))
        case list():
            return [_meta(part) for part in value]
        case _:
            return value
