"""Look-ups on a plan's graph that the passes of all axes share, and the words in which they say what they decided."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from sennit.capture.rules import Letters, RuleBook, is_relabelling
from sennit.errors import LayoutError
from sennit.ir.graph import Graph, Op, Phase, Role
from sennit.ir.layout import Entry, Layout
from sennit.plan.plan import Plan
from sennit.plan.recompute import AGAIN

__all__ = ["Entries", "Moment", "PlanIndex", "is_copy", "is_product"]

Entries = Mapping[str, Entry | None]  # axis -> entry


class Moment(Enum):
    BEFORE = "before"
    DURING = "during"
    AFTER = "after"
    EACH = "each"  # in every task that reads it, and let go with the task


class PlanIndex:
    """Look-ups on a plan's graph that all axes share. `stage` is the stage of each operator."""

    def __init__(self, plan: Plan, book: RuleBook, stage: Mapping[str, int]) -> None:
        self.plan, self.book, self.stage, self.meshes = plan, book, stage, plan.stages
        self.graph, self.types = plan.graph, book.types
        self._sizes = [{axis.name: axis.size for axis in mesh.axes} for mesh in self.meshes]
        self.producers = plan.graph.producers()
        self.reads = {op.name: op.reads for op in plan.graph.ops}
        self.whole = _whole(plan.graph)  # values that can be had whole before any micro-batch
        self.sources = _sources(plan.graph)
        self.products = {
            op.seq: op for op in plan.graph.ops if op.phase is Phase.FORWARD and op.seq is not None and is_product(op)
        }
        self.forward = {  # one autograd node can trace to several operators; its result is that of the last
            op.seq: op for op in plan.graph.ops if op.phase is Phase.FORWARD and op.seq is not None
        }
        self.readers: dict[str, list[Op]] = {}
        for op in plan.graph.ops:
            for name in dict.fromkeys(op.reads):
                self.readers.setdefault(name, []).append(op)
        self.returned = {output.name for output in plan.graph.outputs}
        self.zeros = {
            op.name
            for op in plan.graph.ops
            if not op.reads and isinstance(rule := book.rule(op), Letters) and () in rule.linear
        }
        self.holders: dict[str, tuple[int, ...]] = {  # the stages that read an input
            item.value.name: tuple(sorted({stage[reader.name] for reader in self.readers.get(item.value.name, ())}))
            for item in plan.graph.inputs
        }
        self._layouts: dict[tuple[object, ...], bool] = {}

    def size(self, stage: int, axis: str) -> int:
        """How many pieces an axis makes of things on a stage: 1 where the stage lies at one coordinate of it."""
        return self._sizes[stage].get(axis, 1)

    def root(self, name: str) -> str:
        """The value that a chain of relabellings and copies starts from.

        What is computed again is the value that it was.
        """
        while True:
            first = name.removesuffix(AGAIN)
            if first != name and first in self.producers:
                name = first
            elif name in self.producers and is_copy(self.producers[name]):
                name = self.producers[name].reads[0]
            else:
                return name

    def is_layout(self, stage: int, shape: tuple[int, ...], entries: Entries) -> bool:
        """Whether these entries can lie on one array together, evenly."""
        here = {axis: entry for axis, entry in entries.items() if entry is not None and axis in self._sizes[stage]}
        key = (shape, *((axis, self._sizes[stage][axis], entry) for axis, entry in here.items()))
        if key not in self._layouts:
            try:
                self._layouts[key] = Layout.make(self.meshes[stage], shape, here).is_even
            except LayoutError:
                self._layouts[key] = False
        return self._layouts[key]


_COPIES = ("aten.expand.default", "aten.clone.default", "aten._to_copy.default")


def _whole(graph: Graph) -> set[str]:
    """Values that no parameter flows into: they can be computed on the whole batch before the first micro-batch."""
    whole = {item.value.name for item in graph.inputs if item.role is not Role.PARAM}
    for op in graph.ops:
        if all(name in whole for name in op.reads):
            whole.update(value.name for value in op.results)
    return whole


def _sources(graph: Graph) -> set[str]:
    """The operators that read nothing but the seed, or what such operators make: by name."""
    free = {item.value.name for item in graph.inputs if item.role is Role.SEED}
    found: set[str] = set()
    for op in graph.ops:
        if all(name in free for name in op.reads):
            found.add(op.name)
            free.update(value.name for value in op.results)
    return found


def is_copy(op: Op) -> bool:
    """Whether the result holds the values of the only read, elsewhere or in another order."""
    return is_relabelling(op) or op.kind in _COPIES


def is_product(op: Op) -> bool:
    return op.kind in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
