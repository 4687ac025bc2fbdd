"""Signals on lines: each wait ends with the very signal that it waited for on its flag."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sennit.collective import compile_algorithm
from sennit.collective.library import ring_all_reduce, tree_broadcast
from sennit.collective.runtime.code import Code, Op
from sennit.collective.runtime.code_gates import with_direct_gates
from sennit.collective.runtime.code_lines import with_lines
from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.encode_schedule import encode_schedule
from sennit.collective.runtime.shm_algorithms import build, names

Place = tuple[int, int, int]  # rank, block, number of the step


def codes() -> Iterator[Code]:
    for ranks in (2, 3, 5):
        for name in names():
            rooted = name.split()[0] in ("broadcast", "reduce", "gather", "scatter")
            yield encode_pull(build(name, ranks, ranks - 1 if rooted else None))
        yield encode_schedule(compile_algorithm(ring_all_reduce(ranks)))
    yield encode_pull(tree_broadcast(4, pieces=2))


def places(code: Code, op: Op) -> list[Place]:
    return [
        (rank, block, number)
        for rank in range(code.ranks)
        for block in range(code.rank_block_count(rank))
        for number, step in enumerate(code.block(rank, block))
        if step.op is op
    ]


def signals_by_flag(code: Code) -> dict[tuple[int, int, int], Place]:
    """By waiting rank, flag and count."""
    found = {}
    for place in places(code, Op.SIGNAL):
        step = list(code.block(*place[:2]))[place[2]]
        found[step.peer, step.argument, step.count] = place
    return found


def signals_by_line(code: Code) -> dict[tuple[int, int, int], Place]:
    """By signalling rank, block and count."""
    found = {}
    for place in places(code, Op.SIGNAL):
        step = list(code.block(*place[:2]))[place[2]]
        assert step.argument == place[1]
        found[place[0], step.argument, step.count] = place
    return found


@pytest.mark.parametrize("code", [pytest.param(code, id=f"{code.name} {code.ranks}") for code in codes()])
def test_a_wait_ends_with_the_same_signal(code: Code) -> None:
    code = with_direct_gates(code)
    lined = with_lines(code)
    assert places(code, Op.WAIT) == places(lined, Op.WAIT)
    assert places(code, Op.SIGNAL) == places(lined, Op.SIGNAL)
    by_flag, by_line = signals_by_flag(code), signals_by_line(lined)
    for rank, block, number in places(code, Op.WAIT):
        before, after = list(code.block(rank, block))[number], list(lined.block(rank, block))[number]
        assert (before.peer, before.source_buffer) == (after.peer, after.source_buffer)
        assert by_flag[rank, before.argument, before.count] == by_line[after.peer, after.argument, after.count]
    moves = code.instructions[:, 0] < Op.SIGNAL
    assert (code.instructions[moves] == lined.instructions[moves]).all()
    assert lined.flags.tolist() == [code.rank_block_count(rank) for rank in range(code.ranks)]
