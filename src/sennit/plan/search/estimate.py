"""One plan of the space on the clock: stages, what their units keep, the schedule's recurrence, gradients and
optimizer.

A `Config` fixes how units are split, how many stages and replicas there are, the micro-batches, and what replicas
share. Given a schedule, `Estimator.estimate`

1. cuts the units into stages, in order, with the least slowest stage (`partition`: exact, by bisection over the
   greatest stage);
2. lets each lane choose what its units keep, under what its memory leaves (`choose.py`);
3. runs the schedule by the recurrence of `plan/grid.py`, transfers between stages included;
4. adds, for each lane, the sum of gradients over replicas as far as the last backward does not hide it, and the
   optimizer.

**Replicas.** What is shared changes memory and traffic (ZeRO): 1, optimizer state: gradients are scattered and
parameters gathered once a step; 2, gradients too: they are scattered for each micro-batch, beside its backward; 3,
parameters too: each unit's are gathered for F and again for B.

**Bounds.** `Estimator.bound` is below every plan of a config, whatever its schedule, stages, and what its units keep:
with S lanes and M micro-batches, the interval I from one to the next is at least (all seconds of a micro-batch) / S,
and ceil(n / S) times the seconds of a unit that stands n times. `schedule_bound` is below every plan of a config with
one schedule: the optimum of a linear program with the memory and the bubble of each lane (`relax.py`). The first has

    step >= M I + (S - 1) * the shortest F of a unit

With one lane there are no stages to cut, and `choose.py` finds the least seconds of a micro-batch exactly. Computing
again makes B longer and never F, so what it adds to the step is at least what it hides of the sum of gradients: an
estimate is its own bound. Where units run in pieces F may differ too, and the sum of gradients is left out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil, inf

from sennit.cost import memory_time
from sennit.ir.program import CollectiveKind
from sennit.plan.grid import Durations, Held, chain
from sennit.plan.modulo import Problem, schedule
from sennit.plan.pattern import Pattern, Work
from sennit.plan.schedules import pass_after_pass
from sennit.plan.search.assembly import Assembly, LaneCosts
from sennit.plan.search.choice import Kind
from sennit.plan.search.choose import Group, choose
from sennit.plan.search.config import (
    INTERLACED_SPARE,
    Config,
    Estimate,
    Fixed,
    Shortage,
    in_flight,
    passes_of,
    pattern_of,
    shortened,
    units_of,
)
from sennit.plan.search.costs import CostBook, Variant
from sennit.plan.search.probe import ItemCost
from sennit.plan.search.relax import Counted, Lanes, Rest, UnitOption, least_step
from sennit.plan.search.ways import Keep, Way

__all__ = ["Estimator"]


class Estimator:
    def __init__(
        self,
        book: CostBook,
        fixed: Fixed | None = None,
        *,
        equal_stages: bool = False,
        counted: Counted | None = None,
    ) -> None:
        """`equal_stages` gives each stage as many units, whatever they take.

        `passes` is how often the units of the graph run, each time on their own results, of which the last is trained.
        """
        self.equal_stages, self.counted = equal_stages, counted or Counted()
        self.book, self.model, self.wires, self.fixed = book, book.model, book.wires, fixed or Fixed()
        self.memory = int(book.wires.cluster.device.memory.value)
        self.units, self.passes = [unit.item for unit in units_of(self.model)], passes_of(self.model)
        self.patterns: dict[tuple[Kind, int, int, int], Pattern | None] = {}
        self.relaxed: dict[tuple[Config, Kind, int, bool], float] = {}
        self.picked: dict[tuple[tuple[Group, ...], int], tuple[tuple[int, ...], ...] | None] = {}

    # ---- schedules ---------------------------------------------------------------------------------------------------

    def pattern(self, kind: Kind, lanes: int, microbatches: int, chunks: int) -> Pattern | None:
        """A schedule; None where there is none for these numbers."""
        key = (kind, lanes, microbatches, chunks)
        if key not in self.patterns:
            self.patterns[key] = pattern_of(kind, lanes, microbatches, chunks)
        return self.patterns[key]

    def pick(self, groups: tuple[Group, ...], room: int) -> tuple[tuple[int, ...], ...] | None:
        """`choose`, remembered: the lanes of many plans are alike."""
        if (groups, room) not in self.picked:
            self.picked[groups, room] = choose(groups, room)
        return self.picked[groups, room]

    # ---- one plan ----------------------------------------------------------------------------------------------------

    def estimate(self, config: Config, kind: Kind, chunks: int = 1) -> Estimate | Shortage | None:
        """None where the config has no such schedule, or too few units."""
        options = self.book.options(config.way, config.size)
        fast = self.book.fast(config.way, config.size)
        count = config.pp * chunks
        # the steady state repeats: a longer one is as long as its beginning says
        short = config.microbatches if kind is Kind.GPIPE else shortened(config)  # it has no steady state
        if options is None or fast is None or len(self.units) < count:
            return None
        if self.pattern(kind, config.pp, short, chunks) is None:
            return None
        stages = self._cut(fast, count)
        if stages is None:
            return None

        def make(microbatches: int) -> Pattern | None:
            return self.pattern(kind, config.pp, microbatches, chunks)

        return Assembly(self, config, kind, chunks, make, short, stages, (LaneCosts(config, options, fast),)).estimate()

    def _cut(self, fast: tuple[ItemCost, ...], count: int) -> list[list[int]] | None:
        """The units in order, in `count` stages: with the least slowest one, or with equally many units each.

        None where pins leave no such cut.
        """
        each = [fast[unit].seconds + fast[unit].accumulate for unit in self.units]
        if self.equal_stages:  # what lies outside of units weighs nothing
            each = [1.0 if self.model.items[unit].modules else 1e-6 for unit in self.units]
        cuts = self.fixed.partition(each, count)
        return None if cuts is None else [self.units[begin:end] for begin, end in cuts]

    def interlaced(self, config: Config) -> Estimate | Shortage | None:
        """Embeddings and heads on all lanes, over the devices of all of them; the units in stages between them, in an
        order that the modulo scheduler finds under the memory of the lanes.
        """
        spread = self.book.probed(self._wide(config), config.size)
        options, fast = self.book.options(config.way, config.size), self.book.fast(config.way, config.size)
        inner = [unit for unit in self.units if self.model.items[unit].modules]
        if (
            spread is None
            or options is None
            or fast is None
            or len(inner) < config.pp
            or config.way.devices != config.way.tp
        ):
            return None
        last = max(number for number, item in enumerate(self.model.items) if not item.modules)
        outer = [number for number, item in enumerate(self.model.items) if not item.modules]
        costs = tuple(spread[number] if number in outer else cost for number, cost in enumerate(fast))
        choices = tuple(
            (Variant(Keep.ALL, 1, spread[number]),) if number in outer else row for number, row in enumerate(options)
        )
        fixed = self.fixed.of([place for place, unit in enumerate(self.units) if self.model.items[unit].modules])
        cuts = fixed.partition([fast[unit].seconds + fast[unit].accumulate for unit in inner], config.pp)
        if cuts is None:
            return None
        stages = [[number for number in outer if number != last], *(inner[a:b] for a, b in cuts), [last]]
        problem = self._interlaced_problem(config, stages, costs)

        def make(microbatches: int) -> Pattern | None:
            return schedule(problem, solver=False).pattern(microbatches)

        short = min(config.microbatches, 6 * config.pp)
        lanes = (LaneCosts(config, choices, costs),)
        return Assembly(self, config, Kind.INTERLACED, 1, make, short, stages, lanes).estimate()

    def _interlaced_problem(self, config: Config, stages: list[list[int]], costs: tuple[ItemCost, ...]) -> Problem:
        everywhere = tuple(range(config.pp))
        durations = tuple(
            Durations(
                sum(costs[unit].forward for unit in stage),
                sum(costs[unit].together - costs[unit].weights for unit in stage),
                sum(costs[unit].weights + costs[unit].accumulate for unit in stage),
            )
            for stage in stages
        )
        return Problem(
            lanes=(everywhere, *((lane,) for lane in everywhere), everywhere),
            durations=durations,
            edges=chain(len(stages)),
            trained=(True,) * len(stages),
            held=(Held(0.0, 0.0), *(Held(),) * config.pp, Held(0.0, 0.0)),
            caps=(float(config.pp + INTERLACED_SPARE),) * config.pp,
        )

    def recycled(self, config: Config, kind: Kind) -> Estimate | Shortage | None:
        """Units that run several times on their own results, the last pass trained: pass r of the run on lane i is
        stage r S + i. `SEVERAL_FORWARD` lets passes of different micro-batches run beside each other, in an order that
        the modulo scheduler finds (3F1B); with `ONE_F_ONE_B` a pass begins when all micro-batches are through the one
        before, as a pipeline can that knows one forward pass.
        """
        options, fast, passes = (
            self.book.options(config.way, config.size),
            self.book.fast(config.way, config.size),
            self.passes,
        )
        inner = [place for place, unit in enumerate(self.units) if self.model.items[unit].modules]
        if options is None or fast is None or passes is None or passes == 1 or len(inner) < config.pp:
            return None
        weights = [fast[self.units[place]].seconds + fast[self.units[place]].accumulate for place in inner]
        weights = [1.0] * len(inner) if self.equal_stages else weights
        cuts = self.fixed.of(inner).partition(weights, config.pp)
        if cuts is None:
            return None
        ends = [0, *(inner[end] for _, end in cuts[:-1]), len(self.units)]  # what lies outside goes with its neighbours
        runs = [self.units[begin:end] for begin, end in pairwise(ends)]
        parts = [
            Durations(
                sum(fast[unit].forward for unit in run) / passes,
                sum(fast[unit].together - fast[unit].weights for unit in run),
                sum(fast[unit].weights + fast[unit].accumulate for unit in run),
            )
            for run in runs
        ]
        early = tuple(Durations(part.forward, 0.0, 0.0) for part in parts)
        count = passes * config.pp
        problem = Problem(
            lanes=tuple((stage % config.pp,) for stage in range(count)),
            durations=early * (passes - 1) + tuple(parts),
            edges=chain(count),
            trained=tuple(stage >= count - config.pp for stage in range(count)),
            held=(Held(),) * count,
            caps=(inf,) * config.pp,
        )

        def make(microbatches: int) -> Pattern | None:
            if kind is Kind.ONE_F_ONE_B:
                return pass_after_pass(config.pp, microbatches, passes)
            return schedule(problem, solver=False).pattern(microbatches)

        stages = [*([] for _ in range(count - config.pp)), *runs]
        # passes one after another have no steady state
        short = config.microbatches if kind is Kind.ONE_F_ONE_B else min(config.microbatches, 6 * config.pp)
        lanes = (LaneCosts(config, options, fast),)
        return Assembly(self, config, kind, 1, make, short, stages, lanes, passes).estimate()

    def static(self, config: Config, units: list[int], costs: tuple[ItemCost, ...], others: set[int]) -> int:
        """Bytes of parameters, gradients and state of a lane; tied ones again where the item that has them lies on
        another lane.
        """
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
        most = max(
            (costs[unit].parameters for unit in units), default=0
        )  # whole gradients, and with 3 parameters, of a unit in use
        in_use = (0, most if config.microbatches == 1 else 0, most, 2 * most)[config.zero]
        return int(_standing(config, parameters, gradients, state)) + in_use

    def shared(self, config: Config, cost: ItemCost) -> tuple[float, float]:
        """F and B of a unit, with what replicas exchange beside them for each micro-batch."""
        forward, backward, dp, stride = cost.forward, cost.backward, config.dp, config.way.devices
        if config.zero < 2 or dp == 1:
            return forward, backward
        messages = (
            cost.messages
        )  # large ones by themselves, small ones together: gradients (`kernels/buckets.py`) as parameters
        scatter = messages * self.wires.collective(
            CollectiveKind.REDUCE_SCATTER, stride, dp, cost.gradients // messages
        )
        gather = messages * self.wires.collective(CollectiveKind.ALL_GATHER, stride, dp, cost.parameters // messages)
        both = cost.together
        if config.zero == 2:
            return forward, backward + max(0.0, scatter - both)
        return max(forward, gather), backward + max(0.0, gather + scatter - both)

    # ---- bound -------------------------------------------------------------------------------------------------------

    def bound(self, config: Config) -> float:
        """Seconds that no plan of this config is below, whatever its schedule, its stages and what its units keep."""
        fast = self.book.fast(config.way, config.size)
        if fast is None or config.pp > len(self.units):
            return inf
        if config.pp * self.memory < self.static(config, self.units, fast, set()):
            return inf
        # one unit at a time, with what replicas exchange beside it
        each = [
            max(cost.seconds, sum(self.shared(config, cost)) + cost.together - cost.backward) + _added(config, cost)
            for cost in fast
        ]
        lanes, total = config.pp, sum(each[unit] for unit in self.units)
        interval = total / lanes
        for number, item in enumerate(self.model.items):
            interval = max(interval, ceil(item.copies / lanes) * each[number])
        return config.microbatches * interval + (lanes - 1) * self.shortest(config)

    def shortest(self, config: Config) -> float:
        """The shortest F of a unit, in one pass."""
        fast = self.book.fast(config.way, config.size)
        assert fast is not None, "a config with a bound"
        inner = [fast[unit].forward for unit in self.units if self.model.items[unit].modules]
        return min(inner, default=0.0) / (self.passes or 1)

    def schedule_bound(self, config: Config, kind: Kind, chunks: int, *, whole: bool = False) -> float:
        """Seconds that no plan of a config with this schedule is below (`relax.py`): for the units that most of the
        model is made of, and the rest of the model shared as suits. `whole` counts whole units.
        """
        key = (config, kind, chunks, whole)
        if key not in self.relaxed:
            self.relaxed[key] = self._relaxed(config, kind, chunks, whole)
        return self.relaxed[key]

    def _relaxed(self, config: Config, kind: Kind, chunks: int, whole: bool) -> float:
        fast, options = self.book.fast(config.way, config.size), self.book.options(config.way, config.size)
        pattern = self.pattern(kind, config.pp, min(config.microbatches, shortened(config)), chunks)
        if fast is None or options is None or pattern is None or len(self.units) < config.pp * chunks:
            return inf
        most = max(range(len(self.model.items)), key=lambda number: self.model.items[number].copies)
        alike = [unit for unit in self.units if self._same(fast, unit, most)]
        others = [unit for unit in self.units if not self._same(fast, unit, most)]
        counted, split = self.counted, any(task.work is Work.WEIGHTS for task in pattern.rows[0])
        choices = []
        for variant in options[most]:
            like = (variant.keep, variant.pieces)
            rows = [other.cost for unit in {*alike} for other in options[unit] if (other.keep, other.pieces) == like]
            parts = [self.seconds(config, cost, split=split, shared=counted.traffic) for cost in rows]
            choices.append(
                UnitOption(
                    min(part.forward for part in parts),
                    min(part.backward for part in parts),
                    min(part.weights for part in parts),
                    min(cost.activations for cost in rows),
                    min(cost.working for cost in rows) if counted.working else 0.0,
                )
            )
        rest = Rest(
            len(others),
            sum(_total(self.seconds(config, fast[unit], split=split, shared=counted.traffic)) for unit in others),
            sum(  # of each, one micro-batch at least is in flight
                _per_unit(config, fast[unit]) + min(variant.cost.activations for variant in options[unit])
                for unit in others
            )
            if counted.rest
            else 0.0,
        )
        end = self.optimizer_seconds(config, fast[most].parameters, fast[most].state) if counted.optimizer else 0.0
        lanes = Lanes(pattern.stages, in_flight(pattern), config.microbatches, split)
        return least_step(
            lanes,
            choices,
            len(alike),
            _per_unit(config, fast[most]),
            self.memory,
            rest,
            optimizer=end,
            bubble=counted.bubble,
            whole=whole,
        )

    def optimizer_seconds(self, config: Config, parameters: int, state: int) -> float:
        moved = 3 * parameters + 2 * state
        return memory_time(moved // (config.dp if config.zero else 1), self.wires.cluster.device)[0]

    def seconds(self, config: Config, cost: ItemCost, *, split: bool, shared: bool = True) -> Durations:
        """F, B and W of a unit and a micro-batch, with what replicas exchange beside them.

        Where W is not apart it may run while B waits.
        """
        forward, backward = self.shared(config, cost) if shared else (cost.forward, cost.backward)
        hidden = 0.0 if split else max(0.0, cost.backward + cost.weights - cost.together)
        return Durations(forward, backward - hidden, cost.weights + _added(config, cost))

    def _same(self, fast: tuple[ItemCost, ...], unit: int, most: int) -> bool:
        """Whether a unit costs what those that most of the model is made of cost: the first and the last layer do."""
        one, other = fast[unit], fast[most]
        return unit == most or (
            bool(self.model.items[unit].modules)
            and abs(one.seconds - other.seconds) < 0.02 * other.seconds
            and one.parameters == other.parameters
        )

    def interlaced_bound(self, config: Config) -> float:
        """Seconds that no interlaced plan of a config is below: the units over the lanes, and on each lane all that is
        shared, spread over all devices. Infinite where the memory of all lanes does not hold the model.
        """
        fast = self.book.fast(config.way, config.size)
        spread = self.book.probed(self._wide(config), config.size) if fast is not None else None
        if fast is None or spread is None:
            return inf
        if config.pp * self.memory < self.static(config, self.units, fast, set()):
            return inf
        inner = sum(fast[unit].seconds for unit in self.units if self.model.items[unit].modules)
        outer = sum(spread[unit].seconds for unit in self.units if not self.model.items[unit].modules)
        return config.microbatches * (inner / config.pp + outer)

    def _wide(self, config: Config) -> Way:
        """How embeddings and heads are split in an interlaced plan."""
        return replace(config.way, tp=config.way.tp * config.pp, vocabulary=True, keep=Keep.ALL, pieces=1)

    def fill(self, config: Config, kind: Kind, chunks: int) -> float:
        """Seconds of bubble that a schedule has with equal stages (the table of `plan/schedules.py`): with unequal ones
        it has more.
        """
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


def _per_unit(config: Config, cost: ItemCost) -> float:
    """Bytes of parameters, gradients and state that each unit adds to a lane."""
    return _standing(config, cost.parameters, cost.gradients, cost.state)


def _standing(config: Config, parameters: float, gradients: float, state: float) -> float:
    """Bytes of a replica under what replicas share.

    What is shared lives in pieces; with less than level 3 the wholes of parameters stand beside them. Whole gradients
    are there with level 1 only where micro-batches add to them.
    """
    match config.zero:
        case 0:
            return parameters + gradients + state
        case 1 if config.microbatches > 1:
            return parameters + gradients + (parameters + state) / config.dp
        case 1 | 2:
            return parameters + (parameters + gradients + state) / config.dp
        case _:
            return (parameters + gradients + state) / config.dp


def _total(parts: Durations) -> float:
    return parts.forward + parts.backward + parts.weights


def _added(config: Config, cost: ItemCost) -> float:
    """Seconds for adding up the gradients of micro-batches."""
    return cost.accumulate if config.microbatches > 1 else 0.0
