"""An unmodified torch model to a `Graph`: operators on logical tensors, forward and backward.

The joint graph of torch comes with what planning needs: the module and source line of each operator, which phase it is
in, and for a backward operator the sequence number of the forward one. Here that is brought into the value type: tuples
of results become named values, aliases vanish, tied parameters become one, random operators are taken apart
(`random.py`), and nothing that the outputs do not need is kept.

`capture(model, args, kwargs)` is the simple face; `capture_call` also gives the signature, which turns calls into
tensors by path and back (`signature.py`), and the constants that the model's code made.

**Losses.** What is differentiated is the result called `loss`, if there is one; else every floating scalar that depends
on a parameter. A model that returns one scalar and nothing else has a loss without a path.

**Modes.** `training=True` captures forward and backward, in training mode; `training=False` the forward alone, in
evaluation mode. A model that is in the mode already is taken as it is, frozen parts included; else
`model.train(training)` holds while it is captured.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from sennit.capture.depth import check_depth
from sennit.capture.edges import Edges
from sennit.capture.element_types import dtype_of
from sennit.capture.explain import explain, line_of, place_of, refuse_dynamic
from sennit.capture.fold import NotPeriodic, unroll
from sennit.capture.random import RandomParts, is_random
from sennit.capture.runs import Run, find_runs, shortened
from sennit.capture.signature import Signature, argument_paths, type_of
from sennit.capture.torch_private import (
    JointGraph,
    distinct_leaves,
    forward_graph,
    joint_graph,
    without_memory,
)
from sennit.errors import CaptureError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Graph, Input, Op, Output, OutputKind, Phase, Ref, Role, Value, refs

__all__ = ["Captured", "Model", "capture", "capture_call"]

Model = nn.Module


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph and what surrounds it.

    `constants` are the tensors that the model's code made from numbers, by the path of the `buffer` inputs that stand
    for them: they are in no state dict.
    """

    graph: Graph
    signature: Signature
    constants: Mapping[str, Tensor]


def capture(
    model: Model,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = True,
    name: str | None = None,
) -> Graph:
    """The graph of `model(*args, **kwargs)`: forward and backward, or in inference the forward alone."""
    return capture_call(model, args, kwargs, training=training, name=name).graph


def capture_call(
    model: Model,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = True,
    name: str | None = None,
    fold: bool = True,
) -> Captured:
    """The graph of one call with its signature.

    With `fold`, equal layers are captured a few times and copied: see `fold.py`.
    """
    args, kwargs = distinct_leaves(args, dict(kwargs or {}))
    name = name or type(model).__name__
    argument_paths(model, args, kwargs)  # raises where the arguments do not fit
    with _mode(model, training), without_memory(model, args, kwargs) as (args, kwargs):
        runs = find_runs(model) if fold else ()
        if runs:
            try:
                return _folded(model, args, kwargs, runs, training=training, name=name)
            except (NotPeriodic, CaptureError) as reason:
                logging.getLogger(__name__).info("%s: captured layer by layer, because %s", name, reason)
        return _whole(model, args, kwargs, training=training, name=name)


def _folded(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], runs: tuple[Run, ...], *, training: bool, name: str
) -> Captured:
    check_depth(model, args, kwargs, runs)
    with shortened(model, runs):
        captured = _whole(model, args, kwargs, training=training, name=name)
    graph = captured.graph
    for run in runs:
        graph = unroll(graph, run)
    return replace(captured, graph=graph)


def _whole(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool, name: str) -> Captured:
    try:
        forward = forward_graph(model, args, kwargs)
    except Exception as error:  # torch raises many kinds; each one means that this model was not captured
        raise explain(model, error) from error
    refuse_dynamic(model, forward.module)
    edges = Edges(model, args, kwargs, forward)
    losses = edges.losses() if training else ()
    try:
        joint = joint_graph(forward, args, kwargs, losses=losses, training=training)
    except Exception as error:
        raise explain(model, error) from error
    return _Reader(edges, joint, training).read(name)


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


