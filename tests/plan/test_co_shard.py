"""Co-shard: pieces one after another give the values of the whole, from less memory, with the collectives of the plan
without it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sennit.capture import capture
from sennit.capture.rules import Letters, rule_of
from sennit.capture.rules.certify import Certifier
from sennit.cluster import load
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.errors import PlanError
from sennit.ir.graph import Graph, Phase
from sennit.ir.graph_numpy import run_graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Program
from sennit.ir.timeline import MemoryKind
from sennit.plan import Plan, lower, propagate, zoo
from sennit.plan.co_shard import Cut, co_shard
from sennit.plan.verify import verify
from sennit.plan.zoo.find import pairs_of_products
from sennit.run import run_in_process
from sennit.run.memory import predicted_memory
from sennit.sim import simulate

SERIAL = Mesh.parse("@0")


def values(graph: Graph, gpt) -> dict[str, np.ndarray]:
    return run_graph(graph, {item.value.name: gpt.state[item.path].numpy() for item in graph.inputs})


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert set(one) == set(other)
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def program_of(plan: Plan) -> Program:
    program = lower(propagate(plan))
    verify(program, plan.graph, certifier=Certifier())
    return program


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("again", [False, True])
def test_pieces_in_turn_give_the_values_of_the_whole(pieces: int, again: bool, small_gpt) -> None:
    plan = zoo.co_shard(small_gpt.graph, SERIAL, pieces=pieces, again=again)
    whole = values(small_gpt.graph, small_gpt)
    assert largest_difference(values(plan.graph, small_gpt), whole) <= 1e-14
    assert Graph.parse(str(plan.graph)) == plan.graph


@settings(derandomize=True, deadline=None, max_examples=25)
@given(draw=st.data())
def test_any_operator_can_be_cut_on_any_letter(small_gpt, draw: st.DataObject) -> None:
    """Alone, or with the operators that follow it, with and without an outer axis on the same dim."""
    graph = small_gpt.graph
    types = graph.types()
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD and isinstance(rule_of(op, types), Letters)]
    op = draw.draw(st.sampled_from(forward))
    rule = rule_of(op, types)
    assert isinstance(rule, Letters)
    assume(rule.letters)
    letter = draw.draw(st.sampled_from(rule.letters))
    pieces, again = draw.draw(st.sampled_from([2, 3, 4])), draw.draw(st.booleans())
    refused = ("does not divide", "depends on where it lies", "to be taken")
    try:
        plan = co_shard(Plan("serial", graph, SERIAL), [Cut((op,), letter)], pieces, again=again)
    except PlanError as error:
        if any(reason in str(error) for reason in refused):
            return
        raise
    assert largest_difference(values(plan.graph, small_gpt), values(graph, small_gpt)) <= 1e-14


@pytest.mark.parametrize(("mesh", "sequence"), [("tp=2", True), ("dp=2,tp=2;mb=2", False)])
def test_with_tensor_parallelism_no_collective_is_added(mesh: str, sequence: bool, small_gpt) -> None:
    plain = zoo.tensor_parallel(small_gpt.graph, Mesh.parse(mesh), sequence=sequence)
    pieces = zoo.co_shard(small_gpt.graph, Mesh.parse(mesh), pieces=2, sequence=sequence)
    programs = [program_of(plan) for plan in (plain, pieces)]
    counts = [
        Counter((step.kind, step.axes) for step in program.lanes[0].steps if isinstance(step, Collective))
        for program in programs
    ]
    tensor = [{key: number for key, number in count.items() if key[1] == ("tp",)} for count in counts]
    assert tensor[0] == tensor[1]
    layouts = [{item.path: str(item.buffer.layout) for item in program.lanes[0].inputs} for program in programs]
    assert layouts[0] == layouts[1]  # parameters lie as without it: a device cuts its own heads
    assert max(small_gpt.differences(run_in_process(programs[1], small_gpt.state)).values()) <= 1e-13


def test_pieces_go_with_the_stage_of_what_they_are_pieces_of(small_gpt) -> None:
    mesh = Mesh.parse("pp=2;mb=4")
    plan = zoo.pipeline(small_gpt.graph, mesh, layers=("blocks.0", "blocks.1"))
    pairs = pairs_of_products(small_gpt.graph)
    cuts = [Cut((op,), "n", pairs.chunks[op.name]) for op in pairs.columns]
    plan = co_shard(plan, [*cuts, Cut(pairs.rows, "k")], 2)
    program = program_of(plan)
    assert max(small_gpt.differences(run_in_process(program, small_gpt.state)).values()) <= 1e-13
    held = [{item.path for item in lane.inputs} for lane in program.lanes]
    assert "blocks.0.up.weight" in held[0] - held[1]
    assert "blocks.1.up.weight" in held[1] - held[0]


def test_less_is_live_the_more_pieces_there_are() -> None:
    """Activations at the peak, predicted and simulated: with recomputation each piece's are gone before the next one's
    come.
    """
    config = GPTConfig(vocabulary=48, context=64, width=32, heads=8, layers=2, tie_embeddings=False)
    graph = capture(GPT(config), random_batch(config, 2), name="GPT")
    plans = [Plan("serial", graph, SERIAL)]
    plans += [zoo.co_shard(graph, SERIAL, pieces=pieces) for pieces in (2, 4, 8)]
    programs = [lower(propagate(plan)) for plan in plans]
    activations = [predicted_memory(program, 0)[0][MemoryKind.ACTIVATIONS] for program in programs]
    assert activations == sorted(activations, reverse=True)
    assert activations[3] < activations[0] / 3
    cluster = load("dgx-a100")
    peaks = [simulate(program, cluster).peak_memory(0) for program in programs]
    assert peaks == sorted(peaks, reverse=True)


def test_only_what_is_named_is_cut(small_gpt) -> None:
    graph = small_gpt.graph
    plan = zoo.co_shard(graph, SERIAL, pieces=2, modules="blocks.0.attention.*")
    cut = {op.module for op in plan.graph.ops if op.name.endswith(".p1")}
    assert any(module.startswith("blocks.0.attention") for module in cut)
    assert not any(module.startswith("blocks.1") or module.endswith((".up", ".down")) for module in cut)


def test_mistakes_are_told(small_gpt) -> None:
    graph = small_gpt.graph
    with pytest.raises(PlanError, match=r"no branch has products in 'decoder.\*'[\s\S]*blocks.0.attention.qkv"):
        zoo.co_shard(graph, SERIAL, pieces=2, modules="decoder.*")
    with pytest.raises(PlanError, match=r"dim 'n' of size 128 does not divide into 1 x 5 pieces"):
        zoo.co_shard(graph, SERIAL, pieces=5)
    with pytest.raises(PlanError, match=r"1 piece is no cut"):
        zoo.co_shard(graph, SERIAL, pieces=1)
    with pytest.raises(PlanError, match=r"nothing is cut"):
        co_shard(Plan("serial", graph, SERIAL), [], 2)
    embedding = graph.select("tokens", "aten.embedding.default", Phase.FORWARD)
    with pytest.raises(PlanError, match=r"embedding.default cannot be cut[\s\S]*on other letters"):
        co_shard(Plan("serial", graph, SERIAL), [Cut(embedding, "v")], 2)


def test_dropout_in_pieces_drops_what_the_whole_drops() -> None:
    from sennit.ir.dtype import DType
    from sennit.ir.random_numpy import uniform
    from sennit.run.random import uniform as uniform_torch

    seed = np.array([5, 9])
    whole = uniform(seed, 3, (2, 12, 5), DType.F32)
    # the middle dim in 2 blocks, of 3 pieces, of 2 elements: piece 1
    steps, first = (((2, 60),), ((2, 30), (2, 5)), ((5, 1),)), 10
    piece = uniform(seed, 3, (2, 4, 5), DType.F32, steps, first)
    np.testing.assert_array_equal(piece, whole[:, [2, 3, 8, 9]])
    drawn = uniform_torch(torch.tensor(seed), 3, (2, 4, 5), torch.float32, steps, first)
    np.testing.assert_array_equal(drawn.numpy(), piece)
