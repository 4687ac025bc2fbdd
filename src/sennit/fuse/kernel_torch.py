"""A kernel of a strategy as something that torch runs: its operators as they are, or compiled into one.

`kernel_module` writes the body of a kernel as an fx graph: values that come from outside are its inputs, values that
something outside reads its outputs. Run as it is, it calls the very operators that the model calls, so its results are
the model's, bit for bit. `compile_kernel` hands it to Inductor by itself: the compiler then sees this group and nothing
else, and cannot move what our own driver places around it.

Layers repeat, and so do their kernels. `signature` names a kernel by its structure, without the names of its values;
two kernels with one signature share one compiled artifact.

A graph does not say on which device a tensor is made from numbers (`aten.full`, `aten.arange`): the device of the model
is passed to what `takes_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from sennit.capture.element_types import torch_dtype
from sennit.errors import CaptureError
from sennit.fuse.draws_torch import DRAWS
from sennit.fuse.operator_class import PRODUCTS, is_attention, moves_nothing, stem
from sennit.fuse.signature import signature
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Op, Ref
from sennit.ir.strategy_check import Kernel
from sennit.kernels.attention_calls_torch import CudaAttention, cuda_call

__all__ = [
    "CompiledKernel",
    "call_of",
    "compile_kernel",
    "direct_of",
    "is_worth_compiling",
    "kernel_module",
    "nodes_of",
    "operator_of",
    "results_of",
    "returns_several",
    "sample_inputs",
    "signature",
    "takes_device",
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


def target_of(op: Op) -> Callable[..., Any]:
    """What is called with the operator's arguments."""
    if op.kind in DRAWS:
        return DRAWS[op.kind]
    if (method := cuda_call(op.kind)) is not None:
        return getattr(CudaAttention(), method)  # type: ignore[no-any-return]
    # a clone before a view may have been made without a copy, so a view may have to copy
    is_reshape = op.kind in ("aten.view.default", "aten._unsafe_view.default")
    target: Callable[..., Any] = operator_of("aten.reshape.default" if is_reshape else op.kind)
    return target


# Operators that torch binds to Python under their own names, with the arguments of their schemas in the same order
_BOUND = frozenset(
    [
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "add",
        "addmm",
        "bmm",
        "cat",
        "clone",
        "div",
        "embedding",
        "eq",
        "mm",
        "mul",
        "ne",
        "neg",
        "permute",
        "relu",
        "reshape",
        "select",
        "sigmoid",
        "sub",
        "sum",
        "tanh",
        "unsqueeze",
        "where",
    ]
)


def direct_of(op: Op) -> Callable[..., Any]:
    """The same operator by torch's own binding where it has one.

    Its arguments are read in half the time that a call through `torch.ops` takes, 2 us less: a step makes a thousand
    such calls.
    """
    target: Any = target_of(op)
    if op.kind in DRAWS or cuda_call(op.kind) is not None:
        return target  # type: ignore[no-any-return]
    name = str(target._schema.name).removeprefix("aten::")
    found: Callable[..., Any] = getattr(torch, name) if name in _BOUND else target
    return found


def takes_device(op: Op) -> bool:
    """Whether it makes a tensor from nothing, on a device that the graph does not say."""
    if op.kind in DRAWS:
        return True
    return not op.reads and any(arg.name == "device" for arg in operator_of(op.kind)._schema.arguments)


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


def nodes_of(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a kernel's operators, in their order."""
    return [node for node in module.graph.nodes if node.op == "call_function" and node.target is not _item]


def call_of(
    op: Op, values: Mapping[str, Any], device: torch.device
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What is called, and with what: tensors, or nodes of an fx graph, by name."""
    args = tuple(_argument(arg, values) for arg in op.args)
    kwargs = {name: _argument(arg, values) for name, arg in op.kwargs}
    if op.kind == "aten.clone.default":
        # a capture keeps values and not how they lie. A model copies to have its values in order (`contiguous`, a
        # reshape): a copy in the order of what it copies would be made a second time by the view behind it
        kwargs["memory_format"] = torch.contiguous_format
    return target_of(op), args, {**kwargs, "device": device} if takes_device(op) else kwargs


def results_of(op: Op, returned: Any) -> dict[str, Any]:
    """The operator's values by name, in what torch returned."""
    if not returns_several(op):
        return {op.results[0].name: returned}
    return {value.name: returned[place] for place, value in zip(wanted_results(op), op.results, strict=True)}


def _add(graph: fx.Graph, op: Op, values: dict[str, Any], device: torch.device) -> None:
    node = graph.call_function(*call_of(op, values, device))
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
    """The places of the results that the operator gives: some have a mask of those that are wanted and give None for
    the others.
    """
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


def is_worth_compiling(kernel: Kernel, *, lone: bool = False) -> bool:
    """A single library call gains nothing from a compiler; neither do views.

    With `lone` a single operator that no library has a better kernel for is worth it too, as on a GPU.
    """
    busy = [op for op in kernel.body if not moves_nothing(op)]
    if len(busy) == 1 and lone:
        return stem(busy[0].kind) not in PRODUCTS and not is_attention(busy[0])
    return len(busy) > 1


def compile_kernel(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """The module compiled by Inductor alone, for inputs of these shapes.

    It is tuned when it is first called: left to itself, Inductor makes values of all its sizes while it compiles and
    tunes on them, with whatever else the device does then.
    """
    from torch._inductor import standalone_compile

    options = {"config_patches": {"triton.autotune_at_compile_time": False}}
    artifact: Callable[..., Sequence[Tensor]] = standalone_compile(
        module, list(inputs), dynamic_shapes="from_example_inputs", options=options
    )
    return artifact


@dataclass(slots=True)
class CompiledKernel:
    """A kernel that is compiled when it is first called: the compiler fixes the strides of the inputs, and which
    strides they have is known when they are there. `artifacts` are shared by all kernels of a model, by signature and
    strides; at one place of a program the strides are always the same.
    """

    module: fx.GraphModule
    signature: str
    artifacts: dict[tuple[str, tuple[tuple[int, ...], ...]], Callable[..., Sequence[Tensor]]]
    artifact: Callable[..., Sequence[Tensor]] | None = None

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if self.artifact is None:
            key = (self.signature, tuple(tensor.stride() for tensor in inputs))
            if key not in self.artifacts:
                self.artifacts[key] = compile_kernel(self.module, inputs)
            self.artifact = self.artifacts[key]
        return self.artifact(*inputs)


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
