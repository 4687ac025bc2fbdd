"""The clock: tasks with dependencies, wires shared by max-min fairness, cores shared evenly.

A *task* starts at the moment its last dependency ends. It waits out its `latency`, then does its work, which takes
`drain` seconds where nothing disturbs it. A task without load or workers is undisturbed: it ends at start + latency +
drain. The others are *flows*, and the engine gives each a rate between 0 and 1 (of its undisturbed speed) that changes
only when a flow joins or leaves (`sim/sharing.py` has the rules). A flow may be held up by one that goes the other way
on its connection (`sim/turns.py`): `Tasks.turns` has those that can be.

**What goes through the heap.** The end of an undisturbed task is known as soon as its start is. So such tasks are
settled at once, in the order in which their dependencies become known and possibly ahead of the clock; only flows wait
in the heap, for the end of their latency and for their own end. A flow is known at the latest when the last flow before
it ends, so nothing comes too late. Events at one time are taken together before rates change: the outcome does not
depend on their order.

`cause` is the dependency that ended last; of several that ended together, the one that was known last, which is never
one that another of them waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from sennit.sim.sharing import Sharing, Workers
from sennit.sim.turns import Turn, Turns

__all__ = ["Load", "Run", "Tasks", "Workers", "run", "successors"]

Load = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Tasks:
    """One entry a task in the first five lists, one a dependency in the other two. `turns` has the flows that can be
    held up by those of the other direction."""

    latency: list[float] = field(default_factory=list)
    drain: list[float] = field(default_factory=list)
    unit: list[float] = field(default_factory=list)
    load: list[Load] = field(default_factory=list)
    workers: list[Workers] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    turns: dict[int, Turn] = field(default_factory=dict)

    def add(self, latency: float, drain: float, unit: float = 0.0, load: Load = (), workers: Workers = ()) -> int:
        self.latency.append(latency)
        self.drain.append(drain)
        self.unit.append(unit)
        self.load.append(load)
        self.workers.append(workers)
        return len(self.latency) - 1

    def add_computes(self, seconds: Sequence[float], workers: Workers = ()) -> int:
        """Many tasks without load; the number of the first."""
        first, count = len(self.latency), len(seconds)
        self.latency += [0.0] * count
        self.drain += seconds
        self.unit += [0.0] * count
        self.load += [()] * count
        self.workers += [workers if value else () for value in seconds] if workers else [()] * count
        return first

    def order(self, before: int, after: int) -> None:
        self.before.append(before)
        self.after.append(after)

    def __len__(self) -> int:
        return len(self.latency)


@dataclass(frozen=True, slots=True)
class Run:
    """When each task ran, and the task whose end let it start (-1: none). `stuck` are those that never could."""

    start: list[float]
    stop: list[float]
    cause: list[int]
    stuck: tuple[int, ...]


def run(
    tasks: Tasks, bandwidth: Sequence[float], cores: Sequence[float] = (), burst: Mapping[int, float] | None = None
) -> Run:
    """Play the tasks through; `bandwidth` is by wire, `cores` by node, `burst` by wire that lets some bytes through at
    once.
    """
    count = len(tasks)
    start, stop, cause = [0.0] * count, [0.0] * count, [-1] * count
    after, waits = successors(tasks)
    latency, drain = tasks.latency, tasks.drain
    is_flow = [bool(load or workers) for load, workers in zip(tasks.load, tasks.workers, strict=True)]
    sharing = Sharing(tasks.drain, tasks.unit, tasks.load, tasks.workers, bandwidth, cores, burst or {})
    turns = Turns(tasks.turns, start, stop) if tasks.turns else None
    version = sharing.version
    heap: list[tuple[float, int, int]] = []
    # tasks whose start is known; a stack, so that a chain of undisturbed tasks is followed to its end
    known = [task for task in range(count - 1, -1, -1) if not waits[task]]
    now = 0.0
    while True:
        while known:
            task = known.pop()
            begin = start[task]
            if is_flow[task]:
                heappush(heap, (begin + latency[task], task, _JOIN))
                continue
            end = stop[task] = begin + latency[task] + drain[task]
            for other in after[task]:
                if end >= start[other]:
                    start[other] = end
                    cause[other] = task
                waits[other] -= 1
                if not waits[other]:
                    known.append(other)
        # a flow without latency that has just become known joins now, before rates are set
        if turns is not None and turns.coming and not (heap and heap[0][0] <= now):
            for task, behind in turns.decide():
                if behind is None:
                    sharing.join(task, now)
                else:
                    start[task], cause[task] = stop[behind], behind
                    heappush(heap, (stop[behind] + latency[task], task, _JOIN))
        if sharing.dirty and not (heap and heap[0][0] <= now):
            sharing.settle(now, heap)
        if not heap:
            break
        now, task, kind = heappop(heap)
        if kind == _JOIN:
            if turns is None or task not in tasks.turns or turns.come(task):
                sharing.join(task, now)
            continue
        if kind != version[task]:
            continue  # its rate has changed since
        sharing.leave(task, now)
        stop[task] = now
        if turns is not None and task in tasks.turns:
            for other in turns.leave(task):
                start[other], cause[other] = now, task
                heappush(heap, (now + latency[other], other, _JOIN))
        for other in after[task]:
            if now >= start[other]:
                start[other] = now
                cause[other] = task
            waits[other] -= 1
            if not waits[other]:
                known.append(other)
    return Run(start, stop, cause, tuple(task for task in range(count) if waits[task]))


_JOIN = -1  # the version of a heap entry that ends a latency; others end a task


def successors(tasks: Tasks) -> tuple[list[list[int]], list[int]]:
    """By task, those that wait for it, in the order in which they were said to; and how many each waits for."""
    count = len(tasks)
    before, after = np.array(tasks.before, dtype=np.int64), np.array(tasks.after, dtype=np.int64)
    waits = np.bincount(after, minlength=count).tolist()
    ends = np.cumsum(np.bincount(before, minlength=count)).tolist()
    flat = after[np.argsort(before, kind="stable")].tolist()
    return [flat[begin:end] for begin, end in zip([0, *ends], ends, strict=False)], waits
