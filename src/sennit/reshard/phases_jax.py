"""What steps become on JAX devices, and what that costs.

A *phase* is one step or a few that are lowered together (`lower_jax`): a slice with the all-to-all after it; an
all-to-all or a gather whole, by one collective of each group, or in parts, by permutes between all devices; an
all-to-all in parts with the permute after it; an exchange, which is all of a way. `ways` gives all ways to lower a
sequence of steps.

In one process or over fast links a collective's time is that of its start and of the bytes that it and the copies
around it touch. Per device, for pieces of L bytes before and G bytes after, n members:

| phase | starts | sent or gathered | copied |
|---|---|---|---|
| slice | | | G |
| all-to-all | 1 | L | 2 L: cut and joined |
| all-to-all in parts | n - 1 permutes | (n - 1) / n L | 2 L: the part that stays is copied once more, to be joined |
| the same and a permute after it | n permutes | L | 2 L |
| permute | 1 permute | L | |
| gather | 1 | G | G (1 + 16 / r) where the result must be put in order, of runs of r bytes |
| gather in parts | n - 1 permutes | G - L | G: joined |
| exchange | 2 of all devices, of a few bytes, as long as a permute's | | G, more where runs are short |

An exchange copies runs of r bytes that both pieces have in a row. A run takes some time whatever its length; and where
p bytes in a row are taken out of a row of e bytes, of the lines of 64 bytes that are read only a part is of use: G (1 +
4 / r + (a - 1) / 4), a = max(1, min(64, e) / p). The numbers are by eye, from 150 exchanges on 2 and on 16 cores.

Temporaries count where they are large. An allocation of 32 MiB or more is mapped anew in each call by the allocator of
glibc, and every page of it faults when it is first written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

from sennit.ir.layout import Layout
from sennit.reshard.pieces_jax import Position, held, local
from sennit.reshard.redistribution import Step, StepKind

__all__ = ["DEFAULT_COST", "Phase", "TouchCost", "Work", "leads", "touched", "ways", "work"]

# A phase in parts has a branch for each member, and a permute: with more the starts cost more than the copies saved.
MOST_PARTS = 4
MAPPED = 32 << 20
LINE = 64
SCATTERED = 16.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps that are lowered together: a slice before and a permute after the main one, where there are such."""

    step: Step
    sliced: Step | None = None
    moved: Step | None = None
    in_parts: bool = False

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(step for step in (self.sliced, self.step, self.moved) if step is not None)

    @property
    def source(self) -> Layout:
        return self.steps[0].source

    @property
    def result(self) -> Layout:
        return self.steps[-1].result

    @property
    def members(self) -> int:
        return prod(self.step.source.mesh.size(axis) for axis in self.step.axes)


def leads(step: Step, every: Sequence[Position]) -> bool:
    """Whether what a gather gathers leads in its result."""
    came = tuple(held(step.source, axis, every) for axis in step.axes)
    return local(step.result, every)[: len(came)] == came


def ways(steps: Sequence[Step], every: Sequence[Position]) -> Iterator[tuple[Phase, ...]]:
    """The steps with each all-to-all and each gather whole or in parts; first with all of them whole."""
    joined: list[Step | tuple[Step, Step]] = []
    for step in steps:
        before = joined[-1] if joined else None
        if isinstance(before, Step) and before.kind is StepKind.SLICE and step.kind is StepKind.ALL_TO_ALL:
            joined[-1] = (before, step)
        else:
            joined.append(step)
    whole = [Phase(entry) if isinstance(entry, Step) else Phase(entry[1], sliced=entry[0]) for entry in joined]
    for choice in product(*((False, True) if _has_parts(phase, every) else (False,) for phase in whole)):
        phases: list[Phase] = []
        for phase, in_parts in zip(whole, choice, strict=True):
            before_it = phases[-1] if phases else None
            if before_it is not None and _takes_along(before_it) and phase.step.kind is StepKind.PERMUTE:
                phases[-1] = Phase(before_it.step, before_it.sliced, phase.step, in_parts=True)
            else:
                phases.append(Phase(phase.step, phase.sliced, in_parts=in_parts))
        yield tuple(phases)


def _has_parts(phase: Phase, every: Sequence[Position]) -> bool:
    kind = phase.step.kind
    gathers = kind is StepKind.ALL_GATHER and not leads(phase.step, every)
    return (gathers or kind is StepKind.ALL_TO_ALL) and phase.members <= MOST_PARTS


def _takes_along(phase: Phase) -> bool:
    return phase.in_parts and phase.step.kind is StepKind.ALL_TO_ALL and phase.moved is None


