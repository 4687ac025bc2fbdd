"""The one-sided lowering keeps the sequential meaning, under any order of execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
from sennit.collective.verify_one_sided import verify_one_sided
from sennit.errors import CollectiveError, ParseError
from sennit.ir.algorithm_numpy import run_algorithm
from sennit.ir.collective import Algorithm, Chunks, CollectiveName, CollectiveSpec, Move, MoveKind
from sennit.ir.one_sided import Await, MultiReduce, OneSided, OneSidedRank, Signal
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


def sum_of_all(b: Builder) -> None:
    for rank in range(1, b.ranks):
        b.input(rank).reduce(into=b.output(0))


def test_reduces_in_a_row_are_one_step() -> None:
    spec = CollectiveSpec(CollectiveName.REDUCE, 4, 2, root=0, in_place=True)
    lowered = compile_one_sided(trace(sum_of_all, spec, "sum"))
    assert [str(step) for step in lowered.ranks[0].blocks[1] if isinstance(step, MultiReduce)] == [
        "multi_reduce rank 1 input[0:2], rank 2 input[0:2], rank 3 input[0:2] into output[0:2]"
    ]
    assert verify_one_sided(lowered).output_chunks == 8


def test_a_reduce_whose_source_was_made_after_an_earlier_one_is_a_step_of_its_own() -> None:
    """The second reduce reads what was copied over the source of the first: it cannot be done at the same time."""
    spec = CollectiveSpec(CollectiveName.REDUCE, 2, 2, root=0, in_place=True)
    one, other, total = Chunks(1, "input", 0, 1), Chunks(1, "input", 1, 1), Chunks(0, "input", 0, 1)
    moves = (
        Move(MoveKind.REDUCE, one, total),
        Move(MoveKind.COPY, other, one),
        Move(MoveKind.REDUCE, one, total),
    )
    algorithm = Algorithm("again", spec, moves)
    lowered = compile_one_sided(algorithm)
    assert not any(isinstance(step, MultiReduce) for ranked in lowered.ranks for b in ranked.blocks for step in b)
    inputs = random_inputs(algorithm)
    for seed in range(5):
        assert same_where_asked(algorithm, run_one_sided(lowered, inputs, seed=seed), run_algorithm(algorithm, inputs))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**9))
def test_every_signal_is_needed(seed: int) -> None:
    """The waits are the transitive reduction: without any one of them two operations, or a gate, are not ordered."""
    algorithm = random_moves(seed, most=15)
    lowered = compile_one_sided(algorithm)
    assert ordered(lowered)
    for rank, ranked in enumerate(lowered.ranks):
        for block, steps in enumerate(ranked.blocks):
            for number, step in enumerate(steps):
                if isinstance(step, Await):
                    less = (*steps[:number], *steps[number + 1 :])
                    blocks = (*ranked.blocks[:block], less, *ranked.blocks[block + 1 :])
                    changed = replace(ranked, blocks=blocks)
                    ranks = (*lowered.ranks[:rank], changed, *lowered.ranks[rank + 1 :])
                    assert not ordered(replace(lowered, ranks=ranks))


def ordered(program: OneSided) -> bool:
    """No race and no open gate; what the program computes is left aside."""
    try:
        verify_one_sided(program, values=False)
    except CollectiveError as error:
        return "races" not in error.what and "gate" not in error.what
    return True


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
