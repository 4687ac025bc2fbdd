"""The least interval of a schedule, relaxed: a linear program over how many units each stage has and what they keep.

A schedule says how many micro-batches k_s of stage s are in flight, and which stages a lane has. With n_sc units in stage s that take option c (seconds t_c, bytes
a_c of activations for each micro-batch in flight) and b bytes of parameters, gradients and state:

    minimise    I
    subject to  sum over s on lane, c of  n_sc t_c  +  r         <=  I          for each lane, r its share of the rest
                sum over s on lane, c of  n_sc (b + k_s a_c)     <=  memory     for each lane
                sum over s, c of n_sc = n,  sum over lanes of r = the seconds of the rest of the model

Whole units, their order, the memory of the rest, and working memory are left out: each can only make the interval longer. So no plan of the
config with this schedule has a shorter one. HiGHS solves it in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

__all__ = ["UnitOption", "least_interval"]


@dataclass(frozen=True, slots=True)
class UnitOption:
    seconds: float
    activations: float


def least_interval(
    lanes: Sequence[tuple[int, ...]],
    in_flight: Sequence[int],
    options: Sequence[UnitOption],
    units: int,
    static: float,
    memory: float,
    rest: float = 0.0,
) -> float:
    """The linear program's optimum; infinite where nothing fits. `lanes` are the stages of each lane."""
    import highspy

    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    scale = max(option.seconds for option in options) * units + rest  # I is counted in parts of all work on one lane
    solver.addCol(1.0, 0.0, inf, 0, [], [])  # I
    columns: dict[tuple[int, int], int] = {}
    for stage in range(len(in_flight)):
        for number in range(len(options)):
            columns[stage, number] = 1 + len(columns)
            solver.addCol(0.0, 0.0, float(units), 0, [], [])
    shares = [1 + len(columns) + lane for lane in range(len(lanes))]
    for _ in lanes:
        solver.addCol(0.0, 0.0, inf, 0, [], [])
    for share, own in zip(shares, lanes, strict=True):
        index = [columns[stage, number] for stage in own for number in range(len(options))]
        seconds = [option.seconds / scale for _ in own for option in options]
        held = [(static + in_flight[stage] * option.activations) / memory for stage in own for option in options]
        solver.addRow(-inf, 0.0, len(index) + 2, [0, share, *index], [-1.0, 1.0, *seconds])
        solver.addRow(-inf, 1.0, len(index), index, held)
    every = list(columns.values())
    solver.addRow(float(units), float(units), len(every), every, [1.0] * len(every))
    solver.addRow(rest / scale, rest / scale, len(shares), shares, [1.0] * len(shares))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return inf
    return float(solver.getInfo().objective_function_value) * scale
