"""The one file that touches private parts of torch to capture a model.

`torch.export` gives the forward graph of an unmodified module; `aot_export_joint_with_descriptors` traces forward and
backward of it together, and describes every input and output. Both run on fake tensors: no weights are read, so a model
on the meta device is captured like any other. Under `no_grad` the same call gives the forward graph alone. Tried with
torch 2.11, 2.13 and 2.15; the names used here are private to torch and may move between releases.
"""

from __future__ import annotations

import io
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sennit.capture.certain import Certain
from sennit.capture.decompositions import decompositions

__all__ = [
    "Forward",
    "JointGraph",
    "Recorder",
    "distinct_leaves",
    "flat_arguments",
    "forward_graph",
    "joint_graph",
    "storage_key",
    "without_memory",
]


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward graph, and what it returns: a fake tensor or a constant per leaf, and how leaves make the result."""

    module: fx.GraphModule
    results: tuple[object, ...]
    assemble: Callable[[list[object]], object]


@dataclass(frozen=True, slots=True)
class JointGraph:
    """The joint graph, what each placeholder is, and what each output is. An output goes by its position."""

    module: fx.GraphModule
    parameters: dict[str, str]  # placeholder -> parameter path
    buffers: dict[str, str]
    arguments: dict[str, int]  # placeholder -> position among the flattened arguments
    tangents: dict[str, int]  # placeholder -> the leaf of the result whose upstream gradient it is
    results: dict[int, int]  # output -> leaf of the result
    gradients: dict[int, str]  # output -> parameter path
    updates: dict[int, str]  # output -> path of the buffer whose new value it is
    changed_arguments: tuple[int, ...] = ()  # arguments that the model writes to
    changed_parameters: tuple[str, ...] = ()
    with_gradient: frozenset[int] = frozenset()  # leaves beside the losses that require one in the model


@dataclass(frozen=True, slots=True)
class _Assembly:
    """Leaves to the result, by a result that has their numbers: it can be pickled, which torch's own description of one
    warns of.
    """

    numbered: object

    def __call__(self, leaves: list[object]) -> object:
        from torch.utils._pytree import tree_map

        result: object = tree_map(lambda number: leaves[number], self.numbered)
        return result


def forward_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    """Trace `model(*args, **kwargs)`."""
    from torch.utils._pytree import tree_unflatten

    with Certain(), _quiet(), warnings.catch_warnings():
        # torch's recurrent nets hold their weights a second time, in a list
        warnings.filterwarnings("ignore", message=r"The tensor attributes? self\.\S*_flat_weights")
        exported = torch.export.export(model, args, kwargs, strict=False)
    module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    _inline_grad_regions(module)
    spec = exported.call_spec.out_spec
    assert spec is not None
    results = tuple(part.meta["val"] if isinstance(part, fx.Node) else part for part in _returned(module))
    return Forward(module, results, _Assembly(tree_unflatten(list(range(len(results))), spec)))


@contextmanager
def _without_onednn() -> Iterator[None]:
    """`torch.backends.mkldnn.flags` would set the other flags too, and warn of one of them."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Where torch fails to trace it writes the whole graph to stderr: our error says more with less."""
    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")
    ]
    levels = [logger.level for logger in loggers]
    written = io.StringIO()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stderr(written):
            yield
        sys.stderr.write(written.getvalue())  # not of torch: the model's own
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _inline_grad_regions(module: fx.GraphModule) -> None:
    """`with torch.no_grad()` becomes an operator on a submodule, behind which the modules and lines of its operators
    are lost. Put the operators in its place, with what it returns and what it writes detached: a buffer that it writes
    to must get no gradient either. What it reads stays as it is: under `no_grad` too a product asks whether its operands
    require a gradient, and is another one if they do not.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_set_grad_enabled):
        enabled, region, *operands = node.args
        assert isinstance(region, fx.Node)
        inner = module.get_submodule(str(region.target))
        assert isinstance(inner, fx.GraphModule)
        _inline_grad_regions(inner)
        with module.graph.inserting_before(node):
            inside = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
            results: Any = module.graph.graph_copy(inner.graph, inside)
            if not enabled:
                results = [_detached(module.graph, part) for part in results]
        if not enabled:
            for part in inner.graph.nodes:
                if part.op == "call_function":
                    _write_detached(inside[part])
        for user in list(node.users):  # each takes one result of the tuple
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.recompile()


def _write_detached(node: fx.Node) -> None:
    """Of an operator that writes to one of its arguments: the others, detached."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return

    written = {part.name for part in schema.arguments if part.alias_info is not None and part.alias_info.is_write}

    def read(name: str, value: Any) -> Any:
        return value if name in written else fx.map_arg(value, lambda part: _detached(node.graph, part))

    names = [part.name for part in schema.arguments]
    with node.graph.inserting_before(node):
        node.args = tuple(read(name, value) for name, value in zip(names, node.args, strict=False))
        node.kwargs = {name: read(name, value) for name, value in node.kwargs.items()}


def _detached(graph: fx.Graph, part: Any) -> Any:
    if not isinstance(part, fx.Node) or not isinstance(part.meta.get("val"), Tensor):
        return part
    node = graph.call_function(torch.ops.aten.detach.default, (part,))
    node.meta["val"] = part.meta["val"]  # the model may return it as it is
    return node