# ---- cost ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TouchCost:
    """In bytes of a plain copy: the start of a collective of groups, that of a permute of all devices, a byte that an
    all-to-all or a permute sends, and a byte of temporaries that are mapped anew. A byte that a gather makes costs what
    a copied one does.

    Fitted with `benchmarks/reshard/fit_xla.py` on half of 63 random problems (263 ways) of 0.25 to 64 MiB on 6 to 16
    CPU devices of one process, timed by `benchmarks/reshard/tune_xla.py` on 16 cores in November 2026 (jax 0.11.2): 45
    us for a start, 98 us for a permute, 0.19 ns for a byte sent, 0.15 ns for one gathered or copied, 0.53 ns for one
    mapped, on each of 8 devices.
    """

    start: float = 3.0e5
    permute: float = 6.6e5
    sent: float = 1.3
    mapped: float = 3.5


DEFAULT_COST = TouchCost()


@dataclass(frozen=True, slots=True)
class Work:
    """What phases do on one device: collectives of groups and permutes of all devices started, the bytes that
    all-to-alls and permutes send, that gathers make, that are copied between them, and those of temporaries.
    """

    starts: int = 0
    permutes: int = 0
    sent: float = 0.0
    gathered: float = 0.0
    copied: float = 0.0
    temporary: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.starts + other.starts,
            self.permutes + other.permutes,
            self.sent + other.sent,
            self.gathered + other.gathered,
            self.copied + other.copied,
            max(self.temporary, other.temporary),
        )


def touched(phases: Sequence[Phase], itemsize: int, every: Sequence[Position], cost: TouchCost = DEFAULT_COST) -> float:
    """The cost of the phases, in bytes of a plain copy on each of eight devices.

    All devices share one memory: on more of them a byte takes longer.
    """
    done = work(phases, itemsize, every)
    mapped = done.temporary if done.temporary >= MAPPED else 0.0
    bytes_touched = cost.sent * done.sent + done.gathered + done.copied + cost.mapped * mapped
    share = len(phases[0].source.mesh.devices) / 8 if phases else 1.0
    return cost.start * done.starts + cost.permute * done.permutes + share * bytes_touched


def work(phases: Sequence[Phase], itemsize: int, every: Sequence[Position]) -> Work:
    """The work of the phases. The first reads the input and the last writes the output: those are no temporaries."""
    done = Work()
    in_order, put = True, 0.0
    for number, phase in enumerate(phases):
        step = phase.step
        before, after = (layout.local_elements() * itemsize for layout in (step.source, phase.result))
        disorders = step.kind is StepKind.ALL_GATHER and not phase.in_parts and not leads(step, every)
        if not in_order:
            done += Work(copied=put, temporary=2 * before)
        in_order = not disorders
        put = after * (1.0 + SCATTERED / _runs(step, itemsize)[0])
        given = before if number else 0
        made = after if disorders or number < len(phases) - 1 else 0
        done += _alone(phase, before, after, given, made)
    return done if in_order else done + Work(copied=put)


def _alone(phase: Phase, before: int, after: int, given: int, made: int) -> Work:
    """The work of one phase.

    Of its temporaries `given` is the piece before and `made` the one after; the compiler puts one of the parts where
    the result will be, and the result of an all-to-all where parts were.
    """
    rounds = phase.members if phase.moved is not None else phase.members - 1
    part = before // phase.members
    match phase.step.kind:
        case StepKind.SLICE:
            return Work(copied=after, temporary=given + made)
        case StepKind.ALL_TO_ALL if phase.in_parts:
            staged = (2 * rounds - 1) * part
            return Work(permutes=rounds, sent=rounds * part, copied=2 * before, temporary=given + max(staged, made))
        case StepKind.ALL_TO_ALL:
            return Work(starts=1, sent=before, copied=2 * before, temporary=given + 2 * before - part)
        case StepKind.ALL_GATHER if phase.in_parts:
            return Work(permutes=rounds, sent=after - before, copied=after, temporary=given + after - before + made)
        case StepKind.ALL_GATHER:
            return Work(starts=1, gathered=after, temporary=given + made)
        case StepKind.EXCHANGE:
            run, part, row = _runs(phase.step, after // phase.result.local_elements())
            wasted = max(1.0, min(LINE, row) / part) - 1.0
            return Work(permutes=2, copied=after * (1.0 + 4.0 / run + wasted / 4.0))
        case _:
            return Work(permutes=1, sent=before, temporary=given + made)


def _runs(step: Step, itemsize: int) -> tuple[int, int, int]:
    """Of an exchange, in bytes: what both pieces have in a row, what is taken in a row out of the source, and of how
    much there.
    """
    run = part = row = itemsize
    both = source = True
    sizes = zip(step.source.local_shape(), step.result.local_shape(), strict=True)
    for have, want in reversed(list(sizes)):
        taken = gcd(have, want)
        if both:
            run *= taken
        if source:
            part, row = part * taken, part * have
        both = both and have == want == taken
        source = source and have == taken
    return run, part, row
