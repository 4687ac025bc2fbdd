"""An unmodified torch model to a `Graph`: operators on logical tensors, forward and backward.

The joint graph of torch comes with what planning needs: the module and source line of each operator, which phase it is
in, and for a backward operator the sequence number of the forward one. Here that is brought into the value type: tuples of
results become named values, aliases vanish, tied parameters become one, random operators are taken apart (`random.py`),
and nothing that the outputs do not need is kept.

`capture(model, args, kwargs)` is the simple face; `capture_call` also gives the signature, which turns calls into tensors by
path and back (`signature.py`), and the constants that the model's code made.

**Losses.** What is differentiated is the result called `loss`, if there is one; else every floating scalar that depends on a
parameter. A model that returns one scalar and nothing else has a loss without a path.

**Modes.** `training=True` captures forward and backward, in training mode; `training=False` the forward alone, in evaluation mode.
A model that is in the mode already is taken as it is, frozen parts included; else `model.train(training)` holds while it is
captured.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sennit.capture.element_types import dtype_of
from sennit.capture.random import RandomParts, is_random
from sennit.capture.signature import BuiltIn, ResultLeaf, Signature, argument_paths, leaves, result_paths, type_of
from sennit.capture.torch_private import (
    Forward,
    JointGraph,
    distinct_leaves,
    flat_arguments,
    forward_graph,
    joint_graph,
    storage_key,
)
from sennit.errors import CaptureError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Graph, Input, Op, Output, OutputKind, Phase, Ref, Role, Value

__all__ = ["Captured", "Model", "capture", "capture_call"]

Model = nn.Module


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph and what surrounds it. `constants` are the tensors that the model's code made from numbers, by the path of the
    `buffer` inputs that stand for them: they are in no state dict."""

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
) -> Captured:
    """The graph of one call with its signature."""
    args, kwargs = distinct_leaves(args, dict(kwargs or {}))
    name = name or type(model).__name__
    with _mode(model, training):
        try:
            forward = forward_graph(model, args, kwargs)
        except Exception as error:  # torch raises many kinds; each one means that this model was not captured
            raise _untraceable(model, error) from error
        edges = _Edges(model, args, kwargs, forward)
        losses = edges.losses() if training else ()
        try:
            joint = joint_graph(forward, args, kwargs, losses=losses, training=training)
        except Exception as error:
            raise _untraceable(model, error) from error
    return _Reader(edges, joint, training).read(name)


def _untraceable(model: nn.Module, error: Exception) -> CaptureError:
    return CaptureError(
        f"torch could not trace {type(model).__name__}: {type(error).__name__}: {str(error).strip().splitlines()[0]}",
        fix="branches on tensor values and calls outside torch cannot be traced: see the error above this one",
    )


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


