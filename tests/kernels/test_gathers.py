"""Gathers of parameters in runs and ahead of their use: the same gathers in the same order, before those who read them,
in fewer messages.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import capture
from sennit.cluster import load
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, CollectiveKind, Free, Lane, Program, Step, defines, reads
from sennit.kernels import in_buckets
from sennit.kernels.buckets import bucket_bytes
from sennit.kernels.gathers import gathers, message_count, with_gathers_ahead
from sennit.plan import lower, propagate, zoo
from sennit.run.order import ordered
from sennit.sim import simulate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + down


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return capture(Deep(), (torch.zeros(16, 64),))


BLOCKS = tuple(f"blocks.{i}" for i in range(6))


def stages(graph: Graph, mesh: Mesh, level: int) -> object:
    return zoo.sharded(zoo.pipeline(graph, mesh, layers=BLOCKS), level=level)


PLANS = {
    "ZeRO-1": ("dp=4", partial(zoo.zero, level=1)),
    "ZeRO-3": ("dp=4", partial(zoo.zero, level=3)),
    "ZeRO-3, micro-batches": ("dp=2;mb=4", partial(zoo.zero, level=3)),
    "stages, ZeRO-3": ("pp=2,dp=2;mb=2", partial(stages, level=3)),
}


def program_of(graph: Graph, name: str) -> Program:
    mesh, planner = PLANS[name]
    return lower(propagate(planner(graph, Mesh.parse(mesh))))


def gathered(steps: tuple[Step, ...]) -> list[str]:
    return [
        step.result.name for step in steps if isinstance(step, Collective) and step.kind is CollectiveKind.ALL_GATHER
    ]


def is_in_order(lane: Lane) -> bool:
    known = {item.buffer.name for item in lane.inputs}
    for step in lane.steps:
        if not known.issuperset(reads(step)):
            return False
        known.difference_update([step.source] if isinstance(step, Free) else [])
        known.update(buffer.name for buffer in defines(step))
    return True


@pytest.mark.parametrize("name", PLANS)
def test_runs_are_neighbours_and_go_ahead(graph: Graph, name: str) -> None:
    for lane in program_of(graph, name).lanes:
        found = gathers(lane)
        assert found
        plain = [step for step in lane.steps if not isinstance(step, Free)]
        moved = with_gathers_ahead(plain, found)
        assert sorted(map(repr, moved)) == sorted(map(repr, plain))
        assert gathered(tuple(moved)) == gathered(lane.steps)  # all ranks of a lane gather in one order
        before = ordered(lane).lane
        assert is_in_order(before)
        assert {step.source for step in before.steps if isinstance(step, Free)} == {
            step.source for step in lane.steps if isinstance(step, Free)
        }
        # what is read first is not waited for where it begins to travel, but for the first
        started = {name: number for number, step in enumerate(before.steps) for name in gathered((step,))}
        first_read: dict[str, int] = {}
        for number, step in enumerate(before.steps):
            for read in reads(step):
                first_read.setdefault(read, number)
        late = [result for result, run in found.items() if run.number > 1 and first_read[result] - started[result] < 2]
        assert len(late) <= len(found) // 4


@pytest.mark.parametrize("name", PLANS)
def test_a_run_has_no_parameter_twice_and_is_bounded(graph: Graph, name: str) -> None:
    for lane in program_of(graph, name).lanes:
        found = gathers(lane)
        source = {step.result.name: step.source for step in lane.steps if isinstance(step, Collective)}
        sizes = {name: lane.buffers()[name].bytes(lane.devices[0]) for name in found}
        cap = bucket_bytes(sum({source[name]: size for name, size in sizes.items()}.values()))
        for run in set(found.values()):
            assert len({source[name] for name in run.results}) == len(run.results)
            assert set(run.packed) <= set(run.results)
            assert all(sizes[name] < cap // 8 for name in run.packed)
            assert sum(sizes[name] for name in run.results) <= max(2 * cap, cap + max(sizes.values()))


@pytest.mark.parametrize("name", PLANS)
def test_the_program_for_the_clock(graph: Graph, name: str) -> None:
    program = program_of(graph, name)
    joined = in_buckets(program)
    for lane, other in zip(program.lanes, joined.lanes, strict=True):
        assert is_in_order(other)
        assert len(gathered(other.steps)) < len(gathered(lane.steps))
        buffers, flat = lane.buffers(), other.buffers()

        def sent(steps: tuple[Step, ...], named: dict, device: int = lane.devices[0]) -> int:
            return sum(
                named[step.source].bytes(device)
                for step in steps
                if isinstance(step, Collective) and step.kind is CollectiveKind.ALL_GATHER
            )

        assert sent(other.steps, flat) == sent(lane.steps, buffers)
    cluster = load("dgx-h100")
    assert simulate(joined, cluster).span < simulate(program, cluster).span


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 1 << 22), max_size=40), st.integers(1 << 12, 1 << 23))
def test_messages_are_fewer_than_parameters_and_enough(sizes: list[int], cap: int) -> None:
    count = message_count(sizes, cap)
    large = sum(size >= cap // 8 for size in sizes)
    assert large <= count <= len(sizes)
    assert count >= (len(sizes) > 0)