def joint_graph(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], *, losses: Collection[int], training: bool
) -> JointGraph:
    """Trace forward and backward together.

    Only the leaves `losses` of the result are differentiated; without `training` none is, and there is no backward.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.nn.attention import SDPBackend, sdpa_kernel

    noted: set[int] = set()
    _detach_results(forward.module, losses, noted)
    # Attention in its mathematical form: its parts have operator rules of their own. A recurrent net position by
    # position: oneDNN's layer takes itself for one in inference here, and then leaves out what its backward pass reads.
    mathematical = sdpa_kernel(SDPBackend.MATH)
    with _quiet(), ExitStack() as stack, mathematical, _without_onednn(), torch.set_grad_enabled(training):
        joint = aot_export_joint_with_descriptors(stack, forward.module, args, kwargs, decompositions=decompositions())
    graph_module: fx.GraphModule = joint.graph_module
    return replace(_described(graph_module), with_gradient=frozenset(noted))


def flat_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[object]:
    """The leaves of a call in the order in which `JointGraph.arguments` counts them."""
    from torch.utils._pytree import tree_leaves

    found: list[object] = tree_leaves((args, dict(kwargs)))
    return found


def distinct_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with a tensor object of its own at each leaf: what is one tensor in the sample (tokens that are
    also their labels) may be two in the next call.
    """
    from torch.utils._pytree import tree_map

    fresh: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
    )
    return fresh


@contextmanager
def without_memory(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, everything: bool = False
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A model on the meta device, and a call of it, as fake tensors that say they are on the CPU.

    On the meta device itself some operators have no derivative. Weights with memory are left as they are, unless
    `everything` is asked for: then what the model makes inside has no memory either.
    """
    from torch._subclasses import FakeTensorMode
    from torch.utils._pytree import tree_map

    places = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and (everything or tensor.device.type == "meta")
    ]
    if not places and not everything:
        yield args, kwargs
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}  # tied tensors stay tied

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, requires_grad=tensor.requires_grad)
        return empty

    try:
        for tensors, name, tensor in places:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = fake(tensor)
            tensors[name] = fakes[id(tensor)]  # type: ignore[assignment]
        call = tree_map(lambda leaf: fake(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with mode if everything else nullcontext():
            yield call
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor  # type: ignore[assignment]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives its base class no types
    """Notes every operator that runs: its name, its plain arguments, the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from torch.utils._pytree import tree_leaves

        result = func(*args, **(kwargs or {}))
        plain = [str(leaf) for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.noted.append((str(func), plain, shapes))
        return result


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements in memory; also on the meta device, where there is no memory."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _output(module: fx.GraphModule) -> fx.Node:
    node: fx.Node
    (node,) = module.graph.find_nodes(op="output")
    assert isinstance(node, fx.Node)
    return node


def _returned(module: fx.GraphModule) -> list[Any]:
    leaves = _output(module).args[0]
    assert isinstance(leaves, (tuple, list))
    return list(leaves)


def _detach_results(module: fx.GraphModule, losses: Collection[int], noted: set[int]) -> None:
    """Autograd asks for the upstream gradient of all that requires one: cut off what is not a loss.

    Which of these leaves require one is noted when the module is traced: autograd itself says it there.
    """
    node = _output(module)

    def cut(part: Tensor, position: int) -> Tensor:
        if part.requires_grad:
            noted.add(position)
        return part.detach()

    leaves = _returned(module)
    for position, part in enumerate(leaves):
        if isinstance(part, fx.Node) and position not in losses:
            with module.graph.inserting_before(node):
                leaves[position] = module.graph.call_function(cut, (part, position))
    node.args = (tuple(leaves),)
    module.recompile()


def _described(module: fx.GraphModule) -> JointGraph:
    from torch._functorch._aot_autograd.descriptors import (
        BufferAOTInput,
        GradAOTOutput,
        InputMutationAOTOutput,
        ParamAOTInput,
        PlainAOTInput,
        PlainAOTOutput,
        TangentAOTInput,
    )

    joint = JointGraph(module, {}, {}, {}, {}, {}, {}, {})
    for node in module.graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case ParamAOTInput(target=path):
                joint.parameters[node.name] = path
            case BufferAOTInput(target=path):
                joint.buffers[node.name] = path
            case PlainAOTInput(idx=position):
                joint.arguments[node.name] = position
            case TangentAOTInput(output=PlainAOTOutput(idx=position)):
                joint.tangents[node.name] = position
            case TangentAOTInput():
                pass  # of a parameter that the model writes to: refused below
            case other:
                raise AssertionError(f"torch described a placeholder as {other!r}")
    changed: list[int] = []
    changed_parameters: list[str] = []
    for position, desc in enumerate(_output(module).meta["desc"]):
        match desc:
            case PlainAOTOutput(idx=leaf):
                joint.results[position] = leaf
            case GradAOTOutput(grad_of=ParamAOTInput(target=path)):
                joint.gradients[position] = path
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=path)):
                joint.updates[position] = path
            case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=argument)):
                changed.append(argument)
            case InputMutationAOTOutput(mutated_input=ParamAOTInput(target=path)):
                changed_parameters.append(path)
            case None | GradAOTOutput():
                pass  # nothing, or the gradient of an argument
            case other:
                raise AssertionError(f"torch described an output as {other!r}")
    return replace(joint, changed_arguments=tuple(changed), changed_parameters=tuple(changed_parameters))
