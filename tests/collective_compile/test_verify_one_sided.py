"""The verifier of one-sided programs accepts what the compiler makes, and refuses it with any signal, wait or move
taken out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from collective_programs import all_pairs, all_reduce, random_inputs, ring, same_where_asked, tree

from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.language import Builder, trace
from sennit.collective.verify_one_sided import verify_one_sided
from sennit.errors import CollectiveError
from sennit.ir.algorithm_numpy import run_algorithm
from sennit.ir.one_sided import Await, OneSided, Signal, Step
from sennit.ir.one_sided_numpy import run_one_sided


def lowered(program: Callable[[Builder], None], ranks: int, chunks: int) -> OneSided:
    return compile_one_sided(trace(program, all_reduce(ranks, chunks), program.__name__))


@pytest.mark.parametrize("program", [ring, all_pairs, tree])
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_what_the_compiler_makes_is_right(program: Callable[[Builder], None], ranks: int) -> None:
    proof = verify_one_sided(lowered(program, ranks, 2 * ranks))
    assert proof.output_chunks == 2 * ranks * ranks
    assert proof.ordered_pairs > 0 or ranks == 2  # there a rank has one block for its one peer


def without(program: OneSided, rank: int, block: int, step: int) -> OneSided:
    ranked = program.ranks[rank]
    steps = ranked.blocks[block][:step] + ranked.blocks[block][step + 1 :]
    changed = replace(ranked, blocks=(*ranked.blocks[:block], steps, *ranked.blocks[block + 1 :]))
    return replace(program, ranks=(*program.ranks[:rank], changed, *program.ranks[rank + 1 :]))


def places(program: OneSided) -> list[tuple[int, int, int, Step]]:
    return [
        (ranked.rank, block, number, step)
        for ranked in program.ranks
        for block, steps in enumerate(ranked.blocks)
        for number, step in enumerate(steps)
    ]


@pytest.mark.parametrize("program", [ring, all_pairs, tree])
def test_a_mutant_is_refused_or_does_the_same(program: Callable[[Builder], None]) -> None:
    """A step may be superfluous: what a dropped one orders may follow from others. Then every run must be right."""
    algorithm = trace(program, all_reduce(3, 6), program.__name__)
    right, inputs = compile_one_sided(algorithm), random_inputs(algorithm)
    wanted, refused = run_algorithm(algorithm, inputs), 0
    for rank, block, number, step in places(right):
        mutant = without(right, rank, block, number)
        try:
            verify_one_sided(mutant)
        except CollectiveError:
            refused += 1
            continue
        assert isinstance(step, Signal | Await)
        for seed in range(5):
            assert same_where_asked(algorithm, run_one_sided(mutant, inputs, seed=seed), wanted)
    assert refused > 0.7 * len(places(right))


def test_each_fault_has_its_name() -> None:
    right = lowered(ring, 3, 3)
    for wanted, kinds in (("deadlocks", (Signal,)), ("races|gate", (Await,))):
        for rank, block, number, step in places(right):
            if isinstance(step, kinds) and block > 0:
                with pytest.raises(CollectiveError, match=wanted):
                    verify_one_sided(without(right, rank, block, number))
                break
