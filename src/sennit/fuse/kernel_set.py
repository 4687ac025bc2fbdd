"""Kernels that change: the workspace of the search.

A `KernelSet` holds a partition of the operators into kernels, with a line: an order in which they can run. A move
changes both in place, and costs what it touches, not the size of the graph.

**Fusing** A and B, A before B in the line, makes a cycle exactly if a path leads from A to B through a third kernel.
Everything on such a path stands between them in the line. So with R the kernels between them that can be reached from
A: it is refused if one of R leads to B. Else the kernels between them that are not in R may go before A, and those of R
behind B:

    ... A  x1 r1 x2 r2  B ...     becomes     ... x1 x2  AB  r1 r2 ...

**Repeating** operator x in kernel K: K then reads what x reads, and no longer x. It is refused unless the kernels of
all that stand before K in the line already.

**Cutting** a kernel in two, the first operators and the rest, and **undoing** it leave their parts in its place in the
line, in the order of the graph.

What was changed since the last copy is known (`gone`, `new`), so that a search asks the cost of those kernels alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from sennit.fuse.model import Grouping, Numbers, StepModel
from sennit.fuse.operator_class import Class

__all__ = ["KernelSet", "Limits", "is_legal"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Operators in a kernel at most, operators that it may repeat, and whether a product may have others beside it.

    With `regions` a group may have several products, and reductions beside them: the compiler makes several kernels of
    it, and lays out what is between them as it likes.
    """

    size: int = 48
    repeats: int = 4
    around_products: bool = True
    regions: bool = False


_NONE: Numbers = frozenset()


def is_legal(model: StepModel, group: Numbers, limits: Limits) -> bool:
    """Whether these operators may be one kernel, as far as they themselves say."""
    if len(group) > limits.size or len({model.phase[place] for place in group}) > 1:
        return False
    kinds = [model.kind[place] for place in group]
    if Class.OTHER in kinds:
        return False
    if limits.regions:
        return True
    products = kinds.count(Class.PRODUCT)
    if products > 1:
        return False
    if not products:
        return True
    if not limits.around_products and any(kind is not Class.VIEW for kind in kinds if kind is not Class.PRODUCT):
        return False
    return Class.REDUCTION not in kinds