class _Reader:
    """Walks the nodes of one joint graph, in order."""

    def __init__(self, edges: Edges, joint: JointGraph, training: bool) -> None:
        self.edges = edges
        self.joint = joint
        self.training = training
        self.alias: dict[str, str] = {}  # a node -> the value it is another name of
        self.types: dict[str, TensorType] = {}
        self.modules: dict[int, str] = {}  # sequence number -> module of the forward operator
        self.calls: dict[str, tuple[tuple[str, int], ...]] = {}  # operator -> modules around it, and which call of each
        self.taken = {node.name for node in joint.module.graph.nodes if node.op == "call_function"}
        self.inputs: dict[str, Input] = {}
        self.constants: dict[str, Tensor] = {}
        self.random = RandomParts(self._free("seed"))

    def read(self, name: str) -> Captured:
        self._refuse_writes()
        ops: list[Op] = []
        for node in self.joint.module.graph.nodes:
            match node.op:
                case "placeholder":
                    self._placeholder(node)
                case "get_attr":
                    ops += self._constant(node)
                case "call_function":
                    try:
                        ops += self._ops(node)
                    except CaptureError as error:
                        raise CaptureError(error.what, where=error.where or place_of(node), fix=error.fix) from None
        if self.random.drawn:
            self._input(Role.SEED, self.random.seed, TensorType((2,), DType.I64), "seed")
        outputs = self._outputs()
        graph = _without_dead_code(name, list(self.inputs.values()), self._counted(ops), outputs)
        live = {item.path for item in graph.inputs}
        constants = {path: value for path, value in self.constants.items() if path in live}
        signature = self.edges.signature(set(self.joint.tangents.values()), self.joint.with_gradient)
        return Captured(graph, signature, constants)

    # ---- inputs ------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        joint, edges = self.joint, self.edges
        if node.meta.get("val") is None:
            return  # an argument that is no tensor
        if node.name in joint.parameters:
            path, role = edges.tied[joint.parameters[node.name]], Role.PARAM
        elif node.name in joint.buffers:
            path, role = edges.tied[joint.buffers[node.name]], Role.BUFFER
        elif node.name in joint.arguments:
            argument = edges.argument_path[joint.arguments[node.name]]
            if argument is None:
                return  # a number, which is built into the graph
            path, role = edges.renamed.get(argument, argument), Role.INPUT
        else:
            loss = edges.loss_path(joint.tangents[node.name])
            path, role = f"tangent.{loss}" if loss else "tangent", Role.TANGENT
        self.alias[node.name] = self._input(role, self._free(path), type_of(node.meta["val"]), path)

    def _input(self, role: Role, name: str, type_: TensorType, path: str) -> str:
        self.types[name] = type_
        self.inputs.setdefault(name, Input(role, Value(name, type_), path))
        return name

    def _free(self, path: str) -> str:
        """A name for an input that no operator has."""
        return path + ".in" if path in self.taken else path

    def _constant(self, node: fx.Node) -> list[Op]:
        """A tensor that the model's code made. One value throughout is an operator; else it is an input."""
        value = getattr(self.joint.module, str(node.target))
        assert isinstance(value, Tensor)
        type_ = type_of(value)
        if value.device.type != "meta" and value.numel() and bool((value == value.flatten()[0]).all()):
            self.alias[node.name] = node.name
            self.types[node.name] = type_
            fill = value.flatten()[0].item()
            result = Value(node.name, type_)
            return [Op("aten.full.default", (type_.shape, fill), (("dtype", type_.dtype),), (result,), Phase.FORWARD)]
        path = f"constant.{len(self.constants)}"
        self.constants[path] = value
        self.alias[node.name] = self._input(Role.BUFFER, path, type_, path)
        return []

    def _refuse_writes(self) -> None:
        for path in self.joint.changed_parameters:
            raise CaptureError(
                f"{type(self.edges.model).__name__} writes to its parameter {path!r} in forward",
                fix="make it a buffer, whose new value is kept, or change it outside of forward",
            )
        for position in self.joint.changed_arguments:
            argument = self.edges.argument_path[position]
            raise CaptureError(
                f"{type(self.edges.model).__name__} writes to its argument {argument!r} in place",
                fix=f"let it work on a copy: {argument} = {argument}.clone()",
            )

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _ops(self, node: fx.Node) -> tuple[Op, ...]:
        """The operators that stand for a node: none for an alias, several for a random operator."""
        if node.target is operator.getitem:
            return ()  # named by the operator that makes the tuple
        if node.meta.get("val") is None:
            return ()  # a check of what was traced, such as `_assert_tensor_metadata`: it computes nothing
        kind = str(node.target)
        if kind in ("aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default"):
            self.alias[node.name] = self._name(node.args[0])
            return ()
        if kind == "aten.copy.default" and self.types[self._name(node.args[1])].shape == node.meta["val"].shape:
            return self._copy(node)
        dropped = ("device", "layout", "pin_memory", "memory_format", "requires_grad")  # of storage, not of values
        kwargs = tuple((key, self._arg(value)) for key, value in node.kwargs.items() if key not in dropped)
        args = tuple(self._arg(value) for value in node.args)
        if kind.startswith("aten.squeeze."):
            kind, args = "aten.squeeze.dims", self._squeezed(args)
        op = self._op(node, kind, args, kwargs)
        ops = self.random.take_apart(op, self.types.__getitem__) if is_random(kind) else (op,)
        for part in ops:
            self.calls[part.name] = self.calls[op.name]
        return ops

    def _squeezed(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """`squeeze` drops the dims that have size 1, and a piece may have more of them than the whole: name those that
        are meant.
        """
        source = args[0]
        assert isinstance(source, Ref)
        shape = self.types[source.name].shape
        asked = args[1] if len(args) > 1 else tuple(range(len(shape)))
        dims = [dim % len(shape) for dim in (asked if isinstance(asked, tuple) else (asked,)) if isinstance(dim, int)]
        return source, tuple(dim for dim in dims if shape[dim] == 1)

    def _copy(self, node: fx.Node) -> tuple[Op, ...]:
        """`copy(x, y)` is y in x's element type: x itself is not read."""
        source, type_ = self._name(node.args[1]), type_of(node.meta["val"])
        if self.types[source] == type_:
            self.alias[node.name] = source
            return ()
        return (self._op(node, "aten._to_copy.default", (Ref(source),), (("dtype", type_.dtype),)),)

    def _op(self, node: fx.Node, kind: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> Op:
        phase = Phase.BACKWARD if node.meta.get("partitioner_tag") == "is_backward" else Phase.FORWARD
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        seq: int | None = node.meta.get("seq_nr")
        if phase is Phase.BACKWARD and stack is None:
            seq = None  # a sum of gradients, which autograd made: it carries the number of an unrelated operator
        module = list(stack.values())[-1][0] if stack else self._owner(args)
        if phase is Phase.FORWARD and seq is not None:
            self.modules.setdefault(seq, module)
        elif seq is not None:
            module = module or self.modules.get(seq, "")
        op = Op(kind, args, kwargs, self._results(node), phase, module, line_of(node), seq)
        self.calls[op.name] = tuple(
            (path, int(key.rpartition("@")[2]) if "@" in key else 0) for key, (path, *_) in (stack or {}).items()
        )
        return op

    def _counted(self, ops: list[Op]) -> list[Op]:
        """Operators with the call that they belong to, and with sequence numbers from 0."""
        again = {path for stack in self.calls.values() for path, call in stack if call}
        least = min((op.seq for op in ops if op.seq is not None), default=0)
        counted = []
        for op in ops:
            stack = self.calls.get(op.name, ())
            call = next((call for path, call in stack if path in again), 0)
            counted.append(replace(op, call=call, seq=None if op.seq is None else op.seq - least))
        return counted

    def _owner(self, args: tuple[Arg, ...]) -> str:
        """The module whose parameter or buffer is read: torch does not say where a counter of a norm is counted up."""
        for name in refs(args):
            if name in self.inputs and self.inputs[name].role in (Role.PARAM, Role.BUFFER):
                return self.inputs[name].path.rpartition(".")[0]
        return ""

    def _results(self, node: fx.Node) -> tuple[Value, ...]:
        value = node.meta["val"]
        if not isinstance(value, (tuple, list)):
            self.alias[node.name] = node.name
            self.types[node.name] = self._type(node, value)
            return (Value(node.name, self.types[node.name]),)
        names = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
        results = []
        for position, part in enumerate(value):
            if part is None:
                continue  # a gradient that nobody asked for; it is last or its position is kept by the mask
            name = names.get(position, f"{node.name}.{position}")
            self.alias[name] = name
            self.types[name] = self._type(node, part)
            results.append(Value(name, self.types[name]))
        return tuple(results)

    # ---- outputs -----------------------------------------------------------------------------------------------------

    def _outputs(self) -> list[Output]:
        (node,) = self.joint.module.graph.find_nodes(op="output")
        values = node.args[0]
        losses = set(self.joint.tangents.values())
        if self.training and not losses:
            self._refuse_without_loss()
        outputs: list[Output] = []
        for position, leaf in self.joint.results.items():
            if values[position] is None or not isinstance(self.edges.forward.results[leaf], Tensor):
                continue
            if leaf in losses:
                outputs.append(Output(OutputKind.LOSS, self._name(values[position]), self.edges.loss_path(leaf)))
            else:
                outputs.append(Output(OutputKind.RESULT, self._name(values[position]), self.edges.result_path[leaf]))
        for kind, paths in ((OutputKind.GRADIENT, self.joint.gradients), (OutputKind.BUFFER, self.joint.updates)):
            outputs += [
                Output(kind, self._name(values[position]), self.edges.tied[path])
                for position, path in paths.items()
                if values[position] is not None
            ]
        return outputs

    def _refuse_without_loss(self) -> None:
        tensors = [value for value in self.edges.forward.results if isinstance(value, Tensor)]
        shapes = [list(value.shape) for value in tensors]
        raise CaptureError(
            f"{type(self.edges.model).__name__} returns {len(shapes)} tensors of shapes {shapes}, "
            "and none is a loss: a floating scalar that depends on a parameter",
            fix="capture a module that returns one scalar, the loss (with its targets as arguments); or, for inference, "
            "pass training=False",
        )

    def _name(self, node: Any) -> str:
        return self.alias[node.name]

    def _type(self, node: fx.Node, value: Any) -> TensorType:
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"{node.target} gives a value of type {type(value).__name__}")
        return type_of(value)

    def _arg(self, value: Any) -> Arg:
        match value:
            case fx.Node():
                return Ref(self._name(value))
            case None | bool() | int() | float() | str():
                return value
            case tuple() | list():
                return tuple(self._arg(part) for part in value)
            case torch.dtype():
                return dtype_of(value)
            case _:
                raise CaptureError(f"an operator argument of type {type(value).__name__}: {value!r}")


def _without_dead_code(name: str, inputs: list[Input], ops: list[Op], outputs: list[Output]) -> Graph:
    needed = {output.name for output in outputs}
    kept: list[Op] = []
    for op in reversed(ops):
        if any(value.name in needed for value in op.results):
            kept.append(op)
            needed.update(op.reads)
    live = tuple(item for item in inputs if item.value.name in needed or item.role is Role.INPUT)
    return Graph(name, live, tuple(reversed(kept)), tuple(outputs))
