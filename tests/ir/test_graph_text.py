"""Graphs and tensor types print and parse back, and faults in their text are found where they stand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marked_text import without_mark
from strategies import graphs, layouts, meshes, tensor_types

from sennit.errors import GraphError, ParseError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Op, Phase, Ref
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh

GRAPH = """graph "mlp" {
  param %w : f32[4,8] "up.weight"
  input %x : f32[2,4] "x"
  forward %h : f32[2,8] = aten.mm.default(%x, %w) at "up" "model.py:7" seq 3
  forward %s : f32[], %m : bool[2] = sennit.pair(%h, [1, -2], 0.5, "a b", none, bf16, _keepdim=true)
  loss %s
  result "y" %h
}
"""


@settings(derandomize=True, deadline=None, max_examples=100)
@given(tensor_types)
def test_tensor_types_print_and_parse_back(value: TensorType) -> None:
    assert TensorType.parse(str(value)) == value


@settings(derandomize=True, deadline=None, max_examples=150)
@given(graphs())
def test_graphs_print_and_parse_back(graph: Graph) -> None:
    parsed = Graph.parse(str(graph))
    assert parsed == graph
    assert repr(parsed) == repr(graph)  # equality alone takes 1, 1.0 and True for one


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.data())
def test_meshes_and_layouts_print_and_parse_back(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    layout = data.draw(layouts(mesh))
    assert Mesh.parse(str(mesh)) == mesh
    assert Layout.parse(str(layout), mesh) == layout


def test_the_text_says_what_it_seems_to() -> None:
    graph = Graph.parse(GRAPH)
    assert graph.ops[0] == Op(
        "aten.mm.default",
        (Ref("x"), Ref("w")),
        (),
        graph.ops[0].results,
        Phase.FORWARD,
        module="up",
        line="model.py:7",
        seq=3,
    )
    assert graph.ops[1].reads == ("h",)
    assert graph.ops[1].kwargs == (("_keepdim", True),)
    assert [str(value.type) for value in graph.ops[1].results] == ["f32[]", "bool[2]"]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("%w : f32[4,8]", "^w : f32[4,8]", "a %name"),
        ("%w : f32[4,8]", "%w ^f32[4,8]", "':'"),
        ("%w : f32[4,8]", "%w : f32[4,^x]", "an integer"),
        ('"up.weight"', "^up.weight", "a quoted string"),
        ("input %x", "inlet ^%x", "unknown line 'inlet'"),
        ("%h : f32", "%h : f33^", "unknown element type 'f33'"),
        ("(%x, %w)", "(%x^; %w)", "')'"),
        ("%s : f32[], %m", "%s^, %m", "':'"),
        ("0.5", "^@", "a number"),
        (GRAPH[GRAPH.index("0.5") :], "^", "a number"),
        ('  result "y" %h\n}\n', '  result "y" %h\n^', "an input, an operator or an output"),
        ('"y" %h\n}', '"y" %h\n}\n^more', "the end of the text"),
    ],
)
def test_faults_are_found_where_they_stand(old: str, new: str, what: str) -> None:
    """`^` marks the place. A word that can be read but is not known is reported behind it."""
    assert GRAPH.count(old) == 1
    text, line, column = without_mark(GRAPH.replace(old, new))
    with pytest.raises(ParseError) as caught:
        Graph.parse(text)
    assert what in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.startswith(f"line {line}, column {column}, at ")


def test_a_graph_has_one_seed_and_one_output_for_each_key() -> None:
    seeded = GRAPH.replace("  forward %h", '  seed %k : i64[2] "seed"\n  forward %h', 1)
    outputs = seeded.replace("  loss %s", '  loss "a" %s\n  loss "b" %s\n  buffer "mean" %h')
    assert [str(output) for output in Graph.parse(outputs).outputs] == [
        'loss "a" %s',
        'loss "b" %s',
        'buffer "mean" %h',
        'result "y" %h',
    ]
    with pytest.raises(GraphError, match=r"the seed %k is i32\[2\], not i64\[2\]"):
        Graph.parse(seeded.replace("i64[2]", "i32[2]"))
    with pytest.raises(GraphError, match="there are 2 seeds"):
        Graph.parse(seeded.replace("input %x", "seed %x"))
    with pytest.raises(GraphError, match="two outputs have the key 'loss'"):
        Graph.parse(GRAPH.replace('result "y"', 'result "loss"'))


def test_a_graph_is_in_single_assignment() -> None:
    with pytest.raises(GraphError, match=r"%w is defined twice"):
        Graph.parse(GRAPH.replace("input %x", "input %w"))
    with pytest.raises(GraphError, match=r"%s is read before it is defined"):
        Graph.parse(GRAPH.replace("(%x, %w)", "(%x, %s)"))
    with pytest.raises(GraphError, match=r"output %v is not defined"):
        Graph.parse(GRAPH.replace("loss %s", "loss %v"))
