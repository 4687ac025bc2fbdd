"""Random legal programs, compiled, verified, run and mutated; and programs that compilers have failed on, here or
elsewhere.

`make fuzz` runs 100,000 through `benchmarks/collective/fuzz.py`; here are as many as take some seconds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fuzz_round as fuzz_round_module
import pytest
from fuzz_round import Findings, fault_of, fuzz_round, shrink
from mutants import KINDS, mutate
from one_sided_mutants import ONE_SIDED_KINDS, mutate_one_sided
from random_programs import random_program

from sennit.collective.compile import CompileOptions, compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.verify import verify_algorithm
from sennit.ir.collective import Algorithm, MoveKind
from sennit.ir.schedule import Opcode, Schedule

PROGRAMS = 1200  # each in both lowerings
BATCHES = 8
CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_programs_and_their_mutants(batch: int) -> None:
    size = PROGRAMS // BATCHES
    found = Findings()
    for seed in range(batch * size, (batch + 1) * size):
        found.add(fuzz_round(seed))
    assert not found.failures, "\n".join(f"program {seed}: {fault}" for seed, fault in found.failures)
    outcomes = Counter(outcome for _, outcome in found.mutants.elements())
    assert outcomes["caught"] > outcomes["equivalent"] > outcomes["missed"] == 0


def test_the_programs_are_legal_and_varied() -> None:
    opcodes: Counter[Opcode] = Counter()
    in_place = scratch = 0
    for seed in range(100):
        algorithm = random_program(seed)
        verify_algorithm(algorithm)
        in_place += algorithm.collective.in_place
        scratch += bool(algorithm.scratch)
        assert 1 <= len(algorithm.moves) <= 60
        for ranked in compile_algorithm(algorithm).ranks:
            for block in ranked.blocks:
                opcodes.update(instruction.opcode for instruction in block.instructions)
    assert set(opcodes) == set(Opcode)
    assert min(in_place, 100 - in_place, scratch) > 20


def test_every_kind_of_mutant_is_tried() -> None:
    programs = [random_program(seed) for seed in range(60)]
    draw = random.Random(0)
    for kind in KINDS:
        assert any(mutate(compile_algorithm(program), kind, draw) for program in programs), kind
    for kind in ONE_SIDED_KINDS:
        assert any(mutate_one_sided(compile_one_sided(program), kind, draw) for program in programs), kind


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_programs_that_compilers_have_failed_on(case: Path) -> None:
    assert fault_of(Algorithm.parse(case.read_text(encoding="utf-8"))) == ""


def test_a_failing_program_is_shrunk_to_the_moves_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that forgets the last reduction fails on programs with one; the rest is not needed to show it."""

    def forgetful(algorithm: Algorithm, options: CompileOptions) -> Schedule:
        reduces = [index for index, move in enumerate(algorithm.moves) if move.kind is MoveKind.REDUCE]
        kept = tuple(move for index, move in enumerate(algorithm.moves) if index not in reduces[-1:])
        return compile_algorithm(replace(algorithm, moves=kept), options)

    monkeypatch.setattr(fuzz_round_module, "compile_algorithm", forgetful)
    failing = next(a for a in map(random_program, range(20)) if len(a.moves) > 20 and fault_of(a))
    small = shrink(failing)
    assert fault_of(small)
    assert len(small.moves) <= 4
