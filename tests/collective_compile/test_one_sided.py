"""The one-sided lowering keeps the sequential meaning, under any order of execution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from collective_programs import (
    all_pairs,
    all_reduce,
    random_inputs,
    random_moves,
    ring,
    same_where_asked,
    tree,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.language import Builder, trace
from sennit.errors import CollectiveError, ParseError
from sennit.ir.algorithm_numpy import run_algorithm
from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.one_sided import Await, OneSided, OneSidedRank, Signal
from sennit.ir.one_sided_numpy import run_one_sided


@pytest.mark.parametrize("program", [ring, all_pairs, tree])
def test_known_programs(program: Callable[[Builder], None]) -> None:
    algorithm = trace(program, all_reduce(4, 8), program.__name__)
    inputs = random_inputs(algorithm)
    lowered = compile_one_sided(algorithm)
    for seed in range(5):
        assert same_where_asked(algorithm, run_one_sided(lowered, inputs, seed=seed), run_algorithm(algorithm, inputs))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(0, 10**9))
def test_random_programs_keep_their_meaning(seed: int) -> None:
    algorithm = random_moves(seed)
    inputs = random_inputs(algorithm, seed)
    lowered = compile_one_sided(algorithm)
    assert OneSided.parse(str(lowered)) == lowered
    results = run_one_sided(lowered, inputs, seed=seed)
    assert same_where_asked(algorithm, results, run_algorithm(algorithm, inputs))


def broadcast(b: Builder) -> None:
    b.input(0).copy(to=0, buffer="output").copy(to=1)


def test_a_broadcast_in_full() -> None:
    algorithm = trace(broadcast, CollectiveSpec(CollectiveName.BROADCAST, 2, 1, root=0), "broadcast")
    assert str(compile_one_sided(algorithm)) == "\n".join(
        [
            'one_sided "broadcast" broadcast(ranks=2, chunks=1, root=0) {',
            "  rank 0 {",
            "    block 0 {",
            "    }",
            "    block 1 {",
            "      copy input[0:1] to output[0:1]",
            "      signal rank 0 block 2",
            "    }",
            "    block 2 {",
            "      wait rank 1 block 0 for 1",
            "      wait rank 0 block 1 for 1",
            "      put output[0:1] to rank 1 output[0:1]",
            "      signal rank 1 block 0",
            "    }",
            "  }",
            "  rank 1 {",
            "    block 0 {",
            "      signal rank 0 block 2",
            "      wait rank 0 block 2 for 1",
            "    }",
            "  }",
            "}",
        ]
    )


def without_signals(program: OneSided) -> OneSided:
    """The same without any step that orders."""
    ranks = tuple(
        OneSidedRank(
            ranked.rank,
            tuple(tuple(s for s in steps if not isinstance(s, Signal | Await)) for steps in ranked.blocks),
            ranked.scratch,
        )
        for ranked in program.ranks
    )
    return OneSided(program.name, program.collective, ranks)


def test_the_interpreter_sees_races_and_deadlocks() -> None:
    algorithm = trace(ring, all_reduce(3, 3), "ring")
    inputs = random_inputs(algorithm)
    lowered, wanted = compile_one_sided(algorithm), run_algorithm(algorithm, inputs)
    loose = without_signals(lowered)
    assert not all(same_where_asked(algorithm, run_one_sided(loose, inputs, seed=seed), wanted) for seed in range(5))
    stuck = OneSided("stuck", all_reduce(1, 1), (OneSidedRank(0, ((Await(0, 0, 1),),)),))
    with pytest.raises(CollectiveError, match="deadlocks"):
        run_one_sided(stuck, random_inputs(trace(lambda b: None, all_reduce(1, 1), "nothing")))


def test_text_that_is_not_a_program() -> None:
    with pytest.raises(ParseError, match="no step 'push'"):
        OneSided.parse('one_sided "x" all_reduce(ranks=1, chunks=1) { rank 0 { block 0 { push } } }')
    with pytest.raises(ParseError, match="block 0 of rank 0"):
        OneSided.parse('one_sided "x" all_reduce(ranks=1, chunks=1) { rank 0 { block 1 { } } }')
