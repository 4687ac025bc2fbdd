"""Attention with a table of position biases, as in a Swin: what data parallelism and co-shard send of it, and what
co-shard keeps of it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sennit.capture import capture
from sennit.ir.graph import Graph, Op, Phase, Role
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Program
from sennit.plan import Plan, lower, propagate, recompute, zoo
from sennit.run import run_in_process
from sennit.run.memory import predicted_memory

HEADS, POSITIONS, WIDTH = 4, 16, 16


class Window(nn.Module):
    """Windows that are shifted, a norm before each branch, a bias for each head and distance."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(2 * POSITIONS - 1, HEADS))
        at = torch.arange(POSITIONS)
        self.register_buffer("distance", at[:, None] - at[None, :] + POSITIONS - 1)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        windows = self.first(x).roll(self.shift, 1).reshape(-1, POSITIONS, WIDTH)
        q, k, v = self.qkv(windows).reshape(-1, POSITIONS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.distance.view(-1)].view(POSITIONS, POSITIONS, HEADS).permute(2, 0, 1).contiguous()
        scores = (q @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1)
        made = self.out((scores @ v).transpose(1, 2).reshape(windows.shape))
        x = x + made.reshape(x.shape).roll(-self.shift, 1)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Window(0), Window(5))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(x).mean(1)), wanted)


@pytest.fixture(scope="module")
def model() -> tuple[Windows, Graph, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Windows().double()
    batch = (torch.randn(4, 4 * POSITIONS, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 2, 1]))
    state = {**model.state_dict(), "x": batch[0], "wanted": batch[1], "tangent": torch.ones((), dtype=torch.float64)}
    return model, capture(model, batch), state


def reduced_bytes(program: Program) -> int:
    (lane,) = program.lanes
    buffers = lane.buffers()
    return sum(buffers[step.source].bytes(0) for step in lane.steps if isinstance(step, Collective))


@pytest.mark.parametrize("mesh", ["dp=2", "dp=4"])
def test_what_is_sent_are_the_gradients_of_the_parameters_once(mesh: str, model) -> None:
    """Not the gradients of the biases of all pairs of positions, of which there are many more than distances: an
    all-reduce of the parameters' bytes, which a ring sends 2 (p - 1) / p times, and of two numbers: the loss, and how
    many samples it is the mean of.
    """
    _, graph, _ = model
    parameters = sum(item.value.type.bytes for item in graph.inputs if item.role is Role.PARAM)
    for plan in (zoo.data_parallel(graph, Mesh.parse(mesh)), zoo.co_shard(graph, Mesh.parse(mesh), pieces=2)):
        program = lower(propagate(plan))
        assert reduced_bytes(program) <= parameters + 16


@pytest.mark.parametrize("pieces", [2, 4])
def test_the_step_is_the_serial_one(pieces: int, model) -> None:
    eager, graph, state = model
    program = lower(propagate(zoo.co_shard(graph, Mesh.parse("dp=2"), pieces=pieces)))
    made = run_in_process(program, state)
    eager.zero_grad()
    eager(state["x"], state["wanted"]).backward()
    for name, parameter in eager.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(made[name], parameter.grad, rtol=1e-11, atol=1e-13)


def kept(plan: Plan) -> list[Op]:
    """The forward operators whose results the backward pass reads, through slices that view them."""
    graph = plan.graph
    forward = {value.name: op for op in graph.ops if op.phase is Phase.FORWARD for value in op.results}
    read = {name for op in graph.ops if op.phase is Phase.BACKWARD for name in op.reads}
    return [forward[name] for name in sorted(read & set(forward))]


def test_a_branch_keeps_the_stream_alone(model) -> None:
    """Neither norms, nor windows, nor anything inside a piece: of the size of the stream there is one value a branch."""
    _, graph, _ = model
    stream = 4 * 4 * POSITIONS * WIDTH * 8
    large = [op for op in kept(zoo.co_shard(graph, Mesh.parse("@0"), pieces=2)) if op.results[0].type.bytes >= stream]
    assert {op.kind for op in large} == {"aten.add.Tensor"}
    assert len(large) <= 4  # two blocks of two branches each
    without = zoo.co_shard(graph, Mesh.parse("@0"), pieces=2, again=False)
    assert len([op for op in kept(without) if op.results[0].type.bytes >= stream]) > len(large)


def test_pieces_and_the_stream_take_less_than_whole_blocks_again(model) -> None:
    """What activation checkpoints do: keep what enters a block, and compute all of it again.

    At the peak that holds the scores of all heads.
    """
    _, graph, _ = model
    plan = Plan("checkpoints", graph, Mesh.parse("@0"))
    for block in ("blocks.0", "blocks.1"):
        plan = recompute(plan, plan.graph.select(f"{block}|{block}.*", phase=Phase.FORWARD))
    peaks = [
        sum(predicted_memory(lower(propagate(made)), 0)[0].values())
        for made in (
            plan,
            zoo.co_shard(graph, Mesh.parse("@0"), pieces=2),
            zoo.co_shard(graph, Mesh.parse("@0"), pieces=4),
        )
    ]
    assert peaks[0] > peaks[1] > peaks[2]
