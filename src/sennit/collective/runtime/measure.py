"""Collectives that are run to be timed and checked: what is run, in which form each runtime wants it, and what must
come out.

A *subject* is an algorithm, a schedule or a one-sided program. Each runtime takes the form that it interprets:

| runtime | takes |
|---|---|
| numpy | code, all ranks in this process: the oracle, and slow |
| shm | code, a process a rank, shared memory |
| p2p | a schedule, a process a rank, messages of torch.distributed (gloo) |
| gpu | code with one block a rank, virtual ranks on one GPU |

Inputs are random whole numbers in f32, small enough that sums are exact in any order: a result is right or it is wrong.
`measure_torch.py` does the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

import numpy as np
from numpy.typing import NDArray

from sennit.collective.compile import compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.import_xml import read_msccl_xml
from sennit.collective.runtime.code import INPUT, OUTPUT, Code, Geometry
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.encode_schedule import encode_schedule
from sennit.collective.runtime.gpu_program import gpu_program
from sennit.collective.verify import verify_algorithm, verify_schedule
from sennit.collective.verify_one_sided import verify_one_sided
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, contributors
from sennit.ir.one_sided import OneSided
from sennit.ir.schedule import Schedule

__all__ = [
    "Request",
    "Runtime",
    "Subject",
    "Times",
    "buffers_for",
    "code_for",
    "elements_of",
    "expected_outputs",
    "random_inputs",
    "read_subject",
    "schedule_for",
    "wrong_ranks",
]

Floats = NDArray[np.float32]
Subject = Algorithm | Schedule | OneSided


class Runtime(Enum):
    NUMPY = "numpy"
    SHM = "shm"
    P2P = "p2p"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Request:
    """Run `subject` on arrays of each of `sizes`: bytes of the larger of a rank's input and output."""

    subject: Subject
    sizes: tuple[int, ...]
    repeat: int
    check: bool


@dataclass(frozen=True, slots=True)
class Times:
    """Of one size: the seconds of each repetition, on the rank that took longest; and the ranks whose result was wrong."""

    bytes: int
    seconds: tuple[float, ...]
    wrong: tuple[int, ...] = ()

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def least(self) -> float:
        return min(self.seconds)

    @classmethod
    def slowest(cls, by_rank: Sequence[Sequence[Times]]) -> list[Times]:
        """From each rank's own: by size."""
        found = []
        for same in zip(*by_rank, strict=True):
            seconds = tuple(max(times) for times in zip(*(item.seconds for item in same), strict=True))
            found.append(cls(same[0].bytes, seconds, tuple(sorted({rank for item in same for rank in item.wrong}))))
        return found


def read_subject(text: str) -> Subject:
    """From the text of an algorithm, a schedule or a one-sided program, or from MSCCL XML.

    It is proved right, or refused.
    """
    first = text.lstrip().split(None, 1)[0] if text.strip() else ""
    if first.startswith("<"):
        return read_msccl_xml(text)  # verifies
    match first:
        case "algorithm":
            algorithm = Algorithm.parse(text)
            verify_algorithm(algorithm)
            return algorithm
        case "schedule":
            schedule = Schedule.parse(text)
            verify_schedule(schedule)
            return schedule
        case "one_sided":
            program = OneSided.parse(text)
            verify_one_sided(program)
            return program
        case _:
            raise CollectiveError(
                f"the text begins with {first!r}",
                fix="give an algorithm, a schedule or a one-sided program as text, or MSCCL XML",
            )


def code_for(subject: Subject, runtime: Runtime) -> Code:
    match subject:
        case Schedule():
            return encode_schedule(subject)
        case Algorithm() if runtime is Runtime.GPU:
            return encode(gpu_program(compile_one_sided(subject)))
        case Algorithm():
            return encode_pull(subject)
        case OneSided() if runtime is Runtime.GPU:
            return encode(gpu_program(subject))
        case OneSided():
            return encode(subject)


def schedule_for(subject: Subject) -> Schedule:
    match subject:
        case Schedule():
            return subject
        case Algorithm():
            return compile_algorithm(subject)
        case OneSided():
            raise CollectiveError(
                f"{subject.name!r} is a one-sided program: it has no messages to send",
                where="runtime p2p",
                fix="give the algorithm or the schedule, or use --runtime shm, gpu or numpy",
            )


# ---- arrays ----------------------------------------------------------------------------------------------------------


def elements_of(code: Code, nbytes: int, itemsize: int = 4) -> int:
    """Elements of a part where the larger buffer of a rank has about `nbytes`; at least one."""
    parts = max(code.parts(rank, buffer) for rank in range(code.ranks) for buffer in (INPUT, OUTPUT))
    return max(1, nbytes // itemsize // max(1, parts))


def random_inputs(code: Code, elements: int, seed: int) -> list[Floats]:
    """By rank. Whole numbers, so that a sum is exact whatever its order."""
    draw = np.random.default_rng(seed)
    sizes = [code.parts(rank, INPUT) * elements for rank in range(code.ranks)]
    return [draw.integers(-999, 1000, size).astype(np.float32) for size in sizes]


def buffers_for(code: Code, rank: int, given: Floats, elements: int) -> tuple[Floats, Floats]:
    """A rank's input, a copy of `given`, and its output, NaN: apart, or in place one inside the other."""
    sizes = [code.parts(rank, buffer) * elements for buffer in (INPUT, OUTPUT)]
    if not code.collective.in_place:
        return given.copy(), np.full(sizes[OUTPUT], np.nan, dtype=np.float32)
    whole = np.full(max(sizes), np.nan, dtype=np.float32)
    small = OUTPUT if sizes[OUTPUT] < sizes[INPUT] else INPUT
    first = Geometry.of(code, elements).span(1 - small, code.collective.alias_offset(rank))[0]
    pair = [whole, whole]
    pair[small] = whole[first : first + sizes[small]]
    pair[INPUT][...] = given
    return pair[INPUT], pair[OUTPUT]


def expected_outputs(code: Code, inputs: Sequence[Floats], elements: int) -> list[Floats]:
    """What the collective asks for, by its postcondition; NaN where it asks for nothing."""
    geometry = Geometry.of(code, elements)
    outputs = []
    for rank in range(code.ranks):
        output = np.full(code.parts(rank, OUTPUT) * elements, np.nan, dtype=np.float32)
        for chunk in range(code.buffer_chunks(rank, OUTPUT)):
            value = code.collective.after(rank, chunk)
            if value is None:
                continue
            first, last = geometry.span(OUTPUT, chunk)
            output[first:last] = 0.0
            for index, ranks in value:
                start, stop = geometry.span(INPUT, index)
                for source in contributors(ranks):
                    output[first:last] += inputs[source][start:stop]
        outputs.append(output)
    return outputs


def wrong_ranks(outputs: Sequence[Floats], expected: Sequence[Floats]) -> tuple[int, ...]:
    """Those that differ where something is expected."""
    return tuple(
        rank
        for rank, (found, goal) in enumerate(zip(outputs, expected, strict=True))
        if not np.array_equal(np.where(np.isnan(goal), np.float32(0), found), np.nan_to_num(goal))
    )
