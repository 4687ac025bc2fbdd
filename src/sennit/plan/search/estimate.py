"""One plan of the space on the clock: stages, what their units keep, the schedule's recurrence, gradients and optimizer.

A `Config` fixes how units are split, how many stages and replicas there are, the micro-batches, and what replicas share. Given a schedule,
`Estimator.estimate`

1. cuts the units into stages, in order, with the least slowest stage (`partition`: exact, by bisection over the greatest stage);
2. lets each lane choose what its units keep, under what its memory leaves (`choose.py`);
3. runs the schedule by the recurrence of `plan/grid.py`, transfers between stages included;
4. adds, for each lane, the sum of gradients over replicas as far as the last backward does not hide it, and the optimizer.

**Replicas.** What is shared changes memory and traffic (ZeRO): 1, optimizer state: gradients are scattered and parameters gathered once a step; 2, gradients
too: they are scattered for each micro-batch, beside its backward; 3, parameters too: each unit's are gathered for F and again for B.

**Bound.** `Estimator.bound` is below every plan of a config, whatever its stages, schedule, and what its units keep. With S lanes, M micro-batches,
interval I from one to the next: I >= (all seconds of a micro-batch) / S, and >= ceil(n / S) times the seconds of a unit that stands n times; a unit's
activations are held at least from its F to its B, past all that lies behind it, so by Little's law the sum of held * life is at most I
times the room of all lanes: of the units, so many bytes may be kept, and the rest is computed again (`choose.least_seconds`). Then

    step >= M I + (S - 1) * the shortest F of a unit
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, inf

from sennit.cost import memory_time
from sennit.ir.program import CollectiveKind
from sennit.plan.grid import Durations, Grid, Held, chain, times
from sennit.plan.pattern import Pattern, Work
from sennit.plan.schedules import (
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_h2,
)
from sennit.plan.search.choice import Kind, Part
from sennit.plan.search.choose import Group, Option, choose, least_seconds
from sennit.plan.search.costs import CostBook, Variant
from sennit.plan.search.probe import ItemCost
from sennit.plan.search.ways import Way

__all__ = ["Breakdown", "Config", "Estimate", "Estimator", "Shortage", "partition", "pattern_of"]


@dataclass(frozen=True, slots=True)
class Config:
    way: Way
    pp: int
    dp: int
    size: int
    microbatches: int
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the step of a lane goes, on average over lanes: they add up to the step."""

    compute: float
    recompute: float
    talk: float
    bubble: float
    sync: float
    optimizer: float


@dataclass(frozen=True, slots=True)
class Estimate:
    config: Config
    kind: Kind
    chunks: int
    stages: tuple[tuple[Part, ...], ...]
    step: float
    memory: tuple[int, ...]  # the most of each lane
    breakdown: Breakdown
    wire_bytes: int  # that a device sends in a step, on average over lanes
    grid: Grid


@dataclass(frozen=True, slots=True)
class Shortage:
    """A plan that does not fit: how many bytes the fullest device lacks with the leanest options."""

    config: Config
    kind: Kind
    lacking: int


