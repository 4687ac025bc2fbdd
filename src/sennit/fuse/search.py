"""The search for a strategy: operators and buckets chosen together (DisCo, section 5), with bounds.

    1. seeds: no fusion, greedy fusion; each with the best of several bucketings
    2. take the candidate with the least step time from a queue; apply up to `beta` random moves to it, some times over
    3. after every move on operators, solve the buckets again for the new arrival times
    4. keep what takes at most `alpha` times the best; stop when the queue is empty, after `patience` tries without gain, or when told

Candidates are told apart by their groups, so none is tried twice. Everything is drawn from one seed: the same search gives the same strategy.

**Buckets.** `solve_buckets` compares, by the clock of `clock.py`: the bucketing that ends one step's communication earliest (`earliest_end`), DDP's rule at several sizes, and, where
waits across steps are allowed, the same sizes with waits in the next step. There the order matters: gradients of the first layers come last and are needed first, so they
should go before what is queued. `arranged` lists the buckets in the order in which a channel that could choose by need would take them. Large gradients are cut at the bucket size, so
that they do not hold up what is needed sooner.

**Refinement.** The best candidate's buckets are then improved one change at a time, each judged by the clock: two neighbours joined, one cut in two, a wait moved to the other side of the
step, until no change helps. Kernels between two events of a bucket count as one here (`_condensed`), so a change is judged in a fraction of a millisecond.

**Report.** The step time, the bounds (`full_overlap`, and `tight` for one step), and the gap to them.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from sennit.fuse.buckets import Gradient, by_size, earliest_end
from sennit.fuse.clock import Timing, full_overlap, steady_state, tight
from sennit.fuse.model import Grouping, Numbers, StepModel
from sennit.fuse.moves import Limits, fused_greedily, random_move
from sennit.ir.strategy import Bucket, Part, Strategy, WaitAt

__all__ = ["Found", "SearchOptions", "refine_buckets", "search", "solve_buckets"]

Buckets = tuple[Bucket, ...]
_MEBI = 1 << 20
_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """`operators` and `tensors` switch the two kinds of fusion off for ablation; `across_steps` allows waits in the next step."""

    alpha: float = 1.05
    beta: int = 10
    patience: int = 400
    seconds: float = 60.0
    seed: int = 0
    operators: bool = True
    tensors: bool = True
    across_steps: bool = True
    sizes: tuple[int, ...] = (_MEBI // 2, _MEBI, 2 * _MEBI, 4 * _MEBI, 8 * _MEBI, 25 * _MEBI)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Found:
    """A strategy with its simulated step time, the bounds of it, and how many candidates were timed."""

    strategy: Strategy
    seconds: float
    full_overlap: float
    tight: float
    tried: int

    @property
    def gap(self) -> float:
        """Over the bound that no step can beat."""
        return self.seconds / self.full_overlap


@dataclass(frozen=True, slots=True)
class _Candidate:
    seconds: float
    grouping: Grouping
    buckets: Buckets


Progress = Callable[[int, float], None]


def search(
    model: StepModel, options: SearchOptions | None = None, *, name: str = "joint", progress: Progress | None = None
) -> Found:
    """The best strategy found. `progress` is told the number of candidates and the best step time, now and then."""
    options = options or SearchOptions()
    return _Search(model, options, progress).run(name)


class _Search:
    def __init__(self, model: StepModel, options: SearchOptions, progress: Progress | None) -> None:
        self.model, self.options, self.progress = model, options, progress
        self.draw = random.Random(options.seed)
        self.seen: set[Grouping] = set()
        self.tried = 0
        self.best: _Candidate | None = None

    def run(self, name: str) -> Found:
        deadline = time.monotonic() + self.options.seconds
        queue: list[tuple[float, int, _Candidate]] = []
        for candidate in self._seeds():
            self._consider(candidate, queue)
        idle = 0
        while queue and idle < self.options.patience and time.monotonic() < deadline and self.options.operators:
            _, _, candidate = heapq.heappop(queue)
            idle = 0 if self._improve(candidate, queue) else idle + 1
            if self.progress is not None:
                assert self.best is not None
                self.progress(self.tried, self.best.seconds)
        return self._report(name)

    def _seeds(self) -> Iterator[_Candidate]:
        yield self._time(Grouping())
        if self.options.operators:
            yield self._time(fused_greedily(self.model, self.options.limits))

    def _improve(self, candidate: _Candidate, queue: list[tuple[float, int, _Candidate]]) -> bool:
        """Whether random moves from this candidate found a better one."""
        gained = False
        for _ in range(3):
            grouping = candidate.grouping
            for _ in range(self.draw.randint(1, self.options.beta)):
                grouping = random_move(self.model, grouping, self.draw, self.options.limits) or grouping
            if grouping not in self.seen:
                gained |= self._consider(self._time(grouping), queue)
        return gained

    def _consider(self, candidate: _Candidate, queue: list[tuple[float, int, _Candidate]]) -> bool:
        gained = self.best is None or candidate.seconds < self.best.seconds * (1 - 1e-6)
        if gained:
            self.best = candidate
        assert self.best is not None
        if candidate.seconds <= self.options.alpha * self.best.seconds:
            heapq.heappush(queue, (candidate.seconds, self.tried, candidate))
        return gained

    def _time(self, grouping: Grouping) -> _Candidate:
        self.seen.add(grouping)
        self.tried += 1
        order = self.model.order(grouping)
        assert order is not None  # moves keep an order
        seconds = self.model.kernel_seconds(order, grouping)
        buckets, time_of = solve_buckets(self.model, order, seconds, self.options)
        return _Candidate(time_of, grouping, buckets)

    def _report(self, name: str) -> Found:
        best = self.best
        assert best is not None
        order = self.model.order(best.grouping)
        assert order is not None
        seconds = self.model.kernel_seconds(order, best.grouping)
        buckets, length = best.buckets, best.seconds
        if self.options.tensors:
            buckets, length = refine_buckets(
                self.model, order, seconds, buckets, across_steps=self.options.across_steps
            )
        timing = self.model.timing(order, seconds, buckets)
        strategy = self.model.strategy(name, best.grouping, buckets)
        return Found(strategy, length, full_overlap(timing), tight(timing), self.tried)


def solve_buckets(
    model: StepModel, order: Sequence[Numbers], seconds: Sequence[float], options: SearchOptions
) -> tuple[Buckets, float]:
    """The best of the bucketings that the module's text lists, and its step time."""
    gradients = model.arrivals(order, seconds)
    best: tuple[float, Buckets] | None = None
    for cut in _bucketings(model, gradients, options):
        buckets = arranged(model, order, seconds, cut)
        time_of = steady_state(model.timing(order, seconds, buckets), model.channel.sharing).seconds
        if best is None or time_of < best[0] * (1 - 1e-9):
            best = (time_of, buckets)
    if best is None:  # nothing trains
        return (), sum(seconds)
    return best[1], best[0]


