"""Buckets changed at random, so as to leave a strategy that no single change improves.

`refined` (`bucket_search.py`) climbs: it takes a change only if it helps at once. Some strategies are better by several
changes that each lose at first. The head's gradient is made first and needed last; to hold it back until all else has
travelled fills the time between the last wait and the next gradient, in which the channel would be idle, but only once
the rest is cut and joined anew. A convolutional net with four ranks: 292 to 294 ms climbed, 283 to 284 annealed, of
which the channel carries 272 (simulated).

Annealing draws changes at random and takes one that loses with a probability that shrinks with its loss and with time:

    score(B)  =  step(B) + step(B with kernels a tenth slower)          as `refined` judges
    take B' in place of B with  min(1, exp((score(B) - score(B')) / T))     T = heat * score(B) * (1 - tries so far / tries)^2

| change | is |
|---|---|
| join, cut, wait | as in `bucket_search.py` |
| move | a bucket to any other place in the order |
| part | a gradient, or a piece of one, into another bucket; of 64 KiB or more, since where a small one travels makes no difference to the clock, and a real one is late sooner the further it is from its neighbours |

The best buckets seen are returned: never worse than those given. The draws are of a seed, so the same question has the
same answer, unless a deadline ends it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from sennit.fuse.bucket_search import Buckets, judged_twice, merged, pieces
from sennit.fuse.model import KernelOrder
from sennit.fuse.search_options import SearchOptions
from sennit.ir.strategy import Bucket, Part, WaitAt

__all__ = ["Annealing", "annealed"]

_DRAWS_OF_ONE_CHANGE = 20
_LEAST_PART = 64 << 10


@dataclass(frozen=True, slots=True)
class Annealing:
    """How long to look:

    `runs`, each from the best so far, of so many `tries`. `heat` is the loss, as a fraction, that is taken with a
    probability of 1/e at the start of a run.
    """

    runs: int = 3
    tries: int = 2000
    heat: float = 0.005
    seconds: float = 4.0
    seed: int = 0


def annealed(kernels: KernelOrder, buckets: Buckets, options: SearchOptions, annealing: Annealing) -> Buckets:
    """The best of the buckets met on the way."""
    if not buckets:
        return buckets
    draw, deadline = Random(annealing.seed), time.monotonic() + annealing.seconds
    change = _Change(kernels, options, draw)

    def score(found: Buckets) -> float:
        return sum(judged_twice(kernels, found))

    best = (buckets, score(buckets))
    for _ in range(annealing.runs):
        current = best
        for count in range(annealing.tries):
            if time.monotonic() > deadline:
                return best[0]
            candidate = change(current[0])
            seconds = score(candidate)
            heat = annealing.heat * current[1] * (1.0 - count / annealing.tries) ** 2
            if seconds <= current[1] or draw.random() < math.exp((current[1] - seconds) / heat):
                current = candidate, seconds
                if seconds < best[1]:
                    best = current
    return best[0]


class _Change:
    """One change at random."""

    def __init__(self, kernels: KernelOrder, options: SearchOptions, draw: Random) -> None:
        self.model, self.options, self.draw = kernels.model, options, draw
        self.turn: Mapping[str, int] = {path: turn for turn, (path, _, _) in enumerate(kernels.model.gradients)}
        self.ways: list[Callable[[Buckets, int], Buckets | None]] = [self.joined, self.cut, self.moved, self.with_part]
        if options.across_steps:
            self.ways.append(self.waiting)

    def __call__(self, buckets: Buckets) -> Buckets:
        for _ in range(_DRAWS_OF_ONE_CHANGE):
            found = self.draw.choice(self.ways)(buckets, self.draw.randrange(len(buckets)))
            if found is not None:
                return found
        return buckets  # one gradient in one bucket

    def joined(self, buckets: Buckets, at: int) -> Buckets | None:
        if at + 1 == len(buckets):
            return None
        parts = merged(self.model, (*buckets[at].parts, *buckets[at + 1].parts))
        return (*buckets[:at], replace(buckets[at], parts=parts), *buckets[at + 2 :])

    def cut(self, buckets: Buckets, at: int) -> Buckets | None:
        halves = list(pieces(self.model, buckets[at], splits=self.options.splits))
        if not halves:
            return None
        left, right = self.draw.choice(halves)
        bucket = buckets[at]
        return (*buckets[:at], replace(bucket, parts=left), replace(bucket, parts=right), *buckets[at + 1 :])

    def moved(self, buckets: Buckets, at: int) -> Buckets | None:
        others, to = buckets[:at] + buckets[at + 1 :], self.draw.randrange(len(buckets))
        return None if to == at else (*others[:to], buckets[at], *others[to:])

    def waiting(self, buckets: Buckets, at: int) -> Buckets:
        bucket = buckets[at]
        other = WaitAt.STEP if bucket.wait is WaitAt.NEXT else WaitAt.NEXT
        return (*buckets[:at], replace(bucket, wait=other), *buckets[at + 1 :])

    def with_part(self, buckets: Buckets, at: int) -> Buckets | None:
        to = self.draw.randrange(len(buckets))
        if to == at or len(buckets[at].parts) == 1:
            return None
        taken = self.draw.randrange(len(buckets[at].parts))
        part = buckets[at].parts[taken]
        if self.model.carried(Bucket((part,))) < _LEAST_PART:
            return None
        rest = buckets[at].parts[:taken] + buckets[at].parts[taken + 1 :]
        more = merged(self.model, tuple(sorted((*buckets[to].parts, part), key=self._place)))
        changed = {at: replace(buckets[at], parts=rest), to: replace(buckets[to], parts=more)}
        return tuple(changed.get(number, bucket) for number, bucket in enumerate(buckets))

    def _place(self, part: Part) -> tuple[int, int]:
        """In the order in which gradients are made."""
        return self.turn[part.path], part.span[0] if part.span else 0
