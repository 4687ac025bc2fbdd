"""Hypothesis strategies for pairs of layouts of one array: even (any strides), uneven, with pending sums, on two
meshes.
"""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from sennit.errors import LayoutError
from sennit.ir.layout import Layout, Pending, Reduction, Split
from sennit.ir.mesh import Axis, Mesh

Pair = tuple[Layout, Layout]


@st.composite
def meshes(draw: st.DrawFn, *, most: int = 12, first: int = 0) -> Mesh:
    sizes: list[int] = []
    for size in draw(st.lists(st.sampled_from([2, 3, 4, 6, 2, 3, 1, 5]), min_size=1, max_size=4)):
        if prod(sizes) * size <= most:
            sizes.append(size)
    axes = tuple(Axis(name, size) for name, size in zip("xyzw", sizes, strict=False))
    return Mesh(axes, tuple(range(first, first + prod(sizes))))


def shapes(*, even: bool) -> st.SearchStrategy[list[int]]:
    sizes = st.sampled_from([6, 4, 12, 2, 8, 10, 1]) if even else st.integers(0, 13)
    return st.lists(sizes, min_size=0, max_size=3)


@st.composite
def even_layout(draw: st.DrawFn, mesh: Mesh, shape: list[int], pending: Reduction | None = None) -> Layout:
    """Every axis on any digit that it divides, in any order; or pending; or replicated."""
    layout = Layout.make(mesh, shape)
    for name in draw(st.permutations(mesh.names)):
        role = draw(st.sampled_from(["split", "split", "split", "replicated", "pending"]))
        places = _places(layout, name)
        if role == "split" and places:
            layout = layout.with_entry(name, draw(st.sampled_from(places)))
        elif role == "pending" and pending is not None:
            layout = layout.with_entry(name, Pending(pending))
    return layout


def _places(layout: Layout, name: str) -> list[Split]:
    places: list[Split] = []
    for dim, length in enumerate(layout.shape):
        for stride in range(1, length + 1):
            if length % (stride * layout.mesh.size(name)) == 0:
                try:
                    layout.with_entry(name, Split(dim, stride))
                except LayoutError:
                    continue
                places.append(Split(dim, stride))
    # blocks first: hypothesis shrinks towards them
    return sorted(places, key=lambda split: (split.dim, -split.stride))


@st.composite
def block_layout(draw: st.DrawFn, mesh: Mesh, shape: list[int]) -> Layout:
    """Plain blocks of any sizes, even or not."""
    dims: dict[int, list[str]] = {}
    for name in draw(st.permutations(mesh.names)):
        if shape and draw(st.integers(0, 3)):
            dims.setdefault(draw(st.integers(0, len(shape) - 1)), []).append(name)
    return Layout.block(mesh, shape, dims)


@st.composite
def even_pairs(draw: st.DrawFn, *, most: int = 12) -> Pair:
    mesh, shape = draw(meshes(most=most)), draw(shapes(even=True))
    return draw(even_layout(mesh, shape)), draw(even_layout(mesh, shape))


@st.composite
def uneven_pairs(draw: st.DrawFn) -> Pair:
    mesh, shape = draw(meshes()), draw(shapes(even=False))
    return draw(block_layout(mesh, shape)), draw(block_layout(mesh, shape))


@st.composite
def pending_pairs(draw: st.DrawFn) -> Pair:
    mesh, shape = draw(meshes(most=8)), draw(shapes(even=True))
    op = draw(st.sampled_from([Reduction.SUM, Reduction.MAX]))
    into = draw(st.sampled_from([None, None, op]))
    return draw(even_layout(mesh, shape, op)), draw(even_layout(mesh, shape, into))


@st.composite
def cross_pairs(draw: st.DrawFn) -> Pair:
    """Other axes over the same, other or some of the same devices; pending sums in some sources."""
    here = draw(meshes(most=6))
    there = draw(meshes(most=6, first=draw(st.sampled_from([0, len(here.devices), len(here.devices) // 2]))))
    if draw(st.booleans()):
        shape = draw(shapes(even=True))
        return draw(even_layout(here, shape, Reduction.SUM)), draw(even_layout(there, shape))
    shape = draw(shapes(even=False))
    return draw(block_layout(here, shape)), draw(block_layout(there, shape))


def any_pairs() -> st.SearchStrategy[Pair]:
    return st.one_of(even_pairs(), uneven_pairs(), pending_pairs(), cross_pairs())
