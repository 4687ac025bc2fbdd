"""Which values of a line of operators may lie in the same memory, and who looks at it last.

A line is a sequence of operators, each with what it reads and what it makes. A piece of memory goes by the value that
it was made for.

    under(x) = {x}                                          where x comes from outside, or its operator makes memory of its own
    under(x) = {x} and under(r) of all r that it reads      where its operator may share: a view, or one of which nothing is known

    last(p)  = the last place of the line at which a value is read that may lie in p

So an operator at place i may write over its operand x if last(p) <= i for all p in under(x), and if nothing else that
it reads may lie there (`is_last_look`). Who asks adds what the line does not show: memory from outside, values that are
kept, transfers that go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["SharedMemory", "Touch"]


@dataclass(frozen=True, slots=True)
class Touch:
    """An operator of the line. `shares`: results may lie in the memory of what it reads."""

    reads: tuple[str, ...]
    results: tuple[str, ...]
    shares: bool


class SharedMemory:
    """What is under each value of a line, and when it is last looked at."""

    def __init__(self, line: Iterable[Touch]) -> None:
        self.line = tuple(line)
        self._under: dict[str, frozenset[str]] = {}
        self._last: dict[str, int] = {}
        for place, touch in enumerate(self.line):
            read = self.under(*touch.reads)
            self._last.update(dict.fromkeys(read, place))
            for name in touch.results:
                self._under[name] = read | {name} if touch.shares else frozenset((name,))

    def under(self, *names: str) -> frozenset[str]:
        """The pieces of memory that these values may lie in."""
        own = (frozenset((name,)) for name in names if name not in self._under)
        return frozenset().union(*own, *(self._under[name] for name in names if name in self._under))

    def is_last_look(self, name: str, place: int) -> bool:
        """Whether nothing looks at the memory of `name` behind this place, and this place looks at it once, through
        that name.
        """
        pieces, reads = self.under(name), self.line[place].reads
        looks = sum(not pieces.isdisjoint(self.under(read)) for read in reads)
        return (
            looks == 1 and name in reads and all(self._last[piece] <= place for piece in pieces if piece in self._last)
        )
