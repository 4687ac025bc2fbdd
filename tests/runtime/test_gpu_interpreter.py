"""The GPU kernel's walk against the reference interpreter of `Code`, on a host that stands in for a GPU."""

from __future__ import annotations

from pathlib import Path

import gpu_host
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.compile import compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import recipes
from sennit.collective.library.catalog import Options
from sennit.collective.runtime.code import INPUT, Code
from sennit.collective.runtime.code_numpy import run_code
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.encode_schedule import encode_schedule
from sennit.collective.runtime.gpu_code import walk_of
from sennit.collective.runtime.gpu_join import join_blocks, without_gates
from sennit.collective.verify_one_sided import verify_one_sided
from sennit.errors import RunError
from sennit.ir.dtype import DType
from sennit.ir.layout import Reduction
from sennit.ir.layout_numpy import Array
from sennit.ir.one_sided import Await, OneSided, OneSidedRank

pytestmark = pytest.mark.skipif(gpu_host.compiler() is None, reason="no C++ compiler to build the stand-in for a GPU")
NAMES = [item.name for item in recipes() if not item.across]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_host.shared_folder(tmp_path_factory)


def library_program(name: str, ranks: int, options: Options) -> OneSided:
    found = {item.name: item for item in recipes()}[name]
    return compile_one_sided(found.build(1, ranks, options))


def random_inputs(code: Code, elements: int, seed: int) -> list[Array]:
    draw = np.random.default_rng(seed)
    return [draw.integers(-99, 99, code.parts(r, INPUT) * elements).astype(np.int32) for r in range(code.ranks)]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    ranks=st.sampled_from([2, 4, 3, 5]),
    elements=st.integers(1, 90),
    team=st.integers(1, 4),
    joined=st.booleans(),
    gates=st.booleans(),
    instances=st.integers(1, 2),
)
def test_the_walk_equals_the_reference(
    folder: Path, name: str, ranks: int, elements: int, team: int, joined: bool, gates: bool, instances: int
) -> None:
    if name == "halving_doubling_all_reduce" and ranks & (ranks - 1):
        ranks = 4
    program = library_program(name, ranks, Options(instances=instances, pieces=instances))
    if joined:
        program = join_blocks(program)
    program = program if gates else without_gates(program)
    code = encode(program)
    group = gpu_host.HostGroup(gpu_host.build(folder, DType.I32, Reduction.SUM), walk_of(code))
    for seed in range(2):  # the second call meets the flags of the first
        inputs = random_inputs(code, elements, seed)
        wanted = run_code(code, inputs, elements, alignment=4)
        found = group.run(inputs, elements, DType.I32, team)
        for rank in range(ranks):
            np.testing.assert_array_equal(found[rank], wanted[rank], err_msg=f"rank {rank}")


@pytest.mark.parametrize("name", ["ring_all_reduce", "all_pairs_reduce_scatter", "chain_broadcast"])
def test_a_schedule_with_fifos(name: str, folder: Path) -> None:
    """Messages through slots, with credits: the form that files of schedules and MSCCL XML have."""
    algorithm = {item.name: item for item in recipes()}[name].build(1, 3, Options(instances=2, pieces=4))
    code = encode_schedule(compile_algorithm(algorithm))
    group = gpu_host.HostGroup(gpu_host.build(folder, DType.I32, Reduction.SUM), walk_of(code))
    for elements, team in ((50, 1), (7, 2), (64, 3)):
        inputs = random_inputs(code, elements, team)
        wanted = run_code(code, inputs, elements, alignment=4)
        found = group.run(inputs, elements, DType.I32, team)
        for rank in range(3):
            np.testing.assert_array_equal(found[rank], wanted[rank])


@pytest.mark.parametrize("name", NAMES)
def test_a_joined_program_is_proved(name: str) -> None:
    for ranks in (2, 4):
        program = join_blocks(library_program(name, ranks, Options(instances=2, pieces=2)))
        verify_one_sided(program)
        assert OneSided.parse(str(program)) == program
        assert all(len(ranked.blocks) == 2 for ranked in program.ranks)


def test_a_wait_in_vain_says_where(folder: Path) -> None:
    program = library_program("ring_all_reduce", 2, Options())
    blocks = (program.ranks[0].blocks[0], (Await(1, 1, 99), *program.ranks[0].blocks[1]), *program.ranks[0].blocks[2:])
    ranks = (OneSidedRank(0, blocks, program.ranks[0].scratch), *program.ranks[1:])
    code = encode(OneSided(program.name, program.collective, ranks))
    group = gpu_host.HostGroup(gpu_host.build(folder, DType.I32, Reduction.SUM), walk_of(code), patience=0.2)
    with pytest.raises(RunError, match=r"waited 0.2 s in vain: flag \d+ of rank"):
        group.run(random_inputs(code, 8, 0), 8, DType.I32, 1)
