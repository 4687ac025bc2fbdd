"""The rules of torch's DTensor, as a source for operators that our own table lacks.

The one file that touches DTensor's privates.

DTensor states an operator's sharding in two ways. *Single-dim* strategies list, for one mesh dim, placements of every
result and input: taken as they are. *Legacy* functions take a schema and return strategies for a given placement of the
inputs: asked once for each way to shard one input of a mesh of two. Both work without a process group, on a mesh that
is only described.

What is not taken over: averages (`Partial(avg)`: a mean over uneven parts is no rule), placements with strides or
padding, and rows that shard a dim unevenly. Every row is certified by execution before a program relies on it, like all
rules. Tried with torch 2.11, 2.13 and 2.15. A release that has moved these names gives no rules here, and says so in
the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from sennit.capture.rules.rule import Listed, Row, Types
from sennit.capture.rules.shape_check import operator_of
from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Op, Ref
from sennit.ir.layout import Reduction

__all__ = ["dtensor_rule"]

_LOG = logging.getLogger(__name__)


def dtensor_rule(op: Op, types: Types) -> Listed | None:
    """The rows that DTensor has for an operator, or None where it has none."""
    if not op.kind.startswith("aten."):
        return None
    try:
        operator, propagator = operator_of(op.kind), _propagator()
        if operator in propagator.op_single_dim_strategy_funcs:
            rows = _single_dim(op, types, operator, propagator)
        elif operator in propagator.op_strategy_funcs:
            rows = _legacy(op, types, operator, propagator)
        else:
            return None
    except (
        AttributeError,
        ImportError,
        TypeError,
        AssertionError,
        RuntimeError,
        NotImplementedError,
        IndexError,
    ) as error:
        _LOG.info("DTensor has no usable rule for %s: %s: %s", op.kind, type(error).__name__, error)
        return None
    useful = tuple(
        dict.fromkeys(row for row in rows if row is not None and any(part is not None for part in row.reads))
    )
    return Listed(useful, "torch DTensor") if useful else None


def _propagator() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


def _mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("axis",), _init_backend=False, _rank=0)


def _meta(op: Op, types: Types, wrap: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with `wrap(position, type)` in place of each tensor."""
    positions = iter(range(len(op.reads)))
    names = iter(op.reads)

    def bind(arg: Arg) -> Any:
        match arg:
            case Ref():
                return wrap(next(positions), types[next(names)])
            case DType():
                return getattr(torch, arg.torch_name)
            case tuple():
                return [bind(part) for part in arg]  # the functions tell one dim from several by this
            case _:
                return arg

    return tuple(bind(arg) for arg in op.args), {key: bind(arg) for key, arg in op.kwargs}


def _tensor_meta(item: Any) -> Any:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    strides, step = [], 1
    for size in reversed(item.shape):
        strides.append(step)
        step *= size
    return TensorMeta(torch.Size(item.shape), tuple(reversed(strides)), getattr(torch, item.dtype.torch_name))


def _single_dim(op: Op, types: Types, operator: Any, propagator: Any) -> list[Row | None]:
    args, kwargs = _meta(op, types, lambda _, item: _tensor_meta(item))
    found = propagator.op_single_dim_strategy_funcs[operator]
    lists = getattr(found, "func", found)(operator, args, kwargs)
    return [_row(op, types, placements) for placements in lists]


def _legacy(op: Op, types: Types, operator: Any, propagator: Any) -> list[Row | None]:
    """Every input gets as many specs as the first: the functions walk all lists in step."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy

    mesh, rows = _mesh(), []
    for chosen, name in enumerate(op.reads):
        for dim in range(len(types[name].shape)):

            def wrap(position: int, item: Any, chosen: int = chosen, dim: int = dim) -> Any:
                placement = Shard(dim) if position == chosen else Replicate()
                spec = DTensorSpec(mesh, (placement,), _tensor_meta(item))
                return OpStrategy([OpSpec(spec)])

            args, kwargs = _meta(op, types, wrap)
            schema = OpSchema(operator, args, kwargs)
            for strategy in propagator.op_strategy_funcs[operator](schema).strategies:
                outputs = strategy.output_specs
                many = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
                placements = [spec.placements[0] for spec in many if spec is not None]
                rows.append(_row(op, types, [*placements, *(spec.placements[0] for spec in strategy.input_specs)]))
    return rows


def _row(op: Op, types: Types, placements: Iterable[Any]) -> Row | None:
    """Placements of the results, then of the reads, as a row; None for what we do not take over."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    given = [item for item in placements if item is not None]
    shapes = [value.type.shape for value in op.results] + [types[name].shape for name in op.reads]
    if len(given) != len(shapes):
        return None
    entries: list[int | Reduction | None] = []
    for item, shape in zip(given, shapes, strict=True):
        if isinstance(item, Replicate):
            entries.append(None)
        elif type(item) is Partial:  # its subclasses are sums of masked parts, which need a form of their own
            if item.reduce_op not in [reduction.value for reduction in Reduction]:
                return None
            entries.append(Reduction(item.reduce_op))
        elif type(item) is Shard or type(item).__name__ == "_ShardingPlaceholder":
            dim = item.dim % len(shape) if shape else 0
            entries.append(dim)
        else:
            return None
    results = len(op.results)
    return Row(tuple(entries[results:]), tuple(entries[:results]))
