"""An unmodified torch model to a `Graph`: operators on logical tensors, forward and backward.

The joint graph of torch comes with what planning needs: the module and source line of each operator, which phase it is
in, and for a backward operator the sequence number of the forward one. Here that is brought into the value type: tuples of
results become named values, aliases vanish, tied parameters become one, and nothing that the outputs do not need is kept.

`capture(model, args)` wants a model whose result is one scalar, the loss.
"""

from __future__ import annotations

import inspect
import operator
import re
from typing import Any

import torch
from torch import fx, nn

from sennit.capture.torch_private import JointGraph, joint_graph
from sennit.errors import CaptureError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Graph, Input, Op, Output, OutputKind, Phase, Ref, Role, Value

__all__ = ["Model", "capture", "dtype_of", "torch_dtype"]

Model = nn.Module


def dtype_of(dtype: torch.dtype) -> DType:
    for name in DType:
        if torch_dtype(name) is dtype:
            return name
    known = ", ".join(name.value for name in DType)
    raise CaptureError(f"element type {dtype} has no name here", fix=f"use one of {known}")


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found


def capture(model: Model, args: tuple[Any, ...], name: str | None = None) -> Graph:
    """The joint forward and backward graph of `model(*args)`, whose result must be the loss."""
    try:
        joint = joint_graph(model, args)
    except Exception as error:  # torch raises many kinds; each one means that this model was not captured
        raise CaptureError(
            f"torch could not trace {type(model).__name__}: {type(error).__name__}: {str(error).strip().splitlines()[0]}",
            fix="branches on tensor values and calls outside torch cannot be traced: see the error above this one",
        ) from error
    return _Reader(model, joint).read(name or type(model).__name__)


class _Reader:
    """Walks the nodes of one joint graph, in order."""

    def __init__(self, model: nn.Module, joint: JointGraph) -> None:
        self.model = model
        self.joint = joint
        self.alias: dict[str, str] = {}  # a node -> the value it is another name of
        self.types: dict[str, TensorType] = {}
        self.modules: dict[int, str] = {}  # sequence number -> module of the forward operator

    def read(self, name: str) -> Graph:
        graph = self.joint.module.graph
        inputs = self._inputs()
        ops = [op for node in graph.nodes if node.op == "call_function" and (op := self._op(node)) is not None]
        outputs = self._outputs()
        return _without_dead_code(name, inputs, ops, outputs)

    def _inputs(self) -> list[Input]:
        canonical = self._tied()
        argument_names = list(inspect.signature(self.model.forward).parameters)
        inputs: dict[str, Input] = {}
        taken = {node.name for node in self.joint.module.graph.nodes if node.op == "call_function"}
        for node in self.joint.module.graph.find_nodes(op="placeholder"):
            if node.name in self.joint.parameters:
                path, role = canonical[self.joint.parameters[node.name]], Role.PARAM
            elif node.name in self.joint.buffers:
                path, role = self.joint.buffers[node.name], Role.BUFFER
            elif node.name in self.joint.arguments:
                position = self.joint.arguments[node.name]
                path = argument_names[position] if position < len(argument_names) else f"argument{position}"
                role = Role.INPUT
            else:
                path, role = "tangent", Role.TANGENT
            name = path + ".in" if path in taken else path
            self.alias[node.name] = name
            self.types[name] = self._type(node.meta["val"])
            inputs.setdefault(name, Input(role, Value(name, self.types[name]), path))
        return list(inputs.values())

    def _tied(self) -> dict[str, str]:
        """Each parameter path to the first path of the same parameter: tied weights are one value."""
        first: dict[int, str] = {}
        return {
            path: first.setdefault(id(parameter), path)
            for path, parameter in self.model.named_parameters(remove_duplicate=False)
        }

    def _op(self, node: fx.Node) -> Op | None:
        if node.target is operator.getitem:
            return None  # named by the operator that makes the tuple
        kind = str(node.target)
        if kind in ("aten.alias.default", "aten.detach.default"):
            self.alias[node.name] = self._name(node.args[0])
            return None
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
        dropped = ("device", "layout", "pin_memory", "memory_format", "requires_grad")  # of storage, not of values
        kwargs = tuple((key, self._arg(value)) for key, value in node.kwargs.items() if key not in dropped)
        args = tuple(self._arg(value) for value in node.args)
        return Op(kind, args, kwargs, self._results(node), phase, module, _line(node), seq)

    def _results(self, node: fx.Node) -> tuple[Value, ...]:
        value = node.meta["val"]
        if not isinstance(value, (tuple, list)):
            self.alias[node.name] = node.name
            self.types[node.name] = self._type(value)
            return (Value(node.name, self.types[node.name]),)
        names = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
        results = []
        for position, part in enumerate(value):
            if part is None:
                continue  # a gradient that nobody asked for; it is last or its position is kept by the mask
            name = names.get(position, f"{node.name}.{position}")
            self.alias[name] = name
            self.types[name] = self._type(part)
            results.append(Value(name, self.types[name]))
        return tuple(results)

    def _outputs(self) -> list[Output]:
        (node,) = self.joint.module.graph.find_nodes(op="output")
        values = node.args[0]
        if len(self.joint.results) != 1 or self.types[self._name(values[self.joint.results[0]])].shape != ():
            shapes = [list(self.types[self._name(values[i])].shape) for i in self.joint.results]
            raise CaptureError(
                f"{type(self.model).__name__} returns {len(shapes)} tensors of shapes {shapes}",
                fix="capture a module that returns one scalar, the loss",
            )
        canonical = self._tied()
        outputs = [Output(OutputKind.LOSS, self._name(values[self.joint.results[0]]))]
        outputs += [
            Output(OutputKind.GRADIENT, self._name(values[position]), canonical[path])
            for position, path in self.joint.gradients.items()
            if values[position] is not None
        ]
        return outputs

    def _name(self, node: Any) -> str:
        return self.alias[node.name]

    def _type(self, value: Any) -> TensorType:
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
            raise CaptureError(f"a value of type {type(value).__name__} with shape {getattr(value, 'shape', None)}")
        return TensorType(tuple(int(size) for size in value.shape), dtype_of(value.dtype))

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
