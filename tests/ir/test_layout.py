from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_strategies import even_layouts, layouts, meshes

from sennit.errors import LayoutError, MeshError, ParseError
from sennit.ir.layout import Entry, Factor, Layout, Pending, Reduction, Split, block_strides
from sennit.ir.layout_numpy import assemble, distribute, identity_of, reduce_arrays, regroup
from sennit.ir.mesh import Mesh

quick = settings(derandomize=True, deadline=None, max_examples=100)
mesh_2x4 = Mesh.parse("dp=2,tp=4")


def counting(layout: Layout) -> np.ndarray:
    return np.arange(1, prod(layout.shape) + 1, dtype=np.int64).reshape(layout.shape)


# ---- text ------------------------------------------------------------------------------------------------------------


@quick
@given(layouts())
def test_text_round_trip(layout: Layout) -> None:
    assert Layout.parse(str(layout), layout.mesh) == layout


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("[8,16]", {}),
        ("[8{dp},16]", {"dp": Split(0, 4)}),
        ("[8{dp,tp},16]", {"dp": Split(0, 4), "tp": Split(0, 1)}),
        ("[8{tp,dp},16]", {"dp": Split(0, 1), "tp": Split(0, 2)}),
        ("[8,16{tp:2}]", {"tp": Split(1, 2)}),
        ("[8{dp},16]{sum:tp}", {"dp": Split(0, 4), "tp": Pending()}),
        ("[8,16]{max:dp,tp}", {"dp": Pending(Reduction.MAX), "tp": Pending(Reduction.MAX)}),
        ("[8,16]{sum:tp;prod:dp}", {"dp": Pending(Reduction.PROD), "tp": Pending()}),
    ],
)
def test_golden_text(text: str, entries: dict[str, Entry]) -> None:
    layout = Layout.make(mesh_2x4, [8, 16], entries)
    assert str(layout) == text
    assert Layout.parse(text, mesh_2x4) == layout


@pytest.mark.parametrize("text", ["", "[8", "[8{dp]", "[8{}x]", "[8]{sum}", "[8]{sum:}", "[8] 8", "[8{dp:}]"])
def test_text_that_is_no_layout(text: str) -> None:
    with pytest.raises(ParseError, match="expected"):
        Layout.parse(text, mesh_2x4)


def test_unknown_reduction_in_text() -> None:
    with pytest.raises(ParseError, match=r"unknown reduction 'avg'\n.*\n  fix: use sum, max, min or prod"):
        Layout.parse("[8]{avg:dp}", mesh_2x4)


# ---- where the indices are -------------------------------------------------------------------------------------------


@quick
@given(layouts())
def test_pieces_cover_each_index_once_per_replica(layout: Layout) -> None:
    count = np.zeros(layout.shape, dtype=np.int64)
    for point in layout.mesh.points():
        where = np.ix_(*layout.region(point).indices()) if layout.shape else ()
        count[where] += 1
    split = [name for name, entry in layout.entries if isinstance(entry, Split)]
    assert (count == prod(axis.size for axis in layout.mesh.axes if axis.name not in split)).all()


@quick
@given(layouts())
def test_local_shape_and_offset_are_those_of_the_region(layout: Layout) -> None:
    largest = 0
    for point in layout.mesh.points():
        region = layout.region(point)
        assert layout.local_shape(point) == region.shape
        firsts = [int(dim[0]) if len(dim) else size for dim, size in zip(region.indices(), layout.shape, strict=True)]
        assert layout.offset(point) == tuple(firsts)
        largest = max(largest, region.size)
    assert layout.local_elements() == largest


@quick
@given(layouts(mesh=meshes(min_size=2)))
def test_even_is_one_shape_at_every_point(layout: Layout) -> None:
    # an axis of size 1 is left out: it splits nothing, but a stride that does not divide leaves the dim without factors
    shapes = {layout.region(point).shape for point in layout.mesh.points()}
    assert layout.is_even == (len(shapes) == 1)
    if layout.is_even:
        assert shapes == {layout.local_shape()}
    else:
        with pytest.raises(LayoutError, match=r"is uneven: its pieces differ in shape\n.*\n  fix: name a point"):
            layout.local_shape()


@quick
@given(even_layouts())
def test_factors_multiply_to_the_dim(layout: Layout) -> None:
    for dim, size in enumerate(layout.shape):
        factors = layout.factors(dim)
        assert prod(factor.size for factor in factors) == size
        assert [factor.axis for factor in factors if factor.axis] == [digit.axis for digit in layout.digits(dim)]
        assert prod(factor.size for factor in factors if not factor.axis) == layout.local_shape()[dim]
        # no two local factors in a row: the list of an even dim is unique
        assert all(left.axis or right.axis for left, right in pairwise(factors))


