"""Hypothesis strategies for meshes, layouts and regions, small enough to check by brute force.

A layout is drawn by its factors: each axis is replicated, pending, or a factor of one dim, and local factors are put
between those. The size of a dim is the product of its factors, and the stride of an axis the product of those below.
Every even layout can be drawn this way. An uneven one has a size that was moved off the product, or plain blocks.
"""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import strategies as st

from sennit.ir.layout import Entry, Layout, Pending, Reduction, Split
from sennit.ir.mesh import Axis, AxisKind, Mesh
from sennit.ir.region import Region


@st.composite
def meshes(
    draw: st.DrawFn, *, max_devices: int = 12, min_size: int = 1, time: bool = True, shuffled: bool = True
) -> Mesh:
    """A mesh of a few axes. `shuffled` names devices other than 0, 1, ... in some of them."""
    axes: list[Axis] = []
    names = iter(["dp", "tp", "ep", "x_1", "mb", "t.0"])
    # hypothesis likes its lists short; a mesh with nothing on it is one case among many
    wanted = draw(st.sampled_from([2, 3, 1, 4, 0]))
    sizes = st.sampled_from([size for size in (2, 3, 4, 1, 6) if size >= min_size])
    for size in draw(st.lists(sizes, min_size=wanted, max_size=wanted)):
        if size * prod(axis.size for axis in axes) <= max_devices:
            axes.append(Axis(next(names), size))
    count = prod(axis.size for axis in axes)
    if time:
        axes += [
            Axis(next(names), size, AxisKind.TIME) for size in draw(st.lists(st.integers(min_size, 3), max_size=2))
        ]
    devices = list(range(count))
    if shuffled and draw(st.booleans()):
        devices = draw(st.permutations(range(count + 3)))[:count]
    return Mesh(tuple(axes), tuple(devices))


@st.composite
def even_layouts(
    draw: st.DrawFn, *, mesh: st.SearchStrategy[Mesh] | None = None, strided: bool = True, pending: bool = True
) -> Layout:
    """A layout whose every dim factors: blocks in any order of axes, and with `strided` local factors above them."""
    on = draw(mesh if mesh is not None else meshes())
    rank = draw(st.sampled_from([1, 2, 2, 3, 0]))
    op = draw(st.sampled_from(list(Reduction)))  # one for all: different reductions do not commute
    entries: dict[str, Entry] = {}
    axes_of: dict[int, list[Axis]] = {dim: [] for dim in range(rank)}
    for axis in draw(st.permutations(on.axes)):
        role = draw(st.sampled_from([*range(rank), *range(rank), "replicated", "pending"]))
        if isinstance(role, int):
            axes_of[role].append(axis)
        elif role == "pending" and pending:
            entries[axis.name] = Pending(op)
    shape: list[int] = []
    for dim, axes in axes_of.items():
        size = draw(st.integers(1, 3))
        for axis in axes:
            entries[axis.name] = Split(dim, size)
            size *= axis.size * (draw(st.sampled_from([1, 1, 2, 3])) if strided else 1)
        shape.append(size)
    return Layout.make(on, shape, entries)


@st.composite
def layouts(draw: st.DrawFn, *, mesh: st.SearchStrategy[Mesh] | None = None, pending: bool = True) -> Layout:
    """Any layout: even, or with sizes (zero among them) that the digits do not divide."""
    layout = draw(even_layouts(mesh=mesh, pending=pending))
    if draw(st.booleans()):
        return layout
    shape = [draw(st.integers(0, min(size + 2, 40))) for size in layout.shape]
    if draw(st.booleans()):
        return Layout.make(layout.mesh, shape, dict(layout.entries))
    dims = {dim: [digit.axis for digit in layout.digits(dim)] for dim in range(len(shape))}
    return Layout.block(layout.mesh, shape, dims, dict(layout.pending))


@st.composite
def regions(draw: st.DrawFn, *, rank: int, size: int = 7) -> Region:
    """A product of index sets, each any subset of `range(size)`."""
    subsets = [sorted(draw(st.sets(st.integers(0, size - 1)))) for _ in range(rank)]
    return Region.of_indices(np.array(subset, dtype=np.int64) for subset in subsets)
