"""A property of the reference collective: over all axes, it is assemble-then-distribute; over some, it is so in each
group.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.ir.layout import Entry, Layout, Pending, Reduction, Split
from sennit.ir.layout_numpy import Array, assemble, distribute, regroup
from sennit.ir.mesh import Mesh, Point


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return Mesh.make({f"axis{position}": size for position, size in enumerate(sizes)})


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    """Each axis splits some dim, is pending by one reduction, or is replicated. Strides are disjoint and else free."""
    entries: dict[str, Entry | None] = {}
    above = [1] * len(shape)  # the least stride that is still free, per dim
    op = draw(st.sampled_from(Reduction))
    for name in draw(st.permutations(mesh.names)):
        choice = draw(st.integers(-2, len(shape) - 1))
        if choice >= 0:
            stride = above[choice] * draw(st.integers(1, 3))
            entries[name] = Split(choice, stride)
            above[choice] = stride * mesh.size(name)
        elif choice == -1:
            entries[name] = Pending(op)
    return Layout.make(mesh, shape, entries)


@st.composite
def moves(draw: st.DrawFn) -> tuple[Layout, Layout]:
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    return draw(layouts(mesh, shape)), draw(layouts(mesh, shape))


def sources() -> st.SearchStrategy[Layout]:
    return moves().map(lambda move: move[0])


def pieces_of(layout: Layout) -> dict[Point, Array]:
    """Pieces whose pending parts are all different: integers, which every reduction treats exactly."""
    rng = np.random.default_rng(0)
    parts: dict[tuple[object, ...], Array] = {}
    pieces: dict[Point, Array] = {}
    for point in layout.mesh.points():
        key = tuple(point[layout.mesh.index(name)] for name, _ in layout.entries)
        if key not in parts:
            parts[key] = rng.integers(-9, 9, layout.local_shape(point))
        pieces[point] = parts[key]
    return pieces


def same(left: dict[Point, Array], right: dict[Point, Array]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[point], right[point]) for point in left)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(moves())
def test_over_all_axes_it_is_assemble_then_distribute(move: tuple[Layout, Layout]) -> None:
    source, target = move
    pieces = pieces_of(source)
    expected = distribute(assemble(source, pieces), target)
    assert same(regroup(source, target, source.mesh.names, pieces), expected)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(sources(), st.data())
def test_over_some_axes_it_keeps_the_array(source: Layout, data: st.DataObject) -> None:
    """Resolve or gather the named axes, leave the others: the array stays, and so does the meaning of the other axes."""
    axes = tuple(name for name in source.mesh.names if data.draw(st.booleans()))
    target = Layout.make(source.mesh, source.shape, {name: entry for name, entry in source.entries if name not in axes})
    pieces = pieces_of(source)
    result = regroup(source, target, axes, pieces)
    assert np.array_equal(assemble(target, result), assemble(source, pieces))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(sources(), st.data())
def test_it_works_on_one_coordinate_of_the_other_axes(source: Layout, data: st.DataObject) -> None:
    """As a program calls it: with the pieces of one time only."""
    still = data.draw(st.sampled_from(source.mesh.names))
    axes = tuple(name for name in source.mesh.names if name != still)
    target = Layout.make(source.mesh, source.shape, {still: source.entry(still)})
    pieces, position = pieces_of(source), source.mesh.index(still)
    whole = regroup(source, target, axes, pieces)
    for time in range(source.mesh.size(still)):
        part = regroup(source, target, axes, {p: piece for p, piece in pieces.items() if p[position] == time})
        assert same(part, {p: piece for p, piece in whole.items() if p[position] == time})
