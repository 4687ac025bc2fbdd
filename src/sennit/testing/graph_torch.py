"""A graph run in torch, operator by operator on whole tensors: exact against eager torch, whose kernels it calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sennit.capture.element_types import torch_dtype
from sennit.errors import GraphError
from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Graph, Op, Ref
from sennit.run.random import uniform

__all__ = ["run_graph_torch"]


def run_graph_torch(graph: Graph, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every output by its key; `state` has a tensor for each input by its path."""
    missing = [item.path for item in graph.inputs if item.path not in state]
    if missing:
        raise GraphError(f"no tensor is given for {', '.join(missing)}", where=f"graph {graph.name!r}")
    values = {item.value.name: state[item.path].detach() for item in graph.inputs}
    with torch.no_grad():
        for op in graph.ops:
            for result, tensor in zip(op.results, _apply(op, values), strict=True):
                if tuple(tensor.shape) != result.type.shape or tensor.dtype is not torch_dtype(result.type.dtype):
                    raise GraphError(
                        f"%{result.name} is {tensor.dtype}{list(tensor.shape)}, not {result.type}", where=op.describe()
                    )
                values[result.name] = tensor
    return {output.key: values[output.name] for output in graph.outputs}


def _apply(op: Op, values: Mapping[str, Tensor]) -> list[Tensor]:
    args = [_bind(arg, values) for arg in op.args]
    kwargs = {name: _bind(arg, values) for name, arg in op.kwargs}
    if op.kind == "sennit.uniform":
        return [uniform(*args)]
    packet, overload = op.kind.removeprefix("aten.").split(".")
    if packet in ("view", "_unsafe_view"):  # strides may differ from those at capture
        packet, overload = "reshape", "default"
    results = getattr(getattr(torch.ops.aten, packet), overload)(*args, **kwargs)
    return [part for part in results if part is not None] if isinstance(results, (tuple, list)) else [results]


def _bind(arg: Arg, values: Mapping[str, Tensor]) -> Any:
    match arg:
        case Ref(name):
            return values[name]
        case DType():
            return torch_dtype(arg)
        case tuple():
            return [_bind(part, values) for part in arg]
        case _:
            return arg
