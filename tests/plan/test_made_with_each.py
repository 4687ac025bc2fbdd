"""What is made once for all micro-batches and what with each (`plan/propagate_time.py`): the step is the serial one,
and what stands is small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import capture
from sennit.ir.graph import Graph, Phase
from sennit.ir.mesh import Mesh
from sennit.ir.program import Compute, Free, Lane, Program, defines, reads
from sennit.kernels import fuse_attention
from sennit.plan import Moment, Plan, lower, propagate, propagate_time, recompute, zoo
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.run.memory import predicted_memory

HEADS, POSITIONS, WIDTH, BATCH, BLOCKS = 4, 48, 16, 8, 4
PAIRS = POSITIONS * POSITIONS * HEADS  # elements of a bias


class Block(nn.Module):
    """Attention with a bias for each head and distance, by hand or by torch's function."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(2 * POSITIONS - 1, HEADS))
        at = torch.arange(POSITIONS)
        self.register_buffer("distance", at[:, None] - at[None, :] + POSITIONS - 1)
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).reshape(-1, POSITIONS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        bias = self.table[self.distance.view(-1)].view(POSITIONS, POSITIONS, HEADS).permute(2, 0, 1).contiguous()
        if self.by_hand:
            mixed = (q @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1) @ v
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, bias.unsqueeze(0))
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(by_hand) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(x).mean(1)), wanted)


