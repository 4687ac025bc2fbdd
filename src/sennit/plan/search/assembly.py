"""One plan of the space, put together: what each lane's units keep, the recurrence of its schedule, gradients,
optimizer, memory.

`Assembly` is given the stages and a function that makes the schedule for any number of micro-batches;
`plan/search/estimate.py` says which. A stage may be a further run of another one (`again`: stage -> the stage whose
forward it runs, without gradients, as a recycled model does): it has no units of its own, so no parameters and nothing
kept, and takes the other's forward seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sennit.cost import memory_time
from sennit.ir.program import CollectiveKind
from sennit.kernels.buckets import bucket_count
from sennit.plan.grid import Durations, Grid, Held, chain, times
from sennit.plan.pattern import Pattern, Work
from sennit.plan.search.choice import Kind, Part
from sennit.plan.search.choose import Group, Option
from sennit.plan.search.config import Breakdown, Config, Estimate, Shortage, in_flight, steady_interval
from sennit.plan.search.costs import Variant
from sennit.plan.search.probe import ItemCost

if TYPE_CHECKING:
    from sennit.plan.search.estimate import Estimator

__all__ = ["Assembly", "LaneCosts"]


@dataclass(frozen=True, slots=True)
class LaneCosts:
    """What a lane sees of the config, and what units cost there: each of their options, and where everything is kept."""

    config: Config
    options: tuple[tuple[Variant, ...], ...]
    fast: tuple[ItemCost, ...]

    @property
    def devices(self) -> int:
        return self.config.dp * self.config.way.devices


class Assembly:
    """One plan in the making."""

    def __init__(
        self,
        owner: Estimator,
        config: Config,
        kind: Kind,
        chunks: int,
        make: Callable[[int], Pattern | None],
        microbatches: int,
        stages: list[list[int]],
        costs: tuple[LaneCosts, ...],
        passes: int = 1,
    ) -> None:
        """`costs` are those of each lane; one where they are alike.

        With several `passes`, the stages are those of each pass in turn; units are listed in those of the last, which
        is trained.
        """
        self.passes = passes
        self.owner, self.config, self.kind, self.chunks = owner, config, kind, chunks
        pattern = make(microbatches)
        assert pattern is not None, "the caller looked"
        self.make, self.pattern, self.in_flight, self.stages = make, pattern, in_flight(pattern), stages
        self.wires, self.lanes = owner.wires, costs * len(pattern.rows) if len(costs) == 1 else costs
        self.split = any(task.work is Work.WEIGHTS for task in pattern.rows[0])
        self.lane_of = {stage: lane for lane, own in reversed([*enumerate(pattern.stages)]) for stage in own}

    def estimate(self) -> Estimate | Shortage:
        chosen: dict[int, list[Part]] = {}
        static: list[int] = []
        for lane in range(len(self.pattern.rows)):
            own = self.pattern.stages[lane]
            units = [unit for stage in own for unit in self.stages[stage]]
            others = set(range(len(self.owner.model.items))) - set(units)
            mine = self.lanes[lane]
            static.append(self.owner.static(mine.config, units, mine.fast, others))
            groups, keys = self._groups(own, mine)
            picked = self.owner.pick(tuple(groups), self.owner.memory - static[-1])
            if picked is None:
                return Shortage(self.config, self.kind, self._lacking(groups, static[-1]))
            for (stage, item), counts in zip(keys, picked, strict=True):
                for variant, number in zip(mine.options[item], counts, strict=True):
                    if number:
                        name = self.owner.model.items[item].name
                        chosen.setdefault(stage, []).append(Part(name, number, variant.keep, variant.pieces))
        stages = tuple(tuple(chosen.get(stage, ())) for stage in range(len(self.stages)))
        costs = self._in_passes([self._stage(parts, self.lanes[self.lane_of[at]]) for at, parts in enumerate(stages)])
        transfer = self._transfer()
        grid = times(self.pattern, [cost.durations for cost in costs], chain(len(costs)), transfer)
        peaks = grid.peaks([cost.held for cost in costs])
        working = [max(costs[stage].working for stage in own) for own in self.pattern.stages]
        memory = tuple(int(a + b + c) for a, b, c in zip(static, peaks, working, strict=True))
        if max(memory) > self.owner.memory:
            return Shortage(self.config, self.kind, max(memory) - self.owner.memory)
        return self._finished(stages, costs, grid, memory)

    def _groups(self, own: tuple[int, ...], mine: LaneCosts) -> tuple[list[Group], list[tuple[int, int]]]:
        groups: list[Group] = []
        keys: list[tuple[int, int]] = []
        for stage in own:
            for item in dict.fromkeys(self.stages[stage]):
                choices = tuple(
                    Option(self._takes(mine.config, variant.cost), variant.cost.activations, variant.cost.working)
                    for variant in mine.options[item]
                )
                groups.append(Group(self.stages[stage].count(item), self.in_flight[stage], choices))
                keys.append((stage, item))
        return groups, keys

    def _takes(self, config: Config, cost: ItemCost) -> float:
        parts = self.owner.seconds(config, cost, split=self.split)
        return parts.forward + parts.backward + parts.weights

    def _lacking(self, groups: list[Group], static: int) -> int:
        """The least that all units need, less the memory: for each limit on working memory, the leanest options within
        it.
        """
        least = float("inf")
        for limit in sorted({option.working for group in groups for option in group.options}):
            within = [[o.activations for o in group.options if o.working <= limit] for group in groups]
            if all(within):
                held = [group.count * group.in_flight * min(row) for group, row in zip(groups, within, strict=True)]
                least = min(least, sum(held) + limit)
        return max(1, static + int(least if groups else 0) - self.owner.memory)

    def _variant(self, part: Part, mine: LaneCosts) -> Variant:
        names = [item.name for item in self.owner.model.items]
        return next(
            variant
            for variant in mine.options[names.index(part.item)]
            if variant.keep is part.keep and variant.pieces == part.pieces
        )

    def _stage(self, parts: tuple[Part, ...], mine: LaneCosts) -> _StageCost:
        split = self.split
        forward = backward = weights = compute = kept = sync = 0.0
        wire = working = gradients = state = parameters = tensors = messages = 0
        for part in parts:
            cost = self._variant(part, mine).cost
            seconds = self.owner.seconds(mine.config, cost, split=split)
            forward += part.units * seconds.forward
            backward += part.units * seconds.backward
            weights += part.units * seconds.weights
            compute += part.units * cost.compute
            kept += part.units * cost.activations
            sync += part.units * cost.sync
            wire += part.units * cost.wire_bytes
            gradients += part.units * cost.gradients
            state += part.units * cost.state
            parameters += part.units * cost.parameters
            tensors += part.units * cost.tensors
            messages += part.units * cost.messages
            working = max(working, cost.working)
        durations = Durations(forward, backward, weights)
        return _StageCost(
            durations, Held(kept, kept), working, compute, sync, wire, gradients, state, parameters, tensors, messages
        )

    def _in_passes(self, costs: list[_StageCost]) -> list[_StageCost]:
        """Each pass has its part of the forward work; the last has all the rest."""
        if self.passes == 1:
            return costs
        last = costs[-len(costs) // self.passes :]
        share = [replace(cost.durations, forward=cost.durations.forward / self.passes) for cost in last]
        early = [
            _StageCost(Durations(part.forward, 0.0, 0.0), Held(0.0, 0.0), 0, 0.0, 0.0, 0, 0, 0, 0, 0, 0)
            for part in share
        ]
        trained = [replace(cost, durations=part) for cost, part in zip(last, share, strict=True)]
        return early * (self.passes - 1) + trained

    def _transfer(self) -> dict[tuple[int, int], float]:
        lanes: dict[int, set[int]] = {}
        for number, own in enumerate(self.pattern.stages):
            for stage in own:
                lanes.setdefault(stage, set()).add(number)
        found: dict[tuple[int, int], float] = {}
        each = len(self.stages) // self.passes  # stages of a pass
        for stage in range(len(self.stages) - 1):
            if lanes[stage].isdisjoint(
                lanes[stage + 1]
            ):  # else it is there already, or comes by the collectives of a shared stage
                last = (self.passes - 1) * each + stage % each
                ends = [self.lanes[self.lane_of[at]] for at in (stage, stage + 1)]
                # from or to the fewer devices: those have more of it each
                size = max(end.fast[self.stages[last][-1]].sends for end in ends)
                found[stage, stage + 1] = self.wires.send(ends[0].devices, min(end.devices for end in ends), size)
        return found

    def _finished(
        self,
        stages: tuple[tuple[Part, ...], ...],
        costs: list[_StageCost],
        grid: Grid,
        memory: tuple[int, ...],
    ) -> Estimate:
        config, lanes = self.config, len(self.pattern.rows)
        more = config.microbatches - self.pattern.microbatches
        longer = more * steady_interval(grid) if more else 0.0
        ends: list[tuple[float, float, float]] = []
        for lane, own in enumerate(self.pattern.stages):
            mine = [costs[stage] for stage in own]
            here = self.lanes[lane].config
            ends.append((grid.stop[lane][-1] + longer, self._sync(mine, here), self._optimizer(mine, here)))
        step = max(sum(end) for end in ends)
        busy = [
            sum(
                costs[stage].durations.forward + costs[stage].durations.backward + costs[stage].durations.weights
                for stage in own
            )
            for own in self.pattern.stages
        ]
        plain = [
            sum(self.lanes[lane].fast[unit].compute for stage in own for unit in self.stages[stage])
            for lane, own in enumerate(self.pattern.stages)
        ]
        compute = [sum(costs[stage].compute for stage in own) for own in self.pattern.stages]
        accumulate = [
            sum(self.lanes[lane].fast[unit].accumulate for stage in own for unit in self.stages[stage])
            if config.microbatches > 1
            else 0.0
            for lane, own in enumerate(self.pattern.stages)
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
        placed = stages[-len(stages) // self.passes :]
        return Estimate(config, self.kind, self.chunks, placed, step, memory, parts, wire, grid)

    def _sync(self, stages: list[_StageCost], config: Config) -> float:
        """Seconds for gradients behind the last backward, and for parameters before the first forward.

        Gradients are summed bucket by bucket (`kernels/buckets.py`), beside the backward of what was there before;
        parameters are gathered in runs (`kernels/gathers.py`), beside the forward of the units before.
        """
        size, parameters = sum(cost.gradients for cost in stages), sum(cost.parameters for cost in stages)
        own = sum(cost.sync for cost in stages)
        hidden = sum(cost.durations.backward + cost.durations.weights for cost in stages)
        units = max(1, sum(len(self.stages[stage]) for stage in range(len(self.stages))) // len(self.pattern.rows))
        tensors = max(1, sum(cost.tensors for cost in stages))
        reduces, gathers = config.zero < 2, config.zero in (1, 2)
        kind = CollectiveKind.REDUCE_SCATTER if config.zero else CollectiveKind.ALL_REDUCE
        buckets = bucket_count(tensors, size // config.dp if config.zero else size) if reduces and config.dp > 1 else 1
        copy = memory_time(2 * size, self.wires.cluster.device)[0] if buckets < tensors and config.dp > 1 else 0.0
        gradients = self._times(config, kind, buckets, size) if reduces else 0.0
        messages = max(1, sum(cost.messages for cost in stages))
        gather = self._times(config, CollectiveKind.ALL_GATHER, messages, parameters) if gathers else 0.0
        parts, every = max(1, min(units, buckets)), gradients + own
        behind = max(every / parts, every - hidden * (parts - 1) / parts) + (copy if reduces else 0.0)
        forward = sum(cost.durations.forward for cost in stages)
        return behind + max(gather / units, gather - forward * (units - 1) / units)

    def _times(self, config: Config, kind: CollectiveKind, count: int, size: int) -> float:
        """Seconds of so many messages among replicas, which carry so many bytes together."""
        return count * self.wires.collective(kind, config.way.devices, config.dp, size // count)

    def _optimizer(self, stages: list[_StageCost], config: Config) -> float:
        parameters, state = sum(cost.parameters for cost in stages), sum(cost.state for cost in stages)
        return self.owner.optimizer_seconds(config, parameters, state)


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
    tensors: int
    messages: int
