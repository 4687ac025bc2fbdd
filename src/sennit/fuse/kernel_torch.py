"""A kernel of a strategy as something that torch runs: its operators as they are, or compiled into one.

`kernel_module` writes the body of a kernel as an fx graph: values that come from outside are its inputs, values that something outside
reads its outputs. Run as it is, it calls the very operators that the model calls, so its results are the model's, bit for bit. `compile_kernel`
hands it to Inductor by itself: the compiler then sees this group and nothing else, and cannot move what our own driver places around it.

Layers repeat, and so do their kernels. `signature` names a kernel by its structure, without the names of its values; two kernels with one signature share one
compiled artifact.

A graph does not say on which device a tensor is made from numbers (`aten.full`, `aten.arange`): `target_of` adds the device of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from sennit.capture.element_types import torch_dtype
from sennit.errors import CaptureError
from sennit.fuse.draws_torch import DRAWS
from sennit.fuse.signature import signature
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Op, Ref
from sennit.ir.operators import is_view
from sennit.ir.strategy_check import Kernel

__all__ = [
    "compile_kernel",
    "is_worth_compiling",
    "kernel_module",
    "operator_of",
    "returns_several",
    "sample_inputs",
    "signature",
    "target_of",
    "wanted_results",
]


def operator_of(kind: str) -> Any:
    """The torch operator with this full name, `aten.mm.default`."""
    found: Any = torch.ops
    for part in kind.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise CaptureError(f"torch has no operator {kind}", fix="register it before the model is run") from error
    return found


def target_of(op: Op, device: torch.device) -> Callable[..., Any]:
    """What is called with the operator's arguments."""
    if op.kind in DRAWS:
        return partial(DRAWS[op.kind], device=device)
    # a clone before a view may have been made without a copy, so a view may have to copy
    is_reshape = op.kind in ("aten.view.default", "aten._unsafe_view.default")
    target: Callable[..., Any] = operator_of("aten.reshape.default" if is_reshape else op.kind)
    if device.type != "cpu" and not op.reads and any(arg.name == "device" for arg in target._schema.arguments):  # type: ignore[attr-defined]
        return partial(target, device=device)
    return target


def kernel_module(
    kernel: Kernel, written: frozenset[str], device: torch.device | None = None
) -> tuple[fx.GraphModule, tuple[str, ...], tuple[str, ...]]:
    """The body as an fx module, the values that it takes, and those that it returns."""
    device = device or torch.device("cpu")
    graph = fx.Graph()
    reads = kernel.reads
    values: dict[str, Any] = {name: graph.placeholder(f"in{place}") for place, name in enumerate(reads)}
    for op in kernel.body:
        _add(graph, op, values, device)
    writes = tuple(
        value.name
        for op in kernel.body
        if op.name not in kernel.repeated
        for value in op.results
        if value.name in written
    )
    graph.output(tuple(values[name] for name in writes))
    return fx.GraphModule(torch.nn.Module(), graph), reads, writes


def _add(graph: fx.Graph, op: Op, values: dict[str, Any], device: torch.device) -> None:
    args = tuple(_argument(arg, values) for arg in op.args)
    kwargs = {name: _argument(arg, values) for name, arg in op.kwargs}
    node = graph.call_function(target_of(op, device), args, kwargs)
    if not returns_several(op):
        values[op.results[0].name] = node
        return
    for place, value in zip(wanted_results(op), op.results, strict=True):
        values[value.name] = graph.call_function(_item, (node, place))


def _item(values: Sequence[Tensor], place: int) -> Tensor:
    return values[place]


def returns_several(op: Op) -> bool:
    """Whether torch gives a tuple or list of results."""
    if op.kind in DRAWS:
        return False
    returns = operator_of(op.kind)._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))


def wanted_results(op: Op) -> tuple[int, ...]:
    """The places of the results that the operator gives: some have a mask of those that are wanted and give None for the others."""
    for arg in op.args:
        if isinstance(arg, tuple) and arg and all(isinstance(flag, bool) for flag in arg):
            return tuple(place for place, flag in enumerate(arg) if flag)
    return tuple(range(len(op.results)))


def _argument(arg: Arg, values: Mapping[str, Any]) -> Any:
    match arg:
        case Ref(name):
            return values[name]
        case DType():
            return torch_dtype(arg)
        case tuple():
            return [_argument(part, values) for part in arg]
        case _:
            return arg


def is_worth_compiling(kernel: Kernel) -> bool:
    """A single library call gains nothing from a compiler; neither do views."""
    return sum(not is_view(op.kind) for op in kernel.body) > 1


def compile_kernel(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """The module compiled by Inductor alone, for inputs of these shapes."""
    from torch._inductor import standalone_compile

    artifact: Callable[..., Sequence[Tensor]] = standalone_compile(
        module, list(inputs), dynamic_shapes="from_example_inputs"
    )
    return artifact


def sample_inputs(
    reads: Sequence[str], types: Mapping[str, TensorType], device: torch.device | str, seed: int = 0
) -> list[Tensor]:
    """Random tensors of these types: small positive numbers, so that no operator leaves its domain."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    made: list[Tensor] = []
    for name in reads:
        kind, dtype = types[name], torch_dtype(types[name].dtype)
        if dtype.is_floating_point:
            value = torch.rand(kind.shape, generator=generator, dtype=torch.float32).to(dtype)
        elif dtype is torch.bool:
            value = torch.rand(kind.shape, generator=generator) < 0.5
        else:
            value = torch.zeros(kind.shape, dtype=dtype)
        made.append(value.to(device))
    return made
