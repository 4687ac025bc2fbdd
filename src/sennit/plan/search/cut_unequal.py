"""Stages with different numbers of replicas: the model cut into stages and the devices shared among them, together.

All stages see the same micro-batches, of g samples each. A stage with r replicas gives g / r of them to each; so its
seconds are those that its units take at that size, and a stage of heavy units gets more devices instead of fewer units.
With t[r][u] the seconds of unit u on r replicas, S stages and R replicas in all:

    find  T = min over cuts and counts r_1 + ... + r_S = R  of  max over stages of  (sum of t[r_s][u] over the stage's units)

`cut_unequal` bisects over T. For one T the ends that s stages can reach with q replicas are a set E[s][q]: from each
begin in it, a further stage on r replicas reaches every end up to the farthest whose sum is within T. Sets and not
farthest ends: a stage that is cut short may leave units to one with too few replicas. The test beside it tries all cuts
and all counts.

`replicas_of` lists the counts that a lane may have: those that divide g into a size of micro-batch that the space has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["cut_unequal", "replicas_of", "samples_of"]

Ends = NDArray[np.bool_]  # which ends of the list of units can be reached
Run = tuple[int, int, int]  # the first unit of a stage, the one behind its last, its replicas


def samples_of(batch: int, replicas: int, sizes: Sequence[int]) -> Iterator[int]:
    """The numbers of samples of a micro-batch that lanes with different counts of replicas can share, of at most so
    many together.
    """
    for samples in range(2, batch + 1):
        if batch % samples == 0 and len(replicas_of(samples, replicas - 1, sizes)) > 1:
            yield samples


def replicas_of(samples: int, most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(count for count in range(1, most + 1) if samples % count == 0 and samples // count in sizes)


def cut_unequal(seconds: Mapping[int, Sequence[float]], stages: int, replicas: int) -> tuple[Run, ...] | None:
    """The cut and the counts with the least slowest stage; `seconds` are those of each unit, by count of replicas.

    None where the counts do not add up.
    """
    sums = {count: np.concatenate(([0.0], np.cumsum(row))) for count, row in seconds.items()}
    units = len(next(iter(sums.values()))) - 1 if sums else 0
    high = max((float(row[-1]) for row in sums.values()), default=0.0)
    found = _within(sums, units, stages, replicas, high)
    low = 0.0
    while found is not None and high - low > 1e-6 * high:
        middle = (low + high) / 2
        better = _within(sums, units, stages, replicas, middle)
        if better is None:
            low = middle
        else:
            found, high = better, max(float(sums[count][end] - sums[count][begin]) for begin, end, count in better)
    return found


def _within(
    sums: Mapping[int, NDArray[np.float64]], units: int, stages: int, replicas: int, most: float
) -> tuple[Run, ...] | None:
    """A cut whose stages all take at most so long."""
    farthest = {count: np.searchsorted(row, row + most * (1 + 1e-12), side="right") - 1 for count, row in sums.items()}
    start = np.zeros(units + 1, dtype=bool)
    start[0] = True
    reached: list[dict[int, Ends]] = [{0: start}]
    for _ in range(stages):
        ends: dict[int, Ends] = {}
        for used, begins in reached[-1].items():
            for count, far in farthest.items():
                if used + count <= replicas:
                    before = ends.get(used + count)
                    mine = _ends(begins, far, units)
                    ends[used + count] = mine if before is None else before | mine
        reached.append(ends)
    if replicas not in reached[-1] or not reached[-1][replicas][units]:
        return None
    return _back(reached, farthest, units, replicas)


def _ends(begins: Ends, far: NDArray[np.intp], units: int) -> Ends:
    """Every end behind a begin, up to its farthest."""
    at = np.flatnonzero(begins[:-1])
    edges = np.zeros(units + 2, dtype=np.int64)
    np.add.at(edges, at + 1, 1)
    np.add.at(edges, far[at] + 1, -1)
    return np.cumsum(edges)[: units + 1] > 0


def _back(
    reached: Sequence[Mapping[int, Ends]], farthest: Mapping[int, NDArray[np.intp]], units: int, replicas: int
) -> tuple[Run, ...]:
    runs: list[Run] = []
    end, used = units, replicas
    for ends in reversed(reached[:-1]):
        begin, count = next(
            (int(begin), count)
            for count, far in farthest.items()
            if used - count in ends
            for begin in np.flatnonzero(ends[used - count][:end])
            if far[begin] >= end
        )
        runs.append((begin, end, count))
        end, used = begin, used - count
    return tuple(reversed(runs))
