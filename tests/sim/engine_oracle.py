"""The oracle of `sim/engine.py`: every task goes through the heap, every rate is found from the loads themselves.

Tasks with dependencies, wires shared by max-min fairness, cores shared evenly.

A *task* starts at the moment its last dependency ends. It waits out its `latency`, then does its work, which takes
`drain` seconds where nothing disturbs it. A task without load or workers is undisturbed: it ends at start + latency +
drain. The others are *flows*, and the engine gives each a rate between 0 and 1 (of its undisturbed speed) that changes
only when a flow joins or leaves:

- **wires.** While a flow of unit u (its bytes on its busiest wire) runs at r bytes a second, it fills wire w by r *
  load_w / u.
  Rates are max-min fair: all rise together until a wire is full, the flows on it keep their rate, the others rise on
  (progressive filling). A flow never exceeds its undisturbed speed.
- **bursts.** A flow that comes to a wire with a bucket, idle for t seconds, is ahead by min(t, burst / bandwidth); the
  least over such
  wires, shared by those who come together, and no more than what its other wires allow.
- **cores.** Flows that keep a cores of a node busy, of its c, run at min(1, c / a): a processor shared evenly.
- **turns.** A flow is held up by those of the other direction that had begun and not ended when its receive was posted;
  it starts, with
  its latency, when the last of them has ended.

Only flows that share a wire or an overfull node with one that joined or left are looked at again. Events at the same
time are taken together, in the order of task numbers: the outcome does not depend on the order of insertion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from sennit.sim.engine import Run, Tasks, successors

__all__ = ["run"]


_JOIN = -1  # the version of a heap entry that ends a latency; others end a task


def run(
    tasks: Tasks, bandwidth: Sequence[float], cores: Sequence[float] = (), burst: Mapping[int, float] | None = None
) -> Run:
    """Play the tasks through; `bandwidth` is by wire, `cores` by node, `burst` by wire."""
    count = len(tasks)
    start, stop, cause = [0.0] * count, [0.0] * count, [-1] * count
    started = bytearray(count)
    behind, waits = successors(tasks)
    latency, drain, load, workers = tasks.latency, tasks.drain, tasks.load, tasks.workers
    sharing = _Sharing(tasks, bandwidth, cores, burst or {})
    began: set[int] = set()
    free: set[int] = set()  # those that were held up before

    def posted(task: int) -> float:
        return max([stop[wait] for wait in tasks.turns[task].receiver_waits], default=0.0)

    def holders(task: int) -> list[int]:
        """Who began before the receive was posted, and has not ended by then."""
        mine, when = tasks.turns[task], posted(task)
        return [
            other
            for other, turn in tasks.turns.items()
            if other in began
            and (turn.connection, turn.forth) == (mine.connection, not mine.forth)
            and (other not in over or stop[other] > start[task])
            and (start[other] < when or (start[other] == when > posted(other) and turn.sent < mine.received))
        ]

    def go(task: int) -> None:
        began.add(task)
        sharing.join(task, now)

    def come(task: int) -> None:
        if task not in tasks.turns or task in free:
            go(task)
        else:
            comers.append(task)

    def release(task: int, by: list[int]) -> None:
        """Those that held it up have ended."""
        last = max(by, key=lambda other: stop[other])
        start[task], cause[task] = stop[last], last
        free.add(task)
        held.pop(task, None)
        heappush(heap, (stop[last] + latency[task], task, _JOIN))

    held: dict[int, list[int]] = {}
    over: set[int] = set()
    comers: list[int] = []
    version = sharing.version
    heap: list[tuple[float, int, int]] = []
    ready = [task for task in range(count) if waits[task] == 0]
    now = 0.0
    while True:
        for task in ready:
            start[task] = now
            started[task] = 1
            if not load[task] and not workers[task]:
                heappush(heap, (now + latency[task] + drain[task], task, 0))
            elif latency[task]:
                heappush(heap, (now + latency[task], task, _JOIN))
            else:
                come(task)
        ready = []
        for task, by in list(held.items()):
            if over.issuperset(by):
                release(task, by)
        if comers and not (heap and heap[0][0] == now):
            for task in sorted(comers, key=lambda task: (posted(task), task)):
                by = holders(task)
                if not by:
                    go(task)
                elif over.issuperset(by):
                    release(task, by)
                else:
                    held[task] = by
            comers = []
        if sharing.dirty and not (heap and heap[0][0] == now):
            sharing.settle(now, heap)
        if not heap:
            break
        now = heap[0][0]
        while heap and heap[0][0] == now:
            _, task, kind = heappop(heap)
            if kind == _JOIN:
                come(task)
                continue
            if load[task] or workers[task]:
                if kind != version[task]:
                    continue  # its rate has changed since
                sharing.leave(task, now)
                over.add(task)
            stop[task] = now
            for other in behind[task]:
                waits[other] -= 1
                if waits[other] == 0:
                    cause[other] = task
                    ready.append(other)
    return Run(start, stop, cause, tuple(task for task in range(count) if not started[task]))


class _Sharing:
    """The flows that run now and their rates."""

    def __init__(
        self, tasks: Tasks, bandwidth: Sequence[float], cores: Sequence[float], burst: Mapping[int, float]
    ) -> None:
        count = len(tasks)
        self.tasks, self.bandwidth, self.cores, self.burst = tasks, bandwidth, cores, burst
        self.fresh: list[int] = []
        self.idle_since: dict[int, float] = {}
        self.version = [0] * count
        self.left = [1.0] * count  # of its work
        self.rate = [0.0] * count  # of its work, a second
        self.since = [0.0] * count
        self.on_wire: dict[int, dict[int, None]] = {}
        self.on_node: list[dict[int, None]] = [{} for _ in cores]
        self.busy = [0.0] * len(cores)
        self.share = [1.0] * len(cores)
        self.dirty: dict[int, None] = {}

    def join(self, task: int, now: float) -> None:
        self.since[task] = now
        for wire, _ in self.tasks.load[task]:
            self.on_wire.setdefault(wire, {})[task] = None
        for node, number in self.tasks.workers[task]:
            self.on_node[node][task] = None
            self.busy[node] += number
            self._reshare(node)
        self.dirty[task] = None
        self.fresh.append(task)

    def leave(self, task: int, now: float) -> None:
        for wire, _ in self.tasks.load[task]:
            here = self.on_wire[wire]
            del here[task]
            if all(other in self.fresh for other in here):
                self.idle_since[wire] = now
            self.dirty.update(here)
        for node, number in self.tasks.workers[task]:
            del self.on_node[node][task]
            self.busy[node] -= number
            self._reshare(node)
        self.dirty.pop(task, None)

    def _reshare(self, node: int) -> None:
        share = min(1.0, self.cores[node] / self.busy[node]) if self.busy[node] else 1.0
        if share != self.share[node]:
            self.share[node] = share
            self.dirty.update(self.on_node[node])

    def settle(self, now: float, heap: list[tuple[float, int, int]]) -> None:
        """New rates for every flow that what joined or left can touch."""
        for task in self.fresh:
            self.left[task] -= self._ahead(task, now)
        self.fresh = []
        for group in self._components():
            for task, rate in self._rates(group).items():
                old = self.rate[task]
                if old:
                    if rate == old:
                        continue
                    self.left[task] = max(0.0, self.left[task] - old * (now - self.since[task]))
                self.since[task] = now
                self.rate[task] = rate
                self.version[task] += 1
                heappush(heap, (now + (self.left[task] / rate if rate else 0.0), task, self.version[task]))
        self.dirty.clear()

    def _ahead(self, task: int, now: float) -> float:
        """The part of a new flow's work that its wires' buckets have done."""
        load, drain = self.tasks.load[task], self.tasks.drain[task]
        saved = []
        for wire, _ in load:
            if wire in self.burst:
                together = [other for other in self.on_wire[wire] if other in self.fresh]
                idle = now - self.idle_since.get(wire, -1e9) if len(together) == len(self.on_wire[wire]) else 0.0
                saved.append(min(self.burst[wire] / self.bandwidth[wire], idle) / len(together))
        bound = max((size / self.bandwidth[wire] for wire, size in load if wire not in self.burst), default=0.0)
        return min(min(saved), max(0.0, drain - bound)) / drain if saved else 0.0

    def _components(self) -> Iterable[list[int]]:
        seen: set[int] = set()
        for first in sorted(self.dirty):
            if first in seen:
                continue
            seen.add(first)
            group = [first]
            for task in group:  # grows while it is walked
                for wire, _ in self.tasks.load[task]:
                    for other in self.on_wire[wire]:
                        if other not in seen:
                            seen.add(other)
                            group.append(other)
            yield sorted(group)

    def _speed(self, task: int) -> float:
        """Of its work a second, were the wires its own."""
        share = min((self.share[node] for node, _ in self.tasks.workers[task]), default=1.0)
        drain = self.tasks.drain[task]
        return share / drain if drain else 0.0

    def _rates(self, group: list[int]) -> dict[int, float]:
        speeds = {task: self._speed(task) for task in group}
        if len(group) == 1:
            return speeds
        load, unit = self.tasks.load, self.tasks.unit
        free: dict[int, float] = {}
        for task in group:
            for wire, _ in load[task]:
                free[wire] = self.bandwidth[wire]
        rising = {task: speeds[task] * unit[task] for task in group}  # bytes a second that it can reach
        level = 0.0
        while rising:
            fill: dict[int, float] = {}
            for task in rising:
                for wire, size in load[task]:
                    fill[wire] = fill.get(wire, 0.0) + size / unit[task]
            room = {wire: free[wire] / slope for wire, slope in fill.items()}
            step = min(min(room.values()), min(rising.values()) - level)
            level += step
            for wire, slope in fill.items():
                free[wire] = max(0.0, free[wire] - step * slope)
            full = {wire for wire, space in room.items() if space <= step * (1 + 1e-12)}
            done = [
                task
                for task, top in rising.items()
                if top <= level * (1 + 1e-12) or any(wire in full for wire, _ in load[task])
            ]
            assert done, "progressive filling makes progress"
            for task in done:
                del rising[task]
                speeds[task] = min(speeds[task], level / unit[task])
        return speeds
