"""Which inputs of a group are indices, and how far they may go."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "fuse"))

from look_up_indices import index_limits


def limits(inputs: str, *body: str) -> dict[str, int]:
    lines = [f'  input %{name} : {kind} "{name}"' for name, kind in (item.split(":") for item in inputs.split())]
    lines += [f"  forward {line}" for line in body]
    graph = Graph.parse("\n".join(['graph "group" {', *lines, "}"]))
    return index_limits(Kernel(graph.ops), graph.types())


@pytest.mark.parametrize(
    ("inputs", "body", "found"),
    [
        ("t:f32[512,64] i:i64[8]", "%y : f32[8,64] = aten.embedding.default(%t, %i)", {"i": 512}),
        (
            "g:f32[8,64] i:i64[8]",
            "%y : f32[32,64] = aten.embedding_dense_backward.default(%g, %i, 32, -1, false)",
            {"i": 32},
        ),
        ("t:f32[8,99] i:i64[8,1]", "%y : f32[8,1] = aten.gather.default(%t, 1, %i)", {"i": 99}),
        ("t:f32[5,7] i:i64[3] j:i64[3]", "%y : f32[3] = aten.index.Tensor(%t, [%i, %j])", {"i": 5, "j": 7}),
        ("t:f32[5,7] m:bool[5,7]", "%y : f32[5,7] = aten.masked_fill.Scalar(%t, %m, 0.0)", {}),
    ],
)
def test_an_index_goes_as_far_as_its_table(inputs: str, body: str, found: dict[str, int]) -> None:
    assert limits(inputs, body) == found


def test_values_pass_through_views_and_selections_and_not_through_arithmetic() -> None:
    inputs = "t:f32[512,64] i:i64[4,2] m:bool[8] z:i64[8]"
    view = "%v : i64[8] = aten.view.default(%i, [8])"
    where = "%w : i64[8] = aten.where.self(%m, %v, %z)"
    found = "%y : f32[8,64] = aten.embedding.default(%t, %w)"
    assert limits(inputs, view, where, found) == {"i": 512, "z": 512}
    added = "%w : i64[8] = aten.add.Tensor(%v, %z)"
    assert limits(inputs, view, added, found) == {"i": 1, "z": 1}


def test_of_two_tables_the_smaller_counts_and_a_table_of_indices_holds_places() -> None:
    inputs = "t:f32[512,64] u:f32[32,64] p:i64[16] i:i64[8]"
    places = "%p2 : i64[8] = aten.gather.default(%p, 0, %i)"
    both = ("%a : f32[8,64] = aten.embedding.default(%t, %p2)", "%b : f32[8,64] = aten.embedding.default(%u, %p2)")
    assert limits(inputs, places, *both) == {"i": 16, "p": 32}
