"""Recomputation: keep less between forward and backward, and compute it again when the backward pass needs it.

Let S be the chosen forward operators. Backward operators read some of their results: those values live from the forward
to the backward pass, for every micro-batch in flight. Clone into the backward phase what these reads need of S, and let
the backward pass read the clones:

    clones = the least set with: an operator of S whose result a backward operator or a clone reads is cloned

A clone reads clones of what S makes and the originals of everything else, so what enters S is kept instead of what is
inside. It stands right before the first backward operator that needs it, so the memory is taken late. It computes the
same values from the same values: a random operator is a function of its number (`ir/graph.py`), so dropout comes out
again as it was.

One call is one segment. Layers that are each to start from their own input are one call each: all of them in one call
would keep only what enters the first, and compute the whole model twice before the last layer's backward pass.

Clones are operators like any other. They are placed with the backward pass of the operator they repeat, by its sequence
number, and split as the plan splits that one. Values that no chosen operator makes, and results that backward does not
read, cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sennit.errors import PlanError
from sennit.ir.graph import Arg, Graph, Op, Phase, Ref, Value
from sennit.plan.plan import Plan

__all__ = ["AGAIN", "recompute"]

AGAIN = ".again"  # behind the name of a value that is computed again


def recompute(plan: Plan, ops: Iterable[Op]) -> Plan:
    """The plan on a graph in which the backward pass computes the results of these forward operators again."""
    chosen = {op.name: op for op in ops}
    late = [op for op in chosen.values() if op.phase is not Phase.FORWARD]
    if late:
        raise PlanError(
            f"{late[0].kind} is a backward operator", where=late[0].describe(), fix="recompute forward operators only"
        )
    known = {op.name for op in plan.graph.ops}
    strange = [op for op in chosen.values() if op.name not in known]
    if strange:
        raise PlanError(
            f"{strange[0].describe()} is not an operator of the plan's graph",
            fix="choose with plan.graph.select(...), after the last change of the graph",
        )
    graph = _Cloner(plan.graph, chosen).graph()
    clones = {op.name for op in graph.ops} - known
    splits = [replace(split, op=split.op + AGAIN) for split in plan.splits if split.op + AGAIN in clones]
    places = [(name + AGAIN, stage) for name, stage in plan.places if name + AGAIN in clones]
    return replace(plan, graph=graph, splits=(*plan.splits, *splits), places=(*plan.places, *places))


class _Cloner:
    """Walks the operators in order and puts clones before their first reader."""

    def __init__(self, graph: Graph, chosen: dict[str, Op]) -> None:
        self.source = graph
        self.maker = {value.name: op for op in chosen.values() for value in op.results}
        self.cloned: set[str] = set()
        self.ops: list[Op] = []

    def graph(self) -> Graph:
        for op in self.source.ops:
            self.ops.append(op if op.phase is Phase.FORWARD else self._reading_clones(op))
        return replace(self.source, ops=tuple(self.ops), repeats=())

    def _reading_clones(self, op: Op) -> Op:
        """The operator on clones where there are any; makes them first.

        A stack and not recursion: a chain may be a model deep.
        """
        waiting = [(op, False)]
        while waiting:
            reader, ready = waiting.pop()
            makers = [self.maker[name] for name in reader.reads if name in self.maker]
            missing = {maker.name: maker for maker in makers if maker.name not in self.cloned}
            if missing and not ready:
                waiting.append((reader, True))
                waiting += [(maker, False) for maker in reversed(missing.values())]
            elif reader is not op and reader.name not in self.cloned:
                self.cloned.add(reader.name)
                self.ops.append(self._clone(reader))
        return replace(op, args=self._args(op.args), kwargs=tuple((key, self._arg(arg)) for key, arg in op.kwargs))

    def _clone(self, op: Op) -> Op:
        return replace(
            op,
            args=self._args(op.args),
            kwargs=tuple((key, self._arg(arg)) for key, arg in op.kwargs),
            results=tuple(Value(value.name + AGAIN, value.type) for value in op.results),
            phase=Phase.BACKWARD,
        )

    def _args(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        return tuple(map(self._arg, args))

    def _arg(self, arg: Arg) -> Arg:
        match arg:
            case Ref(name) if name in self.maker:
                return Ref(name + AGAIN)
            case tuple():
                return self._args(arg)
            case _:
                return arg
