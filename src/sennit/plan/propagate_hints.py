"""What a decided reader, a split parameter or an optimizer's state will want of a value, along one axis.

Propagation walks forward and decides an operator by what it reads. Where that leaves a choice, what will be wanted of
its result decides:

| of | lies as |
|---|---|
| a value with a reader that the plan decided | that reader wants it |
| the gradient of a parameter, and each term of it where it has several readers | the parameter |
| an operator of an optimizer's step | the state that it updates |

Each is followed through views to the operator that makes the value.
"""

from __future__ import annotations

from collections.abc import Mapping

from sennit.capture.rules import Strategy, is_relabelling, through_view
from sennit.ir.graph import Op, OutputKind, Phase, Role
from sennit.ir.layout import Entry, Split
from sennit.plan.propagate_index import PlanIndex

__all__ = ["AxisHints", "adds_gradients", "root_of"]


def root_of(index: PlanIndex, axis: str, name: str, entry: Entry | None) -> tuple[str, Entry | None]:
    """The value that a view, or a view of views, looks at, and how it lies when the view lies as `entry` says."""
    while name in index.producers and is_relabelling(index.producers[name]):
        op = index.producers[name]
        try:
            entry = through_view(op, index.types, index.size(index.stage[op.name], axis), entry)
        except LookupError:
            return name, None
        name = op.reads[0]
    return name, entry


def adds_gradients(op: Op) -> bool:
    """Whether it is one of the sums that autograd makes where a value has several readers."""
    return op.kind == "aten.add.Tensor" and op.phase is Phase.BACKWARD and op.seq is None


class AxisHints:
    """`held` says how inputs lie, by stage; `homes` are parameters that are cut only where they live."""

    def __init__(
        self,
        index: PlanIndex,
        axis: str,
        decided: Mapping[str, Strategy],
        held: Mapping[tuple[str, int], Entry | None],
        homes: set[str],
    ) -> None:
        self.index, self.axis, self.graph = index, axis, index.graph
        self.decided, self.held, self.homes = decided, held, homes
        self.at_home: set[str] = set()  # gradients of parameters that are split where they are used
        gradients = self._gradients()
        self.terms = self._terms(gradients)
        self.of = {**self._beside_state(), **gradients, **self._readers()}

    def _size(self, op: Op) -> int:
        return self.index.size(self.index.stage[op.name], self.axis)

    def _root(self, name: str, entry: Entry | None) -> tuple[str, Entry | None]:
        return root_of(self.index, self.axis, name, entry)

    def _gradients(self) -> dict[str, Entry]:
        """How the parameter lies that a value is the gradient of."""
        inputs = {item.path: item.value.name for item in self.graph.inputs}
        found: dict[str, Entry] = {}
        for output in self.graph.outputs:
            if output.kind is OutputKind.GRADIENT:
                name = inputs[output.path]
                made = self.index.producers[output.name]
                holders = self.index.holders[name]
                stage = self.index.stage[made.name]
                if stage not in holders:
                    continue
                waiting = [self._root(output.name, self.held[name, stage])]
                while (
                    waiting
                ):  # a parameter with several readers: the gradient is a sum, and each of its terms lies as it does
                    root, entry = waiting.pop()
                    if isinstance(entry, Split) and root not in found:
                        found[root] = entry
                        op = self.index.producers.get(root)
                        if op is not None and adds_gradients(op) and self._size(op) == self._size(made):
                            waiting += [self._root(term, entry) for term in op.reads]
                    if isinstance(entry, Split) and name not in self.homes:
                        self.at_home.add(root)
        return found

    def _terms(self, gradients: Mapping[str, Entry]) -> dict[str, Entry]:
        """The same of what such a gradient is a sum of: a parameter with several readers has a term from each."""
        found = dict(gradients)
        waiting = list(gradients.items())
        while waiting:
            made, entry = waiting.pop()
            op = self.index.producers.get(made)
            if op is None or not adds_gradients(op):
                continue
            for name in op.reads:
                root, at_root = self._root(name, entry)
                maker = self.index.producers.get(root)
                alike = maker is not None and self._size(maker) == self._size(op)
                if root not in found and alike and isinstance(at_root, Split):
                    found[root] = at_root
                    waiting.append((root, at_root))
        return found

    def _readers(self) -> dict[str, Entry]:
        """How the first decided reader of a value wants it: a pending sum is scattered to there, rather than reduced
        and cut.
        """
        hints: dict[str, Entry] = {}
        for made, strategy in self.decided.items():
            for name, entry in zip(self.index.reads[made], strategy.reads, strict=True):
                root, at_root = self._root(name, entry)
                if isinstance(at_root, Split):
                    hints.setdefault(root, at_root)
        return hints

    def _beside_state(self) -> dict[str, Entry]:
        """The operators of an optimizer's step (`plan/update.py`) lie as the state that they update is cut."""
        found: dict[str, Entry] = {}
        for item in self.graph.inputs:
            name, shape = item.value.name, item.value.type.shape
            entry = next((self.held[name, stage] for stage in self.index.holders[name]), None)
            if item.role is not Role.BUFFER or not isinstance(entry, Split):
                continue
            waiting = list(self.index.readers[name])
            while waiting:
                op = waiting.pop()
                inside = op.phase is Phase.BACKWARD and op.seq is None and op.results[0].type.shape == shape
                if inside and op.name not in found:
                    found[op.name] = entry
                    waiting += [self.index.producers[read] for read in op.reads if read in self.index.producers]
                    waiting += self.index.readers.get(op.name, [])
        return found