class KernelSet:
    """A kernel goes by any number; `home` gives that of each operator."""

    def __init__(self, model: StepModel, grouping: Grouping, limits: Limits) -> None:
        self.model, self.limits = model, limits
        order = model.order(grouping)
        assert order is not None, "a grouping that was not checked"
        repeats = grouping.repeats()
        self.members: dict[int, Numbers] = dict(enumerate(order))
        self.again: dict[int, Numbers] = {
            number: repeats[kernel] for number, kernel in self.members.items() if kernel in repeats
        }
        self.home = [0] * len(model.ops)
        for number, kernel in self.members.items():
            for place in kernel:
                self.home[place] = number
        self.repeated_in: dict[int, frozenset[int]] = {}
        for number, again in self.again.items():
            self._note(number, again)
        self.line = list(range(len(order)))
        self.place_in_line = dict(enumerate(range(len(order))))
        self.next_number = len(order)
        self.gone: set[tuple[Numbers, Numbers]] = set()
        self.new: set[tuple[Numbers, Numbers]] = set()

    def copy(self) -> KernelSet:
        """The same kernels, with nothing changed yet."""
        other = KernelSet.__new__(KernelSet)
        other.model, other.limits, other.next_number = self.model, self.limits, self.next_number
        other.members, other.again = dict(self.members), dict(self.again)
        other.home, other.repeated_in = list(self.home), dict(self.repeated_in)
        other.line, other.place_in_line = list(self.line), dict(self.place_in_line)
        other.gone, other.new = set(), set()
        return other

    def grouping(self) -> Grouping:
        groups = frozenset(kernel for kernel in self.members.values() if len(kernel) > 1)
        repeating = frozenset((self.members[number], again) for number, again in self.again.items())
        return Grouping(groups | {kernel for kernel, _ in repeating}, repeating)

    def kernel(self, place: int) -> tuple[Numbers, Numbers]:
        """The kernel of an operator, and what it repeats."""
        number = self.home[place]
        return self.members[number], self.again.get(number, _NONE)

    def union(self, first: int, second: int) -> tuple[Numbers, Numbers] | None:
        """What the kernels of two operators would be as one; None where its operators may not be one kernel.

        Whether the order allows it is for `fuse` to say.
        """
        (one, once), (other, twice) = self.kernel(first), self.kernel(second)
        union = one | other
        again = (once | twice) - union
        if len(again) > self.limits.repeats or not is_legal(self.model, union, self.limits):
            return None
        return union, again

    # ---- moves -------------------------------------------------------------------------------------------------------

    def fuse(self, first: int, second: int) -> bool:
        """The kernels of two operators as one. False where that is not legal."""
        one, other = self.home[first], self.home[second]
        if one == other:
            return False
        if self.place_in_line[one] > self.place_in_line[other]:
            one, other = other, one
        found = self.union(first, second)
        behind = self._reached(one, other) if found is not None else None
        if found is None or behind is None:
            return False
        start, end = self.place_in_line[one], self.place_in_line[other]
        between = self.line[start + 1 : end]
        self._remove(one)
        self._remove(other)
        number = self._add(*found)
        self.line[start : end + 1] = [
            *(kernel for kernel in between if kernel not in behind),
            number,
            *(kernel for kernel in between if kernel in behind),
        ]
        self._renumber(start)
        return True

    def repeat(self, reader: int, read: int) -> bool:
        """Compute `read` again in the kernel of `reader`."""
        number = self.home[reader]
        kernel, again = self.members[number], self.again.get(number, _NONE)
        model = self.model
        if read in kernel or read in again or len(again) >= self.limits.repeats:
            return False
        if model.kind[read] not in (Class.POINTWISE, Class.VIEW) or model.kind[reader] is Class.OTHER:
            return False
        if model.phase[read] is not model.phase[reader]:
            return False
        here = self.place_in_line[number]
        inside = kernel | again | {read}
        if any(self.place_in_line[self.home[value]] >= here for value in model.reads[read] if value not in inside):
            return False
        self._remove(number)
        self.line[here] = self._add(kernel, again | {read})
        self._renumber(here, here + 1)
        return True

    def undo(self, number: int) -> bool:
        """A kernel's operators alone. Where it repeats some, another order may be needed: that is looked for."""
        if number not in self.again:
            self._replace(number, [frozenset((place,)) for place in sorted(self.members[number])])
            return True
        found = self.grouping()
        kernel = self.members[number]
        without = Grouping(found.groups - {kernel}, frozenset(item for item in found.again if item[0] != kernel))
        if self.model.order(without) is None:
            return False
        gone, new = set(self.gone), set(self.new)
        self.__init__(self.model, without, self.limits)  # type: ignore[misc]
        self.gone, self.new = gone, new
        self._change((kernel, dict(found.again)[kernel]), [(frozenset((place,)), _NONE) for place in kernel])
        return True

    def cut(self, number: int, first: int) -> bool:
        """A kernel in two: its first operators, and the rest."""
        kernel = sorted(self.members[number])
        if number in self.again or not 0 < first < len(kernel):
            return False
        self._replace(number, [frozenset(kernel[:first]), frozenset(kernel[first:])])
        return True

    def random_move(self, draw: random.Random, *, repeats: bool = True) -> bool:
        """One random move; False where the one that was drawn is not legal."""
        reader = draw.randrange(len(self.home))
        chance = draw.random()
        number = self.home[reader]
        size = len(self.members[number])
        if chance < 0.2 and (size > 1 or number in self.again):
            return self.undo(number) if chance < 0.1 or size < 3 else self.cut(number, draw.randrange(1, size))
        reads = self.model.reads[reader]
        if not reads:
            return False
        read = reads[draw.randrange(len(reads))]
        return self.repeat(reader, read) if repeats and chance > 0.85 else self.fuse(read, reader)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _reached(self, one: int, other: int) -> set[int] | None:
        """The kernels between two that can be reached from the first; None where one of them leads to the second."""
        limit = self.place_in_line[other]
        found: set[int] = set()
        waiting = [one]
        while waiting:
            kernel = waiting.pop()
            for reader in self._readers(kernel):
                if reader == other:
                    if kernel != one:
                        return None
                elif reader not in found and self.place_in_line[reader] < limit:
                    found.add(reader)
                    waiting.append(reader)
        return found

    def _readers(self, number: int) -> set[int]:
        """Kernels that read from this one."""
        found: set[int] = set()
        for place in self.members[number]:
            for reader in self.model.readers[place]:
                kernel = self.home[reader]
                if kernel != number and place not in self.again.get(kernel, _NONE):
                    found.add(kernel)
                for kernel in self.repeated_in.get(reader, ()):
                    if kernel != number and place not in self.again[kernel]:
                        found.add(kernel)
        return found

    def _note(self, number: int, again: Iterable[int]) -> None:
        for place in again:
            self.repeated_in[place] = self.repeated_in.get(place, frozenset()) | {number}

    def _add(self, kernel: Numbers, again: Numbers = _NONE) -> int:
        number = self.next_number
        self.next_number += 1
        self.members[number] = kernel
        for place in kernel:
            self.home[place] = number
        if again:
            self.again[number] = again
            self._note(number, again)
        self._change(None, [(kernel, again)])
        return number

    def _remove(self, number: int) -> None:
        kernel, again = self.members.pop(number), self.again.pop(number, _NONE)
        for place in again:
            self.repeated_in[place] -= {number}
        del self.place_in_line[number]
        self._change((kernel, again), [])

    def _replace(self, number: int, parts: list[Numbers]) -> None:
        here = self.place_in_line[number]
        self._remove(number)
        self.line[here : here + 1] = [self._add(part) for part in parts]
        self._renumber(here)

    def _renumber(self, start: int, end: int | None = None) -> None:
        for place in range(start, len(self.line) if end is None else end):
            self.place_in_line[self.line[place]] = place

    def _change(self, gone: tuple[Numbers, Numbers] | None, new: list[tuple[Numbers, Numbers]]) -> None:
        if gone is not None:
            if gone in self.new:
                self.new.discard(gone)
            else:
                self.gone.add(gone)
        for item in new:
            if item in self.gone:
                self.gone.discard(item)
            else:
                self.new.add(item)
