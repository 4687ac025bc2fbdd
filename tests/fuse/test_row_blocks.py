"""Products in blocks of rows: the blocks tile the rows, and what is found in a graph is a product whose rows are the
gradient's.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.capture import capture
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.fuse.bounds import structural
from sennit.fuse.bucket_search import judged, solve_buckets
from sennit.fuse.clock import Sharing
from sennit.fuse.gradient_order import gradients_first
from sennit.fuse.model import Channel, Grouping, KernelOrder, StepModel
from sennit.fuse.products_torch import RowBlocks
from sennit.fuse.profile_torch import MeasuredCost, measure_blocks
from sennit.fuse.program_torch import StepProgram
from sennit.fuse.row_blocks import RowProduct, block_ends, blocks, ready_fractions, row_products
from sennit.fuse.row_uses import row_uses
from sennit.fuse.search_options import SearchOptions
from sennit.ir.graph import Graph
from sennit.ir.strategy import Bucket, Part, Strategy, WaitAt


@pytest.fixture(scope="module")
def graph() -> Graph:
    config = GPTConfig(vocabulary=16, context=8, width=8, heads=2, layers=2, tie_embeddings=False)
    return gradients_first(capture(GPT(config), random_batch(config, 2, seed=0)))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[RowProduct, list[tuple[int, int]]]:
    rows, width = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    inside = draw(st.sets(st.integers(1, max(1, rows * width - 1)), max_size=5))
    ends = sorted({0, *(cut for cut in inside if cut < rows * width), rows * width})
    return RowProduct("mm", "left", "right", (), rows, width), draw(st.permutations(list(pairwise(ends))))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(cuts())
def test_blocks_tile_the_rows_and_give_the_product(case: tuple[RowProduct, list[tuple[int, int]]]) -> None:
    product, spans = case
    found = blocks(spans, product)
    assert sorted(row for start, stop in found for row in range(start, stop)) == list(range(product.rows))
    left, right = torch.randn(5, product.rows).T, torch.randn(5, product.width)
    made = RowBlocks(found, product.width)
    whole = torch.full((product.rows * product.width,), torch.nan)
    for start, block in made(left, right):
        whole[start : start + block.numel()] = block.reshape(-1)
    assert torch.equal(whole.view(product.rows, product.width), torch.mm(left, right))
    elements, ready = np.zeros(product.rows * product.width, bool), dict[tuple[int, int], float]()
    for start, stop, done in block_ends(spans, product):
        elements[start * product.width : stop * product.width] = True
        for span in spans:
            if span not in ready and elements[slice(*span)].all():
                ready[span] = done
    assert ready_fractions(spans, product) == ready
    assert max(ready.values()) == 1.0


def test_products_that_make_gradients_are_found(graph: Graph) -> None:
    found = row_products(graph)
    types = graph.types()
    assert {"head.weight", "blocks.0.up.weight", "blocks.1.attention.qkv.weight"} <= set(found)
    assert not any("norm" in path or "embed" in path or path.endswith("bias") for path in found)
    for output in graph.outputs:
        if (product := found.get(output.path)) is not None:
            assert types[output.name].shape == (product.rows, product.width)


def test_a_cut_product_is_written_in_blocks_and_its_views_are_not(graph: Graph) -> None:
    count = row_products(graph)["head.weight"].rows * row_products(graph)["head.weight"].width
    head = [Bucket((Part("head.weight", span),)) for span in ((0, count // 2), (count // 2, count))]
    others = [output.path for output in graph.outputs if output.path not in ("", "head.weight")]
    strategy = Strategy("cut", (), (*head, Bucket(tuple(map(Part, others)))))
    source = StepProgram(graph, strategy, torch.device("cpu")).source
    assert source.count("product('head.weight', rows_head_weight, ") == 1
    assert "gradient('head.weight'" not in source
    assert source.count("gradient(") + source.count("product('") == len(others) + 1
    assert {path for path in row_products(graph) if f"product({path!r}" not in source} == set()


def test_the_clock_lets_a_bucket_leave_with_its_block(graph: Graph) -> None:
    cost = MeasuredCost({op.name: 1.0 if op.kind == "aten.mm.default" else 1e-3 for op in graph.ops})
    channel = Channel(1e-3, 0.01, sharing=Sharing())
    whole, rows = (StepModel(graph, cost, channel, found) for found in ({}, row_products(graph)))
    for across in (False, True):
        times = []
        for model in (whole, rows):
            order = model.order(Grouping())
            assert order is not None
            seconds = model.kernel_seconds(order, Grouping())
            buckets, length = solve_buckets(model, order, seconds, SearchOptions(across_steps=across))
            kernels = KernelOrder(model, order, seconds)
            assert length == judged(kernels, buckets)
            assert length >= structural(kernels) * (1 - 1e-9)
            times.append(length)
        assert times[1] <= times[0] * (1 + 1e-9)


def test_the_clock_counts_what_blocks_cost(graph: Graph) -> None:
    cost = MeasuredCost({op.name: 1.0 for op in graph.ops})
    made, uses = row_products(graph), row_uses(graph)
    rows = made["head.weight"]
    per_block = {rows.product: 0.25, uses["head.weight"].product: 0.5}
    head = [Part("head.weight", (start * rows.width, (start + 4) * rows.width)) for start in range(0, rows.rows, 4)]
    assert len(head) == 4
    others = [output.path for output in graph.outputs if output.path not in ("", "head.weight")]
    buckets = [*(Bucket((part,), WaitAt.NEXT) for part in head), Bucket(tuple(map(Part, others)))]
    lengths = []
    for extra in ({}, per_block):
        model = StepModel(graph, cost, Channel(0.0, 0.0), made, uses=uses, per_block=extra)
        order = model.order(Grouping())
        assert order is not None
        kernels = KernelOrder(model, order, model.kernel_seconds(order, Grouping()))
        lengths.append(kernels.timing(buckets).kernels)
    assert sum(lengths[1]) - sum(lengths[0]) == pytest.approx((len(head) - 1) * (0.25 + 0.5))
    assert all(after >= before for before, after in zip(*lengths, strict=True))


def test_the_clock_counts_what_a_cut_inside_a_row_costs(graph: Graph) -> None:
    cost, made = MeasuredCost({op.name: 1.0 for op in graph.ops}), row_products(graph)
    rows = made["head.weight"]
    count = rows.rows * rows.width
    others = Bucket(tuple(Part(output.path) for output in graph.outputs if output.path not in ("", "head.weight")))
    model = StepModel(graph, cost, Channel(0.0, 0.0, copy_per_byte=0.5), made)
    order = model.order(Grouping())
    assert order is not None
    kernels = KernelOrder(model, order, model.kernel_seconds(order, Grouping()))
    ready, spent = [], []
    for cut in (count // 2, count // 2 + 1):
        halves = [Bucket((Part("head.weight", span),)) for span in ((cut, count), (0, cut))]  # the second goes first
        timing = kernels.timing([*halves, others])
        ready.append([bucket.ready for bucket in timing.buckets[:2]])
        spent.append(sum(timing.kernels))
    assert ready[0][0] < ready[0][1]
    assert ready[1][0] == ready[1][1], "the row in which it begins is made with the first half"
    assert spent[1] - spent[0] == pytest.approx(0.5 * model.bytes["head.weight"]), "and all of it is copied"


def test_blocks_of_products_are_timed_on_a_models_own_values() -> None:
    config = GPTConfig(vocabulary=64, context=16, width=32, heads=4, layers=1)
    model, batch = GPT(config), random_batch(config, 4)
    captured = gradients_first(capture(model, batch))
    made, uses = row_products(captured), row_uses(captured)
    rows, columns = ({item.product for item in found.values()} for found in (made, uses))
    sample = dict(zip(("tokens", "targets"), batch, strict=True))
    found = measure_blocks(captured, model, sample, rows, columns)
    assert found.keys() <= rows | columns
    assert all(seconds >= 0.0 for seconds in found.values())
