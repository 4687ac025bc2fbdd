"""Multicast and reductions in the switch: the language, the algorithms of the library, and what the simulator makes of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sennit.cluster import Topology, load
from sennit.collective.baseline import nccl_all_reduce
from sennit.collective.compile import compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.language import Builder, trace
from sennit.collective.library import nvls_all_gather, nvls_all_reduce, nvls_reduce_scatter
from sennit.collective.simulate import Machine
from sennit.collective.simulate_one_sided import simulate_one_sided
from sennit.collective.switch import has_switch
from sennit.collective.verify import verify_algorithm, verify_schedule
from sennit.collective.verify_one_sided import verify_one_sided
from sennit.errors import CollectiveError
from sennit.ir.algorithm_check import check_algorithm
from sennit.ir.algorithm_numpy import run_algorithm
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec
from sennit.ir.one_sided import Multicast, MultiReduce, OneSided, Put, ReadReduce, Step, SwitchReduce
from sennit.ir.one_sided_numpy import run_one_sided
from sennit.ir.schedule_numpy import run_schedule

MAKERS = (nvls_all_reduce, nvls_all_gather, nvls_reduce_scatter)


def steps_of(program: OneSided, *kinds: type[Step]) -> list[Step]:
    return [step for ranked in program.ranks for steps in ranked.blocks for step in steps if isinstance(step, kinds)]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("ranks", "instances"), [(2, 1), (5, 2), (8, 1)])
def test_all_forms_are_right(make: Callable[..., Algorithm], in_place: bool, ranks: int, instances: int) -> None:
    algorithm = make(ranks, instances=instances, in_place=in_place)
    assert Algorithm.parse(str(algorithm)) == algorithm
    verify_algorithm(algorithm)
    switched, single = compile_one_sided(algorithm), compile_one_sided(algorithm, switch=False)
    schedule = compile_algorithm(algorithm)
    verify_schedule(schedule)
    draw = np.random.default_rng(ranks)
    inputs = [draw.integers(0, 1000, (algorithm.collective.input_chunks(rank), 3)) for rank in range(ranks)]
    wanted = run_algorithm(algorithm, inputs)
    for program in (switched, single):
        verify_one_sided(program)
        assert OneSided.parse(str(program)) == program
        assert all((one == other).all() for one, other in zip(run_one_sided(program, inputs), wanted, strict=True))
    assert all((one == other).all() for one, other in zip(run_schedule(schedule, inputs), wanted, strict=True))
    assert not steps_of(switched, Put, ReadReduce, MultiReduce)
    assert not steps_of(single, Multicast, SwitchReduce)


def test_an_all_reduce_has_two_data_steps_a_rank_and_waits_for_nothing_else() -> None:
    program = compile_one_sided(nvls_all_reduce(4, in_place=True))
    assert [str(step) for step in steps_of(program, Multicast, SwitchReduce)[:2]] == [
        "switch_reduce ranks {0-3} input[0:1] into output[0:1]",
        "multicast output[0:1] to ranks {0-3} output[0:1]",
    ]
    assert verify_one_sided(program).signals == 4 * (3 + 3)  # in through the gates and out of them


def sums_of_pairs(b: Builder) -> None:
    """Two groups; the sum ends on a rank that is not in the first group."""
    b.input(0).reduce_in_switch([0, 1], into=b.scratch(2, "half", 1))
    b.input(2).reduce_in_switch([2, 3], into=b.scratch(0, "half", 1))
    b.chunk(0, "half", 0).reduce_in_switch([0, 2], into=b.output(0))
    b.output(0).multicast([1, 2, 3])


def test_groups_of_ranks() -> None:
    algorithm = trace(sums_of_pairs, CollectiveSpec(CollectiveName.ALL_REDUCE, 4, 1), "pairs")
    check_algorithm(algorithm)
    program = compile_one_sided(algorithm)
    verify_one_sided(program)
    assert [str(step) for step in steps_of(program, Multicast, SwitchReduce)] == [
        "switch_reduce ranks {2-3} input[0:1] into half[0:1]",
        "switch_reduce ranks {0,2} half[0:1] into output[0:1]",
        "multicast output[0:1] to ranks {1-3} output[0:1]",
        "switch_reduce ranks {0-1} input[0:1] into half[0:1]",
    ]


def test_a_number_that_is_no_switch_operation_is_refused() -> None:
    algorithm = nvls_all_reduce(4)
    first = algorithm.moves[0]
    for moves, fault in (
        ((*algorithm.moves, algorithm.moves[0]), "do not stand together"),
        ((replace(first, instance=1), *algorithm.moves[1:]), "different channels or instances"),
        (algorithm.moves[1:], "begins with a reduce"),
        ((replace(first, source=replace(first.source, start=2)), *algorithm.moves[1:]), "not the same place"),
    ):
        with pytest.raises(CollectiveError, match=fault):
            check_algorithm(replace(algorithm, moves=moves))


def test_only_a_multicast_switch_runs_it() -> None:
    assert has_switch(Topology.of(load("dgx-h100")))
    assert not has_switch(Topology.of(load("dgx-a100")))
    program = compile_one_sided(nvls_all_gather(8))
    simulate_one_sided(program, load("dgx-h100"), 1 << 20)
    with pytest.raises(CollectiveError, match="no multicast switch that joins ranks 0-7"):
        simulate_one_sided(program, load("dgx-a100"), 1 << 20)
    with pytest.raises(CollectiveError, match="ranks 0-15"):
        simulate_one_sided(compile_one_sided(nvls_all_gather(16)), load("dgx-h100:2"), 1 << 20)


def test_a_multicast_goes_up_once() -> None:
    """The time of one large broadcast does not grow with the number of ranks; with puts it does."""

    def spread(b: Builder) -> None:
        b.input(0).multicast(range(b.ranks))

    cluster, machine = load("dgx-h100"), Machine(launch=0.0, block_rate=1e15)
    times = {}
    for ranks in (2, 8):
        spec = CollectiveSpec(CollectiveName.BROADCAST, ranks, 1, root=0, in_place=True)
        algorithm = trace(spread, spec, "spread")
        for switch in (True, False):
            program = compile_one_sided(algorithm, switch=switch)
            times[ranks, switch] = simulate_one_sided(program, cluster, 1 << 30, machine=machine).span
    assert times[8, True] == pytest.approx(times[2, True], rel=0.01)
    assert times[8, False] > 6 * times[2, False]


def test_the_simulated_all_reduce_nears_the_calibrated_closed_form() -> None:
    """480 GB/s bus bandwidth on 8 H100 (nccl-tests#212).

    The pieces that fill and empty the pipeline are what is lost.
    """
    cluster, size = load("dgx-h100"), 8 << 30
    closed = nccl_all_reduce(cluster, size)
    assert closed.algorithm == "NVLS"
    lost = []
    for pieces in (4, 16, 64):
        program = compile_one_sided(nvls_all_reduce(8, pieces=pieces, in_place=True))
        lost.append(simulate_one_sided(program, cluster, size, instances=4).span / closed.seconds - 1)
    assert lost == sorted(lost, reverse=True)
    assert 0 < lost[-1] < 0.03
