"""A map from the integers 0 to size to values that is constant on intervals.

    map      := segment+                adjacent, from 0 to size; neighbours differ
    segment  := START STOP value

Writing cuts segments at its ends and joins those that hold an equal value, so the cost is that of the segments touched,
plus a bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["IntervalMap"]

V = TypeVar("V")


class IntervalMap(Generic[V]):
    __slots__ = ("_starts", "_values", "size")

    def __init__(self, size: int, value: V) -> None:
        self.size = size
        self._starts = [0]
        self._values = [value]

    def whole(self, start: int, stop: int) -> V | None:
        """The value between `start` and `stop` where it is the same in all of it; else None."""
        starts = self._starts
        first = bisect_right(starts, start)
        return self._values[first - 1] if first == len(starts) or starts[first] >= stop else None

    def read(self, start: int, stop: int) -> list[tuple[int, int, V]]:
        """The segments between `start` and `stop`, clipped to them."""
        starts, values = self._starts, self._values
        first = bisect_right(starts, start) - 1
        last = bisect_left(starts, stop, first + 1)
        if last == first + 1:
            return [(start, stop, values[first])]
        edges = [start, *starts[first + 1 : last], stop]
        return list(zip(edges, edges[1:], values[first:last], strict=False))

    def write(self, start: int, stop: int, value: V) -> None:
        starts, values = self._starts, self._values
        first = bisect_left(starts, start)
        last = bisect_left(starts, stop, first)
        follows = starts[last] == stop if last < len(starts) else stop == self.size
        if follows and last == first + 1 and starts[first] == start:
            values[first] = value
        elif follows:
            starts[first:last], values[first:last] = [start], [value]
        else:  # the segment that `stop` lies in goes on behind it
            starts[first:last], values[first:last] = [start, stop], [value, values[last - 1]]
        if first + 1 < len(values) and values[first + 1] == value:
            del starts[first + 1], values[first + 1]
        if first and values[first - 1] == value:
            del starts[first], values[first]

    def __iter__(self) -> Iterator[tuple[int, int, V]]:
        return zip(self._starts, [*self._starts[1:], self.size], self._values, strict=True)
