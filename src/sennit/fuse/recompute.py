"""Cheap forward operators computed again in the backward pass, so that their results need not be kept.

What the backward pass reads of the forward pass has to be written to memory and read again. A pointwise operator costs
nothing beside that traffic where its inputs are read anyway: the several values inside a GELU are all functions of the
one product before it. `recomputed` gives a graph with copies of such operators in the backward phase:

    base of a read      the value that it shows, through views
    chain of a value    the cheap operators (pointwise, views, softmax over rows) that lead to it, back to anchors
    anchor              an input of the graph, the result of an operator that is not cheap, or a value that is in memory anyway: it is read behind a library call, or by one

    a value is computed again if          bytes of its anchors that the backward pass would not read otherwise  <  twice its own bytes

since recomputing saves one write and one read; a chain with a softmax, which has to go over its rows once more, only
for a quarter of that. Values that are in memory anyway are read. A backward operator then reads the copy; the copies
call the same operators on the same values, so results stay the same to the last bit.

It is what a compiler does when it is handed both passes as one graph, and what `torch.compile` does when it cuts them
apart. It pays only where groups are compiled; operators that run one by one would only do more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sennit.fuse.operator_class import Class, classify, moves_nothing, stem
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Arg, Graph, Op, Phase, Ref, Value

__all__ = ["recomputed"]

_LONGEST = 24  # operators of a chain
_ROWS = ("_softmax", "_log_softmax")


def recomputed(graph: Graph, *, least: int = 1 << 18) -> Graph:
    """The graph with cheap forward operators copied into the backward phase where that saves traffic.

    Values of fewer than `least` bytes are not worth copies.
    """
    step = _Step(graph, least)
    chosen = step.chosen()
    return step.rewritten(chosen) if chosen else graph


@dataclass(frozen=True, slots=True)
class _Chain:
    """The places of the operators that lead to a value, and the values that they start from."""

    ops: frozenset[int]
    anchors: frozenset[str]
    has_rows: bool


class _Step:
    def __init__(self, graph: Graph, least: int) -> None:
        self.graph, self.types, self.least = graph, graph.types(), least
        self.maker = {value.name: place for place, op in enumerate(graph.ops) for value in op.results}
        self.base = self._bases()
        self.is_cheap = [_is_cheap(op, self.types) for op in graph.ops]
        self.stored = self._stored()

    def _bases(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for op in self.graph.ops:
            if moves_nothing(op) and op.reads:
                shown = found.get(op.reads[0], op.reads[0])
                found.update((value.name, shown) for value in op.results)
        return found

    def _base(self, name: str) -> str:
        return self.base.get(name, name)

    def _stored(self) -> set[str]:
        """Values that are in memory after the forward pass, whatever the backward pass reads: a library call stands
        between them and a reader.
        """
        found = {self._base(output.name) for output in self.graph.outputs}
        level: dict[str, int] = {}  # library calls on the longest way to a value
        for op in self.graph.ops:
            if op.phase is not Phase.FORWARD:
                continue
            here = max((level.get(name, 0) for name in op.reads), default=0)
            here += classify(op, self.types) in (Class.PRODUCT, Class.OTHER)
            level.update((value.name, here) for value in op.results)
            found |= {self._base(name) for name in op.reads if level.get(self._base(name), 0) < here}
        return found

    # ---- choosing ----------------------------------------------------------------------------------------------------

    def chosen(self) -> dict[str, _Chain]:
        """By value that is computed again, its chain."""
        read = {self._base(n) for op in self.graph.ops if op.phase is not Phase.FORWARD for n in op.reads}
        kept = {name for name in read if not self._may(name)}
        waiting = sorted(read - kept, key=lambda name: (-self.types[name].bytes, name))
        chains = {name: self._chain(name) for name in waiting}
        found: dict[str, _Chain] = {}
        changed = True
        while changed:
            changed = False
            for name in waiting:
                chain = chains[name]
                if name in found or chain is None:
                    continue
                more = sum(self.types[anchor].bytes for anchor in chain.anchors - kept)
                own = self.types[name].bytes
                if more <= own / 2 if chain.has_rows else more < 2 * own:
                    found[name] = chain
                    kept |= chain.anchors
                    changed = True
            # what is not computed again is kept, and may be the anchor of others
            left = {name for name in waiting if name not in found}
            changed |= not left <= kept
            kept |= left
        return found

    def _may(self, name: str) -> bool:
        place = self.maker.get(name)
        if place is None or name in self.stored or not self.is_cheap[place] or self.types[name].bytes < self.least:
            return False
        return self.graph.ops[place].phase is Phase.FORWARD

    def _chain(self, name: str) -> _Chain | None:
        """None where it is too long."""
        ops: set[int] = set()
        anchors: set[str] = set()
        waiting = [name]
        while waiting:
            value = waiting.pop()
            place = self.maker.get(value)
            is_view = place is not None and moves_nothing(self.graph.ops[place])
            if place is None or not self.is_cheap[place] or (value in self.stored and not is_view):
                anchors.add(value)
            elif place not in ops:
                ops.add(place)
                waiting += self.graph.ops[place].reads
        has_rows = any(stem(self.graph.ops[place].kind) in _ROWS for place in ops)
        return _Chain(frozenset(ops), frozenset(anchors), has_rows) if len(ops) <= _LONGEST else None

    # ---- rewriting ---------------------------------------------------------------------------------------------------

    def rewritten(self, chosen: Mapping[str, _Chain]) -> Graph:
        copied = {place for chain in chosen.values() for place in chain.ops}
        # views between a value that is computed again and its reader are copied too
        for place, op in enumerate(self.graph.ops):
            if op.phase is Phase.FORWARD and moves_nothing(op) and op.reads and self._base(op.reads[0]) in chosen:
                copied.add(place)
        names = {value.name for place in copied for value in self.graph.ops[place].results}
        done: set[int] = set()
        ops: list[Op] = []

        def copy(name: str) -> None:
            place = self.maker.get(name)
            if place not in copied or place in done:
                return
            done.add(place)
            op = self.graph.ops[place]
            for read in op.reads:
                copy(read)
            results = tuple(Value(f"{value.name}.again", value.type) for value in op.results)
            ops.append(replace(_reading(op, names), results=results, phase=Phase.BACKWARD))

        for op in self.graph.ops:
            if op.phase is Phase.FORWARD:
                ops.append(op)
                continue
            wanted = {name for name in op.reads if name in names and self._base(name) in chosen}
            for name in op.reads:
                if name in wanted:
                    copy(name)
            ops.append(_reading(op, wanted))
        return replace(self.graph, ops=tuple(ops), repeats=())


def _is_cheap(op: Op, types: Mapping[str, TensorType]) -> bool:
    if len(op.results) > 1 and not moves_nothing(op):
        return False
    kind = classify(op, types)
    if stem(op.kind) in _ROWS:
        dim = op.args[1]
        return dim in (-1, len(op.results[0].type.shape) - 1)
    return kind in (Class.POINTWISE, Class.VIEW)


def _reading(op: Op, names: set[str]) -> Op:
    """The operator with copies in place of these values."""

    def changed(arg: Arg) -> Arg:
        match arg:
            case Ref(name):
                return Ref(f"{name}.again") if name in names else arg
            case tuple():
                return tuple(map(changed, arg))
            case _:
                return arg

    kwargs = tuple((key, changed(arg)) for key, arg in op.kwargs)
    return replace(op, args=tuple(map(changed, op.args)), kwargs=kwargs)
