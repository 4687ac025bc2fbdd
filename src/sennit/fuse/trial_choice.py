"""Which strategy is the fastest, by two witnesses: the clock, which knows the work, and some steps of each, which know
the machine.

Strategy i has simulated seconds s_i and the seconds t_i1, ... of n_i steps. Neither is right. The clock may be wrong by
one factor for all (something else runs on the machine) and by a little more or less for each; steps scatter, and three
of them say little. So with m_i the median of the steps of strategy i:

    b       = median of m_i / s_i                                        by how much all are slower than simulated
    clock   = spread of m_i / (b s_i), less what the steps' own scatter makes of it; at least `LEAST`
    steps_i = 1.25 * spread of t / m, over the steps of all / sqrt(n_i)  how uncertain a median of n_i steps is; at least `LEAST` / sqrt(n_i)

    seconds_i  =  (m_i / steps_i^2  +  b s_i / clock^2) / (1 / steps_i^2  +  1 / clock^2)

(all spreads are fractions; 1.4826 times the median of distances from the median, which a few steps that took twice as
long do not move). With few steps the clock decides between strategies that are close; with many, or where the clock is
off, the steps do. The plain least median of a few steps each takes whichever was lucky: with four ranks it took one of
344 ms where that simulated as the best took 307 when measured for longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

__all__ = ["CLEARLY", "LEAST", "is_clearly_faster", "weighed"]

LEAST = 0.01
CLEARLY = 0.02
_NORMAL = 1.4826  # a normal deviation over the median distance from the median
_MEDIAN = 1.25  # the deviation of a median over that of a mean


def weighed(simulated: Sequence[float], steps: Sequence[Sequence[float]]) -> list[float]:
    """The seconds of each strategy, by its simulated seconds and those of its steps, of which it has one at least."""
    medians = [median(spent) for spent in steps]
    bias = median(found / told for found, told in zip(medians, simulated, strict=True))
    scatter = max(
        LEAST,
        _spread([one / found for spent, found in zip(steps, medians, strict=True) for one in spent if len(spent) > 1]),
    )
    by_steps = [_MEDIAN * scatter / sqrt(len(spent)) for spent in steps]
    apart = _spread([found / (bias * told) for found, told in zip(medians, simulated, strict=True)])
    by_clock = sqrt(max(LEAST**2, apart**2 - median(by_steps) ** 2))
    found: list[float] = []
    for one, told, uncertain in zip(medians, simulated, by_steps, strict=True):
        share = by_clock**2 / (by_clock**2 + uncertain**2)
        found.append(share * one + (1.0 - share) * bias * told)
    return found


def is_clearly_faster(turns: Sequence[float], others: Sequence[float]) -> bool:
    """Whether it was faster in every turn, and by `CLEARLY` in the median of turns."""
    ratios = [one / other for one, other in zip(turns, others, strict=True)]
    return bool(ratios) and max(ratios) < 1.0 and median(ratios) < 1.0 - CLEARLY


def _spread(ratios: Sequence[float]) -> float:
    if not ratios:
        return 0.0
    middle = median(ratios)
    return _NORMAL * median(abs(ratio - middle) for ratio in ratios)
