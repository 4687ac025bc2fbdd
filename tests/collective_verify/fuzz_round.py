"""One round of the fuzz: a random program compiled, verified, run and compared with its sequential meaning; then its
mutants.

A program fails if the compiler raises, the verifier refuses the schedule, a run deadlocks, or a run under any seed
differs from the sequential meaning in a chunk that the collective asks for. A mutant is *caught* if the verifier
refuses it; *equivalent* if the verifier proves it and many runs agree with the sequential meaning; else it is *missed*,
and the verifier is wrong. The same is done with the one-sided lowering and mutants of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from mutants import KINDS, mutate
from numpy.typing import NDArray
from one_sided_mutants import ONE_SIDED_KINDS, mutate_one_sided
from random_programs import random_program
from random_switch_programs import random_switch_program

from sennit.collective.compile import CompileOptions, compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.verify import outputs_of, verify_algorithm, verify_schedule
from sennit.collective.verify_one_sided import verify_one_sided
from sennit.errors import CollectiveError
from sennit.ir.algorithm_numpy import run_algorithm
from sennit.ir.collective import Algorithm, CustomCollective
from sennit.ir.one_sided import OneSided
from sennit.ir.one_sided_numpy import run_one_sided
from sennit.ir.schedule import Schedule
from sennit.ir.schedule_numpy import run_schedule

__all__ = ["Findings", "fault_of", "fuzz_round", "program_of", "shrink"]

Arrays = list[NDArray[np.int64]]
ELEMENTS = 3
RUNS = {True: ((0, 1), (1, 2)), False: ((2, 1),)}  # fused or not: seed and tiles of the runs that a schedule must pass
MUTANT_RUNS = tuple((seed, 1 + seed % 2) for seed in range(8))


@dataclass
class Findings:
    """What came of some rounds; they add up."""

    programs: int = 0
    moves: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)  # seed of the program, what is wrong
    mutants: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, outcome)

    def add(self, other: Findings) -> None:
        self.programs += other.programs
        self.moves += other.moves
        self.failures += other.failures
        self.mutants += other.mutants


def program_of(seed: int) -> Algorithm:
    """Every fourth program is one for a multicast switch."""
    return random_switch_program(seed) if seed % 4 == 3 else random_program(seed)


def fuzz_round(seed: int, mutants: int = 1) -> Findings:
    """The program of this seed, and some mutants of its schedule.

    Every fourth program is compiled without fusion too.
    """
    algorithm = program_of(seed)
    found = Findings(1, len(algorithm.moves))
    if fault := fault_of(algorithm, (True, False) if seed % 4 == 0 else (True,)):
        found.failures.append((seed, fault))
        return found
    schedule = compile_algorithm(algorithm)
    draw = random.Random(seed)
    for _ in range(mutants):
        kind = draw.choice(KINDS)
        mutant = mutate(schedule, kind, draw)
        if mutant is not None:
            outcome = _outcome(algorithm, mutant)
            found.mutants[kind, outcome] += 1
            if outcome == "missed":
                found.failures.append((seed, f"missed mutant ({kind}):\n{mutant}"))
    lowered = compile_one_sided(algorithm)
    for _ in range(mutants):
        kind = draw.choice(ONE_SIDED_KINDS)
        damaged = mutate_one_sided(lowered, kind, draw)
        if damaged is not None:
            outcome = _outcome(algorithm, damaged)
            found.mutants[kind, outcome] += 1
            if outcome == "missed":
                found.failures.append((seed, f"missed mutant ({kind}):\n{damaged}"))
    return found


def fault_of(algorithm: Algorithm, fuse: tuple[bool, ...] = (True, False)) -> str:
    """What is wrong with the compiled forms of a legal program; empty where nothing is."""
    verify_algorithm(algorithm)  # the generator's own promise
    for fused in fuse:
        try:
            schedule = compile_algorithm(algorithm, CompileOptions(fuse=fused))
        except Exception as error:  # whatever it raises on a legal program is a fault of the compiler
            return f"the compiler raises {type(error).__name__}: {error}"
        try:
            verify_schedule(schedule)
        except CollectiveError as error:
            return f"the verifier refuses the schedule: {error}"
        if fault := _run_fault(algorithm, schedule, RUNS[fused]):
            return fault
    try:
        lowered = compile_one_sided(algorithm)
    except Exception as error:
        return f"the one-sided compiler raises {type(error).__name__}: {error}"
    try:
        verify_one_sided(lowered)
    except CollectiveError as error:
        return f"the verifier refuses the one-sided program: {error}"
    return _run_fault(algorithm, lowered, RUNS[False])


def _run_fault(algorithm: Algorithm, schedule: Schedule | OneSided, runs: Sequence[tuple[int, int]]) -> str:
    """Where runs differ from the sequential meaning. Integers wrap, so sums are exact in any order."""
    draw = np.random.default_rng(0)
    bounds = np.iinfo(np.int64)
    inputs: Arrays = [
        draw.integers(bounds.min, bounds.max, (algorithm.collective.input_chunks(rank), ELEMENTS))
        for rank in range(algorithm.collective.ranks)
    ]
    wanted = run_algorithm(algorithm, inputs)
    for seed, tiles in runs:
        try:
            if isinstance(schedule, OneSided):
                outputs = run_one_sided(schedule, inputs, seed=seed)
            else:
                outputs = run_schedule(schedule, inputs, seed=seed, tiles=tiles)
        except CollectiveError as error:
            return f"a run fails (seed {seed}, {tiles} tiles): {error}"
        for rank, (output, expected) in enumerate(zip(outputs, wanted, strict=True)):
            for index in range(len(output)):
                asked = algorithm.collective.after(rank, index) is not None
                if asked and not np.array_equal(output[index], expected[index]):
                    return f"output[{index}] of rank {rank} is wrong (seed {seed}, {tiles} tiles)"
    return ""


def _outcome(algorithm: Algorithm, mutant: Schedule | OneSided) -> str:
    try:
        if isinstance(mutant, OneSided):
            verify_one_sided(mutant)
        else:
            verify_schedule(mutant)
    except CollectiveError:
        return "caught"
    return "missed" if _run_fault(algorithm, mutant, MUTANT_RUNS) else "equivalent"


def shrink(algorithm: Algorithm) -> Algorithm:
    """Fewer moves with which the program still fails. What it computes is asked for anew at every attempt."""
    position = len(algorithm.moves) - 1
    while position >= 0:
        moves = (*algorithm.moves[:position], *algorithm.moves[position + 1 :])
        smaller = _with_meaning(replace(algorithm, moves=moves))
        if smaller is not None and fault_of(smaller):
            algorithm = smaller
        position -= 1
    return algorithm


def _with_meaning(algorithm: Algorithm) -> Algorithm | None:
    """The program with a collective that asks for what it computes where one was asked for; None if it is not legal."""
    old = algorithm.collective
    assert isinstance(old, CustomCollective)
    try:
        held = outputs_of(algorithm)
    except CollectiveError:
        return None
    wanted = tuple(
        tuple(None if asked is None else value for asked, value in zip(*row, strict=True))
        for row in zip(old.wanted, held, strict=True)
    )
    return replace(algorithm, collective=replace(old, wanted=wanted))