class Estimator:
    def __init__(self, book: CostBook) -> None:
        self.book, self.model, self.wires = book, book.model, book.wires
        self.memory = int(book.wires.cluster.device.memory.value)
        self.units = [number for number, item in enumerate(self.model.items) for _ in range(item.copies)]
        self.patterns: dict[tuple[Kind, int, int, int], tuple[Pattern, tuple[int, ...]] | None] = {}
        self.picked: dict[tuple[tuple[Group, ...], int], tuple[tuple[int, ...], ...] | None] = {}

    # ---- schedules -----------------------------------------------------------------------------------------------------

    def pattern(self, kind: Kind, lanes: int, microbatches: int, chunks: int) -> tuple[Pattern, tuple[int, ...]] | None:
        """A schedule, and how many micro-batches of each stage it has in flight; None where there is none for these numbers."""
        key = (kind, lanes, microbatches, chunks)
        if key not in self.patterns:
            pattern = pattern_of(kind, lanes, microbatches, chunks)
            self.patterns[key] = None if pattern is None else (pattern, _in_flight(pattern))
        return self.patterns[key]

    def pick(self, groups: tuple[Group, ...], room: int) -> tuple[tuple[int, ...], ...] | None:
        """`choose`, remembered: the lanes of many plans are alike."""
        if (groups, room) not in self.picked:
            self.picked[groups, room] = choose(groups, room)
        return self.picked[groups, room]

    # ---- one plan ------------------------------------------------------------------------------------------------------

    def estimate(self, config: Config, kind: Kind, chunks: int = 1) -> Estimate | Shortage | None:
        """None where the config has no such schedule, or too few units."""
        options = self.book.options(config.way, config.size)
        fast = self.book.fast(config.way, config.size)
        count = config.pp * chunks
        # the steady state repeats: a longer one is as long as its beginning says
        short = _shortened(config, chunks)
        found = self.pattern(kind, config.pp, short, chunks)
        if options is None or fast is None or found is None or len(self.units) < count:
            return None
        pattern, in_flight = found
        cuts = partition([fast[unit].seconds + fast[unit].accumulate for unit in self.units], count)
        stages = [self.units[begin:end] for begin, end in cuts]
        return _Plan(self, config, kind, chunks, pattern, in_flight, stages, options, fast).estimate()

    def static(self, config: Config, units: list[int], costs: tuple[ItemCost, ...], others: set[int]) -> int:
        """Bytes of parameters, gradients and state of a lane; tied ones again where the item that has them lies on another lane."""
        parameters = gradients = state = 0
        for unit in units:
            cost = costs[unit]
            parameters += cost.parameters
            gradients += cost.gradients
            state += cost.state
            if cost.tied and others:
                parameters += cost.tied
                gradients += cost.tied
                state += cost.tied * cost.state // cost.parameters if cost.parameters else 6 * cost.tied
        shared = config.dp
        most = max((costs[unit].parameters for unit in units), default=0)
        match config.zero:
            case 0:
                return parameters + gradients + state
            case 1:
                return parameters + gradients + state // shared
            case 2:
                return parameters + (gradients + state) // shared + most
            case _:
                return (parameters + gradients + state) // shared + 2 * most

    def shared(self, config: Config, cost: ItemCost) -> tuple[float, float]:
        """F and B of a unit, with what replicas exchange beside them for each micro-batch."""
        forward, backward, dp, stride = cost.forward, cost.backward, config.dp, config.way.devices
        if config.zero < 2 or dp == 1:
            return forward, backward
        scatter = self.wires.collective(CollectiveKind.REDUCE_SCATTER, stride, dp, cost.gradients)
        gather = self.wires.collective(CollectiveKind.ALL_GATHER, stride, dp, cost.parameters)
        both = cost.together
        if config.zero == 2:
            return forward, backward + max(0.0, scatter - both)
        return max(forward, gather), backward + max(0.0, gather + scatter - both)

    # ---- bound ---------------------------------------------------------------------------------------------------------

    def bound(self, config: Config, *, refined: bool) -> float:
        """Seconds that no plan of this config is below; without `refined`, only from what is known without more probes."""
        fast = self.book.fast(config.way, config.size)
        if fast is None or config.pp > len(self.units):
            return inf
        # one unit at a time, with what replicas exchange beside it
        each = [max(cost.seconds, sum(self.shared(config, cost)) + cost.together - cost.backward) for cost in fast]
        lanes, total = config.pp, sum(each[unit] for unit in self.units)
        interval = total / lanes
        for number, item in enumerate(self.model.items):
            interval = max(interval, ceil(item.copies / lanes) * each[number])
        if refined:
            interval = max(interval, self._memory_bound(config, fast, total, interval))
        return config.microbatches * interval + (lanes - 1) * self.shortest(config)

    def shortest(self, config: Config) -> float:
        """The shortest F of a unit."""
        fast = self.book.fast(config.way, config.size)
        assert fast is not None, "a config with a bound"
        return min((fast[unit].forward for unit in self.units if self.model.items[unit].modules), default=0.0)

    def fill(self, config: Config, kind: Kind, chunks: int) -> float:
        """Seconds of bubble that a schedule has with equal stages (the table of `plan/schedules.py`): with unequal ones it has more."""
        fast = self.book.fast(config.way, config.size)
        assert fast is not None, "a config with a bound"
        share = (config.pp - 1) / config.pp
        forward = share * sum(fast[unit].forward for unit in self.units)
        total = share * sum(fast[unit].seconds for unit in self.units)
        weights = share * sum(fast[unit].weights for unit in self.units)
        match kind:
            case Kind.INTERLEAVED:
                return total / chunks
            case Kind.ZERO_BUBBLE_H1:
                return max(forward, total - 2 * weights)
            case Kind.DUAL_PIPE_V:
                return max(forward, total - 2 * weights) / 2
            case Kind.ZERO_BUBBLE_H2:
                return forward
            case _:
                return total

    def _memory_bound(self, config: Config, fast: tuple[ItemCost, ...], total: float, interval: float) -> float:
        options = self.book.options(config.way, config.size)
        if options is None:
            return inf
        room = config.pp * self.memory - self.static(config, self.units, fast, set())
        if room <= 0:
            return inf
        groups: list[Group] = []
        life = 0.0
        for unit in reversed(self.units):
            life += fast[unit].forward + fast[unit].backward
            choices = tuple(
                Option(variant.cost.seconds, int(variant.cost.activations * life), 0) for variant in options[unit]
            )
            groups.append(Group(1, 1, choices))
        low, high = interval, 4.0 * total
        if least_seconds(groups, high * room) / config.pp > high:
            return inf
        for _ in range(24):
            middle = (low + high) / 2
            if least_seconds(groups, middle * room) / config.pp > middle:
                low = middle
            else:
                high = middle
        return low


