"""Which gradients share a bucket, in what order buckets travel, and where they are waited for.

**Solving** (`solve_buckets`) compares, by the clock of `clock.py`: the bucketing that ends one step's communication
earliest (`earliest_end`), DDP's rule at several sizes, and, where waits across steps are allowed, the same sizes with
waits in the next step. There the order matters: gradients of the first layers come last and are needed first, so they
should go before what is queued. `arranged` lists the buckets in the order in which a channel that could choose by need
would take them. Large gradients are cut at the bucket size, so that they do not hold up what is needed sooner.

**Refining** (`refined`) improves buckets one change at a time, each judged by the clock, until none helps. Many buckets
take the same time where every kernel takes its own, and of these some are only just in time: a kernel that takes longer
leaves the channel with nothing to carry. So a change must not make the step longer, and must make it shorter together
with that of kernels which take a tenth longer:

| change | is |
|---|---|
| join | two neighbours travel as one |
| cut | a bucket in two, between two gradients |
| split | a gradient of a bucket in two halves, the second in a bucket of its own |
| wait | at the other side of the step |
| shares | reduced to shares and gathered where it is waited for, or in one all-reduce |
| swap | two neighbours in the other order: priority |
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from sennit.fuse.buckets import Gradient, by_size, earliest_end
from sennit.fuse.clock import Timing, steady_state
from sennit.fuse.model import KernelOrder, Numbers, StepModel
from sennit.fuse.search_options import SearchOptions
from sennit.ir.strategy import Bucket, Part, Reduce, WaitAt

__all__ = [
    "MEGABYTES",
    "SLOWER",
    "Buckets",
    "judged",
    "judged_twice",
    "merged",
    "pieces",
    "refine_buckets",
    "refined",
    "same_as_ddp",
    "solve_buckets",
    "solved",
    "with_algorithms",
]

Buckets = tuple[Bucket, ...]
_MEBI = 1 << 20
MEGABYTES = (1, 5, 25, 100)  # the caps that people give DDP; it closes its first bucket at 1
_FRACTIONS = (2, 4, 8, 16, 32, 64, 128)
_LEAST = 64 << 10
_LEAST_PIECE = (
    256 << 10
)  # a product in blocks of a few rows takes longer than the clock says: each reads the other factor again
_PIECES = 64  # of a model whose gradients are small, a piece is at least one in so many of all bytes
_ROUNDS = 200
SLOWER = 1.1


def solve_buckets(
    model: StepModel, order: Sequence[Numbers], seconds: Sequence[float], options: SearchOptions
) -> tuple[Buckets, float]:
    """The best of the bucketings that the module's text lists, and its step time."""
    return solved(KernelOrder(model, order, seconds), options)


def solved(kernels: KernelOrder, options: SearchOptions) -> tuple[Buckets, float]:
    model = kernels.model
    gradients = model.arrivals(kernels.order, kernels.seconds)
    best: tuple[float, Buckets] | None = None
    for cut in _bucketings(model, gradients, options):
        buckets = arranged(kernels, cut)
        time_of = judged(kernels, buckets)
        if best is None or time_of < best[0] * (1 - 1e-9):
            best = (time_of, buckets)
    if best is None:  # nothing trains
        return (), sum(kernels.seconds)
    return best[1], best[0]


def judged(kernels: KernelOrder, buckets: Buckets, slower: float = 1.0) -> float:
    """Seconds of a step with these buckets, in this order; of one whose kernels take `slower` times as long."""
    return _seconds(kernels, kernels.timing(buckets), slower)


def judged_twice(kernels: KernelOrder, buckets: Buckets) -> tuple[float, float]:
    """The same as the clock has it, and with kernels that take `SLOWER` times as long."""
    timing = kernels.timing(buckets)
    return _seconds(kernels, timing), _seconds(kernels, timing, SLOWER)


