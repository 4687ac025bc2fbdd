"""Weights that are read and updated in blocks of rows: which, in what order, and with the bits of the whole."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sennit.capture import capture
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.fuse.bounds import structural
from sennit.fuse.bucket_search import judged, solve_buckets
from sennit.fuse.gradient_order import gradients_first
from sennit.fuse.model import Channel, Grouping, KernelOrder, StepModel
from sennit.fuse.products_torch import ReadInBlocks
from sennit.fuse.profile_torch import MeasuredCost
from sennit.fuse.program_torch import StepProgram
from sennit.fuse.row_blocks import row_products
from sennit.fuse.row_uses import RowUse, UseBlock, row_uses, use_blocks
from sennit.fuse.search_options import SearchOptions
from sennit.fuse.update_torch import BY_ELEMENT, DeferredStep
from sennit.ir.graph import Graph, OutputKind
from sennit.ir.strategy import Bucket, Part, Strategy, WaitAt


def graph_of(*, tied: bool) -> Graph:
    config = GPTConfig(vocabulary=16, context=8, width=8, heads=2, layers=2, tie_embeddings=tied)
    return gradients_first(capture(GPT(config), random_batch(config, 2, seed=0)))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(tied=False)


def test_weights_of_linear_layers_are_found(graph: Graph) -> None:
    found = row_uses(graph)
    assert {"head.weight", "blocks.0.up.weight", "blocks.1.attention.qkv.weight"} <= set(found)
    assert not any("norm" in path or "embed" in path or path.endswith("bias") for path in found)
    ops = {op.name: op for op in graph.ops}
    for use in found.values():
        assert ops[use.product].kind in ("aten.mm.default", "aten.addmm.default")


def test_a_table_that_is_looked_up_first_is_not_one_of_them() -> None:
    assert "tokens.weight" not in row_uses(graph_of(tied=True))


def test_blocks_come_in_the_order_of_the_buckets() -> None:
    use = RowUse("product", "x", "w", None, rows=6, width=4)

    def found(*parts: tuple[tuple[int, int] | None, WaitAt], alone: str = "product") -> tuple[UseBlock, ...] | None:
        buckets = [Bucket((Part("w", span),), wait) for span, wait in parts]
        return use_blocks(buckets, {"w": use}, {alone}).get("w")

    late = WaitAt.NEXT
    assert found(((8, 24), late), ((0, 8), late)) == (UseBlock(2, 6, 0), UseBlock(0, 2, 1))
    assert found(((9, 24), late), ((0, 9), late)) is None  # inside a row
    assert found(((8, 24), late), ((0, 8), WaitAt.STEP)) is None  # updated when the step ends
    assert found((None, late)) is None
    assert found(((8, 24), late), ((0, 8), late), alone="another") is None


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(2, 70), st.integers(1, 40), st.booleans(), st.data())
def test_a_product_in_blocks_waits_for_each_and_has_the_same_bits(
    batch: int, rows: int, width: int, has_bias: bool, data: st.DataObject
) -> None:
    ends = sorted({0, rows, *data.draw(st.sets(st.integers(1, rows), max_size=4))})
    spans = data.draw(st.permutations(list(pairwise(ends))))
    blocks = tuple(UseBlock(start, stop, number) for number, (start, stop) in enumerate(spans))
    x, bias = torch.randn(batch, width), torch.randn(rows) if has_bias else None
    expected, weight = torch.randn(rows, width), torch.full((rows, width), torch.nan)
    settled: list[int] = []

    def settle(number: int) -> None:
        if number not in settled:
            start, stop = spans[number]
            weight[start:stop] = expected[start:stop]
            settled.append(number)

    product = ReadInBlocks(blocks)
    for _ in range(2):  # the first call compares, the second has blocks where they are the same
        settled.clear()
        weight.fill_(torch.nan)
        made = product(settle, x, weight, bias)
        assert settled == list(range(len(spans)))
        whole = torch.mm(x, expected.t()) if bias is None else torch.addmm(bias, x, expected.t())
        assert torch.equal(made, whole)


def test_a_cut_weight_is_read_in_blocks_and_waited_for_there(graph: Graph) -> None:
    uses = row_uses(graph)
    head = uses["head.weight"]
    cut = 5 * head.width
    spans = [Part("head.weight", span) for span in ((cut, head.rows * head.width), (0, cut))]
    others = [output.path for output in graph.outputs if output.kind is OutputKind.GRADIENT]
    others.remove("head.weight")
    buckets = [*(Bucket((part,), WaitAt.NEXT) for part in spans), Bucket(tuple(map(Part, others)), WaitAt.NEXT)]
    source = StepProgram(graph, Strategy("cut", (), tuple(buckets)), torch.device("cpu"), uses=uses).source
    assert source.count("reads_head_weight(settle, ") == 1
    assert [number for number in range(3) if f"settle({number})" in source] == [2]


def test_the_clock_waits_for_blocks_where_they_are_read(graph: Graph) -> None:
    cost = MeasuredCost({op.name: 1.0 if "mm" in op.kind else 1e-3 for op in graph.ops})
    channel, made = Channel(1e-3, 0.02), row_products(graph)
    times = []
    for uses in ({}, row_uses(graph)):
        model = StepModel(graph, cost, channel, made, uses=uses)
        order = model.order(Grouping())
        assert order is not None
        seconds = model.kernel_seconds(order, Grouping())
        buckets, length = solve_buckets(model, order, seconds, SearchOptions(across_steps=True))
        kernels = KernelOrder(model, order, seconds)
        assert length == judged(kernels, buckets)
        assert length >= structural(kernels) * (1 - 1e-9)
        times.append(length)
    assert times[1] <= times[0] * (1 + 1e-9)


OPTIMIZERS = [
    pytest.param(kind, more, id=f"{kind.__name__} {', '.join(more)}".strip())
    for kind in sorted(BY_ELEMENT, key=lambda kind: kind.__name__)
    for more in ({}, {"weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}, {"amsgrad": True})
    if more.keys() <= inspect.signature(kind).parameters.keys()
]


@pytest.mark.parametrize(("kind", "more"), OPTIMIZERS)
def test_rows_are_updated_as_the_whole_is(kind: type[torch.optim.Optimizer], more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    start = torch.randn(37, 13)
    whole, parts = (torch.nn.Parameter(start.clone()) for _ in range(2))
    plain, deferred = kind([whole], lr=0.01, **more), kind([parts], lr=0.01, **more)
    step = DeferredStep(deferred)
    assert step.is_by_element
    for turn in range(4):
        gradient = torch.randn(37, 13)
        whole.grad = gradient.clone()
        plain.step()
        step.ask({id(parts)})
        cuts = [slice(20, 37), slice(0, 7), slice(7, 20)]
        if step.has_state(parts):
            for number, rows in enumerate(cuts):
                step.update_rows(parts, rows, gradient[rows].reshape(-1), is_last=number == len(cuts) - 1)
        else:
            assert turn == 0
            parts.grad = gradient.clone()
            step.update([parts])
        assert torch.equal(whole, parts)
        assert list(deferred.state) == [parts] or not deferred.state
        for key, value in plain.state[whole].items():
            other = deferred.state[parts][key]
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other


def test_an_optimizer_of_somebody_else_gets_its_parameters_whole() -> None:
    class Other(torch.optim.SGD):
        pass

    assert not DeferredStep(Other([torch.nn.Parameter(torch.zeros(2))], lr=0.1)).is_by_element
