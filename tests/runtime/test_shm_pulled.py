"""Reductions of what peers have in their own memory give the bits of numpy, whatever lies where; and what is proved of
a code before it may.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pulled_jobs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shm_jobs import allowed
from shm_ranks import Failed, Ranks, good

from sennit.collective.runtime.code import INPUT, OUTPUT, Code, Instruction, Op, Operand
from sennit.collective.runtime.code_direct import DirectFacts
from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.shm_abi import Inputs, Reduction, load_core
from sennit.collective.runtime.shm_algorithms import build
from sennit.collective.runtime.shm_plan import LoadedCode, make_plan
from sennit.ir.dtype import DType

compiled_core = pytest.mark.skipif(load_core() is None, reason="the compiled core was not built")
KIB, MIB = 1 << 10, 1 << 20


def may(results: list[Any]) -> list[Any]:
    found = good(results)
    if found[0] in (None, False):
        pytest.skip("this kernel does not let processes read each other's memory")
    return found


@compiled_core
@pytest.mark.parametrize("names", [pulled_jobs.SLICES, pulled_jobs.WHOLE], ids=["slices", "whole"])
@pytest.mark.parametrize(("size", "counts"), [(2, [1, 17, 5003]), (3, [1001, 4099]), (4, [3, 9001])])
def test_every_type_and_reduction(ranks: Ranks, size: int, counts: list[int], names: tuple[str, ...]) -> None:
    assert may(ranks.run(size, pulled_jobs.every_type, counts, names)) == [len(counts) * (4 * 5 + 5 * 8 + 7)] * size


cases = st.tuples(
    st.one_of(st.integers(0, 300), st.integers(301, 60_000)),
    st.sampled_from(list(DType)),
    st.sampled_from(list(Reduction)),
    st.integers(0, 1 << 30),
).filter(lambda case: allowed(case[1], case[2]))


@compiled_core
@settings(derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 4), st.lists(cases, min_size=1, max_size=6), st.sampled_from([16 * KIB, 52 * KIB, MIB]))
def test_any_sizes_and_places(
    ranks: Ranks, size: int, drawn: list[tuple[int, DType, Reduction, int]], slot: int
) -> None:
    told = [(n, dtype.value, reduction.value, seed) for n, dtype, reduction, seed in drawn]
    may(ranks.run(size, pulled_jobs.examples, told, slot))


@compiled_core
@pytest.mark.parametrize("size", [2, 3])
def test_inputs_in_memory_of_the_group(ranks: Ranks, size: int) -> None:
    may(ranks.run(size, pulled_jobs.memory_of_the_group))


@compiled_core
@pytest.mark.parametrize("size", [2, 3, 4])
def test_codes_of_several_chunks(ranks: Ranks, size: int) -> None:
    may(ranks.run(size, pulled_jobs.codes_of_several_chunks))


@compiled_core
@pytest.mark.parametrize("size", [2, 4])
def test_inputs_that_change_as_soon_as_a_call_returns(ranks: Ranks, size: int) -> None:
    may(ranks.run(size, pulled_jobs.changed_at_once, 60))


@compiled_core
@pytest.mark.parametrize("size", [2, 3])
def test_a_reduction_that_is_tried_again_adds_nothing_twice(ranks: Ranks, size: int) -> None:
    found = may(ranks.run(size, pulled_jobs.unreadable_for_a_while))
    assert found[0] == 2 * 16 * 4096  # the first half was done


@compiled_core
@pytest.mark.skipif(platform.machine() != "x86_64", reason="pages that are only written may not be read")
@pytest.mark.parametrize("size", [2, 3])
def test_inputs_that_the_kernel_does_not_read_for_others(ranks: Ranks, size: int) -> None:
    may(ranks.run(size, pulled_jobs.closed_to_others))


@compiled_core
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_a_rank_that_is_killed_while_others_add_it_up(mortal: Ranks, kind: str) -> None:
    results = mortal.run(3, pulled_jobs.killed, 1, kind)
    for rank in (0, 2):
        failed = results[rank]
        assert isinstance(failed, Failed)
        assert (failed.cause, failed.ranks) == ("died", (1,)), failed.text


# ---- what is known of codes ------------------------------------------------------------------------------------------


def facts(name: str, ranks: int = 4, root: int | None = None) -> DirectFacts:
    return DirectFacts(encode_pull(build(name, ranks, root)))


@pytest.mark.parametrize(
    ("name", "root", "read_once", "operands", "in_place", "by_the_end"),
    [
        ("all_reduce slices", None, True, 3, True, True),
        ("reduce slices", 1, True, 3, True, False),  # only the root hears of all slices
        ("reduce direct", 1, True, 3, True, False),
        ("reduce_scatter", None, True, 3, True, False),
        ("all_reduce direct", None, False, 3, False, False),
        ("all_to_all", None, True, 0, False, False),
        ("all_gather", None, False, 0, True, False),
        ("broadcast slices", 1, True, 0, True, False),
    ],
)
def test_facts(name: str, root: int | None, read_once: bool, operands: int, in_place: bool, by_the_end: bool) -> None:
    found = facts(name, 4, root)
    assert found.may
    assert (found.read_once, found.operands) == (read_once, operands)
    assert (found.in_place, found.read_by_the_end) == (in_place, by_the_end)


def rewritten(code: Code, change: Callable[[int, list[Instruction]], list[Instruction]]) -> Code:
    blocks = [
        [change(rank, list(code.block(rank, block))) for block in range(code.rank_block_count(rank))]
        for rank in range(code.ranks)
    ]
    operands = [Operand(*row) for row in code.operands.tolist()]
    return Code.of(code.name, code.collective, blocks, operands, code.flags.tolist(), code.scratch)


def test_a_write_before_peers_have_read_is_found() -> None:
    """The same sums and waits, but rank 0 writes to its output before it waits for the others: right as it stands, and
    not in place.
    """
    code = encode_pull(build("reduce_scatter", 3))

    def early(rank: int, steps: list[Instruction]) -> list[Instruction]:
        moves = [step for step in steps if step.op.moves_data]
        if rank or not moves:
            return steps
        first = Instruction(Op.COPY, 0, INPUT, 1, OUTPUT, 0, 1)
        return [first, *steps]

    assert DirectFacts(code).in_place
    assert not DirectFacts(rewritten(code, early)).in_place


def test_what_may_not_be_direct() -> None:
    code = encode_pull(build("reduce_scatter", 3))
    for buffer, source in ((INPUT, OUTPUT), (OUTPUT, OUTPUT)):

        def more(rank: int, steps: list[Instruction], buffer: int = buffer, source: int = source) -> list[Instruction]:
            return [*steps, Instruction(Op.COPY, rank, source, 0, buffer, 0, 1)]

        assert not DirectFacts(rewritten(code, more)).may


def test_two_blocks_that_reduce_may_not_be_direct() -> None:
    code = encode_pull(build("reduce_scatter", 2))
    gates = [[list(code.block(rank, block)) for block in range(2)] for rank in range(2)]
    doubled = [[*blocks, [step for step in blocks[1] if step.op.moves_data]] for blocks in gates]
    operands = [Operand(*row) for row in code.operands.tolist()]
    assert not DirectFacts(Code.of("two", code.collective, doubled, operands, code.flags.tolist(), code.scratch)).may


def test_plans_of_sums() -> None:
    """A reduce_scatter is one tile; an all_reduce has tiles of as many sums as stay in the cache.

    Many ranks would have short pieces, and are staged.
    """
    scatter = LoadedCode.load(encode_pull(build("reduce_scatter", 8)), 3, 0)
    plan = make_plan(scatter, 8 * MIB, DType.U8, Reduction.BXOR, MIB, inputs=Inputs.DIRECT)
    assert (plan.record.tile, plan.record.piece, plan.staged, plan.one_array) == (8 * MIB, 72 * KIB, 0, False)
    assert not plan.record.early
    assert scatter.overlaid == 3
    summed = LoadedCode.load(encode_pull(build("all_reduce slices", 8)), 3, 0)
    plan = make_plan(summed, 16 * MIB, DType.U8, Reduction.BXOR, MIB, inputs=Inputs.DIRECT)
    assert (plan.record.tile, plan.staged, plan.one_array) == (MIB, 0, True)
    assert plan.record.early
    pieces = [LoadedCode.load(encode_pull(build("reduce_scatter", p)), 0, 0) for p in (2, 17, 33, 40)]
    assert [loaded.piece(MIB) for loaded in pieces] == [128 * KIB, 32 * KIB, 16 * KIB, 12 * KIB]
    assert [loaded.inputs(MIB) is Inputs.DIRECT for loaded in pieces] == [False, True, False, False]
    assert [pieces[1].inputs(MIB, cores=cores) is Inputs.DIRECT for cores in (16, 17)] == [
        False,
        True,
    ]  # ranks of one core share its cache
    assert replace(summed, rank=0).overlaid == 0
