"""What a report shows: several plans for one model, each simulated on clusters and perhaps measured on ranks.

**Breakdown.** For each device d of a timeline with span T,

    T = compute(d) + exposed(d) + idle(d)

compute is the time in which at least one compute event runs, exposed the time in which the device communicates and does
not compute, idle the rest (the bubble of a pipeline, or waiting). The mean over devices keeps the sum, so the
difference between the steps of two plans is exactly the sum of the differences of their parts. `Comparison.why` names
the part that explains most of it, and a part that works against it.

**Verdict.** A measured run is *equal, bitwise* where no compared tensor differs in any bit, *equal within rounding*
where the greatest difference is within the tolerance that came with the run, else *DIFFERENT*. A difference that is not
a number is DIFFERENT.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from statistics import median

from sennit.errors import PlanError, RunError
from sennit.ir.program import Program
from sennit.ir.timeline import Category, Timeline
from sennit.report import units

__all__ = ["Breakdown", "Comparison", "MeasuredRun", "PlanResult", "SimulatedRun", "Verdict"]


class Verdict(Enum):
    BITWISE = "equal, bitwise"
    ROUNDING = "equal within rounding"
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a step by what the mean device does in them; they sum to the step."""

    compute: float
    exposed: float
    idle: float

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.idle

    @classmethod
    def of(cls, timeline: Timeline) -> Breakdown:
        """The mean over the timeline's devices of `Timeline.busy`, `.exposed` and `.idle`, in one pass over the events."""
        span, devices = timeline.span, timeline.devices
        if not devices:
            return cls(0.0, 0.0, 0.0)
        compute = busy = 0.0
        for events in timeline.by_device().values():
            compute += _covered((e.start, e.stop) for e in events if e.category is Category.COMPUTE)
            busy += _covered((e.start, e.stop) for e in events)
        # a rounding error must not show as a negative time
        return cls(
            compute / len(devices),
            max(0.0, (busy - compute) / len(devices)),
            max(0.0, span - busy / len(devices)),
        )


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One plan on one cluster. `cluster` and `mesh` are names to show."""

    cluster: str
    mesh: str
    timeline: Timeline
    program: Program

    @property
    def step(self) -> float:
        return self.timeline.span

    @property
    def peak_memory(self) -> int:
        """Bytes live at the worst moment of the worst device."""
        return max((sample.total for sample in self.timeline.memory), default=0)

    @property
    def wire_bytes(self) -> int:
        """Bytes that all devices together put on the wire in one step."""
        return self.timeline.wire_bytes()


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One plan on real ranks, against the single-device run:

    `seconds` of each repeated step, and how the loss and the gradients compare. `worst` names the tensor that differs
    most; `bitwise` of `compared` tensors are equal to the last bit.
    """

    ranks: int
    backend: str
    seconds: tuple[float, ...]
    max_difference: float
    worst: str
    tolerance: float
    bitwise: int
    compared: int

    def __post_init__(self) -> None:
        if not self.seconds:
            raise RunError(f"a run on {self.ranks} ranks has no measured step", fix="time at least one step")
        if not 0 <= self.bitwise <= self.compared:
            raise RunError(f"{self.bitwise} of {self.compared} compared tensors are equal to the last bit")

    @property
    def step(self) -> float:
        """The median of the repeated steps."""
        return median(self.seconds)

    @property
    def verdict(self) -> Verdict:
        if self.max_difference == 0 and self.bitwise == self.compared:
            return Verdict.BITWISE
        return Verdict.ROUNDING if self.max_difference <= self.tolerance else Verdict.DIFFERENT


@dataclass(frozen=True, slots=True)
class PlanResult:
    """One plan: `simulated[0]` is the run on the headline cluster.

    `predicted` is the simulation of the very run that was measured (the same program on a description of this machine);
    it is usually one of `simulated` too.
    """

    name: str
    summary: str
    simulated: tuple[SimulatedRun, ...]
    measured: MeasuredRun | None = None
    predicted: SimulatedRun | None = None

    def __post_init__(self) -> None:
        if not self.simulated:
            raise PlanError(f"plan {self.name!r} was not simulated", fix="simulate it on at least one cluster")

    @property
    def headline(self) -> SimulatedRun:
        return self.simulated[0]

    @property
    def error(self) -> float | None:
        """The signed relative error of the predicted step: positive where the simulation says longer than measured."""
        if self.measured is None or self.predicted is None or self.measured.step <= 0:
            return None
        return (self.predicted.step - self.measured.step) / self.measured.step


@dataclass(frozen=True, slots=True)
class Comparison:
    """`reference_seconds` is the measured step of the single-device run that every plan is compared with."""

    model: str
    model_summary: str
    reference_seconds: float
    results: tuple[PlanResult, ...]

    def __post_init__(self) -> None:
        if not self.results:
            raise PlanError(f"there is no plan to compare for model {self.model!r}", fix="give at least one plan")
        clusters = {result.headline.cluster for result in self.results}
        if len(clusters) > 1:
            raise PlanError(
                f"the first simulated runs are on different clusters: {', '.join(sorted(clusters))}",
                where=f"comparison for model {self.model!r}",
                fix="put the run on the headline cluster first in every plan",
            )

    @property
    def cluster(self) -> str:
        """The headline cluster: the plans are ranked by their simulated step on it."""
        return self.results[0].headline.cluster

    @property
    def ranked(self) -> tuple[PlanResult, ...]:
        """From the least simulated step on the headline cluster to the greatest; equal ones in the order given."""
        return tuple(sorted(self.results, key=lambda result: result.headline.step))

    @property
    def best(self) -> PlanResult:
        return self.ranked[0]

    def why(self) -> str:
        """One sentence: how far the best plan is ahead of the next one, and which part of the step explains it."""
        first = self.best
        step = units.seconds(first.headline.step)
        lead = f"{first.name} has the shortest simulated step on {self.cluster}, {step}"
        if len(self.results) == 1:
            sentence = f"{lead}, and is the only plan compared"
        else:
            sentence = lead + _explain(first, self.ranked[1])
        if first.measured is not None and first.measured.verdict is Verdict.DIFFERENT:
            sentence += ", BUT its measured run does not equal the single-device run"
        return sentence + "."


def _explain(first: PlanResult, second: PlanResult) -> str:
    """The rest of the sentence: the gain over the runner-up, what explains most of it and what works against it."""
    gain = second.headline.step - first.headline.step
    if gain <= 0:
        return f", the same as {second.name}"
    ours, theirs = Breakdown.of(first.headline.timeline), Breakdown.of(second.headline.timeline)
    parts = {
        "computing": (ours.compute, theirs.compute),
        "in exposed communication": (ours.exposed, theirs.exposed),
        "idle": (ours.idle, theirs.idle),
    }
    helps = max(parts, key=lambda part: parts[part][1] - parts[part][0])
    hurts = min(parts, key=lambda part: parts[part][1] - parts[part][0])
    text = f": {units.seconds(gain)} ({units.percent(gain / second.headline.step)}) less than {second.name}"
    mine, other = parts[helps]
    text += f", because its devices spend {units.seconds(mine)} {helps} on average instead of {units.seconds(other)}"
    mine, other = parts[hurts]
    # a part that costs a tenth of the gain or more belongs to the truth of the sentence
    if mine - other > 0.1 * gain:
        text += f", although they spend {units.seconds(mine)} {hurts} instead of {units.seconds(other)}"
    return text


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total