def _bucketings(model: StepModel, gradients: Sequence[Gradient], options: SearchOptions) -> Iterator[Buckets]:
    if not gradients:
        return
    if not options.tensors:
        yield tuple(Bucket((Part(item.path),)) for item in gradients)
        return
    ends, _ = earliest_end(gradients, model.channel.latency, model.channel.per_byte)
    yield _cut(gradients, ends)
    for size in options.sizes:
        yield _cut(gradients, by_size(gradients, size))
    if options.across_steps:
        for size in options.sizes:
            yield _across(model, gradients, size)


def _cut(gradients: Sequence[Gradient], ends: Sequence[int]) -> Buckets:
    """Runs of gradients that are waited for at the end of the step, in the order in which they are ready."""
    starts = [0, *ends[:-1]]
    return tuple(
        Bucket(tuple(Part(item.path) for item in gradients[start:end])) for start, end in zip(starts, ends, strict=True)
    )


def _across(model: StepModel, gradients: Sequence[Gradient], size: int) -> Buckets:
    """Buckets of about `size` bytes that the next step waits for."""
    found: list[Bucket] = []
    parts: list[Part] = []
    held = 0
    for item in gradients:
        pieces = max(1, round(item.bytes / size)) if item.bytes > 1.5 * size else 1
        count = model.elements[item.path]
        for piece in range(pieces):
            span = (count * piece // pieces, count * (piece + 1) // pieces) if pieces > 1 else None
            parts.append(Part(item.path, span))
            held += item.bytes // pieces
            if held >= size:
                found.append(Bucket(tuple(parts), WaitAt.NEXT))
                parts, held = [], 0
    return (*found, Bucket(tuple(parts), WaitAt.NEXT)) if parts else tuple(found)


def arranged(model: StepModel, order: Sequence[Numbers], seconds: Sequence[float], buckets: Buckets) -> Buckets:
    """The buckets in the order in which a channel that chooses by need takes them."""
    timing = _condensed(model.timing(order, seconds, buckets, by_priority=True))
    return tuple(buckets[number] for number in steady_state(timing, model.channel.sharing).order)


def refine_buckets(
    model: StepModel, order: Sequence[Numbers], seconds: Sequence[float], buckets: Buckets, *, across_steps: bool
) -> tuple[Buckets, float]:
    """The buckets improved one change at a time, and the step time."""

    def judge(candidate: Buckets) -> float:
        return steady_state(_condensed(model.timing(order, seconds, candidate)), model.channel.sharing).seconds

    best, length = buckets, judge(buckets)
    for _ in range(_ROUNDS):
        before = length
        for change in _changes(model, best, across_steps=across_steps):
            candidate = arranged(model, order, seconds, change)
            time_of = judge(candidate)
            if time_of < length * (1 - 1e-6):
                best, length = candidate, time_of
                break
        if length == before:
            break
    return best, length


def _changes(model: StepModel, buckets: Buckets, *, across_steps: bool) -> Iterator[Buckets]:
    for place in range(len(buckets) - 1):
        left, right = buckets[place : place + 2]
        joined = replace(left, parts=_merged(model, (*left.parts, *right.parts)))
        yield (*buckets[:place], joined, *buckets[place + 2 :])
    for place, bucket in enumerate(buckets):
        for cut in range(1, len(bucket.parts)):
            halves = [replace(bucket, parts=parts) for parts in (bucket.parts[:cut], bucket.parts[cut:])]
            yield (*buckets[:place], *halves, *buckets[place + 1 :])
        if across_steps:
            other = WaitAt.STEP if bucket.wait is WaitAt.NEXT else WaitAt.NEXT
            yield (*buckets[:place], replace(bucket, wait=other), *buckets[place + 1 :])


def _merged(model: StepModel, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Neighbouring spans of one gradient as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and last.path == part.path and last.span and part.span and last.span[1] == part.span[0]:
            span = (last.span[0], part.span[1])
            found[-1] = Part(part.path, None if span == (0, model.elements[part.path]) else span)
        else:
            found.append(part)
    return tuple(found)


def _condensed(timing: Timing) -> Timing:
    """The same step with the kernels between two events of a bucket as one."""
    ends = {bucket.ready for bucket in timing.buckets} | {len(timing.kernels) - 1}
    ends |= {bucket.needed - 1 for bucket in timing.buckets if bucket.needed}
    place: dict[int, int] = {}
    lengths: list[float] = []
    held = 0.0
    for kernel, seconds in enumerate(timing.kernels):
        place[kernel] = len(lengths)
        held += seconds
        if kernel in ends:
            lengths.append(held)
            held = 0.0
    buckets = tuple(
        replace(bucket, ready=place[bucket.ready], needed=None if bucket.needed is None else place[bucket.needed])
        for bucket in timing.buckets
    )
    return Timing(tuple(lengths), buckets, timing.by_priority)
