"""Gradients that are scattered at each micro-batch (ZeRO-2 and 3): in buckets, added up a bucket behind, to the same
bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import capture
from sennit.cluster import load
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, CollectiveKind, Free, Lane, Program, defines, reads
from sennit.ir.program_check import check_program
from sennit.ir.program_numpy import run_program
from sennit.kernels import in_buckets
from sennit.kernels.buckets import buckets, term_runs
from sennit.plan import Plan, lower, propagate, zoo
from sennit.run import emit_lane, run_in_process
from sennit.run.order import ordered
from sennit.sim import simulate


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.tanh(self.up(x)))
        return x + down


class Deep(nn.Module):
    """A weight is read at either end: with stages, its gradient goes from one to the other."""

    def __init__(self, width: int = 24, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.tied = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.tied
        for block in self.blocks:
            x = block(x)
        return (x * self.tied).square().sum()


LAYERS = tuple(f"blocks.{number}" for number in range(4))


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return capture(Deep().double(), (torch.zeros(16, 24, dtype=torch.float64),))


@pytest.fixture(scope="module")
def state(graph: Graph) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        item.path: torch.ones(()).double()
        if item.role.value == "tangent"
        else torch.randn(item.value.type.shape, dtype=torch.float64)
        for item in graph.inputs
    }


def stages(graph: Graph, mesh: Mesh, level: int) -> Plan:
    return zoo.sharded(zoo.pipeline(graph, mesh, layers=LAYERS), level=level)


def tensors(graph: Graph, mesh: Mesh, level: int) -> Plan:
    return zoo.sharded(zoo.tensor_parallel(graph, mesh, column="*.up", row="*.down"), level=level)


PLANS: dict[str, tuple[str, Callable[[Graph, Mesh], Plan]]] = {
    "ZeRO-2": ("dp=4;mb=2", partial(zoo.zero, level=2)),
    "ZeRO-2, 4 micro-batches": ("dp=2;mb=4", partial(zoo.zero, level=2)),
    "ZeRO-3": ("dp=4;mb=4", partial(zoo.zero, level=3)),
    "ZeRO-3, no micro-batches": ("dp=4", partial(zoo.zero, level=3)),
    "stages, ZeRO-2": ("pp=2,dp=2;mb=4", partial(stages, level=2)),
    "stages, ZeRO-3": ("pp=2,dp=2;mb=2", partial(stages, level=3)),
    "tensors, ZeRO-2": ("dp=2,tp=2;mb=2", partial(tensors, level=2)),
    "tensors, ZeRO-3": ("dp=2,tp=2;mb=4", partial(tensors, level=3)),
}


def program_of(graph: Graph, name: str) -> Program:
    mesh, planner = PLANS[name]
    return lower(propagate(planner(graph, Mesh.parse(mesh))))


def can_run(lane: Lane) -> bool:
    """Everything is made before it is read, once, and not read behind its free."""
    there = {item.buffer.name for item in lane.inputs}
    made = set(there)
    for step in lane.steps:
        names = {buffer.name for buffer in defines(step)}
        if not there.issuperset(reads(step)) or names & made:
            return False
        there.difference_update([step.source] if isinstance(step, Free) else [])
        there |= names
        made |= names
    return there.issuperset(item.name for item in lane.outputs)


def without_terms(patch: pytest.MonkeyPatch) -> None:
    """As before: what micro-batches add to sums is reduced one by one."""
    patch.setattr("sennit.kernels.buckets._terms", lambda lane: set())


@pytest.mark.parametrize("name", PLANS)
def test_the_joined_program_has_the_bits_of_the_one_without(graph: Graph, state: dict[str, Tensor], name: str) -> None:
    """The oracle: the reference interpreter runs both."""
    program = program_of(graph, name)
    joined = in_buckets(program)
    check_program(joined)
    assert Program.parse(str(joined)) == joined
    arrays = {path: value.numpy() for path, value in state.items()}
    before, after = run_program(program, arrays), run_program(joined, arrays)
    assert before.keys() == after.keys()
    for key, whole in before.items():
        np.testing.assert_array_equal(after[key], whole, err_msg=key)


@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize("name", PLANS)
def test_ranks_have_the_bits_of_one_by_one(
    graph: Graph, state: dict[str, Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(graph, name)
    found = run_in_process(program, state)
    without_terms(monkeypatch)
    for key, whole in run_in_process(program, state).items():
        assert torch.equal(found[key], whole), key


@pytest.mark.parametrize("name", [name for name in PLANS if "mb" in PLANS[name][0]])
def test_terms_travel_together_and_are_added_later(graph: Graph, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(graph, name)
    for lane in program.lanes:
        order = ordered(lane)
        assert can_run(order.lane)
        # what the source joins is what was joined when the additions were moved
        assert term_runs(order.lane, order.late) == term_runs(lane, order.late)
        scatters = [
            step for step in lane.steps if isinstance(step, Collective) and step.kind is CollectiveKind.REDUCE_SCATTER
        ]
        found = buckets(order.lane, order.late)
        joined = [step for step in scatters if step.result.name in found]
        assert len(joined) > len(scatters) // 3
        assert len({found[step.result.name].number for step in joined}) <= len(joined) // 2
        # a bucket ends with its task
        for number in {bucket.number for bucket in found.values()}:
            times = {step.result.times for step in joined if found[step.result.name].number == number}
            assert len(times) <= 1
        at = {name: position for position, step in enumerate(order.lane.steps) for name in reads(step)}
        made = {buffer.name: place for place, step in enumerate(order.lane.steps) for buffer in defines(step)}
        waits = [at[name] - made[name] for run in term_runs(lane, order.late) for name in run]
        assert sum(wait > 2 for wait in waits) >= len(waits) // 2
    assert "bucket(" in emit_lane(program, program.lanes[0])
    cluster = load("dgx-h100")
    after = simulate(in_buckets(program), cluster).span
    without_terms(monkeypatch)
    assert after < simulate(in_buckets(program), cluster).span


# ---- random programs -------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Lanes of micro-batches that scatter what they made of one parameter, add it up, and now and then read a sum
    early.
    """
    batches, count = draw(st.integers(2, 3)), draw(st.integers(1, 5))
    axis = draw(st.sampled_from([2, 4]))
    sizes = [4 * draw(st.sampled_from([1, 2, 700, 3000])) for _ in range(count)]
    dtypes = [draw(st.sampled_from(["f64", "f32"])) for _ in range(count)]
    lines: list[str] = []
    for number, size in enumerate(sizes):
        lines.append(f'param %w{number} : {dtypes[number]}[{axis}{{dp}},{size}] of %w{number} on m0 "w{number}"')
    sums: dict[int, str] = {}
    results: list[str] = []
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    for batch in range(batches):
        for number in rng.sample(range(count), count):
            size, dtype, last = sizes[number], dtypes[number], batch == batches - 1
            name, of = f"{number}.{batch}", f"of %g{number} on m0"
            at = f"at mb={batch}"
            lines += [
                f'backward %p{name} : {dtype}[{size}]{{sum:dp}} {of} = aten.sum.dim_IntList(%w{number}, [0]) for %g{number} ""',
                f"backward %t{name} : {dtype}[{size}]{{sum:dp,mb}} {of} {at} = "
                f'aten.mul.Scalar(%p{name}, {batch + 1.3}) for %g{number} ""',
            ]
            lines.append(f"reduce_scatter %r{name} : {dtype}[{size}{{dp}}]{{sum:mb}} {of} {at} = %t{name} over dp")
            if number not in sums:
                sums[number] = f"r{name}"
                continue
            covered = "+".join(map(str, range(batch + 1)))
            layout = f"{dtype}[{size}{{dp}}]" if last else f"{dtype}[{size}{{dp}}]{{sum:mb}}"
            when = "" if last else f" at mb={covered}"
            lines.append(
                f'backward %s{name} : {layout} {of}{when} = sennit.accumulate(%{sums[number]}, %r{name}) for %g{number} ""'
            )
            sums[number] = f"s{name}"
            if last and rng.random() < 0.4:  # something needs it in the middle of the task
                lines.append(f"all_gather %a{number} : {dtype}[{size}] {of} = %s{name} over dp")
                lines.append(
                    f'backward %x{number} : {dtype}[{size}] of %x{number} on m0 = aten.tanh.default(%a{number}) for %x{number} ""'
                )
                results.append(f'result "x{number}" %x{number}')
            elif last and rng.random() < 0.5:  # a view of it
                lines.append(
                    f'backward %v{number} : {dtype}[1,{size}{{dp}}] of %v{number} on m0 = aten.unsqueeze.default(%s{name}, 0) for %v{number} ""'
                )
                results.append(f'result "v{number}" %v{number}')
            if last:
                results.append(f'result "s{number}" %s{name}')
    body = "\n    ".join([*lines, *results])
    devices = f"0-{axis - 1}"
    return (
        f'program "random" {{\n  mesh m0 = dp={axis};mb={batches}\n  lane all on {devices} {{\n    {body}\n  }}\n}}\n'
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(programs())
def test_random_programs_keep_their_bits(text: str) -> None:
    program = Program.parse(text)
    check_program(program)
    joined = in_buckets(program)
    check_program(joined)
    (lane,) = program.lanes
    assert can_run(ordered(lane).lane)
    rng = np.random.default_rng(len(text))
    state = {
        item.path: rng.standard_normal(item.buffer.layout.shape).astype(item.buffer.dtype.value.replace("f", "float"))
        for item in lane.inputs
    }
    before, after = run_program(program, state), run_program(joined, state)
    ranks = run_in_process(program, {path: torch.from_numpy(value) for path, value in state.items()})
    for key, whole in before.items():
        np.testing.assert_array_equal(after[key], whole)
        np.testing.assert_allclose(ranks[key].numpy(), whole, rtol=1e-6)
