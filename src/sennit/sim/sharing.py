"""The rates of flows that run at the same time: wires shared by max-min fairness, cores shared evenly.

- **wires.** While a flow of unit u (its bytes on its busiest wire) runs at r bytes a second, it fills wire w by r *
  load_w / u.
  Rates are max-min fair: all rise together until a wire is full, the flows on it keep their rate, the others rise on
  (progressive filling). A flow never exceeds its undisturbed speed.
- **bursts.** A wire with a token bucket of b bytes lets through at once what it has saved while nobody used it, up to
  b. So a flow that
  finds it idle for t seconds is ahead by min(t, b / bandwidth) of its drain (the least over such wires, and no more than what its
  wires without a bucket allow). Flows that come together share what was saved.
- **cores.** Flows that keep a cores of a node busy, of its c, run at min(1, c / a): a processor shared evenly. A
  transfer may keep
  less than one busy.

Only flows that share a wire or an overfull node with one that joined or left are looked at again.

Layers and micro-batches repeat, so the same few transfers meet again and again. Flows of equal drain, unit and load are
of one *shape*. Which shapes share a wire is found once for each pair, and the rates of a set of shapes once for each
set: the loads themselves, which have hundreds of wires on a large cluster, are then never walked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappush
from math import inf

__all__ = ["Sharing", "Workers", "fair_rates"]

Load = tuple[tuple[int, float], ...]
Workers = tuple[tuple[int, float], ...]


class Sharing:
    """The flows that run now and their rates. Lists are by task; `dirty` are the flows whose rate may have changed."""

    def __init__(
        self,
        drain: Sequence[float],
        unit: Sequence[float],
        load: Sequence[Load],
        workers: Sequence[Workers],
        bandwidth: Sequence[float],
        cores: Sequence[float],
        burst: Mapping[int, float],
    ) -> None:
        count = len(drain)
        self.drain, self.unit, self.load, self.workers = drain, unit, load, workers
        self.bandwidth, self.cores, self.burst = bandwidth, cores, burst
        self.version = [0] * count
        self.left = [1.0] * count  # of its work
        self.rate = [0.0] * count  # of its work, a second
        self.since = [0.0] * count
        self.dirty: dict[int, None] = {}
        self.on_node: list[dict[int, None]] = [{} for _ in cores]
        self.busy = [0.0] * len(cores)
        self.share = [1.0] * len(cores)
        self.shapes: dict[tuple[float, float, Load], int] = {}
        self.shapes_by_identity: dict[tuple[float, float, int], int] = {}
        self.shape_of = [-1] * count
        self.meets: list[list[int]] = []  # by shape, those that share a wire with it, itself included
        self.on_wire: dict[int, list[int]] = {}  # shapes
        self.running: list[dict[int, None]] = []  # by shape
        self.rates: dict[tuple[int, ...], tuple[float, ...]] = {}
        self.fresh: list[int] = []  # flows that have joined and were not looked at for bursts
        self.users = dict.fromkeys(burst, 0)  # by wire with a bucket
        self.idle_since = dict.fromkeys(burst, -inf)

    def join(self, task: int, now: float) -> None:
        self.since[task] = now
        shape = self.shape_of[task]
        if shape < 0:
            shape = self.shape_of[task] = self._shape(task)
        self.running[shape][task] = None
        for node, number in self.workers[task]:
            self.on_node[node][task] = None
            self.busy[node] += number
            self._reshare(node)
        self.dirty[task] = None
        if self.burst:
            self.fresh.append(task)

    def leave(self, task: int, now: float) -> None:
        shape = self.shape_of[task]
        del self.running[shape][task]
        for other in self.meets[shape]:
            if self.running[other]:
                self.dirty.update(self.running[other])
        for node, number in self.workers[task]:
            del self.on_node[node][task]
            self.busy[node] -= number
            self._reshare(node)
        self.dirty.pop(task, None)
        if self.burst:
            for wire, _ in self.load[task]:
                if wire in self.burst:
                    self.users[wire] -= 1
                    if not self.users[wire]:
                        self.idle_since[wire] = now

    def _reshare(self, node: int) -> None:
        share = min(1.0, self.cores[node] / self.busy[node]) if self.busy[node] else 1.0
        if share != self.share[node]:
            self.share[node] = share
            self.dirty.update(self.on_node[node])

    def settle(self, now: float, heap: list[tuple[float, int, int]]) -> None:
        """New rates for every flow that what joined or left can touch."""
        if self.fresh:
            self._use_bursts(now)
        for group in self._components():
            for task, rate in zip(group, self._rates(group), strict=True):
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

    def _use_bursts(self, now: float) -> None:
        """What came now is ahead by what its wires had saved."""
        coming: dict[int, int] = {}
        for task in self.fresh:
            for wire, _ in self.load[task]:
                coming[wire] = coming.get(wire, 0) + 1
        for task in self.fresh:
            drain = self.drain[task]
            ahead, bound = inf, 0.0
            for wire, size in self.load[task]:
                rate = self.bandwidth[wire]
                if wire not in self.burst:
                    bound = max(bound, size / rate)
                elif self.users[wire]:
                    ahead = 0.0
                else:
                    ahead = min(ahead, min(self.burst[wire] / rate, now - self.idle_since[wire]) / coming[wire])
            if 0 < ahead < inf:
                self.left[task] = max(0.0, 1.0 - min(ahead, max(0.0, drain - bound)) / drain)
        for wire, number in coming.items():
            if wire in self.burst:
                self.users[wire] += number
        self.fresh.clear()

    def _components(self) -> Iterator[list[int]]:
        seen: set[int] = set()
        running, meets, shape_of = self.running, self.meets, self.shape_of
        for first in sorted(self.dirty):
            if first in seen:
                continue
            seen.add(first)
            group = [first]
            for task in group:  # grows while it is walked
                for shape in meets[shape_of[task]]:
                    for other in running[shape]:
                        if other not in seen:
                            seen.add(other)
                            group.append(other)
            group.sort()
            yield group

    def _speed(self, task: int) -> float:
        """Of its work a second, were the wires its own."""
        share = min((self.share[node] for node, _ in self.workers[task]), default=1.0)
        return share / self.drain[task] if self.drain[task] else 0.0

    def _rates(self, group: list[int]) -> Sequence[float]:
        if len(group) == 1:
            return (self._speed(group[0]),)
        if self.cores:  # speeds change with every share
            return self._fair(group)
        key = tuple([self.shape_of[task] for task in group])
        found = self.rates.get(key)
        if found is None:
            found = self.rates[key] = self._fair(group)
        return found

    def _fair(self, group: list[int]) -> tuple[float, ...]:
        speeds = [self._speed(task) for task in group]
        return fair_rates(
            speeds, [self.unit[task] for task in group], [self.load[task] for task in group], self.bandwidth
        )

    def _shape(self, task: int) -> int:
        """Loads are compared by identity first: those of one transfer are one, and long. The tasks keep them alive."""
        load, drain, unit = self.load[task], self.drain[task], self.unit[task]
        shape = self.shapes_by_identity.get((drain, unit, id(load)))
        if shape is None:
            shape = self.shapes.setdefault((drain, unit, load), len(self.meets))
            self.shapes_by_identity[drain, unit, id(load)] = shape
        if shape < len(self.meets):
            return shape
        self.running.append({})
        near = {shape: None} if load else {}  # a flow without load meets none, itself not either
        for wire, _ in load:
            here = self.on_wire.setdefault(wire, [])
            near.update(dict.fromkeys(here))
            here.append(shape)
        for other in near:
            if other != shape:
                self.meets[other].append(shape)
        self.meets.append(list(near))
        return shape


def fair_rates(
    speeds: Sequence[float], units: Sequence[float], loads: Sequence[Load], bandwidth: Sequence[float]
) -> tuple[float, ...]:
    """Max-min fair rates of flows that would run at `speeds` (of their work a second) were the wires their own."""
    rates = list(speeds)
    free: dict[int, float] = {}
    for load in loads:
        for wire, _ in load:
            free[wire] = bandwidth[wire]
    rising = {flow: speed * units[flow] for flow, speed in enumerate(speeds)}  # bytes a second that it can reach
    level = 0.0
    while rising:
        fill: dict[int, float] = {}
        for flow in rising:
            for wire, size in loads[flow]:
                fill[wire] = fill.get(wire, 0.0) + size / units[flow]
        room = {wire: free[wire] / slope for wire, slope in fill.items()}
        step = min(min(room.values()), min(rising.values()) - level)
        level += step
        for wire, slope in fill.items():
            free[wire] = max(0.0, free[wire] - step * slope)
        full = {wire for wire, space in room.items() if space <= step * (1 + 1e-12)}
        done = [
            flow
            for flow, top in rising.items()
            if top <= level * (1 + 1e-12) or any(wire in full for wire, _ in loads[flow])
        ]
        assert done, "progressive filling makes progress"
        for flow in done:
            del rising[flow]
            rates[flow] = min(rates[flow], level / units[flow])
    return tuple(rates)
