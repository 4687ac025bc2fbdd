"""The collectives that propagation makes of a plan's decisions: those that people who wrote them by hand count on."""

from __future__ import annotations

import importlib.util
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sennit.capture import capture, capture_call
from sennit.capture.rewrite import take_apart
from sennit.capture.rules.certify import Certifier
from sennit.ir.graph import Graph, Phase
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Program
from sennit.plan import Plan, data_inputs, lower, propagate, tensor_parallel, transform
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.testing.eager_torch import Float64
from sennit.testing.families_torch import families
from sennit.testing.graph_torch import run_graph_torch
from sennit.testing.parity_torch import state_of
from sennit.testing.random_plans import trained

PRODUCTS = "aten.mm.default|aten.addmm.default"
LAYERS = 2


def program_of(plan: Plan) -> Program:
    program = lower(propagate(plan))
    verify(program, plan.graph, certifier=Certifier())
    return program


def counted(program: Program, graph: Graph, *, smallest: int = 0) -> Counter[tuple[str, str]]:
    """Collectives by kind and phase; those of tensors with fewer than `smallest` elements (weights of norms, biases)
    are left out.
    """
    producers = graph.producers()
    return Counter(
        (step.kind.value, producers[step.result.tensor].phase.value)
        for lane in program.lanes
        for step in lane.steps
        if isinstance(step, Collective) and step.result.type.elements >= smallest
    )


def check(program: Program, graph: Graph, state: dict[str, Tensor]) -> None:
    whole, outputs = run_graph_torch(graph, state), run_in_process(program, state)
    for key, value in whole.items():
        torch.testing.assert_close(outputs[key], value, rtol=1e-12, atol=1e-13)


def megatron(graph: Graph, mesh: str = "tp=2") -> Plan:
    return tensor_parallel(graph, Mesh.parse(mesh), qkv="*.qkv", column="*.up", row="*.proj|*.down")


def test_a_split_vocabulary_reduces_numbers_per_token_and_gathers_nothing(untied_gpt) -> None:
    graph = take_apart(untied_gpt.graph, untied_gpt.graph.select(kind="aten._log_softmax*"))
    plan = transform(megatron(graph), graph.select("head", PRODUCTS, Phase.FORWARD), dim="n", axis="tp")
    plan = transform(plan, graph.select("tokens", "aten.embedding.default", Phase.FORWARD), dim="v", axis="tp")
    program = program_of(plan)
    tokens = 8 * 12
    per_token = [
        graph.producers()[step.result.tensor].phase
        for step in program.lanes[0].steps
        if isinstance(step, Collective) and step.result.type.elements == tokens
    ]
    assert per_token == [Phase.FORWARD] * 3 + [
        Phase.BACKWARD
    ]  # the largest logit, the sum, the target's; the sum of the gradient
    # and one activation for the embedding, one for the gradient of what the head reads, and Megatron's
    assert counted(program, graph, smallest=tokens + 1) == {
        ("all_reduce", "forward"): 1 + 2 * LAYERS,
        ("all_reduce", "backward"): 1 + 2 * LAYERS,
    }
    assert {step.kind for lane in program.lanes for step in lane.steps if hasattr(step, "kind")} >= {
        "sennit.embedding",
        "sennit.embedding_dense_backward",
        "sennit.gather",
        "sennit.scatter",
    }
    widest = max(
        buffer.layout.local_elements()
        for buffer in program.lanes[0].buffers().values()
        if buffer.layout.shape[-1:] == (48,) and len(buffer.layout.shape) > 1
    )
    assert widest == tokens * 48 // 2  # no device ever holds all logits, nor rows as wide as they are
    assert max(untied_gpt.differences(run_in_process(program, untied_gpt.state)).values()) <= 1e-13


def test_sequence_parallelism_gathers_and_scatters(untied_gpt) -> None:
    graph = untied_gpt.graph
    plan = transform(megatron(graph), graph.select(kind="aten.native_layer_norm.default"), dim="i1", axis="tp")
    program = program_of(plan)
    weights = 48 * 32  # nothing larger is a weight's gradient
    found = counted(program, graph, smallest=weights + 1)
    assert found == {
        ("all_gather", "forward"): 2 * LAYERS,
        ("reduce_scatter", "forward"): 2 * LAYERS,
        ("all_gather", "backward"): 2 * LAYERS,
        ("reduce_scatter", "backward"): 2 * LAYERS,
    }
    assert max(untied_gpt.differences(run_in_process(program, untied_gpt.state)).values()) <= 1e-13


def test_a_norm_over_a_split_hidden_dim(untied_gpt) -> None:
    graph = untied_gpt.graph
    graph = take_apart(graph, graph.select("norm", "aten.native_layer_norm*"))
    centred = [
        op for op in graph.ops if op.module == "norm" and op.kind == "aten.sub.Tensor" and op.phase is Phase.FORWARD
    ]
    program = program_of(transform(Plan("hidden", graph, Mesh.parse("tp=2")), centred, dim="i2", axis="tp"))
    rows = 8 * 12
    sums = [
        graph.producers()[step.result.tensor].phase
        for step in program.lanes[0].steps
        if isinstance(step, Collective) and step.result.type.elements == rows
    ]
    # what it reads is whole, so its mean is; the variance is a sum, and so are two means of the backward pass
    assert sums == [Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD]
    assert counted(program, graph)["all_gather", "forward"] == 0
    assert max(untied_gpt.differences(run_in_process(program, untied_gpt.state)).values()) <= 1e-13


