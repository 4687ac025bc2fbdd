"""Where to cut a sequence of gradients into buckets, inside one step.

Gradients come in the order in which the backward pass makes them, gradient j at time ready_j with bytes_j. A bucket is
a run of them, ready with its last one; a collective of x bytes takes D + C x. The channel is serial, so with f[j] the
least time at which the first j gradients are communicated,

    f[0] = 0        f[j] = min over i < j of  max(f[i], ready_j) + D + C (bytes_{i+1} + ... + bytes_j)

and the cuts that attain f[n] are the best contiguous bucketing (O(n^2); n is the number of parameters).

That optimum ends the step's communication as early as possible. Across steps the end is not what counts, so `by_size`
gives DDP's rule (a bucket is closed once it holds a number of bytes) for seeds and comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Gradient", "by_size", "earliest_end"]


@dataclass(frozen=True, slots=True)
class Gradient:
    path: str
    ready: float
    bytes: int


def earliest_end(gradients: Sequence[Gradient], latency: float, per_byte: float) -> tuple[list[int], float]:
    """The end of each bucket (a count of gradients), and when the last is communicated."""
    count = len(gradients)
    total = np.concatenate([[0.0], np.cumsum([item.bytes for item in gradients], dtype=float)])
    finish = np.zeros(count + 1)
    cut = np.zeros(count + 1, dtype=np.int64)
    for j in range(1, count + 1):
        ends = np.maximum(finish[:j], gradients[j - 1].ready) + latency + per_byte * (total[j] - total[:j])
        cut[j] = int(np.argmin(ends))
        finish[j] = ends[cut[j]]
    ends_of: list[int] = []
    at = count
    while at:
        ends_of.append(at)
        at = int(cut[at])
    return ends_of[::-1], float(finish[count])


def by_size(gradients: Sequence[Gradient], cap: int, first: int | None = None) -> list[int]:
    """A bucket ends with the gradient that brings it to `cap` bytes; the first one to `first`."""
    ends: list[int] = []
    held, limit = 0, first if first is not None else cap
    for place, item in enumerate(gradients, start=1):
        held += item.bytes
        if held >= limit:
            ends.append(place)
            held, limit = 0, cap
    if held:
        ends.append(len(gradients))
    return ends
