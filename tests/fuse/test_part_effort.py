"""What a part has to do beside moving bytes, and whether its rows are kept."""

from __future__ import annotations

import pytest
import torch

from sennit.cluster import load
from sennit.fuse.compiled_cost import Compiled
from sennit.fuse.compiled_parts import Part, Sort, parts_of
from sennit.fuse.computed_once import computed_once
from sennit.fuse.kernel_cost import Staged
from sennit.fuse.operator_class import Class, classify
from sennit.fuse.signature import signature
from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel


def group(inputs: str, body: str, *results: str) -> Graph:
    lines = [f'  input %{name} : {kind} "{name}"' for name, kind in (item.split(":") for item in inputs.split())]
    lines += [f"  forward {line.strip()}" for line in body.strip().splitlines()]
    lines += [f'  result "{name}" %{name}' for name in results]
    return Graph.parse("\n".join(['graph "group" {', *lines, "}"]))


def only(graph: Graph) -> Part:
    (part,) = parts_of(Kernel(graph.ops), frozenset(output.name for output in graph.outputs), graph.types())
    return part


def seconds(graph: Graph, measured: dict[str, float] | None = None) -> float:
    staged = Staged.of(graph, load("h200x8").device).with_measured(measured or {})
    return Compiled(staged).split(Kernel(graph.ops), frozenset(output.name for output in graph.outputs)).seconds


@pytest.mark.parametrize(
    ("inputs", "body", "depth"),
    [
        ("", "%y : i64[512] = aten.arange.default(512)", 0),
        ("x:f32[512]", "%y : f32[512] = aten.neg.default(%x)", 1),
        ("t:f32[4096,64] i:i64[512]", "%y : f32[512,64] = aten.embedding.default(%t, %i)", 2),
        ("x:f32[64,512]", "%y : f32[64,512] = aten.zeros_like.default(%x)", 0),
    ],
)
def test_a_load_waits_for_the_index_that_it_needs(inputs: str, body: str, depth: int) -> None:
    assert only(group(inputs, body, "y")).effort.depth == depth


def test_what_is_made_from_nothing_reads_nothing() -> None:
    part = only(group("x:f32[64,512]", "%y : f32[64,512] = aten.zeros_like.default(%x)", "y"))
    assert (part.read, part.written) == (0, 64 * 512 * 4)


def test_two_slices_of_a_value_show_all_of_it() -> None:
    body = """%a : f32[64,32] = aten.slice.Tensor(%x, 1, 0, 32)
        %b : f32[64,32] = aten.slice.Tensor(%x, 1, 32, 64)
        %n : f32[64,32] = aten.neg.default(%b)
        %y : f32[64,64] = aten.cat.default([%n, %a], 1)"""
    assert only(group("x:f32[64,64]", body, "y")).read == 64 * 64 * 4


def test_an_inlined_operator_is_computed_for_each_element_of_the_space() -> None:
    small = only(group("x:f32[512]", "%y : f32[512] = aten.tanh.default(%x)", "y"))
    body = """%h : f32[512] = aten.tanh.default(%x)
        %y : f32[4096,512] = aten.mul.Tensor(%z, %h)"""
    inlined = only(group("x:f32[512] z:f32[4096,512]", body, "y"))
    assert inlined.effort.instructions > 4096 * small.effort.instructions


@pytest.mark.parametrize(
    ("shape", "mask", "kept"),
    [
        ("8,12,512,512", "8,12,512,512", True),
        ("8,12,512,512", "8,1,512,512", False),  # broadcast in the middle, 49152 rows
        ("2,8,128,512", "2,1,128,512", True),  # 2048 rows: Inductor does not look
        ("32,12,197,197", "32,12,197,197", False),  # its own results have gaps
        ("512,6,49,49", "512,1,49,49", True),  # short rows
        ("1,16,2048,2048", "1,16,2048,2048", False),  # long rows
    ],
)
def test_rows_that_a_program_keeps(shape: str, mask: str, kept: bool) -> None:
    body = f"""%a : f32[{shape}] = aten.add.Tensor(%x, %m)
        %y : f32[{shape}] = aten._softmax.default(%a, -1, false)"""
    part = only(group(f"x:f32[{shape}] m:f32[{mask}]", body, "y"))
    assert (part.sort, part.kept) == (Sort.ROW, kept)


def test_permutations_that_undo_each_other_leave_a_value_as_it_lies() -> None:
    body = """%t : f32[64,512] = aten.permute.default(%x, [1, 0])
        %u : f32[512,64] = aten.permute.default(%t, [1, 0])
        %y : f32[512,64] = aten.neg.default(%u)"""
    assert only(group("x:f32[512,64]", body, "y")).contiguous
    assert not only(
        group(
            "x:f32[512,64]",
            body.replace("%y : f32[512,64] = aten.neg.default(%u)", "%y : f32[64,512] = aten.neg.default(%t)"),
            "y",
        )
    ).contiguous


LOSS = """%n : bool[512] = aten.ne.Scalar(%t, -100)
        %w : i64[512] = aten.where.self(%n, %t, %z)
        %m : bool[512] = aten.ne.Scalar(%t, -100)
        %s : i64[] = aten.sum.default(%m)"""


def test_what_is_computed_twice_is_one_part_with_all_that_reads_it() -> None:
    graph = group("t:i64[512] z:i64[]", LOSS, "w", "s")
    body, same = computed_once(graph.ops)
    assert ([op.name for op in body], same) == (["n", "w", "s"], {"m": "n"})
    part = only(graph)
    assert (part.ops, part.launches) == ({"n", "w", "m", "s"}, 1)