@quick
@given(even_layouts())
def test_over_factors_every_layout_is_a_block_layout(layout: Layout) -> None:
    factors = [factor for dim in range(len(layout.shape)) for factor in layout.factors(dim)]
    table = counting(layout).reshape([factor.size for factor in factors])
    for point in layout.mesh.points():
        at = tuple(point[layout.mesh.index(f.axis)] if f.axis else slice(None) for f in factors)
        region = layout.region(point).indices()
        expected = counting(layout)[np.ix_(*region)] if region else counting(layout)
        assert np.array_equal(table[at].reshape(layout.local_shape()), expected)


def test_factors_of_an_uneven_layout() -> None:
    with pytest.raises(
        LayoutError, match=r"layout \[7\{tp\}\] is uneven: its dims do not factor\n  where: .*\n  fix: "
    ):
        Layout.parse("[7{tp}]", mesh_2x4).factors(0)


@quick
@given(layouts())
def test_refinement_leaves_every_piece(layout: Layout) -> None:
    refined = layout.refined()
    before = [layout.region(point) for point in layout.mesh.points()]
    assert [refined.region(point) for point in refined.mesh.points()] == before
    assert refined.refined() == refined
    assert {op for _, op in refined.pending} == {op for _, op in layout.pending}


@quick
@given(layouts(), st.data())
def test_with_entry_changes_one_axis(layout: Layout, data: st.DataObject) -> None:
    if not layout.mesh.axes:
        return
    axis = data.draw(st.sampled_from(layout.mesh.names))
    for entry in (None, Pending(Reduction.MIN)):
        changed = layout.with_entry(axis, entry)
        assert changed.entry(axis) == entry
        assert all(changed.entry(name) == layout.entry(name) for name in layout.mesh.names if name != axis)
        assert changed.with_entry(axis, layout.entry(axis)) == layout