@pytest.fixture(scope="module")
def subject() -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    """The graph, its inputs, and the gradients of eager torch."""
    torch.manual_seed(0)
    model = Model(by_hand=True).double()
    batch = (torch.randn(BATCH, POSITIONS, WIDTH, dtype=torch.float64), torch.randint(3, (BATCH,)))
    state = {**model.state_dict(), "x": batch[0], "wanted": batch[1], "tangent": torch.ones((), dtype=torch.float64)}
    model(*batch).backward()
    gradients = {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
    return capture(model, batch), state, gradients


LAYERS = tuple(f"blocks.{number}" for number in range(BLOCKS))
PLANS: dict[str, tuple[str, Callable[[Graph, Mesh], Plan]]] = {
    "micro-batches": ("dp=1;mb=4", zoo.data_parallel),
    "data parallel": ("dp=2;mb=2", zoo.data_parallel),
    "ZeRO-2": ("dp=2;mb=4", partial(zoo.zero, level=2)),
    "ZeRO-3": ("dp=2;mb=2", partial(zoo.zero, level=3)),
    "tensor parallel": ("tp=2;mb=2", zoo.tensor_parallel),
    "co-shard": ("dp=2;mb=2", partial(zoo.co_shard, pieces=2)),
    "1F1B": ("pp=2;mb=4", partial(zoo.pipeline, layers=LAYERS)),
    "GPipe, replicas": ("pp=2,dp=2;mb=2", partial(zoo.pipeline, layers=LAYERS, schedule="GPipe")),
    "zero bubble": ("pp=2;mb=4", partial(zoo.pipeline, layers=LAYERS, schedule="zero bubble H1")),
    "interleaved": ("pp=2;mb=4", partial(zoo.pipeline, layers=LAYERS, schedule="interleaved")),
}


@settings(derandomize=True, deadline=None, max_examples=14)
@given(st.sampled_from(sorted(PLANS)), st.booleans())
def test_the_step_is_the_serial_one(subject, name: str, again: bool) -> None:
    graph, state, gradients = subject
    mesh, planner = PLANS[name]
    plan = planner(graph, Mesh.parse(mesh))
    if again and name != "co-shard":
        plan = checkpointed(plan)
    program = lower(propagate(plan))
    verify(program, plan.graph)
    made = run_in_process(program, state)
    for path, gradient in gradients.items():
        torch.testing.assert_close(made[path], gradient, rtol=1e-11, atol=1e-12)


def checkpointed(plan: Plan) -> Plan:
    for layer in LAYERS:
        plan = recompute(plan, plan.graph.select(f"{layer}|{layer}.*", phase=Phase.FORWARD))
    return plan


def steps_in_memory(lane: Lane, elements: int) -> int:
    """The most buffers of so many elements, views left out, that are there at one time.

    A sum over samples has as many as a bias.
    """
    live: dict[str, str] = {}  # buffer -> the buffer whose memory it is
    most = 0
    for step in lane.steps:
        if isinstance(step, Free):
            live.pop(step.source, None)
            continue
        for buffer in defines(step):
            if buffer.layout.local_elements() == elements:
                source = next((name for name in live if name in reads(step)), None)
                is_view = isinstance(step, Compute) and step.kind in VIEWS and source is not None
                live[buffer.name] = live[source] if is_view and source is not None else buffer.name
        most = max(most, len(set(live.values())))
    return most


VIEWS = tuple(
    f"aten.{kind}"
    for kind in (
        "view.default",
        "permute.default",
        "unsqueeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "expand.default",
    )
)


@pytest.mark.parametrize("name", ["micro-batches", "1F1B", "zero bubble"])
def test_no_bias_of_all_pairs_stands(subject, name: str) -> None:
    """Between tasks there is none, and no sum over micro-batches has that size: not one a block."""
    graph, _, _ = subject
    mesh, planner = PLANS[name]
    program = lower(propagate(checkpointed(planner(graph, Mesh.parse(mesh)))))
    for lane in program.lanes:
        sums = [
            step.results[0] for step in lane.steps if isinstance(step, Compute) and step.kind == "sennit.accumulate"
        ]
        assert sums
        assert all(buffer.layout.local_elements() < PAIRS for buffer in sums)
        assert (
            steps_in_memory(lane, PAIRS) <= 4
        )  # a gather, its copy in the order of heads, and the gradient's of a block


def peak(program: Program) -> int:
    return max(sum(predicted_memory(program, lane.devices[0])[0].values()) for lane in program.lanes)


def test_what_it_saves_is_a_bias_and_its_gradient_a_block(subject, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _, _ = subject
    plan = checkpointed(zoo.data_parallel(graph, Mesh.parse("dp=1;mb=8")))
    lean = peak(lower(propagate(plan)))
    monkeypatch.setattr(propagate_time, "HELD", 1 << 40)
    standing = peak(lower(propagate(plan)))
    assert standing - lean >= (BLOCKS - 1) * PAIRS * 8


def test_a_derivative_as_a_kernel_makes_its_bias_again() -> None:
    """The kernel of the derivative reads the bias: kept from F to B there would be one for each of four micro-batches
    in flight and block.
    """
    batch = (torch.randn(BATCH, POSITIONS, WIDTH), torch.randint(3, (BATCH,)))
    graph = capture(Model(by_hand=False), batch)
    mesh, planner = "pp=2;mb=4", partial(zoo.pipeline, layers=LAYERS, schedule="GPipe")
    program = fuse_attention(lower(propagate(planner(graph, Mesh.parse(mesh)))))
    kernels = [step for step in program.lanes[0].steps if isinstance(step, Compute) and "attention" in step.kind]
    assert len(kernels) == 2 * 4 * BLOCKS // 2  # forward and backward, micro-batches, blocks of a stage
    assert all(steps_in_memory(lane, PAIRS) <= 4 for lane in program.lanes)


class Kinds(nn.Module):
    """One of each: a value that is made of parameters, or of nothing, before the first micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.row = nn.Parameter(torch.randn(128, 128)), nn.Parameter(torch.randn(512))
        self.left, self.right = nn.Parameter(torch.randn(128, 4)), nn.Parameter(torch.randn(4, 128))
        self.small = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        casts = x @ self.weight.double().float()  # as large as the weight
        outer = self.row[:, None] * self.row[None, :]  # 512 x 512 of 512
        tiny = self.small[:, None] * self.small[None, :]  # below what is worth it
        product = torch.sigmoid(self.left @ self.right)  # a product stands; what is as large stands too
        far = torch.arange(512)[:, None] > torch.arange(512)[None, :]  # of positions alone
        rows = x.repeat(1, 4)
        used = (rows @ torch.where(far, outer, 0.0)).sum() + (x[:, :8] @ tiny).sum() + (x @ product).sum()
        return casts.sum() + used


def test_which_values_are_made_with_each() -> None:
    graph = capture(Kinds(), (torch.randn(4, 128),))
    decisions = propagate(zoo.data_parallel(graph, Mesh.parse("dp=1;mb=2")))
    each = {op.name for op in graph.ops if decisions.moment[op.name] is Moment.EACH}
    sizes = {op.results[0].type.elements for op in graph.ops if op.name in each}
    assert sizes == {512 * 512}
    kinds = {op.kind for op in graph.ops if op.name in each}
    assert {"aten.mul.Tensor", "aten.gt.Tensor", "aten.where.self"} <= kinds
    assert not any("mm" in kind for kind in kinds)
    once = [op for op in graph.ops if decisions.moment[op.name] is Moment.BEFORE]
    assert {"aten._to_copy.default", "aten.mm.default", "aten.sigmoid.default", "aten.arange.default"} <= {
        op.kind for op in once
    }
