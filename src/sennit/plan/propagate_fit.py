"""What one axis can split of an operator, beside the axes that were propagated before it.

    digits of a dim      outer axis | ... | inner axis        each axis takes some; a split *fits* where those that it would take are free

| part | function |
|---|---|
| whether a strategy fits | `fits` |
| what the plan decided, and where its dims have room: inside the pieces of an axis that was there before | `decided` |
| backward products as their forward ones | `mirrored` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sennit.capture.rules import Letters, Strategy, decide, making, split_on
from sennit.errors import PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Op, Phase
from sennit.ir.layout import Entry, Split
from sennit.plan.plan import OpSplit
from sennit.plan.propagate_index import PlanIndex, is_product

__all__ = ["AxisFit"]


@dataclass(frozen=True, slots=True)
class AxisFit:
    """`strategies` are those of the axes before, and of this one as far as it is settled, by operator and axis."""

    index: PlanIndex
    axis: str
    types: Mapping[str, TensorType]
    strategies: Mapping[str, Mapping[str, Strategy]]

    def fits(self, op: Op, strategy: Strategy) -> bool:
        """Whether the digits that this axis would take are free of the other axes', in all that the operator touches."""
        others = self.strategies[op.name]
        shapes = [self.types[name].shape for name in op.reads] + [value.type.shape for value in op.results]
        for position, (shape, entry) in enumerate(zip(shapes, (*strategy.reads, *strategy.results), strict=True)):
            if not isinstance(entry, Split):
                continue
            entries: dict[str, Entry | None] = {
                axis: (*other.reads, *other.results)[position] for axis, other in others.items()
            }
            if not self.index.is_layout(self.index.stage[op.name], shape, {**entries, self.axis: entry}):
                return False
        return True

    def decided(self, op: Op, split: OpSplit) -> Strategy:
        """What the plan decided. Where an earlier axis has split the dim already, in blocks inside its pieces."""
        size = self.index.size(self.index.stage[op.name], self.axis)
        if size == 1:
            raise PlanError(
                f"the stage of this operator has no axis {self.axis!r}",
                where=f"{op.describe()} on {self.index.meshes[self.index.stage[op.name]]}",
                fix="split it over an axis of its stage",
            )
        strategy = decide(op, self.types, size, split.letter, split.chunks)
        if self.fits(op, strategy):
            return strategy
        taken = [
            entry.stride
            for other in self.strategies[op.name].values()
            for entry, mine in zip((*other.reads, *other.results), (*strategy.reads, *strategy.results), strict=True)
            if isinstance(entry, Split) and isinstance(mine, Split) and entry.dim == mine.dim
        ]
        if taken and min(taken) % size == 0:
            nested = self._restrided(op, split.letter, strategy, min(taken) // size)
            if nested is not None and self.fits(op, nested):
                return nested
        raise PlanError(
            f"dim {split.letter!r} has no room for axis {self.axis!r} beside the axes that split it already",
            where=op.describe(),
            fix="choose another dim, or a smaller axis",
        )

    def _restrided(self, op: Op, letter: str, strategy: Strategy, stride: int) -> Strategy | None:
        """The same split with another stride.

        A view's strides before and after differ, so it is made from its result's.
        """
        rule = self.index.book.rule(op)
        if isinstance(rule, Letters):
            return split_on(rule, letter, stride)
        entry = strategy.results[0]
        return (
            making(
                op, self.types, self.index.size(self.index.stage[op.name], self.axis), 0, Split(entry.dim, stride), rule
            )
            if isinstance(entry, Split)
            else None
        )

    def mirrored(self, op: Op) -> Strategy | None:
        """A product of the backward pass, split as the forward product with its sequence number is."""
        forward = self.index.products.get(op.seq) if op.phase is Phase.BACKWARD and op.seq is not None else None
        if forward is None or not is_product(op) or op.kind == "aten.addmm.default":
            return None
        strategy = self.strategies[forward.name].get(self.axis)
        letter = _letter(forward, strategy) if strategy is not None else None
        if strategy is None or letter is None:
            return None
        mapped, stride = self._mapped(op, forward, letter[0]), letter[1]
        if mapped is None:
            return None
        rule = self.index.book.rule(op)
        assert isinstance(rule, Letters)
        mirrored = split_on(rule, mapped, stride)
        return mirrored if self.fits(op, mirrored) else None

    def _mapped(self, op: Op, forward: Op, letter: str) -> str | None:
        """The letter of a derivative that a letter of y = x w is: by which of x and w it reads besides the gradient."""
        if letter == "b":
            return "b"
        x, w = (self.index.root(name) for name in forward.reads[-2:])
        roots = [self.index.root(name) for name in op.reads]
        for position, other in enumerate(roots):
            if other in (x, w) and x != w and roots[1 - position] not in (x, w):
                summed, own, theirs = ("n", "k", "m") if other == w else ("m", "k", "n")
                names = {summed: "k", own: "mn"[position], theirs: "nm"[position]}
                return names[letter]
        return None


def _letter(product: Op, strategy: Strategy) -> tuple[str, int] | None:
    """The letter, and the stride, that a product is split on; None where it is not."""
    x, w = strategy.reads[-2:]
    names = ("b", "m", "k") if product.kind == "aten.bmm.default" else ("m", "k")
    if isinstance(x, Split):
        return names[x.dim], x.stride
    return ("n", w.stride) if isinstance(w, Split) else None
