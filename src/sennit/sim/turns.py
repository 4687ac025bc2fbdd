"""Connections on which a message can hold up one of the other direction: when a receive is announced.

Gloo sends a message once its receiver has announced the receive, and the announcement travels behind what the receiver
itself is sending on the same connection. So a message from a to b that was under way when a posted a receive from b
holds that one up, to its own end (`[host] take_turns`). With r the time at which a task's receive was posted, which is
the end of `Turn.receiver_waits`:

    X holds up Y   if they go opposite ways of a connection, X has begun and not ended at r(Y), and X began before r(Y), or at it
                   by a send that was posted before Y's receive and was itself announced before

A task comes at the end of its latency. One that was held up starts when the last that held it up has ended, and waits
out its latency from then on. What was announced in time goes both ways at once. Decisions are taken when everything at
one time has been seen, those announced first before others: the order of events at that time means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Turn", "Turns"]


@dataclass(frozen=True, slots=True)
class Turn:
    """A transfer's part in a connection.

    `forth` is its direction, `receiver_waits` the tasks whose ends let the receiver post its receive, `sent` and
    `received` the places of the two steps in the programs of their ranks.
    """

    connection: int
    forth: bool
    receiver_waits: tuple[int, ...]
    sent: int = 0
    received: int = 0


class Turns:
    """`start` and `stop` are those of the engine, by task."""

    def __init__(self, of: Mapping[int, Turn], start: Sequence[float], stop: Sequence[float]) -> None:
        self.of, self.start, self.stop = of, start, stop
        self.coming: list[int] = []
        self.going: dict[tuple[int, bool], dict[int, None]] = {}  # by connection and direction
        self.ended: dict[tuple[int, bool], list[int]] = {}  # in order
        self.held: dict[int, set[int]] = {}  # by task that was held up, who still does it
        self.holds: dict[int, list[int]] = {}
        self.announced: set[int] = set()  # those that were held up and are not any more

    def come(self, task: int) -> bool:
        """Whether the task goes now; else it is decided on by `decide`."""
        if task in self.announced:
            self._go(task)
            return True
        self.coming.append(task)
        return False

    def leave(self, task: int) -> Iterator[int]:
        """Those that start now, because the last that held them up has ended."""
        turn = self.of[task]
        way = (turn.connection, turn.forth)
        del self.going[way][task]
        self.ended.setdefault(way, []).append(task)
        for other in self.holds.pop(task, ()):
            self.held[other].remove(task)
            if not self.held[other]:
                self.announced.add(other)
                yield other

    def decide(self) -> Iterator[tuple[int, int | None]]:
        """Of those that came: who goes (with None), and who starts again behind a task that held it up and has ended."""
        coming = sorted(self.coming, key=lambda task: (self._posted(task), task))
        self.coming.clear()
        for task in coming:
            turn = self.of[task]
            against = (turn.connection, not turn.forth)
            holders = {other for other in self.going.get(against, ()) if self._holds(other, task)}
            if holders:
                self.held[task] = holders
                for other in holders:
                    self.holds.setdefault(other, []).append(task)
                continue
            behind = self._last_holder(task, against)
            if behind is None:
                self._go(task)
            else:
                self.announced.add(task)
            yield task, behind

    def _go(self, task: int) -> None:
        turn = self.of[task]
        self.going.setdefault((turn.connection, turn.forth), {})[task] = None

    def _posted(self, task: int) -> float:
        return max([self.stop[wait] for wait in self.of[task].receiver_waits], default=0.0)

    def _holds(self, other: int, task: int) -> bool:
        """Whether a task that has begun did so before the receive of `task` was announced."""
        began, posted = self.start[other], self._posted(task)
        if began != posted:
            return began < posted
        return self._posted(other) < began and self.of[other].sent < self.of[task].received

    def _last_holder(self, task: int, against: tuple[int, bool]) -> int | None:
        """Who held the task up beyond its start, and has ended by now."""
        for other in reversed(self.ended.get(against, ())):
            if self.stop[other] <= self.start[task]:
                return None
            if self._holds(other, task):
                return other
        return None
