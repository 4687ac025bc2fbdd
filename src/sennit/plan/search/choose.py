"""What each unit of a stage keeps, under the stage's memory: a small integer program.

A stage has n_i units of item i, and each unit one of several options (what it keeps, in how many pieces it runs) with
seconds t, bytes a of activations for each micro-batch in flight and w of working memory. With k_i micro-batches of item
i in flight:

    minimise    sum over i, c of  n_ic t_ic
    subject to  sum over c of n_ic = n_i                                n_ic whole
                sum over i, c of  k_i a_ic n_ic  +  z  <=  room
                z >= w_ic  wherever n_ic > 0                            one unit's backward runs at a time

`choose` tries all counts where they are few, and else solves it with HiGHS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Group", "Option", "choose"]


@dataclass(frozen=True, slots=True)
class Option:
    seconds: float
    activations: int
    working: int


@dataclass(frozen=True, slots=True)
class Group:
    """`count` units with the same options, and how many micro-batches of them are in flight."""

    count: int
    in_flight: int
    options: tuple[Option, ...]


def choose(groups: Sequence[Group], room: float) -> tuple[tuple[int, ...], ...] | None:
    """How many units of each group take each option; None where nothing fits."""
    fastest = [min(range(len(group.options)), key=lambda c: group.options[c].seconds) for group in groups]
    if _need(groups, fastest) <= room:
        return tuple(
            tuple(group.count if c == best else 0 for c in range(len(group.options)))
            for group, best in zip(groups, fastest, strict=True)
        )
    leanest = [
        min(range(len(group.options)), key=lambda c: group.options[c].activations * group.in_flight) for group in groups
    ]
    least = sum(
        group.count * group.in_flight * group.options[c].activations for group, c in zip(groups, leanest, strict=True)
    )
    if least > room:
        return None
    ways = [_counts(group.count, len(group.options)) for group in groups]
    return _try_all(groups, ways, room) if prod(map(len, ways)) <= 3000 else _solve(groups, room)


def _counts(total: int, options: int) -> list[tuple[int, ...]]:
    """All ways to share units among options."""
    if options == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in _counts(total - first, options - 1)]


def _try_all(
    groups: Sequence[Group], ways: list[list[tuple[int, ...]]], room: float
) -> tuple[tuple[int, ...], ...] | None:
    """The fastest of all combinations that fit."""
    front: list[tuple[float, float, float, tuple[tuple[int, ...], ...]]] = [(0.0, 0.0, 0.0, ())]
    for group, counts in zip(groups, ways, strict=True):
        grown = []
        for held, working, seconds, chosen in front:
            for row in counts:
                pairs = [(number, option) for number, option in zip(row, group.options, strict=True) if number]
                more = held + group.in_flight * sum(number * option.activations for number, option in pairs)
                peak = max([working, *(option.working for _, option in pairs)])
                if more + peak <= room:
                    took = seconds + sum(number * option.seconds for number, option in pairs)
                    grown.append((more, peak, took, (*chosen, row)))
        front = grown
    return min(front, key=lambda entry: entry[2])[3] if front else None


def _need(groups: Sequence[Group], chosen: Sequence[int]) -> float:
    pairs = [(group, group.options[c]) for group, c in zip(groups, chosen, strict=True) if group.count]
    held = sum(group.count * group.in_flight * option.activations for group, option in pairs)
    return held + max((option.working for _, option in pairs), default=0)


def _solve(groups: Sequence[Group], room: float) -> tuple[tuple[int, ...], ...] | None:
    import highspy

    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 1e-4)
    unit = max(room, 1.0)  # bytes are counted in parts of the room, seconds in parts of the slowest option
    slowest = max(option.seconds for group in groups for option in group.options) or 1.0
    peak = solver.addVariable(0.0, 1.0)
    total = 1.0 * peak
    counts = []
    for group in groups:
        row = []
        for option in group.options:
            number = solver.addIntegral(0.0, float(group.count), option.seconds / slowest)
            used = solver.addBinary()
            solver.addConstr(number <= float(group.count) * used)
            solver.addConstr(peak >= (option.working / unit) * used)
            total = total + (group.in_flight * option.activations / unit) * number
            row.append(number)
        solver.addConstr(sum(row[1:], 1.0 * row[0]) == float(group.count))
        counts.append(row)
    solver.addConstr(total <= 1.0)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return tuple(tuple(round(solver.val(number)) for number in row) for row in counts)
