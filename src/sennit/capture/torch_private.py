"""The one file that touches private parts of torch to capture a model.

`torch.export` gives the forward graph of an unmodified module; `aot_export_joint_with_descriptors` traces forward and
backward of it together, and describes every input and output. Both run on fake tensors: no weights are read.
Tried with torch 2.11 and 2.13; the names used here are private to torch and may move between releases.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from sennit.capture.decompositions import decompositions

__all__ = ["JointGraph", "joint_graph"]


@dataclass(frozen=True, slots=True)
class JointGraph:
    """The joint graph, what each placeholder is, and which output is the gradient of which parameter."""

    module: fx.GraphModule
    parameters: dict[str, str]  # placeholder -> parameter path
    buffers: dict[str, str]
    arguments: dict[str, int]  # placeholder -> position among the flattened arguments
    tangents: tuple[str, ...]
    results: tuple[int, ...]  # positions in the output list that the model returns
    gradients: dict[int, str]  # position in the output list -> parameter path


def joint_graph(model: nn.Module, args: tuple[Any, ...]) -> JointGraph:
    """Trace forward and backward of `model(*args)` together."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # Attention in its mathematical form: its parts have operator rules of their own.
    with ExitStack() as stack, sdpa_kernel(SDPBackend.MATH):
        exported = torch.export.export(model, args, strict=False)
        module: nn.Module = exported.module(check_guards=False)
        joint = aot_export_joint_with_descriptors(stack, module, args, decompositions=decompositions())
    graph_module: fx.GraphModule = joint.graph_module
    return _described(graph_module)


def _described(module: fx.GraphModule) -> JointGraph:
    from torch._functorch._aot_autograd.descriptors import (
        BufferAOTInput,
        GradAOTOutput,
        ParamAOTInput,
        PlainAOTInput,
        PlainAOTOutput,
        TangentAOTInput,
    )

    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    arguments: dict[str, int] = {}
    tangents: list[str] = []
    for node in module.graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case ParamAOTInput() as desc:
                parameters[node.name] = desc.target
            case BufferAOTInput() as desc:
                buffers[node.name] = desc.target
            case PlainAOTInput() as desc:
                arguments[node.name] = desc.idx
            case TangentAOTInput():
                tangents.append(node.name)
            case other:
                raise AssertionError(f"torch described a placeholder as {other!r}")
    (output,) = module.graph.find_nodes(op="output")
    results = [i for i, desc in enumerate(output.meta["desc"]) if isinstance(desc, PlainAOTOutput)]
    gradients = {
        i: desc.grad_of.target
        for i, desc in enumerate(output.meta["desc"])
        if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, ParamAOTInput)
    }
    return JointGraph(module, parameters, buffers, arguments, tuple(tangents), tuple(results), gradients)
