"""Faults that users can make, each with what is wrong, where, and what to change."""

from __future__ import annotations

import pytest

from sennit.cluster import load
from sennit.errors import ClusterError, LayoutError, ParseError
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard import Mode, Redistribution, plan

MESH = Mesh.parse("x=4,y=2")


def layout(text: str, mesh: Mesh = MESH) -> Layout:
    return Layout.parse(text, mesh)


def test_an_axis_used_twice() -> None:
    with pytest.raises(LayoutError, match="axis 'x' is used 2 times"):
        layout("[8{x},8{x}]")


def test_sizes_that_do_not_match() -> None:
    with pytest.raises(LayoutError, match=r"source has shape \[8, 8\] and the target \[8, 9\]"):
        plan(layout("[8{x},8]"), layout("[8{x},9]"))


@pytest.mark.parametrize("role", ["source", "target"])
def test_mixed_reductions(role: str) -> None:
    mixed, plain = layout("[8]{sum:x;max:y}"), layout("[8]")
    pair = (mixed, plain) if role == "source" else (plain, mixed)
    with pytest.raises(LayoutError, match=f"the {role} mixes the reductions max and sum") as error:
        plan(*pair)
    assert "resolve one of them first" in str(error.value)


def test_another_reduction_of_the_same_axis() -> None:
    with pytest.raises(LayoutError, match="axis 'y' is pending sum in the source and max in the target"):
        plan(layout("[8]{sum:y}"), layout("[8]{max:y}"))
    with pytest.raises(LayoutError, match="axis 'y' is pending sum"):  # by another name
        plan(layout("[8]{sum:y}"), layout("[8]{max:b}", Mesh.parse("a=4,b=2")))


def test_a_budget_below_the_least_possible() -> None:
    with pytest.raises(LayoutError, match="the budget is 8 bytes") as error:
        plan(layout("[8{x},8{y}]"), layout("[8,8]"), budget=8)
    assert "allow 28 bytes, the least possible, or more" in str(error.value)
    found = plan(layout("[8{x},8{y}]"), layout("[8,8]"), budget=28)
    assert found.certificate.staging * 4 <= 28


def test_a_mesh_with_time() -> None:
    timed = Mesh.parse("x=4;mb=2")
    with pytest.raises(LayoutError, match=r"the mesh of the source has the time axes \['mb'\]"):
        plan(layout("[8{x}]", timed), layout("[8]", timed))


def test_a_cluster_that_is_too_small() -> None:
    with pytest.raises(ClusterError, match="laptop"):
        plan(layout("[8{x},8]"), layout("[8,8{x}]"), cluster=load("laptop:2"))


def test_a_cluster_decides() -> None:
    big = Mesh.parse("x=16")
    source, target = layout("[4096{x},4096]", big), layout("[4096,4096{x}]", big)
    one, two = (plan(source, target, cluster=load(name)).certificate.seconds for name in ("dgx-h100:2", "dgx-a100:2"))
    assert 0 < one < two
    assert plan(source, target, cluster=load("dgx-h100:2"), mode=Mode.DIRECT).certificate.seconds > 0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("redistribute {}", "expected 'redistribution'"),
        ("redistribution { mesh m0 = x=2 source m1[8] }", "unknown mesh 'm1'"),
        ("redistribution { mesh m0 = x=2 source m0[8] target m0[8{x}] cut m0[8] }", "'cut' is not a kind of step"),
        ("redistribution { mesh m0 = x=2 source m0[8] target m0[8] chosen best }", "'best' is not a candidate"),
    ],
)
def test_text_that_is_no_redistribution(text: str, what: str) -> None:
    with pytest.raises(ParseError, match=what):
        Redistribution.parse(text)