class _Edges:
    """Paths of what goes into a call and of what comes out of it."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward) -> None:
        self.model = model
        self.forward = forward
        self.tied = _tied(model)
        own = {*self.tied, "seed", "tangent"}
        self.arguments = argument_paths(model, args, kwargs)
        self.renamed = {path: f"inputs.{path}" for path in self.arguments if path in own}
        by_identity = {id(leaf): path for path, leaf in self.arguments.items() if isinstance(leaf, Tensor)}
        self.argument_path = [
            by_identity[id(leaf)] if isinstance(leaf, Tensor) else None for leaf in flat_arguments(args, kwargs)
        ]
        numbered = forward.assemble(list(range(len(forward.results))))
        order = [leaf for _, leaf in leaves(numbered, "")]
        paths = dict(zip(order, result_paths(numbered, own), strict=True))
        self.result_path: list[str] = [paths[leaf] for leaf in range(len(order))]
        self.is_bare = isinstance(numbered, int)

    def losses(self) -> tuple[int, ...]:
        """The leaves of the result that may be differentiated: the one called loss, or else all floating scalars."""
        scalars = [
            leaf
            for leaf, value in enumerate(self.forward.results)
            if isinstance(value, Tensor) and value.shape == () and value.dtype.is_floating_point
        ]
        named = [leaf for leaf in scalars if self.result_path[leaf] == "loss"]
        return tuple(named or scalars)

    def loss_path(self, leaf: int) -> str:
        return "" if self.is_bare else self.result_path[leaf]

    def signature(self, losses: set[int]) -> Signature:
        def kind(leaf: object) -> TensorType | BuiltIn:
            return type_of(leaf) if isinstance(leaf, Tensor) else BuiltIn(leaf)

        def result(position: int, value: object) -> ResultLeaf:
            if not isinstance(value, Tensor):
                return ResultLeaf(None, value)
            return ResultLeaf("loss" if self.is_bare and position in losses else self.result_path[position])

        return Signature(
            type(self.model).__name__,
            inspect.signature(self.model.forward),
            {path: kind(leaf) for path, leaf in self.arguments.items()},
            self.renamed,
            tuple(result(position, value) for position, value in enumerate(self.forward.results)),
            self.forward.assemble,
        )


def _tied(model: nn.Module) -> dict[str, str]:
    """Each path of a parameter or buffer to the first path of the same memory: tied weights are one value."""
    first: dict[tuple[object, ...], str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {path: first.setdefault(storage_key(tensor), path) for path, tensor in named}


class _Reader:
    """Walks the nodes of one joint graph, in order."""

    def __init__(self, edges: _Edges, joint: JointGraph, training: bool) -> None:
        self.edges = edges
        self.joint = joint
        self.training = training
        self.alias: dict[str, str] = {}  # a node -> the value it is another name of
        self.types: dict[str, TensorType] = {}
        self.modules: dict[int, str] = {}  # sequence number -> module of the forward operator
        self.taken = {node.name for node in joint.module.graph.nodes if node.op == "call_function"}
        self.inputs: dict[str, Input] = {}
        self.constants: dict[str, Tensor] = {}
        self.random = RandomParts(self._free("seed"))

    def read(self, name: str) -> Captured:
        self._refuse_changed_arguments()
        ops: list[Op] = []
        for node in self.joint.module.graph.nodes:
            match node.op:
                case "placeholder":
                    self._placeholder(node)
                case "get_attr":
                    ops += self._constant(node)
                case "call_function":
                    ops += self._ops(node)
        if self.random.drawn:
            self._input(Role.SEED, self.random.seed, TensorType((2,), DType.I64), "seed")
        outputs = self._outputs()
        graph = _without_dead_code(name, list(self.inputs.values()), ops, outputs)
        live = {item.path for item in graph.inputs}
        constants = {path: value for path, value in self.constants.items() if path in live}
        return Captured(graph, self.edges.signature(set(self.joint.tangents.values())), constants)

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

    def _refuse_changed_arguments(self) -> None:
        for position in self.joint.changed_arguments:
            path = self.edges.argument_path[position]
            raise CaptureError(
                f"{type(self.edges.model).__name__} writes to its argument {path!r} in place",
                fix=f"let it work on a copy: {path} = {path}.clone()",
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
        op = self._op(node, kind, args, kwargs)
        return self.random.take_apart(op, self.types.__getitem__) if is_random(kind) else (op,)

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
        module = list(stack.values())[-1][0] if stack else ""
        if phase is Phase.FORWARD and seq is not None:
            self.modules.setdefault(seq, module)
        elif seq is not None:
            module = module or self.modules.get(seq, "")
        return Op(kind, args, kwargs, self._results(node), phase, module, _line(node), seq)

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
            raise CaptureError(f"{node.target} gives a value of type {type(value).__name__}", where=_line(node) or None)
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


def _line(node: fx.Node) -> str:
    """The user's line nearest to the operator: the last frame outside torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    mine = [(path, line) for path, line in frames if "/torch/" not in path]
    return f"{mine[-1][0].rsplit('/', 1)[-1]}:{mine[-1][1]}" if mine else ""


def _without_dead_code(name: str, inputs: list[Input], ops: list[Op], outputs: list[Output]) -> Graph:
    needed = {output.name for output in outputs}
    kept: list[Op] = []
    for op in reversed(ops):
        if any(value.name in needed for value in op.results):
            kept.append(op)
            needed.update(op.reads)
    live = tuple(item for item in inputs if item.value.name in needed or item.role is Role.INPUT)
    return Graph(name, live, tuple(reversed(kept)), tuple(outputs))