def test_draws_are_never_the_same() -> None:
    body = """%a : f32[64] = aten.rand_like.default(%x)
        %b : f32[64] = aten.rand_like.default(%x)"""
    assert len(computed_once(group("x:f32[64]", body, "a", "b").ops)[0]) == 2


def test_two_norms_in_one_loop_take_no_less_than_both() -> None:
    norm = "aten._log_softmax.default"
    body = f"""%a : f32[512,4096] = {norm}(%x, -1, false)
        %b : f32[512,4096] = {norm}(%y, -1, false)
        %c : f32[512,4096] = aten.add.Tensor(%a, %b)"""
    graph = group("x:f32[512,4096] y:f32[512,4096]", body, "c")
    key = signature(Kernel(graph.ops[:1]), frozenset("a"), graph.types())
    assert not only(graph).kept
    assert seconds(graph, {key: 50e-6}) > 95e-6


def test_what_need_not_wait_is_one_start() -> None:
    """Three sums that were each faster than modelled are not faster three times over."""
    body = """%a : f32[2600] = aten.sum.dim_IntList(%x, [0])
        %b : f32[2600] = aten.sum.dim_IntList(%y, [0])
        %c : f32[2600] = aten.sum.dim_IntList(%z, [0])
        %d : f32[2600] = aten.add.Tensor(%a, %b)
        %e : f32[2600] = aten.add.Tensor(%c, %d)"""
    graph = group("x:f32[20,2600] y:f32[20,2600] z:f32[20,2600]", body, "e")
    alone = seconds(group("x:f32[20,2600]", body.splitlines()[0], "a"))
    key = signature(Kernel(graph.ops[:1]), frozenset("a"), graph.types())
    saved = 0.3e-6
    assert seconds(graph) - saved < seconds(graph, {key: alone - saved}) < seconds(graph)


def test_a_sum_of_few_elements_is_pointwise() -> None:
    body = """%s : f32[8,1,2048] = aten.sum.dim_IntList(%x, [1], true)
        %y : f32[8,1,2048] = aten.mul.Tensor(%s, %w)"""
    part = only(group("x:f32[8,4,2048] w:f32[8,1,2048]", body, "y"))
    assert (part.sort, part.size, part.launches) == (Sort.POINT, 8 * 2048, 1)


def test_zeros_in_the_shape_of_a_value_are_a_part_of_their_own() -> None:
    body = """%s : f32[512,64] = aten._softmax.default(%x, -1, false)
        %z : f32[512,64] = aten.zeros_like.default(%s)"""
    graph = group("x:f32[512,64]", body, "s", "z")
    found = parts_of(Kernel(graph.ops), frozenset(("s", "z")), graph.types())
    assert sorted(part.sort for part in found) == [Sort.POINT, Sort.ROW]
    read = """%w : f32[512,64] = aten.where.self(%m, %z, %s)"""
    assert only(group("x:f32[512,64] m:bool[512,64]", f"{body}\n{read}", "w")).sort is Sort.ROW


def test_nothing_that_torch_draws_is_the_same_twice() -> None:
    """Of all operators that torch knows: those that use a generator."""
    names = {
        str(overload).split(".")[1] for overload in _overloads() if torch.Tag.nondeterministic_seeded in overload.tags
    }
    assert {"bernoulli", "native_dropout", "rand_like"} <= names
    for name in sorted(names):
        body = f"""%a : f32[64] = aten.{name}.default(%x)
        %b : f32[64] = aten.{name}.default(%x)"""
        graph = group("x:f32[64]", body, "a", "b")
        assert len(computed_once(graph.ops)[0]) == 2, name
        assert classify(graph.ops[0], graph.types()) is Class.OTHER, name


def _overloads() -> list[torch._ops.OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    found = [packet for packet in packets if isinstance(packet, torch._ops.OpOverloadPacket)]
    return [getattr(packet, name) for packet in found for name in packet.overloads()]


def test_a_group_of_one_operator_takes_what_that_took() -> None:
    graph = group("x:f32[512,768]", "%y : f32[512,1] = aten.sum.dim_IntList(%x, [-1], true)", "y")
    key = signature(Kernel(graph.ops), frozenset("y"), graph.types())
    assert seconds(graph, {key: 5e-6}) == pytest.approx(5e-6)


def test_a_reduction_that_took_longer_makes_its_group_longer_by_less() -> None:
    graph = group(
        "x:f32[4096,768]",
        """%h : f32[4096,768] = aten.mul.Tensor(%x, 2.0)
        %y : f32[4096,1] = aten.sum.dim_IntList(%h, [-1], true)""",
        "y",
    )
    alone = Kernel(graph.ops[1:])
    key, plain = signature(alone, frozenset("y"), graph.types()), seconds(graph)
    lone = Compiled(Staged.of(graph, load("h200x8").device)).split(alone, frozenset("y")).seconds
    assert seconds(graph, {key: lone}) == pytest.approx(plain)
    longer = seconds(graph, {key: lone + 2e-6})
    assert plain + 0.5e-6 < longer < plain + 2e-6


def test_more_bytes_never_take_less() -> None:
    times = [
        seconds(group(f"x:f32[{rows},1024]", f"%y : f32[{rows},1024] = aten.neg.default(%x)", "y"))
        for rows in range(64, 32768, 512)
    ]
    assert times == sorted(times)
