"""The search for a strategy: operators and buckets chosen together (DisCo, section 5), with bounds.

    1. seeds: no fusion, fusion wherever it is legal, fusion as a compiler does it that leaves products to libraries, fusion wherever one kernel is estimated to take less than
       two; each with the best of several bucketings, DDP's among them
    2. take the candidate with the least step time from a queue; apply up to `beta` random moves to it, some times over
    3. after every change of operators, time the step with the buckets that it had; where that is a gain, solve the buckets again for the new arrival times
    4. keep what takes at most `alpha` times the best; stop when the queue is empty, after `patience` tries without gain, at the deadline, or when told
    5. refine the buckets of the best (`bucket_search.py`)

**What makes it fast.** A move touches a few kernels, and only those are estimated (`kernel_set.py`); kernels of one
structure are estimated once (`known_cost.py`). A candidate's kernels and updates take a time that no buckets can beat:
where that alone is above `alpha` times the best, the candidate goes before an order or a bucket is looked at.
Candidates are told apart by the hash of their kernels, so none is tried twice.

Everything is drawn from one seed: a search that ends by `patience` gives the same strategy again. Whenever it is
stopped, it reports the best so far.

**Report.** The step time, the bounds (`full_overlap`, `tight` for waits in the same step, `structural` for these
kernels with any buckets), and the gap. With `keep`, the next best too: `measured_best` asks a measurement to choose
among them.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sennit.fuse.bounds import structural
from sennit.fuse.bucket_search import (
    Buckets,
    judged,
    refine_buckets,
    refined,
    solve_buckets,
    solved,
    with_algorithms,
)
from sennit.fuse.clock import full_overlap, tight
from sennit.fuse.kernel_set import KernelSet
from sennit.fuse.model import Grouping, KernelOrder, Numbers, StepModel
from sennit.fuse.moves import AS_COMPILED, fused_by_cost, fused_greedily
from sennit.fuse.search_options import SearchOptions
from sennit.ir.strategy import Strategy

__all__ = ["Found", "SearchOptions", "measured_best", "refine_buckets", "search", "solve_buckets"]


@dataclass(frozen=True, slots=True)
class Found:
    """A strategy with its simulated step time, the bounds of it, how many candidates were looked at, and how many of
    them were timed. `others` are the next best, with their times.
    """

    strategy: Strategy
    seconds: float
    full_overlap: float
    tight: float
    structural: float
    tried: int
    timed: int = 0
    others: tuple[tuple[Strategy, float], ...] = ()

    @property
    def gap(self) -> float:
        """Over the bound that no buckets can beat, whatever they wait for and whenever they travel."""
        return self.seconds / self.structural


@dataclass(frozen=True, slots=True)
class _Candidate:
    seconds: float
    kernels: KernelSet
    compute: float
    buckets: Buckets


Progress = Callable[[int, float], None]
_NONE: Numbers = frozenset()


def search(
    model: StepModel,
    options: SearchOptions | None = None,
    *,
    name: str = "joint",
    start: Sequence[Grouping] = (),
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Found:
    """The best strategy found.

    `start` are further seeds. `progress` is told the number of candidates and the best step time, now and then; the
    search ends when `stop` says so.
    """
    return _Search(model, options or SearchOptions(), progress, stop).run(name, start)


def measured_best(found: Found, measure: Callable[[Strategy], float]) -> tuple[Strategy, float]:
    """The strategy among the best few that is measured to be the fastest, and that time."""
    candidates = [found.strategy, *(strategy for strategy, _ in found.others)]
    times = [(measure(strategy), place) for place, strategy in enumerate(candidates)]
    seconds, place = min(times)
    return candidates[place], seconds


class _Search:
    def __init__(
        self, model: StepModel, options: SearchOptions, progress: Progress | None, stop: Callable[[], bool] | None
    ) -> None:
        self.model, self.options, self.progress, self.stop = model, options, progress, stop
        self.draw = random.Random(options.seed)
        self.seen: set[int] = set()
        self.tried = self.timed = self.pushed = 0
        self.queue: list[tuple[float, int, _Candidate]] = []
        self.best: list[_Candidate] = []  # as many as are kept, the best first
        carried = sum(model.bytes.values())
        self.updates = model.channel.update_per_byte * carried
        self.deadline = time.monotonic() + options.seconds

    def run(self, name: str, start: Sequence[Grouping]) -> Found:
        for grouping in (*start, *self._seeds()):
            kernels = KernelSet(self.model, grouping, self.options.limits)
            key = self._key(kernels)
            if key not in self.seen:
                self.seen.add(key)
                self.tried += 1
                self._consider(kernels, None)
        idle = 0
        while self.options.operators and self.queue and idle < self.options.patience and not self._is_over():
            _, _, candidate = heapq.heappop(self.queue)
            idle = 0 if self._improve(candidate) else idle + 1
            if self.progress is not None:
                self.progress(self.tried, self.best[0].seconds)
        return self._report(name)

    def _is_over(self) -> bool:
        return time.monotonic() > self.deadline or (self.stop is not None and self.stop())

    def _seeds(self) -> list[Grouping]:
        if not self.options.operators:
            return [Grouping()]
        limits = self.options.limits
        as_compiled = fused_greedily(self.model, AS_COMPILED)
        by_cost = fused_by_cost(self.model, limits), fused_by_cost(self.model, limits, as_compiled)
        return [Grouping(), fused_greedily(self.model, limits), as_compiled, *by_cost]

    def _improve(self, candidate: _Candidate) -> bool:
        """Whether random moves from this candidate found a better one.

        It goes back to the queue while it is among the best.
        """
        gained = False
        for _ in range(3):
            kernels = candidate.kernels.copy()
            for _ in range(self.draw.randint(1, self.options.beta)):
                kernels.random_move(self.draw, repeats=self.options.repeats)
            key = self._key(kernels)
            if key not in self.seen:
                self.seen.add(key)
                self.tried += 1
                gained |= self._consider(kernels, candidate)
        if candidate.seconds <= self.best[0].seconds * (1 + 1e-9):
            self._push(candidate)
        return gained

    def _push(self, candidate: _Candidate) -> None:
        self.pushed += 1  # of equals, the one that came first
        heapq.heappush(self.queue, (candidate.seconds, self.pushed, candidate))

    def _consider(self, kernels: KernelSet, parent: _Candidate | None) -> bool:
        """Whether this is the best so far. What cannot come near it is dropped as early as possible."""
        model, options = self.model, self.options
        if parent is None:
            compute = model.seconds_of(
                (kernel, kernels.again.get(n, frozenset())) for n, kernel in kernels.members.items()
            )
        else:
            compute = parent.compute - model.seconds_of(kernels.gone) + model.seconds_of(kernels.new)
        limit = options.alpha * self.best[0].seconds if self.best else float("inf")
        if compute + self.updates > limit:
            return False
        self.timed += 1
        ordered = self._ordered(kernels.grouping())
        buckets, seconds = ((), float("inf")) if parent is None else (parent.buckets, judged(ordered, parent.buckets))
        if parent is None or seconds < self.best[0].seconds * (1 - 1e-6):
            found, length = solved(ordered, options)
            if length < seconds:
                buckets, seconds = found, length
        if seconds > limit:
            return False
        candidate = _Candidate(seconds, kernels.copy(), compute, buckets)
        gained = not self.best or seconds < self.best[0].seconds * (1 - 1e-6)
        self.best = sorted([*self.best, candidate], key=lambda item: item.seconds)[: max(1, options.keep)]
        if seconds <= options.alpha * self.best[0].seconds:
            self._push(candidate)
        return gained

    def _ordered(self, grouping: Grouping) -> KernelOrder:
        order = self.model.order(grouping)
        assert order is not None  # moves keep an order
        return KernelOrder(self.model, order, self.model.kernel_seconds(order, grouping))

    @staticmethod
    def _key(kernels: KernelSet) -> int:
        """A hash of the kernels, whatever they are called."""
        found = 0
        for number, kernel in kernels.members.items():
            if len(kernel) > 1 or number in kernels.again:
                found ^= hash((kernel, kernels.again.get(number, _NONE)))
        return found

    def _report(self, name: str) -> Found:
        reports = [self._refined(name, candidate) for candidate in self.best]
        first, *others = sorted(reports, key=lambda item: item.seconds)
        return replace(first, others=tuple((item.strategy, item.seconds) for item in others))

    def _refined(self, name: str, candidate: _Candidate) -> Found:
        grouping = candidate.kernels.grouping()
        ordered = self._ordered(grouping)
        buckets, seconds = candidate.buckets, candidate.seconds
        if self.options.tensors:
            allowed = max(5.0, 0.2 * self.options.seconds) / len(self.best)
            buckets, seconds = refined(ordered, buckets, self.options, time.monotonic() + allowed)
        timing = ordered.timing(buckets)
        if self.options.algorithms:
            buckets = with_algorithms(self.model, buckets)
        strategy = self.model.strategy(name, grouping, buckets)
        return Found(
            strategy, seconds, full_overlap(timing), tight(timing), structural(ordered), self.tried, self.timed
        )
