"""Plans of the zoo that split sequences and experts: what they find in a graph, the collectives that follow, equal to
the serial step.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sennit.capture import capture, capture_call
from sennit.capture.rules.certify import Certifier
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Program
from sennit.plan import Plan, lower, propagate, zoo
from sennit.plan.verify import verify
from sennit.plan.zoo.find import attention_products, norms, pairs_of_products
from sennit.run import run_in_process
from sennit.testing.eager_torch import Float64
from sennit.testing.families_torch import families
from sennit.testing.family_plans import splits
from sennit.testing.graph_torch import run_graph_torch
from sennit.testing.parity_torch import state_of
from sennit.testing.random_plans import trained

LAYERS = 2
STREAM = 4 * 8 * 32  # samples, positions, width of the families


@cache
def family(name: str) -> tuple[Graph, dict[str, Tensor]]:
    chosen = families()[name]
    if importlib.util.find_spec(chosen.library) is None:
        pytest.skip(f"{chosen.library} is not installed")
    sample = chosen.build(LAYERS)
    with Float64():
        captured = capture_call(sample.model.train(), (), sample.kwargs, training=True)
    return trained(captured.graph), state_of(captured, sample.model, sample.kwargs, 5, 9)


def program_of(plan: Plan) -> Program:
    program = lower(propagate(plan))
    verify(program, plan.graph, certifier=Certifier())
    return program


def counted(program: Program, graph: Graph, *, of: int) -> Counter[tuple[str, str]]:
    """Collectives of tensors that are no weights' gradients, with `of` elements, by kind and phase."""
    producers = graph.producers()
    gradients = {output.name for output in graph.outputs}
    views = {name for output in gradients for name in _behind(producers, output)}
    return Counter(
        (step.kind.value, producers[step.result.tensor].phase.value)
        for step in program.lanes[0].steps
        if isinstance(step, Collective) and step.result.type.elements == of and step.result.tensor not in views
    )


def _behind(producers, name: str) -> set[str]:
    """A value, and what it is a view of."""
    found = {name}
    while name in producers and producers[name].kind in ("aten.permute.default", "aten.view.default"):
        name = producers[name].reads[0]
        found.add(name)
    return found


def check(program: Program, graph: Graph, state: dict[str, Tensor]) -> None:
    whole, outputs = run_graph_torch(graph, state), run_in_process(program, state)
    for key, value in whole.items():
        torch.testing.assert_close(outputs[key], value, rtol=1e-12, atol=1e-13)


# ---- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["gpt2", "llama", "swin"])
def test_the_pairs_of_products_are_those_that_people_name(name: str) -> None:
    graph, _ = family(name)
    split = splits()[name]
    found = pairs_of_products(graph)
    products = "aten.mm.default|aten.addmm.default"
    fused = graph.select(split.qkv, products) if split.qkv else ()
    forward = {op.name for op in graph.ops if op.phase.value == "forward"}
    named = {op.name for op in (*graph.select(split.column, products), *fused)} & forward
    assert {op.name for op in found.columns} == named
    assert {op.name for op in found.rows} == {op.name for op in graph.select(split.row, products)} & forward
    assert {found.chunks[op.name] for op in fused if op.name in forward} <= {3}
    assert {found.chunks[op.name] for op in found.columns} - {1, 3} == set()


@pytest.mark.filterwarnings("default")
def test_a_router_and_a_head_are_left_whole() -> None:
    graph, _ = family("mixtral batch")
    found = pairs_of_products(graph)
    modules = {op.module.rsplit(".", 1)[-1] for op in (*found.columns, *found.rows)}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(attention_products(graph)) == 2 * LAYERS  # not those of the experts
    assert len(norms(graph)) == 2 * LAYERS + 1


def test_a_model_without_branches_is_told_so() -> None:
    graph = capture(Norms(), (torch.randn(2, 4, 6),))
    with pytest.raises(PlanError, match=r"no pair of products opens and closes a branch[\s\S]*column=..., row=..."):
        zoo.tensor_parallel(graph, Mesh.parse("tp=2"))
    with pytest.raises(PlanError, match=r"no batched product with the weights of experts"):
        zoo.expert_parallel(graph, Mesh.parse("ep=2"))
    with pytest.raises(PlanError, match=r"only some of the products are named"):
        zoo.tensor_parallel(graph, Mesh.parse("tp=2"), column="*")


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).square().mean()


# ---- what follows ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tensor_and_sequence_parallel(name: str) -> None:
    """Two gathers and two scatters a layer, each way; with dropout between them, and with norms that are written out."""
    graph, state = family(name)
    program = program_of(zoo.tensor_parallel(graph, Mesh.parse("tp=2"), sequence=True))
    assert counted(program, graph, of=STREAM) == {
        ("all_gather", "forward"): 2 * LAYERS,
        ("reduce_scatter", "forward"): 2 * LAYERS,
        ("all_gather", "backward"): 2 * LAYERS,
        ("reduce_scatter", "backward"): 2 * LAYERS,
    }
    check(program, graph, state)


@pytest.mark.filterwarnings("default")
def test_context_parallel_gathers_keys_and_values() -> None:
    graph, state = family("gpt2")
    program = program_of(zoo.context_parallel(graph, Mesh.parse("cp=2")))
    assert counted(program, graph, of=STREAM) == {
        ("all_gather", "forward"): 2 * LAYERS,
        ("reduce_scatter", "backward"): 2 * LAYERS,
    }
    producers = graph.producers()
    scores = [
        buffer.layout.local_elements()
        for buffer in program.lanes[0].buffers().values()
        if buffer.tensor in producers and "softmax" in producers[buffer.tensor].kind and len(buffer.layout.shape) == 4
    ]
    assert scores == [4 * 4 * 8 * 8 // 2] * 2 * LAYERS  # of own queries and all keys, forward and backward
    check(program, graph, state)


@pytest.mark.filterwarnings("default")
def test_gradients_of_keys_return_to_their_positions() -> None:
    """Rotations of positions stand between the gradient and the product: the factor is whole, and the gradient is
    scattered all the same.
    """
    graph, state = family("llama")
    program = program_of(zoo.context_parallel(graph, Mesh.parse("cp=2")))
    keys = 4 * 2 * 8 * 8  # samples, heads of keys, positions, width of a head
    assert counted(program, graph, of=keys) == {("reduce_scatter", "backward"): 2 * LAYERS}
    assert counted(program, graph, of=STREAM) == {("all_gather", "forward"): 2 * LAYERS}
    check(program, graph, state)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2"])
def test_expert_parallel_dispatches_and_combines_once_each_way(mesh: str) -> None:
    graph, state = family("mixtral batch")
    program = program_of(zoo.expert_parallel(graph, Mesh.parse(mesh)))
    assert counted(program, graph, of=STREAM) == {
        ("all_gather", "forward"): LAYERS,
        ("reduce_scatter", "forward"): LAYERS,
        ("all_gather", "backward"): LAYERS,
        ("reduce_scatter", "backward"): LAYERS,
    }
    layouts = {item.path: str(item.buffer.layout) for item in program.lanes[0].inputs}
    assert layouts["model.layers.0.mlp.experts.down_proj"] == "[4{ep},32,24]"
    check(program, graph, state)
