"""Code does what the program that it was encoded from does, at any size, and its checker sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.compile import compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.language import Builder, trace
from sennit.collective.library import (
    all_pairs_all_reduce,
    all_pairs_reduce_scatter,
    chain_broadcast,
    halving_doubling_all_reduce,
    hierarchical_all_gather,
    nvls_all_reduce,
    recipes,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    two_step_all_to_all,
)
from sennit.collective.runtime.code import INPUT, OUTPUT, Code, Geometry, Instruction, Op, Operand
from sennit.collective.runtime.code_gates import with_direct_gates
from sennit.collective.runtime.code_numpy import run_code
from sennit.collective.runtime.code_verify import verify_code
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.encode_schedule import encode_schedule
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec
from sennit.ir.layout_numpy import Array
from sennit.ir.one_sided_numpy import run_one_sided

Make = Callable[[], Algorithm]


def in_place() -> list[Make]:
    return [
        partial(ring_all_reduce, 3, channels=2, in_place=True),
        partial(ring_all_gather, 4, instances=2, in_place=True),
        partial(ring_reduce_scatter, 3, in_place=True),
        partial(all_pairs_all_reduce, 4, in_place=True),
        partial(all_pairs_reduce_scatter, 3, instances=2, in_place=True),
        partial(halving_doubling_all_reduce, 5, in_place=True),
        partial(hierarchical_all_gather, (2, 3), in_place=True),
        partial(chain_broadcast, 3, root=2, pieces=3, in_place=True),
        partial(nvls_all_reduce, 3, pieces=2, in_place=True),
    ]


def library() -> list[Make]:
    made: list[Make] = in_place()
    for nodes, per_node in ((1, 3), (2, 2), (3, 2)):
        for item in recipes():
            if nodes > 1 or not item.across:
                made += [partial(item.build, nodes, per_node, options) for options in item.worth_trying[-2:]]
    return made


def wanted(algorithm: Algorithm, inputs: list[Array], elements: int, rank: int) -> list[Array | None]:
    """By part of the output: what the collective asks for."""
    spec = algorithm.collective
    assert isinstance(spec, CollectiveSpec)
    result: list[Array | None] = []
    for part in range(spec.output_chunks(rank) // spec.chunks):
        value = spec.after(rank, part * spec.chunks)
        if value is None:
            result.append(None)
            continue
        ((chunk, bits),) = value
        start = chunk // spec.chunks * elements
        terms = [inputs[r][start : start + elements] for r in range(spec.ranks) if bits >> r & 1]
        result.append(np.sum(terms, axis=0))
    return result


def check_outputs(algorithm: Algorithm, inputs: list[Array], outputs: list[Array], elements: int) -> None:
    for rank, output in enumerate(outputs):
        for part, array in enumerate(wanted(algorithm, inputs, elements, rank)):
            if array is not None:
                np.testing.assert_array_equal(output[part * elements : (part + 1) * elements], array)


def draw_inputs(code: Code, elements: int, seed: int) -> list[Array]:
    draw = np.random.default_rng(seed)
    return [draw.integers(-99, 99, code.parts(rank, INPUT) * elements) for rank in range(code.ranks)]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.sampled_from(library()), st.integers(0, 70), st.sampled_from([1, 4, 16]), st.booleans(), st.integers(0, 99))
def test_any_size_of_any_algorithm(make: Make, elements: int, alignment: int, join: bool, seed: int) -> None:
    algorithm = make()
    for code in (
        encode(compile_one_sided(algorithm), join=join),
        encode_pull(algorithm),
        encode_schedule(compile_algorithm(algorithm)),
    ):
        verify_code(code)
        inputs = draw_inputs(code, elements, seed)
        outputs = run_code(code, inputs, elements, alignment=alignment, seed=seed)
        check_outputs(algorithm, inputs, outputs, elements)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.sampled_from(library()), st.integers(1, 5), st.integers(0, 99))
def test_the_same_as_the_interpreter_of_one_sided_programs(make: Make, width: int, seed: int) -> None:
    """Where chunks divide the size, all chunks agree, also those that the collective leaves open."""
    program = compile_one_sided(make())
    code = encode(program)
    elements = code.chunks * width
    inputs = draw_inputs(code, elements, seed)
    chunked = [array.reshape(-1, width) for array in inputs]
    for mine, theirs in zip(
        run_code(code, inputs, elements, seed=seed), run_one_sided(program, chunked, seed=seed + 1), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs.reshape(-1))


def test_geometry() -> None:
    code = encode(compile_one_sided(ring_all_gather(3, channels=4)))
    geometry = Geometry.of(code, 10, alignment=2)
    assert geometry.stride == 4  # ceil(10 / 4) = 3, rounded up
    assert [geometry.span(INPUT, chunk) for chunk in range(4)] == [(0, 4), (4, 8), (8, 10), (10, 10)]
    assert geometry.span(OUTPUT, 4, 4) == (10, 20)
    assert geometry.span(OUTPUT, 5, 2) == (14, 20)
    assert geometry.span(2, 3, 2) == (12, 20)
    assert Geometry.of(code, 0).span(OUTPUT, 7) == (0, 0)


def test_reductions_into_one_target_are_joined() -> None:
    program = compile_one_sided(all_pairs_all_reduce(4))
    code, apart = encode(program), encode(program, join=False)
    joined = [step for step in code.block(0, 1) if step.op is Op.MULTI_REDUCE]
    assert [step.overwrites for step in joined] == [True]
    assert [operand.buffer for operand in code.operands_of(joined[0])] == [INPUT, 2, 2, 2]
    assert not any(step.overwrites for step in apart.block(0, 1) if step.op is Op.MULTI_REDUCE)
    assert code.fingerprint != apart.fingerprint


def test_pulling_writes_to_nobody() -> None:
    code = encode_pull(two_step_all_to_all(2, 3, instances=2))
    assert not any(op in (Op.PUT, Op.MULTICAST) for op in code.instructions[:, 0])


def test_a_fifo_keeps_input_and_output_private() -> None:
    code = encode_schedule(compile_algorithm(ring_all_reduce(4)))
    for rank in range(4):
        for block in range(code.rank_block_count(rank)):
            for step in code.block(rank, block):
                assert step.op not in (Op.GET, Op.READ_REDUCE, Op.MULTI_REDUCE)
                assert step.op is not Op.PUT or step.target_buffer >= 2


def changed(code: Code, number: int, **fields: int) -> Code:
    rows = [Instruction(Op(row[0]), *row[1:]) for row in code.instructions.tolist()]
    rows[number] = replace(rows[number], **fields)  # type: ignore[arg-type]
    blocks = [
        [rows[first:last] for first, last in code.blocks[code.rank_blocks[r] : code.rank_blocks[r + 1]].tolist()]
        for r in range(code.ranks)
    ]
    return Code.of(code.name, code.collective, blocks, [], code.flags.tolist(), code.scratch)


def first(code: Code, op: Op) -> int:
    return int(np.flatnonzero(code.instructions[:, 0] == op)[0])


@pytest.mark.parametrize(
    ("op", "fields", "message"),
    [
        (Op.SIGNAL, {"peer": 9}, "no rank 9"),
        (Op.SIGNAL, {"argument": 99}, "no flag 99"),
        (Op.SIGNAL, {"count": 5}, "set to 5 after 0"),
        (Op.WAIT, {"count": 5}, "never comes"),
        (Op.COPY, {"source_buffer": 7}, "does not exist"),
        (Op.COPY, {"source_chunk": 3}, "at Operand"),
        (Op.COPY, {"count": 0}, "of 0 chunks"),
        (Op.COPY, {"source_buffer": 1}, "overlap"),
        (Op.PUT, {"target_chunk": 2}, "may be shorter"),
        (Op.READ_REDUCE, {"source_chunk": 2}, "different indices"),
        (Op.WAIT, {"count": 0}, "WAIT with count 0"),
        (Op.PUT, {"op": 17}, "no opcode 17"),
    ],
)
def test_what_the_checker_sees(op: Op, fields: dict[str, int], message: str) -> None:
    code = encode(compile_one_sided(ring_all_reduce(3)), join=False)
    verify_code(code)
    with pytest.raises(CollectiveError, match=message):
        verify_code(changed(code, first(code, op), **fields))


def test_a_value_may_not_pass_a_shorter_place() -> None:
    """Chunk 0 goes through the place of chunk 1, which may be shorter: right for divisible sizes only."""

    def program(b: Builder) -> None:
        b.chunk(0, "input", 0).copy(to=1, buffer="output", index=1)
        b.chunk(1, "output", 1).copy(to=1, buffer="output", index=0)
        b.chunk(0, "input", 1).copy(to=1, buffer="output", index=1)
        b.input(0).copy(to=0, buffer="output")

    spec = CollectiveSpec(CollectiveName.BROADCAST, 2, 2, root=0)
    code = encode(compile_one_sided(trace(program, spec, "detour")))
    with pytest.raises(CollectiveError, match="may be shorter"):
        verify_code(code)


def test_code_that_lacks_a_wait_is_caught_or_right() -> None:
    """Some waits are implied by others.

    Where the verifier accepts code without one, every order of execution gives the right result.
    """
    algorithm = ring_all_reduce(3)
    code = encode_pull(algorithm)
    rows = [Instruction(Op(row[0]), *row[1:]) for row in code.instructions.tolist()]
    operands = [Operand(*row) for row in code.operands.tolist()]
    inputs = draw_inputs(code, 7, 0)
    caught = 0
    for number in (n for n, row in enumerate(rows) if row.op is Op.WAIT):
        blocks = [
            [[rows[n] for n in range(*edges) if n != number] for edges in code.blocks[2 * r : 2 * r + 2].tolist()]
            for r in range(3)
        ]
        mutant = Code.of(code.name, code.collective, blocks, operands, code.flags.tolist(), code.scratch)
        try:
            verify_code(mutant)
        except CollectiveError:
            caught += 1
            continue
        for seed in range(10):
            check_outputs(algorithm, inputs, run_code(mutant, inputs, 7, seed=seed), 7)
    assert caught > 10


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.sampled_from(library()), st.integers(0, 99))
def test_gates_that_others_imply_are_added(make: Make, seed: int) -> None:
    """Every block waits itself for the gates of the ranks whose input or output it touches; else nothing changes."""
    algorithm = make()
    code = with_direct_gates(encode(compile_one_sided(algorithm)))
    verify_code(code)
    assert with_direct_gates(code) is code
    inputs = draw_inputs(code, 13, seed)
    check_outputs(algorithm, inputs, run_code(code, inputs, 13, seed=seed), 13)


def test_a_ring_leaves_gates_out() -> None:
    code = encode(compile_one_sided(ring_all_reduce(4)))
    assert len(with_direct_gates(code).instructions) > len(code.instructions)
