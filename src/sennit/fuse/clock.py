"""How long a training step takes in the steady state: one compute stream, one communication channel.

**Model.** Kernels run one after another. Bucket b is ready when kernel `ready[b]` is done. The channel carries one
bucket at a time and is not interrupted. It takes the buckets in the order in which they are listed, as ranks that must
agree on an order do; or, with `by_priority`, the one with the least priority number among those ready, then the one
that was ready first: what a channel would do that could choose. `StepTime.order` says in which order that was, and
listing the buckets so makes the choice one that ranks can follow. Bucket b occupies it for `seconds[b]`, and `queued`
more (or less) where it was ready before the channel was free: what a message that queues costs is not an idle channel's
latency. Before kernel `needed[b]` of the *next* step, or at the end of this one where `needed[b]` is None, the compute
stream waits for bucket b and updates its parameters, which takes `update[b]`. No gradient is ready before a parameter
is first needed: forward comes before backward, so all buckets of a step are waited for before one of the next is ready.
A bucket that was reduced to shares is gathered there: the gather takes `gather[b]`, after all that the channel was
given before.

While both are busy each runs at its own rate, at most 1: cores and memory are shared (`compute_rate`, `channel_rate`).
When the channel takes a bucket, that costs the compute stream `issued`, whatever its bytes: the threads of the network
wake up on its core. They do so for nothing while it waits.

**Steady state.** Steps follow each other. A wait in the next step couples it to this one, so the time between the ends
of steps settles after a few of them. `steady_state` runs steps until two have the same length, and gives that length.

**Bounds.** No step is shorter than all its kernels and updates, nor than all its communication: `full_overlap` is the
greater. If every wait is in the same step, no communication starts before the first gradient is there, at t_first:
`tight` is max(compute, t_first + communication + the last update).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "Activity",
    "BucketTime",
    "Sharing",
    "Span",
    "StepTime",
    "Timing",
    "full_overlap",
    "steady_state",
    "tight",
    "traced",
]

_STEPS = 12
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class BucketTime:
    """`ready`: the kernel after which it may start; `needed`: the kernel of the next step that needs it, None for the
    end of this one.
    """

    ready: int
    seconds: float
    update: float = 0.0
    priority: float = 0
    needed: int | None = None
    gather: float = 0.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """Rates while both are busy; seconds that a bucket which had to queue takes longer, or less long where it is below
    0; seconds of computing that the channel's taking one costs.
    """

    compute_rate: float = 1.0
    channel_rate: float = 1.0
    queued: float = 0.0
    issued: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One step's work: seconds of each kernel in order, and the buckets, in the order in which they travel unless
    `by_priority`.
    """

    kernels: tuple[float, ...]
    buckets: tuple[BucketTime, ...]
    by_priority: bool = False


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step in the steady state, how much of it the compute stream waited, whether it settled, and the
    order in which the channel took the buckets.
    """

    seconds: float
    waited: float
    settled: bool
    order: tuple[int, ...]


class Activity(Enum):
    KERNEL = "kernel"
    UPDATE = "update"
    WAIT = "wait"
    BUCKET = "bucket"  # the only one on the channel


@dataclass(frozen=True, slots=True)
class Span:
    """What ran when; `number` is that of the kernel or the bucket."""

    activity: Activity
    number: int
    start: float
    stop: float


def traced(timing: Timing, sharing: Sharing | None = None, steps: int = 2) -> tuple[Span, ...]:
    """What runs in some steps of the steady state, from the start of the first of them.

    A bucket on the channel at the start counts from there.
    """
    run = _Run(timing, sharing or Sharing())
    for _ in range(_STEPS):
        run.step()
    start, run.spans = run.now, []
    for _ in range(steps):
        run.step()
    end = run.now
    if run.carrying is not None:
        run.spans.append(Span(Activity.BUCKET, run.carrying, run.since, end))
    return tuple(
        Span(span.activity, span.number, max(0.0, span.start - start), span.stop - start)
        for span in run.spans
        if span.stop > span.start
    )


def steady_state(timing: Timing, sharing: Sharing | None = None) -> StepTime:
    """The length of a step once its waits have settled."""
    run = _Run(timing, sharing or Sharing())
    length, waited = 0.0, 0.0
    for _ in range(_STEPS):
        start, waited_before = run.now, run.waited
        run.step()
        before, length, waited = length, run.now - start, run.waited - waited_before
        if abs(length - before) <= _SAME * max(length, 1e-12):
            return StepTime(length, waited, True, run.order())
    return StepTime(length, waited, False, run.order())


def full_overlap(timing: Timing) -> float:
    compute = sum(timing.kernels) + sum(bucket.update for bucket in timing.buckets)
    return max(compute, sum(bucket.seconds + bucket.gather for bucket in timing.buckets))


def tight(timing: Timing) -> float:
    """The bound where every wait is in the same step."""
    if not timing.buckets:
        return sum(timing.kernels)
    first = min(bucket.ready for bucket in timing.buckets)
    carried = sum(bucket.seconds + bucket.gather for bucket in timing.buckets)
    carried += min(bucket.update for bucket in timing.buckets)
    return max(full_overlap(timing), sum(timing.kernels[: first + 1]) + carried)


class _Run:
    """The two streams under way. `now` is the time of the compute stream; the channel is brought up to it."""

    def __init__(self, timing: Timing, sharing: Sharing) -> None:
        self.timing, self.sharing = timing, sharing
        self.now = 0.0
        self.waited = 0.0
        self.ready: list[tuple[float, float, int]] = []  # (priority, since, bucket): what the channel may take
        self.carrying: int | None = None
        self.left = 0.0  # seconds of the bucket on the channel, at full rate
        self.since = 0.0  # when it was taken
        self.owing = 0.0  # seconds of computing that buckets have cost which were taken meanwhile
        self.spans: list[Span] | None = None  # what ran, where somebody wants to see it
        self.done: set[int] = set()  # buckets carried and not yet waited for
        self.by_kernel: list[list[int]] = [[] for _ in timing.kernels]
        self.before_kernel: list[list[int]] = [[] for _ in timing.kernels]
        self.at_end: list[int] = []
        self.taken: list[int] = []
        self.owed: set[int] = set()  # buckets of the step before that this step still has to wait for
        for number, bucket in enumerate(timing.buckets):
            self.by_kernel[bucket.ready].append(number)
            (self.at_end if bucket.needed is None else self.before_kernel[bucket.needed]).append(number)

    def step(self) -> None:
        buckets = self.timing.buckets
        for kernel, seconds in enumerate(self.timing.kernels):
            for number in self.before_kernel[kernel]:
                if number in self.owed:
                    self.owed.discard(number)
                    self._wait(number)
            self._compute(seconds, Activity.KERNEL, kernel)
            for number in self.by_kernel[kernel]:
                if number in self.owed:  # it is made anew before anything needed the old one
                    self.owed.discard(number)
                    self._wait(number)
                turn = buckets[number].priority if self.timing.by_priority else number
                heapq.heappush(self.ready, (turn, self.now, number))
                self._take()
        for number in self.at_end:
            self._wait(number)
        self.owed.update(number for number, bucket in enumerate(buckets) if bucket.needed is not None)

    def order(self) -> tuple[int, ...]:
        """How the last step that is complete was carried.

        A step's buckets are waited for before they are made again, so the channel takes all of one step before any of
        the next.
        """
        count = len(self.timing.buckets)
        complete = len(self.taken) // count * count if count else 0
        return tuple(self.taken[complete - count : complete])

    def _take(self) -> None:
        """Start the next bucket if the channel is free and there is one."""
        if self.carrying is None and self.ready and (self.timing.by_priority or self.ready[0][2] == self._next()):
            _, since, number = heapq.heappop(self.ready)
            late = self.sharing.queued if since < self.now else 0.0
            self.carrying, self.left = number, max(0.0, self.timing.buckets[number].seconds + late)
            self.since = self.now
            self.owing += self.sharing.issued
            self.taken.append(number)

    def _next(self) -> int:
        return len(self.taken) % len(self.timing.buckets)

    def _finish(self) -> None:
        assert self.carrying is not None
        self._note(Activity.BUCKET, self.carrying, self.since)
        self.done.add(self.carrying)
        self.carrying, self.left = None, 0.0
        self._take()

    def _note(self, activity: Activity, number: int, start: float) -> None:
        if self.spans is not None:
            self.spans.append(Span(activity, number, start, self.now))

    def _compute(self, seconds: float, activity: Activity, number: int) -> None:
        work, start = seconds, self.now
        while self.carrying is not None and work > 0.0:
            work, self.owing = work + self.owing, 0.0
            ours, theirs = work / self.sharing.compute_rate, self.left / self.sharing.channel_rate
            span = min(ours, theirs)
            self.now += span
            work = 0.0 if ours <= theirs else work - span * self.sharing.compute_rate
            if theirs <= ours:
                self._finish()
            else:
                self.left -= span * self.sharing.channel_rate
        self.now += work
        self._note(activity, number, start)

    def _wait(self, number: int) -> None:
        """Until the bucket is there; then its update."""
        start = self.now
        while number not in self.done:
            assert self.carrying is not None, "a bucket that was never made ready"
            self.now += self.left
            self.waited += self.left
            self.owing = 0.0
            self._finish()
        self.done.discard(number)
        if gather := self.timing.buckets[number].gather:
            while self.carrying is not None:
                self.now += self.left
                self.waited += self.left
                self._finish()
            gathered = self.now
            self.now += gather
            self.waited += gather
            self._note(Activity.BUCKET, number, gathered)
        self._note(Activity.WAIT, number, start)
        self._compute(self.timing.buckets[number].update, Activity.UPDATE, number)