def _seconds(kernels: KernelOrder, timing: Timing, slower: float = 1.0) -> float:
    if slower != 1.0:
        timing = replace(timing, kernels=tuple(slower * seconds for seconds in timing.kernels))
    return steady_state(timing, kernels.model.channel.sharing).seconds


def arranged(kernels: KernelOrder, buckets: Buckets) -> Buckets:
    """The buckets in the order in which a channel that chooses by need takes them."""
    timing = kernels.timing(buckets, by_priority=True)
    return tuple(buckets[number] for number in steady_state(timing, kernels.model.channel.sharing).order)


def _sizes(gradients: Sequence[Gradient], options: SearchOptions) -> list[int]:
    if options.sizes is not None:
        return list(options.sizes)
    total = sum(item.bytes for item in gradients)
    usual = [size * _MEBI for size in (1, 2, 5, 10, 25) if total / (size * _MEBI) <= _FRACTIONS[-1]]
    return sorted({*usual, *(max(_LEAST, total // part) for part in _FRACTIONS)})


def _bucketings(model: StepModel, gradients: Sequence[Gradient], options: SearchOptions) -> Iterator[Buckets]:
    if not gradients:
        return
    if not options.tensors:
        yield tuple(Bucket((Part(item.path),)) for item in gradients)
        if options.across_steps:
            yield tuple(Bucket((Part(item.path),), WaitAt.NEXT) for item in gradients)
        return
    ends, _ = earliest_end(gradients, model.channel.latency, model.channel.per_byte)
    yield _cut(gradients, ends)
    sizes = _sizes(gradients, options)
    for size in sizes:
        yield same_as_ddp(gradients, size)
    if options.sizes is None:
        for size in MEGABYTES:
            yield same_as_ddp(gradients, size * _MEBI, _MEBI)
    if options.across_steps:
        for size in sizes:
            yield _across(model, gradients, size, splits=options.splits)


def same_as_ddp(gradients: Sequence[Gradient], size: int, first: int | None = None) -> Buckets:
    """Runs of gradients, in the order in which they are ready, each closed once it holds `size` bytes; the first one at
    `first`.
    """
    return _cut(gradients, by_size(gradients, size, first))


def _cut(gradients: Sequence[Gradient], ends: Sequence[int]) -> Buckets:
    starts = [0, *ends[:-1]]
    return tuple(
        Bucket(tuple(Part(item.path) for item in gradients[start:end])) for start, end in zip(starts, ends, strict=True)
    )


def _across(model: StepModel, gradients: Sequence[Gradient], size: int, *, splits: bool) -> Buckets:
    """Buckets of about `size` bytes that the next step waits for."""
    found: list[Bucket] = []
    parts: list[Part] = []
    held = 0
    for item in gradients:
        pieces = max(1, round(item.bytes / size)) if splits and item.bytes > 1.5 * size else 1
        for span in _spans(model, item.path, pieces):
            parts.append(Part(item.path, span))
            held += item.bytes // pieces
            if held >= size:
                found.append(Bucket(tuple(parts), WaitAt.NEXT))
                parts, held = [], 0
    return (*found, Bucket(tuple(parts), WaitAt.NEXT)) if parts else tuple(found)


def _spans(model: StepModel, path: str, pieces: int) -> list[tuple[int, int] | None]:
    """A gradient in so many pieces, or fewer where rows are long: one that is made by rows is cut between them."""
    if pieces == 1:
        return [None]
    count = model.elements[path]
    cuts = sorted({0, *(_cut_at(model, path, count * piece // pieces) for piece in range(1, pieces)), count})
    return list(pairwise(cuts)) if len(cuts) > 2 else [None]


def _cut_at(model: StepModel, path: str, element: int) -> int:
    rows = model.in_rows.get(path)
    return element if rows is None else rows.aligned(element)


# ---- refining --------------------------------------------------------------------------------------------------------


def refine_buckets(
    model: StepModel, order: Sequence[Numbers], seconds: Sequence[float], buckets: Buckets, *, across_steps: bool
) -> tuple[Buckets, float]:
    """The buckets improved by changes that every backend enforces alike: all-reduces only."""
    options = SearchOptions(across_steps=across_steps, reduce_scatter=False)
    return refined(KernelOrder(model, order, seconds), buckets, options)


def refined(
    kernels: KernelOrder, buckets: Buckets, options: SearchOptions, deadline: float | None = None
) -> tuple[Buckets, float]:
    """The buckets improved one change at a time, and the step time; `deadline` is of `time.monotonic`."""
    best, (length, late) = buckets, judged_twice(kernels, buckets)
    for _ in range(_ROUNDS):
        before = length, late
        for change, in_this_order in _changes(kernels.model, best, options):
            candidate = change if in_this_order else arranged(kernels, change)
            timing = kernels.timing(candidate)
            time_of = _seconds(kernels, timing)
            if time_of <= length * (1 + 1e-9):
                late_of = _seconds(kernels, timing, SLOWER)
                if time_of + late_of < (length + late) * (1 - 1e-6):
                    best, length, late = candidate, time_of, late_of
                    break
            if deadline is not None and time.monotonic() > deadline:
                return best, length
        if (length, late) == before:
            break
    return best, length


def _changes(model: StepModel, buckets: Buckets, options: SearchOptions) -> Iterator[tuple[Buckets, bool]]:
    """Each change, and whether it is one of the order itself."""
    for place in range(len(buckets) - 1):
        left, right = buckets[place : place + 2]
        joined = replace(left, parts=merged(model, (*left.parts, *right.parts)))
        yield (*buckets[:place], joined, *buckets[place + 2 :]), False
    for place, bucket in enumerate(buckets):
        for parts in pieces(model, bucket, splits=options.splits):
            yield (*buckets[:place], *(replace(bucket, parts=part) for part in parts), *buckets[place + 1 :]), False
        others: list[Bucket] = []
        if options.across_steps:
            others.append(replace(bucket, wait=WaitAt.STEP if bucket.wait is WaitAt.NEXT else WaitAt.NEXT))
        if options.reduce_scatter:
            whole = bucket.reduce is Reduce.ALL_REDUCE
            others.append(replace(bucket, reduce=Reduce.REDUCE_SCATTER if whole else Reduce.ALL_REDUCE))
        for other in others:
            yield (*buckets[:place], other, *buckets[place + 1 :]), False
    for place in range(len(buckets) - 1):
        left, right = buckets[place : place + 2]
        yield (*buckets[:place], right, left, *buckets[place + 2 :]), True


def pieces(model: StepModel, bucket: Bucket, *, splits: bool) -> Iterator[tuple[tuple[Part, ...], tuple[Part, ...]]]:
    """A bucket's parts in two."""
    for cut in range(1, len(bucket.parts)):
        yield bucket.parts[:cut], bucket.parts[cut:]
    if not splits:
        return
    largest = max(range(len(bucket.parts)), key=lambda place: model.carried(Bucket((bucket.parts[place],))))
    part = bucket.parts[largest]
    start, stop = part.span or (0, model.elements[part.path])
    if stop - start > 1:
        middle = _cut_at(model, part.path, (start + stop) // 2)
        piece = model.carried(Bucket((part,))) // 2
        if not start < middle < stop or piece < min(_LEAST_PIECE, sum(model.bytes.values()) // _PIECES):
            return
        halves = replace(part, span=(start, middle)), replace(part, span=(middle, stop))
        yield (*bucket.parts[:largest], halves[0]), (halves[1], *bucket.parts[largest + 1 :])


def merged(model: StepModel, parts: tuple[Part, ...]) -> tuple[Part, ...]:
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


def with_algorithms(model: StepModel, buckets: Buckets) -> Buckets:
    """Each all-reduce by the algorithm that is the fastest for its bytes, where the channel knows several."""
    return tuple(
        replace(bucket, algorithm=model.channel.algorithm(model.carried(bucket)))
        if bucket.reduce is Reduce.ALL_REDUCE
        else bucket
        for bucket in buckets
    )
