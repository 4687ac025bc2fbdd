"""The one file that touches private parts of torch to capture a model.

`torch.export` gives the forward graph of an unmodified module; `aot_export_joint_with_descriptors` traces forward and
backward of it together, and describes every input and output. Both run on fake tensors: no weights are read, so a model on
the meta device is captured like any other. Under `no_grad` the same call gives the forward graph alone.
Tried with torch 2.11 and 2.13; the names used here are private to torch and may move between releases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from sennit.capture.certain import Certain

__all__ = ["Forward", "JointGraph", "distinct_leaves", "flat_arguments", "forward_graph", "joint_graph", "storage_key"]


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
    changed_arguments: tuple[int, ...]  # arguments that the model writes to


def forward_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    """Trace `model(*args, **kwargs)`."""
    from torch.utils._pytree import tree_unflatten

    with Certain():
        exported = torch.export.export(model, args, kwargs, strict=False)
    module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    spec = exported.call_spec.out_spec
    assert spec is not None
    results = tuple(part.meta["val"] if isinstance(part, fx.Node) else part for part in _returned(module))
    return Forward(module, results, lambda leaves: tree_unflatten(leaves, spec))


def joint_graph(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], *, losses: Collection[int], training: bool
) -> JointGraph:
    """Trace forward and backward together. Only the leaves `losses` of the result are differentiated; without `training`
    none is, and there is no backward."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _detach_results(forward.module, losses)
    # Attention in its mathematical form: its parts have operator rules of their own.
    with ExitStack() as stack, sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(training):
        joint = aot_export_joint_with_descriptors(stack, forward.module, args, kwargs, decompositions=_decompositions())
    graph_module: fx.GraphModule = joint.graph_module
    return _described(graph_module)


def flat_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[object]:
    """The leaves of a call in the order in which `JointGraph.arguments` counts them."""
    from torch.utils._pytree import tree_leaves

    found: list[object] = tree_leaves((args, dict(kwargs)))
    return found


def distinct_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with a tensor object of its own at each leaf: what is one tensor in the sample (tokens that are also
    their labels) may be two in the next call."""
    from torch.utils._pytree import tree_map

    fresh: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
    )
    return fresh


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements in memory; also on the meta device, where there is no memory."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _output(module: fx.GraphModule) -> fx.Node:
    node = next(reversed(module.graph.nodes))
    assert isinstance(node, fx.Node)
    assert node.op == "output"
    return node


def _returned(module: fx.GraphModule) -> list[Any]:
    leaves = _output(module).args[0]
    assert isinstance(leaves, (tuple, list))
    return list(leaves)


def _detach_results(module: fx.GraphModule, losses: Collection[int]) -> None:
    """Autograd asks for the upstream gradient of all that requires one: cut off what is not a loss."""
    node = _output(module)

    leaves = _returned(module)
    for position, part in enumerate(leaves):
        if isinstance(part, fx.Node) and position not in losses:
            with module.graph.inserting_before(node):
                leaves[position] = module.graph.call_function(torch.ops.aten.detach.default, (part,))
    node.args = (tuple(leaves),)
    module.recompile()


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """What is taken apart before planning: the loss, so that its count of targets is a tensor of its own, and
    compositions whose parts have rules."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    wanted: list[Any] = [aten.nll_loss_forward, aten.nll_loss_backward, aten._safe_softmax, aten.tril]
    wanted += [aten.split.Tensor, aten.t, aten.transpose.int]
    return dict(get_decompositions(wanted))


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

    joint = JointGraph(module, {}, {}, {}, {}, {}, {}, {}, ())
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
            case other:
                raise AssertionError(f"torch described a placeholder as {other!r}")
    changed: list[int] = []
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
            case None | GradAOTOutput():
                pass  # nothing, or the gradient of an argument
            case other:
                raise AssertionError(f"torch described an output as {other!r}")
    return replace(joint, changed_arguments=tuple(changed))
