"""The optimizer step as operators of the graph: split, placed and ordered like any other.

With p a parameter, g its gradient, and what is kept between steps as buffers of the graph (path `PARAMETER@NAME`):

    SGD      m' = mu m + g (where mu is not 0)
             p' = (1 - lambda eta) p - eta m'
    AdamW    m' = m + (1 - b1) (g - m)     v' = b2 v + (1 - b2) g g
             p' = (1 - lambda eta) p - (eta c1) m' / (c2 sqrt(v') + eps)

eta is the learning rate, c1 = 1 / (1 - b1^t) and c2 = 1 / sqrt(1 - b2^t) in step t: `optimizer@rate`, `optimizer@c1`,
`optimizer@c2`, numbers that come in with each step (`scalars`). (Loshchilov and Hutter, "Decoupled weight decay
regularization", 2019, as torch has it.)

The graph then returns p', m' and v' in place of gradients. Nothing more is needed for the plans of optimizers: cut
`exp_avg` and `exp_avg_sq` over `dp` (`transform`) and the gradient is scattered to where they lie, the update is made
on pieces, and the new parameter is gathered: ZeRO-1 by propagation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

from sennit.errors import PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Arg, Graph, Input, Op, Output, OutputKind, Phase, Ref, Role, Value

__all__ = ["SGD", "AdamW", "scalars", "states_of", "with_optimizer"]

RATE, C1, C2 = "optimizer@rate", "optimizer@c1", "optimizer@c2"


@dataclass(frozen=True, slots=True)
class SGD:
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class AdamW:
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


def with_optimizer(graph: Graph, optimizer: SGD | AdamW) -> Graph:
    """The graph with an update behind every gradient, and the new values as its outputs."""
    writer = _Writer(graph, optimizer)
    inputs = {item.path: item for item in graph.inputs}
    outputs: list[Output] = []
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT:
            outputs += writer.update(inputs[output.path], output.name)
        else:
            outputs.append(output)
    if len(outputs) == len(graph.outputs) and not writer.ops:
        raise PlanError(f"graph {graph.name!r} has no gradient", fix="capture it for training")
    return replace(
        graph,
        inputs=(*graph.inputs, *writer.inputs.values()),
        ops=(*graph.ops, *writer.ops),
        outputs=tuple(outputs),
        repeats=(),
    )


def scalars(optimizer: SGD | AdamW, rate: float, step: int) -> dict[str, float]:
    """The numbers of a step, counted from 1, by the paths of their inputs."""
    if isinstance(optimizer, SGD):
        return {RATE: rate}
    b1, b2 = optimizer.betas
    return {RATE: rate, C1: 1 / (1 - b1**step), C2: 1 / sqrt(1 - b2**step)}


def states_of(graph: Graph) -> tuple[Input, ...]:
    """What an optimizer keeps between steps, for a plan to cut."""
    return tuple(item for item in graph.inputs if "@" in item.path and not item.path.startswith("optimizer@"))


class _Writer:
    def __init__(self, graph: Graph, optimizer: SGD | AdamW) -> None:
        self.optimizer, self.types = optimizer, graph.types()
        self.inputs: dict[str, Input] = {}
        self.ops: list[Op] = []

    def update(self, parameter: Input, gradient: str) -> list[Output]:
        """The operators behind one gradient; the outputs that take its place."""
        self.prefix, self.type = f"{gradient}.update", parameter.value.type
        self.module = parameter.path.rpartition(".")[0]
        self.count = 0
        old, g = parameter.value.name, gradient
        rate = self._scalar(RATE)
        match self.optimizer:
            case SGD(momentum, decay):
                kept: dict[str, str] = {}
                if momentum:
                    g = self._op("add", self._op("mul", self._state(parameter, "momentum"), momentum), g)
                    kept = {"momentum": g}
                step = self._op("mul", g, Ref(rate))
            case AdamW((b1, b2), eps, decay):
                old_first = self._state(parameter, "exp_avg")
                # the gradient meets the state first, and is scattered to where that lies
                first = self._op("add", old_first, Ref(self._op("mul", self._op("sub", g, Ref(old_first)), 1 - b1)))
                square = self._op("mul", self._op("mul", g, Ref(g)), 1 - b2)
                second = self._op("add", self._op("mul", self._state(parameter, "exp_avg_sq"), b2), square)
                below = self._op("add", self._op("mul", self._op("sqrt", second), Ref(self._scalar(C2))), eps)
                moved = self._op("mul", self._op("mul", first, Ref(self._scalar(C1))), Ref(rate))
                step, kept = self._op("div", moved, Ref(below)), {"exp_avg": first, "exp_avg_sq": second}
        if decay:
            old = self._op("sub", old, Ref(self._op("mul", self._op("mul", old, Ref(rate)), decay)))
        new = self._op("sub", old, Ref(step))
        outputs = {parameter.path: new, **{f"{parameter.path}@{name}": value for name, value in kept.items()}}
        return [Output(OutputKind.BUFFER, value, path) for path, value in outputs.items()]

    def _op(self, name: str, left: str, right: Ref | str | float | None = None) -> str:
        """One operator on values of the parameter's type. Returns its name."""
        self.count += 1
        result = Value(f"{self.prefix}{self.count}", self.type)
        args: tuple[Arg, ...] = (Ref(left),)
        if right is not None:
            args += (Ref(right) if isinstance(right, str) else right,)
        kind = f"aten.{name}.{'default' if right is None else 'Tensor'}"
        self.ops.append(Op(kind, args, (), (result,), Phase.BACKWARD, self.module))
        return result.name

    def _state(self, parameter: Input, name: str) -> str:
        return self._input(f"{parameter.path}@{name}", parameter.value.type)

    def _scalar(self, path: str) -> str:
        return self._input(path, TensorType((), self.type.dtype))

    def _input(self, path: str, type_: TensorType) -> str:
        if path not in self.inputs:
            self.inputs[path] = Input(Role.BUFFER, Value(path.replace("@", "."), type_), path)
        return self.inputs[path].value.name
