"""The schedules of `plan/schedules.py` on one time axis, and how long the modulo scheduler takes.

    python benchmarks/plan/schedules.py [--svg FILE]

Spans are computed by the recurrence of plan/grid.py (simulated, in units of a stage's forward); the scheduler's seconds
are measured.
"""

from __future__ import annotations

import argparse
import time
from math import inf
from pathlib import Path

from sennit.plan.grid import Durations, Grid, Held, chain, times
from sennit.plan.modulo import Problem, schedule
from sennit.plan.schedules import (
    chimera,
    dual_pipe_v,
    gpipe,
    interlaced,
    interleaved,
    one_forward_one_backward,
    several_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_h2,
)
from sennit.report.schedule_svg import schedules_svg


def known(lanes: int, microbatches: int) -> list[tuple[str, Grid]]:
    """Each lane has the same work in all of them, but for 3F1B (two more passes) and interlaced (more for what is
    shared).
    """
    half = Durations(0.5, 0.5, 0.5)
    whole = Durations(1.0, 1.0, 1.0)
    everywhere = (Durations(0.5, 0.5, 0.0), *(whole,) * lanes, Durations(0.5, 1.0, 0.0))
    return [
        ("GPipe", times(gpipe(lanes, microbatches), (whole,) * lanes)),
        ("1F1B", times(one_forward_one_backward(lanes, microbatches), (whole,) * lanes)),
        ("interleaved 1F1B, two stages a lane", times(interleaved(lanes, microbatches, 2), (half,) * 2 * lanes)),
        ("Chimera, a lane is two devices", times(chimera(2 * lanes, microbatches), (half,) * 2 * lanes)),
        ("zero bubble H1", times(zero_bubble_h1(lanes, microbatches), (whole,) * lanes)),
        ("zero bubble H2", times(zero_bubble_h2(lanes, microbatches), (whole,) * lanes)),
        ("DualPipeV", times(dual_pipe_v(lanes, microbatches), (half,) * 2 * lanes)),
        ("3F1B", times(several_forward_one_backward(lanes, microbatches), (whole,) * 3 * lanes)),
        ("interlaced", times(interlaced(lanes, microbatches, in_flight=lanes + 4, durations=everywhere), everywhere)),
    ]


def problems() -> list[tuple[str, Problem]]:
    def plain(stages: int, cap: float, split: bool) -> Problem:
        lanes = tuple((stage,) for stage in range(stages))
        unit = (Durations(1.0, 1.0, 1.0),) * stages
        marks, held = (True,) * stages, (Held(),) * stages
        return Problem(lanes, unit, chain(stages), marks, held, (cap,) * stages, split=split)

    everywhere = tuple(range(8))
    return [
        ("1F1B, 16 stages, cap 16", plain(16, 16.0, False)),
        ("zero bubble, 16 stages, cap 31", plain(16, 31.0, True)),
        (
            "3F1B, 8 stages",
            Problem(
                tuple((stage % 8,) for stage in range(24)),
                (Durations(1.0, 1.0, 1.0),) * 24,
                chain(24),
                (False,) * 16 + (True,) * 8,
                (Held(),) * 24,
                (inf,) * 8,
            ),
        ),
        (
            "interlaced, 8 stages, cap 12",
            Problem(
                (everywhere, *((lane,) for lane in range(8)), everywhere),
                (Durations(1.0, 1.0, 0.0), *(Durations(2.0, 2.0, 2.0),) * 8, Durations(1.0, 2.0, 0.0)),
                chain(10),
                (True,) * 10,
                (Held(0.0, 0.0), *(Held(),) * 8, Held(0.0, 0.0)),
                (12.0,) * 8,
            ),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, help="also draw the schedules")
    options = parser.parse_args()
    grids = known(4, 8)
    print("| schedule, 4 lanes, 8 micro-batches | span | bubble | idle inside a lane |")
    print("|---|---|---|---|")
    for name, grid in grids:
        idle = max(grid.idle(lane) for lane in range(len(grid.start)))
        print(f"| {name} | {grid.span:g} | {100 * grid.bubble:.1f} % | {idle:g} |")
    print("\n| modulo schedule | interval | bound | solver | milliseconds |")
    print("|---|---|---|---|---|")
    for name, problem in problems():
        begin = time.perf_counter()
        found = schedule(problem)
        seconds = time.perf_counter() - begin
        print(f"| {name} | {found.interval:g} | {problem.bound:g} | {found.solver} | {1000 * seconds:.1f} |")
    if options.svg is not None:
        options.svg.write_text(schedules_svg(grids), encoding="utf-8")


if __name__ == "__main__":
    main()