def test_attention_over_split_keys(untied_gpt) -> None:
    """Scores split over keys: a largest and a sum per query, and the values' sum; no scores are gathered."""
    graph = take_apart(untied_gpt.graph, untied_gpt.graph.select(kind="aten._softmax*|aten.all.dim"))
    attention = graph.select("*.attention", "aten.bmm.default", Phase.FORWARD)
    plan = transform(Plan("keys", graph, Mesh.parse("cp=2")), attention[0::2], dim="n", axis="cp")
    program = program_of(plan)
    scores = 8 * 4 * 12 * 12
    assert not any(
        step.kind.value == "all_gather" and step.result.type.elements == scores
        for step in program.lanes[0].steps
        if isinstance(step, Collective)
    )
    assert max(untied_gpt.differences(run_in_process(program, untied_gpt.state)).values()) <= 1e-13


def test_attention_over_split_queries(untied_gpt) -> None:
    graph = untied_gpt.graph
    attention = graph.select("*.attention", "aten.bmm.default", Phase.FORWARD)
    program = program_of(transform(Plan("queries", graph, Mesh.parse("cp=2")), attention, dim="m", axis="cp"))
    assert max(untied_gpt.differences(run_in_process(program, untied_gpt.state)).values()) <= 1e-13


class DenseExperts(nn.Module):
    """Every expert on every token, weighted by a gate: the experts are one batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.bmm(x.expand(4, -1, -1), self.up).relu()
        weights = torch.softmax(self.gate(x), -1).T[..., None]
        return (torch.bmm(hidden, self.down) * weights).sum(0).square().mean()


def test_experts_are_split_with_one_reduction_each_way() -> None:
    torch.manual_seed(0)
    model, x = DenseExperts().double(), torch.randn(6, 8, dtype=torch.float64)
    graph = capture(model, (x,))
    plan = Plan("experts", graph, Mesh.parse("ep=2"))
    plan = transform(plan, graph.select(kind="aten.bmm.default", phase=Phase.FORWARD), dim="b", axis="ep")
    program = program_of(plan)
    layouts = {item.path: str(item.buffer.layout) for item in program.lanes[0].inputs}
    assert (layouts["up"], layouts["down"]) == ("[4{ep},8,16]", "[4{ep},16,8]")
    # the sum over experts; the gradient of the gate's softmax is made of pieces of its columns
    assert counted(program, graph, smallest=6 * 8) == {("all_reduce", "forward"): 1}
    state = {path: value.detach() for path, value in model.named_parameters()}
    check(program, graph, {**state, "x": x, "tangent": torch.ones((), dtype=torch.float64)})


# ---- families --------------------------------------------------------------------------------------------------------


@cache
def family(name: str) -> tuple[Graph, dict[str, Tensor]]:
    chosen = families()[name]
    if importlib.util.find_spec(chosen.library) is None:
        pytest.skip(f"{chosen.library} is not installed")
    sample = chosen.build(LAYERS)
    with Float64():
        captured = capture_call(sample.model.train(), (), sample.kwargs, training=True)
    return trained(captured.graph), state_of(captured, sample.model, sample.kwargs, 5, 9)


@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.parametrize(
    ("name", "column", "row", "forward", "backward"),
    [
        ("llama", "*.q_proj|*.k_proj|*.v_proj|*.gate_proj|*.up_proj", "*.o_proj|*.down_proj", 4, 4),
        ("bert", "*.query|*.key|*.value|*.intermediate.dense", "*.attention.output.dense|*.output.dense", 4, 4),
        ("vit", "*.q_proj|*.k_proj|*.v_proj|*.fc1", "*.o_proj|*.fc2", 4, 4),
        # two layers of two and two layers of three; and the gradient of what both decoder layers read from the encoder
        ("t5", "*.q|*.k|*.v|*.wi", "*.o|*.wo", 10, 11),
    ],
)
def test_tensor_parallel_families(name: str, column: str, row: str, forward: int, backward: int) -> None:
    graph, state = family(name)
    plan = Plan("tensor", graph, Mesh.parse("tp=2"))
    plan = transform(plan, graph.select(column, PRODUCTS, Phase.FORWARD), dim="n", axis="tp")
    plan = transform(plan, graph.select(row, PRODUCTS, Phase.FORWARD), dim="k", axis="tp")
    program = program_of(plan)
    found = counted(program, graph, smallest=4 * 8 * 32)
    assert found == {("all_reduce", "forward"): forward, ("all_reduce", "backward"): backward}
    check(program, graph, state)


@pytest.mark.filterwarnings("default")
def test_batch_norm_of_a_split_batch_is_synchronised() -> None:
    graph, state = family("resnet")
    norms = [op for op in graph.ops if "batch_norm" in op.kind]
    apart = take_apart(graph, norms)
    plan = transform(Plan("data", apart, Mesh.parse("dp=2")), data_inputs(apart), dim=0, axis="dp")
    program = program_of(plan)
    found = counted(program, apart)
    layers = sum(op.phase is Phase.FORWARD for op in norms)
    assert found["all_gather", "forward"] == 0
    assert (
        found["all_reduce", "forward"] == 2 * layers + 2
    )  # a mean and a variance each; the loss and the count of targets
    check(program, graph, state)  # against the batch norms as they were
