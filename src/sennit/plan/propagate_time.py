"""What is made once for all micro-batches, what with each, and where sums over them are added up: by the bytes that
would stand.

A value that no micro-batch flows into can be made before the first of them. Then it stands through the whole step. A
bias for every pair of positions is such a value: it is gathered from a table that is a hundred times smaller. So is a
mask that is made of a few positions. With them comes the gradient: a sum over micro-batches of what each has for every
pair, before it is added up into the table.

**With each** (`made_with_each`). A value of the moment *before* is made again in every task (F, B or W of a
micro-batch) that reads it, and let go with the task, if

- it has `HELD` bytes or more: below that a launch costs more than the memory is worth;
- it is larger than all that it is made of and that stands: parameters, and what else is made before. So a cast or a
  transpose of a weight, which is as large as
  the weight or smaller, is made once;
- its operator computes one result an element: no product, no convolution. What these make stands, and what is larger
  than that is made of it with each task;
- it reads nothing that the time axis splits, since that would be the work of all micro-batches with each of them; and
  everything that it reads or that
  reads it is on its stage, since a transfer with each task costs more than a copy that is there.

Views of such a value go with it. What it saves is its bytes, for each layer that has one; what it costs is to write it
once a task, which is less than reading the parts of one micro-batch that it is added to.

**Sums** (`fewest_ahead`). A sum over micro-batches is added up where it is smallest: with terms p0, made into p1, into
p2, ... by operators that are linear, each the only reader of the one before, it is the first p_i with the fewest bytes.
Operators up to there run with each micro-batch, those behind it once. Where nothing gets smaller that is p0, and
weights add up as they always did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sennit.capture.rules import Chunks, Letters, Reshape, is_relabelling
from sennit.ir.graph import Op
from sennit.ir.operators import is_view
from sennit.plan.flops import flops_of
from sennit.plan.propagate_index import Moment, PlanIndex

__all__ = ["HELD", "fewest_ahead", "made_with_each"]

HELD = 1 << 16  # bytes


def made_with_each(index: PlanIndex, moment: Mapping[str, Moment], split: set[str]) -> frozenset[str]:
    """The operators of the moment before that every task runs again.

    `split` are the inputs that the time axis splits.
    """
    standing = _Standing(index)
    chosen: dict[str, Op] = {}
    for op in index.graph.ops:
        if moment[op.name] is not Moment.BEFORE or not _is_near(index, op, split):
            continue
        if _is_view_of(op, standing) or (_is_large(op) and _is_cheap(index, op) and standing.is_outgrown(op)):
            chosen[op.name] = op
            standing.let_go(op)
    during: set[str] = set()  # what only other values of that moment are made of is gone before the first task
    for op in reversed(chosen.values()):
        readers = [reader for value in op.results for reader in index.readers.get(value.name, ())]
        if any(moment[reader.name] is Moment.DURING or reader.name in during for reader in readers):
            during.add(op.name)
    return frozenset(during)


class _Standing:
    """What each value would be made of with each task: values that stand."""

    def __init__(self, index: PlanIndex) -> None:
        self.index = index
        self.made_of: dict[str, frozenset[str]] = {}  # of those that are let go

    def of(self, op: Op) -> frozenset[str]:
        return frozenset().union(*(self.made_of.get(name, frozenset((name,))) for name in op.reads))

    def is_outgrown(self, op: Op) -> bool:
        """Whether the result is larger than what it is made of.

        Beside what parameters flow into, indices do not count: they are there anyhow.
        """
        leaves = self.of(op)
        trained = [name for name in leaves if name not in self.index.whole]
        return sum(value.type.bytes for value in op.results) > sum(
            self.index.types[name].bytes for name in trained or leaves
        )

    def let_go(self, op: Op) -> None:
        self.made_of.update((value.name, self.of(op)) for value in op.results)


def _is_large(op: Op) -> bool:
    return sum(value.type.bytes for value in op.results) >= HELD and not is_view(op.kind)


def _is_cheap(index: PlanIndex, op: Op) -> bool:
    return flops_of(op, index.types) <= sum(value.type.elements for value in op.results)


def _is_view_of(op: Op, standing: _Standing) -> bool:
    return (is_view(op.kind) or is_relabelling(op)) and any(name in standing.made_of for name in op.reads)


def _is_near(index: PlanIndex, op: Op, split: set[str]) -> bool:
    stage = index.stage[op.name]
    makers = [index.producers[name] for name in op.reads if name in index.producers]
    readers = [reader for value in op.results for reader in index.readers.get(value.name, ())]
    return (
        not any(name in split for name in op.reads)
        and not any(value.name in index.returned for value in op.results)
        and all(index.stage[other.name] == stage for other in (*makers, *readers))
    )


def fewest_ahead(index: PlanIndex) -> dict[str, int]:
    """For each value the fewest bytes of anything in the chain of linear operators that begins with it."""
    found: dict[str, int] = {}
    for op in reversed(index.graph.ops):
        for value in op.results:
            found[value.name] = min((value.type.bytes, *_behind(index, value.name, found)))
    return found


def _behind(index: PlanIndex, name: str, found: Mapping[str, int]) -> Iterator[int]:
    readers = index.readers.get(name, [])
    if len(readers) == 1 and name not in index.returned and _is_linear(index, readers[0], name):
        yield found[readers[0].results[0].name]


def _is_linear(index: PlanIndex, op: Op, name: str) -> bool:
    """Whether a sum passes from this read to the only result."""
    if len(op.results) > 1 or op.reads.count(name) > 1:
        return False
    match index.book.rule(op):
        case Reshape() | Chunks():
            return True
        case Letters(linear=sets):
            return any(op.reads.index(name) in group for group in sets)
        case _:
            return False
