"""Reductions in buckets: the program for the clock carries the same bytes in fewer calls, in an order that can run, and
the search counts as many.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import capture
from sennit.cli import main
from sennit.cluster import load
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, CollectiveKind, Free, Lane, Program, defines, reads
from sennit.kernels import in_buckets
from sennit.kernels.buckets import bucket_bytes, bucket_count, buckets
from sennit.plan import lower, propagate, zoo
from sennit.sim import simulate


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return capture(Deep(), (torch.zeros(8, 64),))


PLANS = {
    "data parallel": ("dp=4", zoo.data_parallel),
    "micro-batches": ("dp=2;mb=2", zoo.data_parallel),
    "ZeRO-1": ("dp=4", partial(zoo.zero, level=1)),
    "stages": ("pp=2,dp=2;mb=2", partial(zoo.pipeline, layers=tuple(f"layers.{i}" for i in range(12)))),
}


def program_of(graph: Graph, name: str) -> Program:
    mesh, planner = PLANS[name]
    return lower(propagate(planner(graph, Mesh.parse(mesh))))


def sent(lane: Lane) -> dict[CollectiveKind, int]:
    buffers, found = lane.buffers(), dict[CollectiveKind, int]()
    for step in lane.steps:
        if isinstance(step, Collective):
            found[step.kind] = found.get(step.kind, 0) + buffers[step.source].bytes(lane.devices[0])
    return found


@pytest.mark.parametrize("name", PLANS)
def test_the_same_bytes_in_fewer_calls(graph: Graph, name: str) -> None:
    program = program_of(graph, name)
    joined = in_buckets(program)
    for before, after in zip(program.lanes, joined.lanes, strict=True):
        found = buckets(before)
        calls = {bucket.number for bucket in found.values()}
        alone = [step for step in before.steps if isinstance(step, Collective) and step.result.name not in found]
        assert len(found) >= 2 * len(calls) >= 2
        assert sum(isinstance(step, Collective) for step in after.steps) == len(calls) + len(alone)
        assert sent(after) == sent(before)
        assert after.outputs == before.outputs


@pytest.mark.parametrize("name", PLANS)
def test_it_can_run(graph: Graph, name: str) -> None:
    """Everything is made before it is read, and not read behind its free; the simulator takes it."""
    program = in_buckets(program_of(graph, name))
    for lane in program.lanes:
        there = {item.buffer.name for item in lane.inputs}
        for step in lane.steps:
            if isinstance(step, Free):
                there.remove(step.source)
                continue
            assert there.issuperset(reads(step))
            there.update(buffer.name for buffer in defines(step))
        assert there.issuperset(item.name for item in lane.outputs)
    assert simulate(program, load("laptop:4")).span > 0


def test_fewer_calls_take_less_latency(graph: Graph) -> None:
    program = program_of(graph, "data parallel")
    cluster = load("laptop:4")
    assert simulate(in_buckets(program), cluster).span < simulate(program, cluster).span


def test_the_command_simulates_what_ranks_send(
    graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, cluster = program_of(graph, "data parallel"), load("laptop:4")
    file = tmp_path / "program.txt"
    file.write_text(str(program))
    spans = {"": simulate(in_buckets(program), cluster).span, "--as-written": simulate(program, cluster).span}
    for option, span in spans.items():
        assert main(["simulate", str(file), "--cluster", "laptop:4", "--json", *option.split()]) == 0
        assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(span)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(1, 500), st.integers(1, 64 << 20))
def test_the_search_counts_what_is_cut(tensors: int, size: int) -> None:
    """Tensors of one size, one after another into a bucket until it is full, or the next would make it half as large
    again.
    """
    cap, count, full = bucket_bytes(tensors * size), 1, 0
    for _ in range(tensors):
        if full >= cap or (full and full + size > 1.5 * cap):
            count, full = count + 1, 0
        full += size
    assert bucket_count(tensors, tensors * size) == count