class _Plan:
    """One plan in the making."""

    def __init__(
        self,
        owner: Estimator,
        config: Config,
        kind: Kind,
        chunks: int,
        pattern: Pattern,
        in_flight: tuple[int, ...],
        stages: list[list[int]],
        options: tuple[tuple[Variant, ...], ...],
        fast: tuple[ItemCost, ...],
    ) -> None:
        self.owner, self.config, self.kind, self.chunks = owner, config, kind, chunks
        self.pattern, self.in_flight, self.stages = pattern, in_flight, stages
        self.options, self.fast, self.wires = options, fast, owner.wires
        self.devices = config.dp * config.way.devices  # of a lane

    def estimate(self) -> Estimate | Shortage:
        chosen: dict[int, list[Part]] = {}
        static: list[int] = []
        for lane in range(len(self.pattern.rows)):
            own = self.pattern.stages[lane]
            units = [unit for stage in own for unit in self.stages[stage]]
            others = set(range(len(self.owner.model.items))) - set(units)
            static.append(self.owner.static(self.config, units, self.fast, others))
            groups, keys = self._groups(own)
            picked = self.owner.pick(tuple(groups), self.owner.memory - static[-1])
            if picked is None:
                return Shortage(self.config, self.kind, self._lacking(groups, static[-1]))
            for (stage, item), counts in zip(keys, picked, strict=True):
                for variant, number in zip(self.options[item], counts, strict=True):
                    if number:
                        name = self.owner.model.items[item].name
                        chosen.setdefault(stage, []).append(Part(name, number, variant.keep, variant.pieces))
        stages = tuple(tuple(chosen[stage]) for stage in range(len(self.stages)))
        costs = [self._stage(parts) for parts in stages]
        transfer = self._transfer()
        grid = times(self.pattern, [cost.durations for cost in costs], chain(len(costs)), transfer)
        peaks = grid.peaks([cost.held for cost in costs])
        working = [max(costs[stage].working for stage in own) for own in self.pattern.stages]
        memory = tuple(int(a + b + c) for a, b, c in zip(static, peaks, working, strict=True))
        if max(memory) > self.owner.memory:
            return Shortage(self.config, self.kind, max(memory) - self.owner.memory)
        return self._finished(stages, costs, grid, memory, transfer)

    def _groups(self, own: tuple[int, ...]) -> tuple[list[Group], list[tuple[int, int]]]:
        groups: list[Group] = []
        keys: list[tuple[int, int]] = []
        for stage in own:
            for item in dict.fromkeys(self.stages[stage]):
                choices = tuple(
                    Option(variant.cost.seconds, variant.cost.activations, variant.cost.working)
                    for variant in self.options[item]
                )
                groups.append(Group(self.stages[stage].count(item), self.in_flight[stage], choices))
                keys.append((stage, item))
        return groups, keys

    def _lacking(self, groups: list[Group], static: int) -> int:
        lean = sum(group.count * group.in_flight * min(o.activations for o in group.options) for group in groups)
        working = max((min(o.working for o in group.options) for group in groups), default=0)
        return max(1, static + lean + working - self.owner.memory)

    def _variant(self, part: Part) -> Variant:
        names = [item.name for item in self.owner.model.items]
        return next(
            variant
            for variant in self.options[names.index(part.item)]
            if variant.keep is part.keep and variant.pieces == part.pieces
        )

    def _stage(self, parts: tuple[Part, ...]) -> _StageCost:
        split = any(task.work is Work.WEIGHTS for task in self.pattern.rows[0])
        forward = backward = weights = compute = kept = sync = 0.0
        wire = working = gradients = state = parameters = 0
        for part in parts:
            cost = self._variant(part).cost
            f, b = self.owner.shared(self.config, cost)
            forward += part.units * f
            backward += part.units * (b if split else min(b, b + cost.together - cost.backward - cost.weights))
            weights += part.units * (cost.weights + (cost.accumulate if self.config.microbatches > 1 else 0.0))
            compute += part.units * cost.compute
            kept += part.units * cost.activations
            sync += part.units * cost.sync
            wire += part.units * cost.wire_bytes
            gradients += part.units * cost.gradients
            state += part.units * cost.state
            parameters += part.units * cost.parameters
            working = max(working, cost.working)
        durations = Durations(forward, backward, weights)
        return _StageCost(durations, Held(kept, kept), working, compute, sync, wire, gradients, state, parameters)

    def _transfer(self) -> dict[tuple[int, int], float]:
        lane = {stage: number for number, own in enumerate(self.pattern.stages) for stage in own}
        found: dict[tuple[int, int], float] = {}
        for stage in range(len(self.stages) - 1):
            if lane[stage] != lane[stage + 1]:
                size = self.fast[self.stages[stage][-1]].sends
                found[stage, stage + 1] = self.wires.send(self.devices, self.devices, size)
        return found

    def _finished(
        self,
        stages: tuple[tuple[Part, ...], ...],
        costs: list[_StageCost],
        grid: Grid,
        memory: tuple[int, ...],
        transfer: dict[tuple[int, int], float],
    ) -> Estimate:
        config, lanes = self.config, len(self.pattern.rows)
        more = config.microbatches - self.pattern.microbatches
        longer = more * self._interval(costs, transfer, grid) if more else 0.0
        ends: list[tuple[float, float, float]] = []
        for lane, own in enumerate(self.pattern.stages):
            mine = [costs[stage] for stage in own]
            ends.append((grid.stop[lane][-1] + longer, self._sync(mine), self._optimizer(mine)))
        step = max(sum(end) for end in ends)
        busy = [
            sum(
                costs[stage].durations.forward + costs[stage].durations.backward + costs[stage].durations.weights
                for stage in own
            )
            for own in self.pattern.stages
        ]
        plain = [
            sum(self.fast[unit].compute for stage in own for unit in self.stages[stage]) for own in self.pattern.stages
        ]
        compute = [sum(costs[stage].compute for stage in own) for own in self.pattern.stages]
        accumulate = [
            sum(self.fast[unit].accumulate for stage in own for unit in self.stages[stage])
            if config.microbatches > 1
            else 0.0
            for own in self.pattern.stages
        ]
        scale = config.microbatches / lanes
        parts = Breakdown(
            compute=scale * (sum(plain) + sum(accumulate)),
            recompute=scale * (sum(compute) - sum(plain)),
            talk=scale * (sum(busy) - sum(compute) - sum(accumulate)),
            bubble=step - scale * sum(busy) - sum(end[1] + end[2] for end in ends) / lanes,
            sync=sum(end[1] for end in ends) / lanes,
            optimizer=sum(end[2] for end in ends) / lanes,
        )
        wire = config.microbatches * sum(cost.wire for cost in costs) // lanes
        return Estimate(config, self.kind, self.chunks, stages, step, memory, parts, wire, grid)

    def _interval(self, costs: list[_StageCost], transfer: dict[tuple[int, int], float], grid: Grid) -> float:
        """Seconds that one more micro-batch adds to the steady state."""
        fewer = self.pattern.microbatches - self.config.pp
        found = self.owner.pattern(self.kind, self.config.pp, fewer, self.chunks)
        assert found is not None
        before = times(found[0], [cost.durations for cost in costs], chain(len(costs)), transfer)
        return (grid.span - before.span) / self.config.pp

    def _sync(self, stages: list[_StageCost]) -> float:
        """Seconds for gradients behind the last backward. The sum of each unit's gradients runs beside the backward of the units before it."""
        config, stride = self.config, self.config.way.devices
        size, parameters = sum(cost.gradients for cost in stages), sum(cost.parameters for cost in stages)
        own = sum(cost.sync for cost in stages)
        hidden = sum(cost.durations.backward + cost.durations.weights for cost in stages)
        units = max(1, sum(len(self.stages[stage]) for stage in range(len(self.stages))) // len(self.pattern.rows))
        match config.zero:
            case 0:
                gradients, gather = self.wires.collective(CollectiveKind.ALL_REDUCE, stride, config.dp, size), 0.0
            case 1:
                gradients = self.wires.collective(CollectiveKind.REDUCE_SCATTER, stride, config.dp, size)
                gather = self.wires.collective(CollectiveKind.ALL_GATHER, stride, config.dp, parameters)
            case 2:
                gradients, gather = 0.0, self.wires.collective(CollectiveKind.ALL_GATHER, stride, config.dp, parameters)
            case _:
                gradients = gather = 0.0
        every = gradients + own
        return max(every / units, every - hidden * (units - 1) / units) + gather

    def _optimizer(self, stages: list[_StageCost]) -> float:
        moved = sum(3 * cost.parameters + 2 * cost.state for cost in stages)
        return memory_time(moved // (self.config.dp if self.config.zero else 1), self.wires.cluster.device)[0]


@dataclass(frozen=True, slots=True)
class _StageCost:
    durations: Durations
    held: Held
    working: int
    compute: float
    sync: float
    wire: int
    gradients: int
    state: int
    parameters: int


def _shortened(config: Config, chunks: int) -> int:
    """So many micro-batches that the steady state is reached, in whole groups of as many as there are lanes."""
    enough = 5 * config.pp
    if config.microbatches <= enough + config.pp:
        return config.microbatches
    return enough + config.microbatches % config.pp


def pattern_of(kind: Kind, lanes: int, microbatches: int, chunks: int) -> Pattern | None:
    match kind:
        case Kind.ONE_F_ONE_B:
            return one_forward_one_backward(lanes, microbatches)
        case Kind.GPIPE:
            return gpipe(lanes, microbatches)
        case Kind.INTERLEAVED:
            return interleaved(lanes, microbatches, chunks) if microbatches % lanes == 0 else None
        case Kind.ZERO_BUBBLE_H1:
            return zero_bubble_h1(lanes, microbatches)
        case Kind.ZERO_BUBBLE_H2:
            return zero_bubble_h2(lanes, microbatches)
        case Kind.DUAL_PIPE_V:
            return dual_pipe_v(lanes, microbatches) if microbatches >= 2 * lanes else None
        case _:
            return None


def _in_flight(pattern: Pattern) -> tuple[int, ...]:
    """The most micro-batches of each stage between F and the last work on it."""
    stages = 1 + max(stage for own in pattern.stages for stage in own)
    found = [0] * stages
    for row in pattern.rows:
        split = {task.stage for task in row if task.work is Work.WEIGHTS}
        live: dict[int, int] = {}
        for task in row:
            if task.work is Work.FORWARD:
                live[task.stage] = live.get(task.stage, 0) + 1
                found[task.stage] = max(found[task.stage], live[task.stage])
            elif (task.work is Work.WEIGHTS) == (task.stage in split):
                live[task.stage] -= 1
    return tuple(found)


def partition(weights: list[float], parts: int) -> list[tuple[int, int]]:
    """Cuts of a list into `parts` runs, none empty, with the least greatest sum."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    low, high = max(max(weights, default=0.0), sums[-1] / parts), sums[-1]
    for _ in range(50):
        middle = (low + high) / 2
        if len(_runs(sums, middle, parts)) <= parts:
            high = middle
        else:
            low = middle
    cuts = _runs(sums, high * (1 + 1e-12), parts)
    while len(cuts) < parts:  # fewer runs are enough: cut the longest that has several
        longest = max((cut for cut in cuts if cut[1] - cut[0] > 1), key=lambda cut: sums[cut[1]] - sums[cut[0]])
        place = cuts.index(longest)
        middle_of = (longest[0] + longest[1]) // 2
        cuts[place : place + 1] = [(longest[0], middle_of), (middle_of, longest[1])]
    return cuts


def _runs(sums: list[float], most: float, parts: int) -> list[tuple[int, int]]:
    """Runs from the left, each as long as `most` allows, with one unit left for each run that is still to come."""
    cuts: list[tuple[int, int]] = []
    begin, end = 0, len(sums) - 1
    while begin < end:
        stop = max(begin + 1, bisect_left(sums, sums[begin] + most * (1 + 1e-12), begin + 1) - 1)
        if sums[min(stop + 1, end)] - sums[begin] <= most * (1 + 1e-12):
            stop = min(stop + 1, end)
        stop = min(stop, max(begin + 1, end - (parts - len(cuts) - 1)))
        cuts.append((begin, stop))
        begin = stop
        if len(cuts) > parts:
            break
    return cuts