@given(st.integers(0, 60), st.lists(st.integers(1, 4), min_size=1, max_size=3))
@quick
def test_block_strides_cut_blocks_of_the_ceiling(size: int, axis_sizes: list[int]) -> None:
    names = [f"a{position}" for position in range(len(axis_sizes))]
    mesh = Mesh.make(dict(zip(names, axis_sizes, strict=True)))
    layout = Layout.block(mesh, [size], {0: names})
    assert tuple(digit.stride for digit in layout.digits(0)) == block_strides(size, axis_sizes)
    block = -(-size // prod(axis_sizes))
    for position, point in enumerate(mesh.points()):
        expected = range(min(position * block, size), min((position + 1) * block, size))
        assert layout.indices(0, point).tolist() == list(expected)


def test_entries_stand_in_the_order_of_the_mesh() -> None:
    one = Layout(mesh_2x4, (8,), (("tp", Split(0, 2)), ("dp", Pending())))
    assert one.entries == (("dp", Pending()), ("tp", Split(0, 2)))
    assert one == Layout.make(mesh_2x4, [8], {"dp": Pending(), "tp": Split(0, 2)})
    assert hash(one) == hash(Layout.parse("[8{tp}]{sum:dp}", mesh_2x4))


def test_a_strided_split_by_hand() -> None:
    layout = Layout.parse("[12{tp:1}]", mesh_2x4)
    assert layout.indices(0, (1, 3)).tolist() == [3, 7, 11]
    assert str(layout.region((0, 1))) == "(1:2+5:6+9:10)"
    assert layout.factors(0) == (Factor(3, None), Factor(4, "tp"))
    assert str(layout.on(Mesh.parse("tp=4;mb=2"))) == "[12{tp:1}]"


# ---- values ----------------------------------------------------------------------------------------------------------


@quick
@given(layouts(), st.sampled_from([np.int64, np.int8, np.float32, np.float64]))
def test_assemble_undoes_distribute(layout: Layout, dtype: type[np.generic]) -> None:
    array = (counting(layout) % 100 - 50).astype(dtype)
    pieces = distribute(array, layout)
    assert set(pieces) == set(layout.mesh.points())
    result = assemble(layout, pieces)
    assert result.dtype == array.dtype
    assert np.array_equal(result, array)


@quick
@given(even_layouts(mesh=meshes(max_devices=6)))
def test_pending_parts_are_reduced_over_their_axes(layout: Layout) -> None:
    """Parts with values of their own at every point: the array is their reduction, written out by hand."""
    whole = counting(layout)
    pending = [layout.mesh.index(axis) for axis, _ in layout.pending]
    values = {p: 1 + sum(p[i] * 3**k for k, i in enumerate(pending)) % 5 for p in layout.mesh.points()}
    pieces = {p: piece * 0 + values[p] for p, piece in distribute(whole, layout).items()}
    parts = {tuple(p[i] for i in pending): v for p, v in values.items()}.values()
    op = layout.pending[0][1] if pending else Reduction.SUM
    expected = {Reduction.SUM: sum, Reduction.MAX: max, Reduction.MIN: min, Reduction.PROD: prod}[op](parts)
    assert (assemble(layout, pieces) == expected).all()


@quick
@given(st.data())
def test_regrouping_over_all_axes_is_gather_then_slice(data: st.DataObject) -> None:
    source = data.draw(even_layouts(mesh=meshes(max_devices=6, time=False)))
    target = data.draw(even_layouts(mesh=st.just(source.mesh)))
    target = Layout.block(
        source.mesh,
        source.shape,
        {d: [x.axis for x in target.digits(d)] for d in range(min(len(source.shape), len(target.shape)))},
        dict(target.pending),
    )
    array = counting(source)
    moved = regroup(source, target, source.mesh.names, distribute(array, source))
    expected = distribute(array, target)
    assert all(np.array_equal(moved[point], expected[point]) for point in expected)


@pytest.mark.parametrize("op", list(Reduction))
@pytest.mark.parametrize("dtype", ["i1", "u1", "i8", "f2", "f8", "?"])
def test_identity_leaves_values(op: Reduction, dtype: str) -> None:
    values = np.array([0, 1, 1, 0] if dtype == "?" else [0, 1, 5, 100], dtype=dtype)
    identity = np.full_like(values, identity_of(op, values.dtype))
    assert np.array_equal(reduce_arrays(op, values, identity), values)


def test_replicas_that_disagree() -> None:
    layout = Layout.parse("[4{tp}]", mesh_2x4)
    pieces = distribute(np.arange(4), layout)
    pieces[(1, 2)] = pieces[(1, 2)] + 1
    with pytest.raises(LayoutError, match=r"replicas of layout \[4\{tp\}\] disagree at \(1, 2\)"):
        assemble(layout, pieces)


def test_pieces_of_another_layout() -> None:
    layout = Layout.parse("[4{tp}]", mesh_2x4)
    with pytest.raises(LayoutError, match=r"the piece at \(0, 0\) has shape \[2\], not \[1\]"):
        assemble(layout, distribute(np.arange(4), Layout.parse("[4{dp}]", mesh_2x4)))
    with pytest.raises(LayoutError, match=r"an array of shape \[5\] under a layout of shape \[4\]"):
        distribute(np.arange(5), layout)


def test_mixed_reductions_are_refused() -> None:
    layout = Layout.parse("[4]{sum:dp;max:tp}", mesh_2x4)
    with pytest.raises(LayoutError, match=r"mixes reductions\n  fix: resolve one of them first"):
        assemble(layout, distribute(np.arange(4), layout))


# ---- errors say which axis, where, and the fix -----------------------------------------------------------------------

WHERE = r"\n  where: an array of shape \[8, 16\] on mesh dp=2,tp=4\n  fix: "


def test_unknown_axis() -> None:
    with pytest.raises(MeshError, match=r"unknown axis 'pp'\n  where: mesh dp=2,tp=4 has .*\n  fix: use one of these"):
        Layout.make(mesh_2x4, [8], {"pp": Split(0, 4)})
    with pytest.raises(MeshError, match="unknown axis 'pp'"):
        Layout.parse("[8{pp}]", mesh_2x4)


def test_axis_used_twice() -> None:
    with pytest.raises(LayoutError, match=r"axis 'dp' is used 2 times" + WHERE + "use each axis once"):
        Layout.parse("[8{dp},16{dp}]", mesh_2x4)
    with pytest.raises(LayoutError, match=r"axis 'tp' is used 2 times" + WHERE):
        Layout.parse("[8{tp},16]{sum:tp}", mesh_2x4)


def test_overlapping_digits() -> None:
    message = r"axes 'dp' \(stride 2\) and 'tp' \(stride 1, size 4\) take overlapping digits of dim 1"
    with pytest.raises(LayoutError, match=message + WHERE + r"give 'dp' a stride that is a multiple of 4"):
        Layout.parse("[8,16{dp:2,tp:1}]", mesh_2x4)


@pytest.mark.parametrize("stride", [0, -2])
def test_stride_below_one(stride: int) -> None:
    with pytest.raises(LayoutError, match=rf"axis 'tp' has stride {stride}" + WHERE + "use a stride of 1 or more"):
        Layout.make(mesh_2x4, [8, 16], {"tp": Split(0, stride)})


@pytest.mark.parametrize("dim", [2, -1])
def test_dim_that_the_array_does_not_have(dim: int) -> None:
    with pytest.raises(LayoutError, match=rf"axis 'tp' splits dim {dim} of an array with 2 dims" + WHERE):
        Layout.make(mesh_2x4, [8, 16], {"tp": Split(dim, 1)})
    with pytest.raises(LayoutError, match=rf"dim {dim} of an array of shape \[8, 16\]\n  fix: use dims 0 to 1"):
        Layout.block(mesh_2x4, [8, 16], {dim: ["tp"]})


def test_negative_size() -> None:
    with pytest.raises(
        LayoutError, match=r"shape \[8, -1\] has a negative size\n  where: .*dp=2,tp=4\n  fix: use sizes"
    ):
        Layout.make(mesh_2x4, [8, -1])
