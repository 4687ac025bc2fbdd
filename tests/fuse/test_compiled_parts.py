"""What a compiler is foretold to make of a group."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import load
from sennit.fuse.compiled_cost import Compiled
from sennit.fuse.compiled_parts import Part, Sort, parts_of
from sennit.fuse.kernel_cost import Roofline, Staged, added_to, called, copies_bias
from sennit.fuse.kernel_set import KernelSet, Limits
from sennit.fuse.model import Channel, Grouping, StepModel
from sennit.fuse.moves import fused_greedily
from sennit.fuse.operator_class import moves_nothing
from sennit.fuse.signature import signature
from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel


def group(inputs: str, body: str, *results: str) -> Graph:
    lines = [f'  input %{name} : {kind} "{name}"' for name, kind in (item.split(":") for item in inputs.split())]
    lines += [f"  forward {line.strip()}" for line in body.strip().splitlines()]
    lines += [f'  result "{name}" %{name}' for name in results]
    return Graph.parse("\n".join(['graph "group" {', *lines, "}"]))


def parts(graph: Graph) -> tuple[Part, ...]:
    return parts_of(Kernel(graph.ops), frozenset(output.name for output in graph.outputs), graph.types())


def test_a_softmax_and_what_is_pointwise_around_it_are_one_part() -> None:
    graph = group(
        "x:bf16[96,512,512] m:bf16[8,1,512,512]",
        """%v : bf16[8,12,512,512] = aten.view.default(%x, [8, 12, 512, 512])
        %s : bf16[8,12,512,512] = aten.mul.Tensor(%v, 0.125)
        %a : bf16[8,12,512,512] = aten.add.Tensor(%s, %m)
        %p : bf16[8,12,512,512] = aten._softmax.default(%a, -1, false)
        %d : bf16[8,12,512,512] = aten.mul.Tensor(%p, 1.1)""",
        "d",
    )
    (part,) = parts(graph)
    full, mask = 96 * 512 * 512 * 2, 8 * 512 * 512 * 2
    assert (part.sort, part.launches, part.outer) == (Sort.ROW, 1, 96 * 512)
    assert (part.read, part.written) == (full + mask, full)
    assert part.stored == {"d"}


def test_a_product_stands_between_what_it_reads_and_what_reads_it() -> None:
    graph = group(
        "x:bf16[512,1024] w:bf16[1024,2048] b:bf16[2048]",
        """%h : bf16[512,1024] = aten.mul.Tensor(%x, 0.5)
        %y : bf16[512,2048] = aten.mm.default(%h, %w)
        %c : bf16[512,2048] = aten.add.Tensor(%y, %b)
        %g : bf16[512,2048] = aten.gelu.default(%c)""",
        "g",
    )
    before, product, behind = parts(graph)
    assert [part.sort for part in (before, product, behind)] == [Sort.POINT, Sort.LIBRARY, Sort.POINT]
    assert before.stored == {"h"}
    assert behind.ops == {"c", "g"}


def test_what_a_pointwise_part_makes_for_a_convolution_is_written_out_of_order() -> None:
    body = """%r : bf16[8,64,32,32] = aten.relu.default(%x)
        %y : bf16[8,64,32,32] = aten.convolution.default(%r, %w, none, [1, 1], [1, 1], [1, 1], false, [0, 0], 1)"""
    fused = group("x:bf16[8,64,32,32] w:bf16[64,64,3,3]", body, "y")
    before, _ = parts(fused)
    assert (before.sort, before.reordered) == (Sort.POINT, 8 * 64 * 32 * 32)
    (alone,) = parts(group("x:bf16[8,64,32,32]", body.splitlines()[0], "r"))
    assert alone.reordered == 0
    device = load("h200x8").device
    split = Compiled(Staged.of(fused, device)).split(Kernel(fused.ops), frozenset("y"))
    assert split.seconds - split.library > 5e-6  # 13 ps an element, where 0.5 M elements pass the memory in 1 us


@pytest.mark.parametrize(
    ("mask", "contiguous"),
    [("8,12,512,512", True), ("512", True), ("1,12,512,512", True), ("8,12,512,1", True), ("8,1,512,512", False)],
)
def test_rows_are_contiguous_where_no_dim_is_broadcast_between_others(mask: str, contiguous: bool) -> None:
    graph = group(
        f"x:bf16[8,12,512,512] m:bf16[{mask}]",
        """%a : bf16[8,12,512,512] = aten.add.Tensor(%x, %m)
        %p : bf16[8,12,512,512] = aten._softmax.default(%a, -1, false)""",
        "p",
    )
    (part,) = parts(graph)
    assert part.contiguous is contiguous


def test_what_is_transposed_is_not_contiguous() -> None:
    graph = group(
        "x:f32[64,512]",
        """%t : f32[512,64] = aten.permute.default(%x, [1, 0])
        %p : f32[512,64] = aten._softmax.default(%t, -1, false)""",
        "p",
    )
    (part,) = parts(graph)
    assert not part.contiguous


_LINEAR = """%t : f32[64,256] = aten.permute.default(%w, [1, 0])
        %y : f32[32,256] = aten.addmm.default(%b, %x, %t)
        %v : f32[4,8,256] = aten.view.default(%y, [4, 8, 256])
        %g : f32[4,8,256] = aten.gelu.default(%v)"""


@pytest.mark.parametrize(("written", "kind"), [("g", "mm"), ("v g", "addmm"), ("y g", "addmm")])
def test_a_product_is_called_with_its_views_and_without_a_bias_that_its_readers_add(written: str, kind: str) -> None:
    graph = group("x:f32[32,64] w:f32[256,64] b:f32[256]", _LINEAR, *written.split())
    product = graph.ops[1]
    found = called(product, Kernel(graph.ops), frozenset(written.split()), graph.types())
    assert [op.kind for op in found.body] == ["aten.permute.default", f"aten.{kind}.default"]
    assert found.reads == (("w", "x") if kind == "mm" else ("w", "b", "x"))


def test_a_bias_stays_with_its_product_in_half_precision() -> None:
    graph = group("x:bf16[32,64] w:bf16[256,64] b:bf16[256]", _LINEAR.replace("f32", "bf16"), "g")
    found = called(graph.ops[1], Kernel(graph.ops), frozenset("g"), graph.types())
    assert found.body[-1].kind == "aten.addmm.default"


@pytest.mark.parametrize(("width", "written", "copies"), [(2600, "g", True), (2600, "y g", False), (2560, "g", False)])
def test_a_bias_is_copied_where_rows_have_gaps(width: int, written: str, copies: bool) -> None:
    body = f"""%y : bf16[32,{width}] = aten.addmm.default(%b, %x, %w)
        %g : bf16[32,{width}] = aten.gelu.default(%y)"""
    graph = group(f"x:bf16[32,64] w:bf16[64,{width}] b:bf16[{width}]", body, *written.split())
    kernel, wanted, types = Kernel(graph.ops), frozenset(written.split()), graph.types()
    assert copies_bias(graph.ops[0], kernel, wanted, types) is copies
    assert called(graph.ops[0], kernel, wanted, types).body[-1].kind == f"aten.{'mm' if copies else 'addmm'}.default"


_SUM = """%m : f32[32,256] = aten.mm.default(%x, %w)
        %t : f32[256,32] = aten.permute.default(%m, [1, 0])
        %u : f32[32,256] = aten.permute.default(%t, [1, 0])
        %s : f32[32,256] = aten.add.Tensor(%z, %u)
        %r : f32[32,256] = aten.relu.default(%s)"""


@pytest.mark.parametrize(("written", "together"), [("s r", True), ("r", False), ("m s r", False), ("t s r", False)])
def test_a_sum_that_is_handed_out_is_made_with_its_product(written: str, together: bool) -> None:
    graph = group("x:f32[32,64] w:f32[64,256] z:f32[32,256]", _SUM, *written.split())
    kernel, wanted, types = Kernel(graph.ops), frozenset(written.split()), graph.types()
    total = added_to(graph.ops[0], kernel, wanted, types)
    assert (total is not None and total.name == "s") is together
    assert (called(graph.ops[0], kernel, wanted, types).body[-1].kind == "aten.addmm.default") is together
    library = next(part for part in parts(graph) if part.sort is Sort.LIBRARY)
    assert ("s" in library.ops) is together


def test_of_two_products_that_are_added_the_first_takes_the_second() -> None:
    body = """%m : f32[32,256] = aten.mm.default(%x, %w)
        %n : f32[32,256] = aten.mm.default(%y, %w)
        %s : f32[32,256] = aten.add.Tensor(%n, %m)"""
    graph = group("x:f32[32,64] y:f32[32,64] w:f32[64,256]", body, "s")
    kernel, types = Kernel(graph.ops), graph.types()
    assert [added_to(op, kernel, frozenset("s"), types) for op in graph.ops] == [None, graph.ops[2], None]
    staged = Staged.of(graph, load("h200x8").device)
    key = signature(called(graph.ops[1], kernel, frozenset("s"), types), frozenset("n"), types)
    assert Compiled(staged.with_measured({key: 1e-3})).split(kernel, frozenset("s")).seconds > 1e-3


def test_a_product_takes_what_it_took_as_it_is_called() -> None:
    graph = group("x:f32[32,64] w:f32[256,64] b:f32[256]", _LINEAR, "g")
    kernel, written, types = Kernel(graph.ops), frozenset("g"), graph.types()
    product, results = graph.ops[1], frozenset("y")
    plain = Staged.of(graph, load("h200x8").device)
    alone = plain.with_measured({signature(Kernel((product,)), results, types): 1e-3})
    assert alone.inside(product, kernel, written) == 1e-3
    key = signature(called(product, kernel, written, types), results, types)
    both = plain.with_measured({signature(Kernel((product,)), results, types): 1e-3, key: 2e-3})
    assert both.inside(product, kernel, written) == 2e-3
    assert Compiled(both).split(kernel, written).library == 2e-3
    assert plain.inside(product, kernel, written) == plain.alone(product)


def test_sums_of_few_columns_are_split_and_those_of_many_are_not() -> None:
    few = group("x:f32[4096,768]", "%s : f32[1,768] = aten.sum.dim_IntList(%x, [0], true)", "s")
    many = group("x:f32[64,16384]", "%s : f32[1,16384] = aten.sum.dim_IntList(%x, [0], true)", "s")
    assert [(part.sort, part.launches) for part in parts(few)] == [(Sort.COLUMN, 2)]
    assert [(part.sort, part.launches) for part in parts(many)] == [(Sort.COLUMN, 1)]


def test_sums_of_rows_and_of_columns_are_two_parts() -> None:
    graph = group(
        "x:f32[4096,768]",
        """%e : f32[4096,768] = aten.exp.default(%x)
        %r : f32[4096,1] = aten.sum.dim_IntList(%e, [-1], true)
        %c : f32[1,768] = aten.sum.dim_IntList(%e, [0], true)""",
        "r",
        "c",
    )
    assert sorted(part.sort for part in parts(graph)) == [Sort.ROW, Sort.COLUMN]


def test_a_norm_backward_reduces_over_columns_beside_its_rows() -> None:
    graph = group(
        "g:bf16[8,512,768] x:bf16[8,512,768] mean:f32[8,512,1] rstd:f32[8,512,1] w:bf16[768] b:bf16[768]",
        """%d : bf16[8,512,768], %dw : bf16[768], %db : bf16[768] = aten.native_layer_norm_backward.default(%g, %x, [768], %mean, %rstd, %w, %b, [true, true, true])
        %m : bf16[8,512,768] = aten.mul.Tensor(%d, 2.0)""",
        "m",
        "dw",
        "db",
    )
    rows, columns = parts(graph)
    assert (rows.sort, rows.outer, rows.ops) == (Sort.ROW, 4096, {"d", "m"})
    assert (columns.sort, columns.outer, columns.launches) == (Sort.COLUMN, 768, 3)  # partial sums; weights; bias


@pytest.mark.parametrize(("results", "reads"), [(("d", "dw"), 3), (("d", "dw", "g"), 2)])
def test_sums_of_a_norm_compute_again_what_is_in_front_and_not_handed_out(results: tuple[str, ...], reads: int) -> None:
    full = 8 * 512 * 768 * 2
    graph = group(
        "p:bf16[8,512,768] q:bf16[8,512,768] x:bf16[8,512,768] mean:f32[8,512,1] rstd:f32[8,512,1] w:bf16[768] b:bf16[768]",
        """%g : bf16[8,512,768] = aten.add.Tensor(%p, %q)
        %d : bf16[8,512,768], %dw : bf16[768], %db : bf16[768] = aten.native_layer_norm_backward.default(%g, %x, [768], %mean, %rstd, %w, %b, [true, true, true])""",
        *results,
    )
    *_, columns = parts(graph)
    assert (columns.sort, columns.read) == (Sort.COLUMN, reads * full)


def test_a_convolution_makes_no_copy_of_what_a_part_lays_out_for_it() -> None:
    graph = group(
        "x:bf16[8,64,32,32] w:bf16[64,64,1,1]",
        """%r : bf16[8,64,32,32] = aten.relu.default(%x)
        %y : bf16[8,64,32,32] = aten.convolution.default(%r, %w, none, [1, 1], [0, 0], [1, 1], false, [0, 0], 1)""",
        "y",
    )
    alone = Kernel(graph.ops[1:])
    took = {signature(alone, frozenset("y"), graph.types()): 2e-5}
    cost = Compiled(Staged.of(graph, load("h200x8").device).with_measured(took))
    assert cost.split(alone, frozenset("y")).library == 2e-5
    assert 1.7e-5 < cost.split(Kernel(graph.ops), frozenset("y")).library < 1.93e-5


def test_planes_smaller_than_a_warp_share_sectors() -> None:
    body = """%r : bf16[8,64,4,4] = aten.relu.default(%x)
        %y : bf16[8,64,4,4] = aten.convolution.default(%r, %w, none, [1, 1], [0, 0], [1, 1], false, [0, 0], 1)"""
    before, _ = parts(group("x:bf16[8,64,4,4] w:bf16[64,64,1,1]", body, "y"))
    assert before.reordered == 8 * 64 * 4 * 4 // 2


def test_readers_of_one_value_share_a_launch() -> None:
    graph = group(
        "x:f32[1024,64]",
        """%a : f32[1024,64] = aten.exp.default(%x)
        %b : f32[1024,64] = aten.tanh.default(%x)""",
        "a",
        "b",
    )
    (part,) = parts(graph)
    assert part.read == 1024 * 64 * 4
    assert part.written == 2 * part.read


@pytest.fixture(scope="module")
def model(small_gpt) -> StepModel:
    return StepModel(small_gpt.graph, Roofline.of(small_gpt.graph, load("h200x8").device), Channel(0.0, 0.0))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_parts_hold_every_operator_once_and_write_what_others_read(model, seed: int) -> None:
    """On the groups of random strategies: parts are a partition, with an order, and nothing that is wanted stays
    inside.
    """
    draw = random.Random(seed)
    kernels = KernelSet(model, fused_greedily(model, Limits(size=8)) if seed % 2 else Grouping(), Limits(size=20))
    for _ in range(60):
        kernels.random_move(draw, repeats=False)
    types = model.graph.types()
    for members in kernels.members.values():
        kernel, written = model.question(members)
        busy = [op for op in kernel.body if not moves_nothing(op)]
        found = [part for part in parts_of(kernel, written, types) if part.stored or part.sort is not Sort.COLUMN]
        held = [name for part in found for name in part.ops]
        assert set(held) >= {op.name for op in busy if op.name not in _beside(kernel, written, types)}
        assert len(held) == len(set(held))
        home = {name: place for place, part in enumerate(found) for name in part.ops}
        stored = {name for part in found for name in part.stored}
        for op in busy:
            if any(value.name in written for value in op.results):
                assert op.name in stored
        edges = _edges(kernel, home)
        order = _sorted(len(found), edges)
        assert order is not None, "parts wait for each other"
    compiled = Compiled(Staged.of(model.graph, load("h200x8").device))
    assert all(compiled.estimate(*model.question(kernel)).seconds >= 0 for kernel in kernels.members.values())


def _beside(kernel, written, types) -> set[str]:
    return {
        name
        for part in parts_of(kernel, written, types)
        if part.sort is Sort.COLUMN and not part.stored
        for name in part.ops
    }


def _edges(kernel: Kernel, home: dict[str, int]) -> set[tuple[int, int]]:
    maker: dict[str, str] = {}
    for op in kernel.body:
        for value in op.results:
            maker[value.name] = maker.get(op.reads[0], "") if moves_nothing(op) and op.reads else op.name
    found = set()
    for op in kernel.body:
        for read in op.reads:
            one, two = home.get(maker.get(read, "")), home.get(op.name)
            if one is not None and two is not None and one != two:
                found.add((one, two))
    return found


def _sorted(count: int, edges: set[tuple[int, int]]) -> list[int] | None:
    left, order = set(range(count)), []
    while left:
        free = [place for place in left if not any(two == place and one in left for one, two in edges)]
        if not free:
            return None
        order += free
        left -= set(free)
    return order
