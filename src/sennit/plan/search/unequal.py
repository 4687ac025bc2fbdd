"""Plans whose stages have different numbers of replicas: which there are, what they take, and a bound.

All stages see the same micro-batches, of g samples each; a stage with r replicas gives g / r of them to each
(`cut_unequal.py` cuts the model and shares the devices together). Everything else is as in `estimate.py`, with costs of
its own for each lane. Such a plan shares nothing among replicas (ZeRO), has one stage a lane, and splits all units the
same way.

**Bound.** With R replicas in all, a micro-batch keeps r_s of them busy for the seconds of each unit of stage s, so with
t[r][u] the seconds of unit u on r replicas

    step >= M * (sum over units u of  min over r of  r t[r][u]) / R  +  (S - 1) * the shortest F of a unit
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from sennit.plan.pattern import Pattern
from sennit.plan.search.assembly import Assembly, LaneCosts
from sennit.plan.search.choice import Kind
from sennit.plan.search.config import Config, Estimate, Shortage, shortened
from sennit.plan.search.cut_unequal import cut_unequal, replicas_of, samples_of
from sennit.plan.search.estimate import Estimator
from sennit.plan.search.probe import ItemCost
from sennit.plan.search.ways import Way

__all__ = ["UnequalStages"]

_UNLIKE = 1.25  # how much longer the longest unit takes than the shortest, where units are told apart
_MOST = 8  # lanes


class UnequalStages:
    """A config here has in `dp` the replicas of all lanes together, and in `size` the samples of a micro-batch on each
    lane.
    """

    def __init__(self, estimator: Estimator, sizes: tuple[int, ...]) -> None:
        self.estimator, self.sizes, self.book = estimator, sizes, estimator.book
        self.model, self.units = estimator.model, estimator.units

    def is_worth_it(self) -> bool:
        """Whether units differ: stages of equal ones are cut into equal parts."""
        fast = self.book.fast(Way(), self.sizes[0])
        if fast is None or self.estimator.passes != 1 or self.estimator.fixed or self.estimator.equal_stages:
            return False
        seconds = [fast[unit].seconds for unit in self.units if self.model.items[unit].modules]
        return bool(seconds) and max(seconds) > _UNLIKE * min(seconds)

    def configs(self, way: Way, batch: int, devices: int, most_pp: int | None) -> Iterator[Config]:
        replicas = devices // way.devices
        units = sum(bool(self.model.items[unit].modules) for unit in self.units)
        if devices % way.devices or way.devices != way.tp:
            return
        for pp in range(2, min(replicas, units, most_pp or units, _MOST) + 1):
            for samples in samples_of(batch, replicas, self.sizes):
                yield Config(way, pp, replicas, samples, batch // samples)

    def estimate(self, config: Config, kind: Kind) -> Estimate | Shortage | None:
        """None where as many replicas each are best, or there is no such plan."""
        counts = self._counts(config)
        weights = {
            count: [fast[unit].seconds + fast[unit].accumulate for unit in self.units] for count, fast in counts.items()
        }
        runs = cut_unequal(weights, config.pp, config.dp) if weights else None
        if runs is None or len({count for _, _, count in runs}) == 1:
            return None
        made = replace(config, dp=1, lanes=tuple(count for _, _, count in runs))
        lanes: list[LaneCosts] = []
        for lane, count in enumerate(made.lanes):
            options = self.book.options(config.way, config.size // count)
            if options is None:
                return None
            lanes.append(LaneCosts(made.of_lane(lane), options, counts[count]))

        def make(microbatches: int) -> Pattern | None:
            return self.estimator.pattern(kind, config.pp, microbatches, 1)

        short = shortened(config)
        if make(short) is None:
            return None
        stages = [self.units[begin:end] for begin, end, _ in runs]
        return Assembly(self.estimator, made, kind, 1, make, short, stages, tuple(lanes)).estimate()

    def bound(self, config: Config) -> float:
        counts = self._counts(config)
        if len(counts) < 2:
            return inf
        each = [min(count * fast[unit].seconds for count, fast in counts.items()) for unit in self.units]
        inner = [unit for unit in self.units if self.model.items[unit].modules]
        shortest = min((fast[unit].forward for fast in counts.values() for unit in inner), default=0.0)
        return config.microbatches * sum(each) / config.dp + (config.pp - 1) * shortest

    def _counts(self, config: Config) -> dict[int, tuple[ItemCost, ...]]:
        """What units cost on a lane, by its replicas."""
        most = config.dp - config.pp + 1
        found = {
            count: self.book.fast(config.way, config.size // count)
            for count in replicas_of(config.size, most, self.sizes)
        }
        return {count: fast for count, fast in found.items() if fast is not None}
