"""All pairs by reading: one pass over memory in the one-sided form, and right in every form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sennit.collective.compile import compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import one_shot_all_reduce, read_all_reduce, read_reduce_scatter
from sennit.collective.verify import verify_schedule
from sennit.collective.verify_one_sided import verify_one_sided
from sennit.ir.algorithm_numpy import run_algorithm
from sennit.ir.collective import Algorithm
from sennit.ir.one_sided import MultiReduce, ReadReduce
from sennit.ir.one_sided_numpy import run_one_sided


@pytest.mark.parametrize("make", [one_shot_all_reduce, read_all_reduce, read_reduce_scatter])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("ranks", "instances"), [(3, 1), (4, 2), (8, 1)])
def test_they_are_right_and_read_once(
    make: Callable[..., Algorithm], in_place: bool, ranks: int, instances: int
) -> None:
    algorithm = make(ranks, instances=instances, in_place=in_place)
    verify_schedule(compile_algorithm(algorithm))
    program = compile_one_sided(algorithm)
    verify_one_sided(program)
    steps = [step for ranked in program.ranks for block in ranked.blocks for step in block]
    assert sum(isinstance(step, MultiReduce) for step in steps) == ranks * instances
    assert not any(isinstance(step, ReadReduce) for step in steps)
    draw = np.random.default_rng(ranks)
    inputs = [draw.integers(0, 1000, (algorithm.collective.input_chunks(rank), 2)) for rank in range(ranks)]
    wanted = run_algorithm(algorithm, inputs)
    for seed in range(3):
        assert all((a == b).all() for a, b in zip(run_one_sided(program, inputs, seed=seed), wanted, strict=True))


def test_an_all_reduce_by_reading_waits_at_the_gates_and_for_its_own_sum_alone() -> None:
    proof = verify_one_sided(compile_one_sided(read_all_reduce(8)))
    assert proof.signals == 8 * 7 + 8 * (1 + 7) + 8 * 7  # entry; copy to sum, sum to each put; exit
