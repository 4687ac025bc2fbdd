"""Tables of which rows travel: found in graphs, counted by the clock."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sennit.capture import capture
from sennit.fuse.gradient_order import gradients_first
from sennit.fuse.looked_up import ROWS, looked_up, parameter_of, rows_apart
from sennit.fuse.model import Channel, StepModel
from sennit.fuse.profile_torch import MeasuredCost
from sennit.fuse.row_blocks import row_products
from sennit.ir.graph import Graph, OutputKind, Phase
from sennit.ir.strategy import Bucket, Part, Reduce


class Words(nn.Module):
    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(128, 4), nn.Linear(4, 128, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.tokens(tokens))), targets)


def captured(*, is_tied: bool, count: int = 8) -> Graph:
    tokens = torch.arange(count)
    return capture(Words(is_tied=is_tied), (tokens, tokens))


def gradients(graph: Graph) -> list[str]:
    return [output.path for output in graph.outputs if output.kind is OutputKind.GRADIENT]


def test_a_table_of_its_own_is_packed_where_few_rows_are_named() -> None:
    graph = captured(is_tied=False)
    assert rows_apart(graph, 2) is graph
    found = looked_up(graph, 2)
    assert list(found) == ["tokens.weight"]
    item = found["tokens.weight"]
    assert (item.count, item.rows, item.width, item.most, item.elements) == (8, 128, 4, 16, 64)
    assert looked_up(graph, 8)["tokens.weight"].most == 64
    assert looked_up(graph, 9) == {}  # more than half of the table
    assert looked_up(graph, 1) == {}  # nothing travels


def test_a_table_that_is_the_head_too_has_two_gradients() -> None:
    graph = captured(is_tied=True)
    assert looked_up(graph, 2) == {}
    apart = rows_apart(graph, 2)
    assert gradients(graph) == ["tokens.weight"]
    assert gradients(apart) == ["tokens.weight", "tokens.weight" + ROWS]
    assert parameter_of(gradients(apart)[1]) == "tokens.weight"
    assert looked_up(apart, 2)["tokens.weight" + ROWS].most == 16
    assert looked_up(rows_apart(graph, 8), 8)["tokens.weight" + ROWS].most == 64
    assert rows_apart(graph, 9) is graph  # more than half of the table


def test_a_head_does_not_carry_the_rows_that_travel_packed() -> None:
    graph = rows_apart(captured(is_tied=True), 2)
    cost = MeasuredCost({op.name: 1e-3 for op in graph.ops})
    model = StepModel(graph, cost, Channel(0.0, 1e-6), packed=looked_up(graph, 2))
    table, rows, half = 128 * 4 * 4, 16 * 4 * 4, Part("tokens.weight", (0, 256))
    assert model.carried(Bucket((Part("tokens.weight"),))) == table - rows
    assert model.carried(Bucket((half,))) == (table - rows) // 2
    assert model.carried(Bucket((half,)), cut={"tokens.weight", "tokens.weight" + ROWS}) == table // 2
    assert model.carried(Bucket((Part("tokens.weight", (0, 255)),))) == 255 * 4, "cut inside a row"
    assert model.carried(Bucket((half,), reduce=Reduce.REDUCE_SCATTER)) == table // 2
    assert model.updated(Bucket((half, Part("tokens.weight" + ROWS)))) == table // 2


def test_a_head_is_made_before_the_rest_and_in_blocks_though_the_look_up_adds_to_it() -> None:
    graph = gradients_first(rows_apart(captured(is_tied=True), 2))
    product = row_products(graph)["tokens.weight"]
    names = [op.name for op in graph.ops]
    others = [op.name for op in graph.ops if op.kind == "aten.mm.default" and op.name != product.product]
    backward = [name for name in others if graph.ops[names.index(name)].phase is Phase.BACKWARD]
    assert all(names.index(product.product) < names.index(name) for name in backward)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_clock_counts_what_travels(is_tied: bool) -> None:
    graph = rows_apart(captured(is_tied=is_tied), 2)
    cost = MeasuredCost({op.name: 1e-3 for op in graph.ops})
    model = StepModel(graph, cost, Channel(0.0, 1e-6), packed=looked_up(graph, 2))
    path = "tokens.weight" + (ROWS if is_tied else "")
    assert model.carried(Bucket((Part(path),))) == 16 * 4 * 4
    assert model.carried(Bucket((Part(path, (0, 256)),))) == 256 * 4  # what is cut travels as it is
    assert model.updated(Bucket((Part("tokens.weight"),))) == 128 * 4 * 4
    assert model.first_use[path] == model.first_use["tokens.weight"]
