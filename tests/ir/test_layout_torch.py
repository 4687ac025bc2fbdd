"""Conversions to and from DTensor placements, against DTensor's own cutting of a tensor."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_strategies import even_layouts, layouts, meshes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sennit.errors import LayoutError
from sennit.ir.layout import Layout, Pending, Split
from sennit.ir.layout_numpy import distribute
from sennit.ir.layout_torch import from_placements, to_placements
from sennit.ir.mesh import Mesh, Point

quick = settings(derandomize=True, deadline=None, max_examples=100)
space = meshes(time=False)
space_2 = meshes(time=False, min_size=2)  # no axis of size 1
mesh_2x2 = Mesh.parse("dp=2,tp=2")


def counting(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def torch_pieces(mesh: Mesh, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> dict[Point, torch.Tensor]:
    """What DTensor gives to each coordinate: its own `_split_tensor`, from left to right."""
    pieces = {}
    for point in mesh.in_space().points():
        local = counting(shape)
        for axis, coordinate, placement in zip(mesh.space, point, placements, strict=True):
            if isinstance(placement, Shard | _StridedShard):
                local = placement._split_tensor(local, axis.size, with_padding=False)[0][coordinate]
        pieces[point] = local
    return pieces


def same_pieces(layout: Layout, placements: tuple[Placement, ...]) -> bool:
    unreduced = Layout.make(layout.mesh, layout.shape, {n: e for n, e in layout.entries if isinstance(e, Split)})
    ours = distribute(counting(layout.shape).numpy(), unreduced)
    theirs = torch_pieces(layout.mesh, layout.shape, placements)
    return all(np.array_equal(ours[point], theirs[point].numpy()) for point in theirs)


@quick
@given(even_layouts(mesh=space))
def test_dtensor_cuts_an_even_layout_into_the_same_pieces(layout: Layout) -> None:
    assert same_pieces(layout, to_placements(layout))


@quick
@given(even_layouts(mesh=space_2))
def test_round_trip_of_an_even_layout(layout: Layout) -> None:
    assert from_placements(layout.mesh, layout.shape, to_placements(layout)) == layout


@quick
@given(even_layouts(mesh=space))
def test_round_trip_with_axes_of_size_one_keeps_the_pieces(layout: Layout) -> None:
    again = from_placements(layout.mesh, layout.shape, to_placements(layout))
    assert [again.region(p) for p in again.mesh.points()] == [layout.region(p) for p in layout.mesh.points()]
    assert again.pending == layout.pending
    assert to_placements(again) == to_placements(layout)


def placements_or_refusal(layout: Layout) -> tuple[Placement, ...] | LayoutError:
    try:
        return to_placements(layout)
    except LayoutError as refused:
        return refused


@quick
@given(layouts(mesh=space_2))
def test_what_converts_has_the_same_pieces_and_the_rest_says_why(layout: Layout) -> None:
    placements = placements_or_refusal(layout)
    if isinstance(placements, LayoutError):
        assert not layout.is_even
        assert "uneven" in placements.what
        assert placements.fix is not None
        return
    assert same_pieces(layout, placements)
    again = from_placements(layout.mesh, layout.shape, placements)
    assert [again.region(p) for p in again.mesh.points()] == [layout.region(p) for p in layout.mesh.points()]


@quick
@given(meshes(time=False, max_devices=8), st.integers(0, 24), st.data())
def test_any_placements_of_one_dim(mesh: Mesh, size: int, data: st.DataObject) -> None:
    """A layout comes back only if DTensor's pieces are exactly its pieces; whatever factors of the size appear."""
    choices = st.one_of(
        st.just(Replicate()),
        st.just(Shard(0)),
        st.builds(lambda k: _StridedShard(0, split_factor=k), st.integers(1, 6)),
    )
    placements = tuple(data.draw(choices) for _ in mesh.space)
    try:
        layout = from_placements(mesh, (size,), placements)
    except LayoutError:
        return
    assert same_pieces(layout, placements)


@given(st.integers(0, 40), st.integers(1, 6))
@quick
def test_one_axis_always_converts(size: int, count: int) -> None:
    layout = Layout.block(Mesh.make({"tp": count}), [size], {0: ["tp"]})
    assert to_placements(layout) == (Shard(0),)
    assert from_placements(layout.mesh, [size], (Shard(0),)) == layout
    assert same_pieces(layout, (Shard(0),))


def test_two_uneven_axes_convert_exactly_where_the_cuts_agree() -> None:
    agree = []
    for size in range(1, 17):
        layout = Layout.block(mesh_2x2, [size], {0: ["dp", "tp"]})
        both = (Shard(0), Shard(0))
        try:
            assert to_placements(layout) == both
            assert from_placements(mesh_2x2, [size], both) == layout
            agree.append(size)
        except LayoutError:
            with pytest.raises(LayoutError):
                from_placements(mesh_2x2, [size], both)
        assert same_pieces(layout, both) == (size in agree)
    assert agree == [1, 3, 4, 7, 8, 11, 12, 15, 16]


@pytest.mark.parametrize(
    ("mesh", "text", "placements"),
    [
        ("dp=2,tp=4", "[16{dp},8]", (Shard(0), Replicate())),
        ("dp=2,tp=4", "[16{dp,tp},8]", (Shard(0), Shard(0))),
        # FSDP inside of tensor parallelism: tp is the major digit, and dp comes first in the mesh
        ("dp=2,tp=4", "[16{tp,dp},8]", (_StridedShard(0, split_factor=4), Shard(0))),
        # the q, k and v of a fused projection, each split over tp
        ("dp=2,tp=4", "[48{tp:4},8]", (Replicate(), _StridedShard(0, split_factor=3))),
        ("dp=2,tp=4", "[48{tp:4,dp:2},8]", (_StridedShard(0, split_factor=12), _StridedShard(0, split_factor=3))),
        ("dp=2,tp=4", "[16,8{tp}]{sum:dp}", (Partial("sum"), Shard(1))),
        ("dp=2,tp=4", "[16,8]{prod:dp;min:tp}", (Partial("product"), Partial("min"))),
        ("dp=2;mb=4", "[16{dp},8]", (Shard(0),)),
    ],
)
def test_examples(mesh: str, text: str, placements: tuple[Placement, ...]) -> None:
    layout = Layout.parse(text, Mesh.parse(mesh))
    assert to_placements(layout) == placements
    assert from_placements(layout.mesh, layout.shape, placements) == layout


def test_negative_dims_count_from_the_end() -> None:
    assert str(from_placements(mesh_2x2, (4, 6), (Shard(-1), Shard(-2)))) == "[4{tp},6{dp}]"


def test_distribute_tensor_agrees_on_every_rank() -> None:
    """DTensor's public entry, on a process group that stands for each rank in turn."""
    mesh = Mesh.parse("dp=2,tp=4")
    tensor = counting((48, 6))
    for text in ["[48{tp:4},6{dp}]", "[48{tp,dp},6]", "[48,6{dp}]"]:
        layout = Layout.parse(text, mesh)
        ours = distribute(tensor.numpy(), layout)
        for rank in range(8):
            dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
            try:
                device_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
                local = distribute_tensor(tensor, device_mesh, to_placements(layout), src_data_rank=None).to_local()
            finally:
                dist.destroy_process_group()
            assert np.array_equal(local.numpy(), ours[mesh.coordinate(rank)])


# ---- refused, with the reason and the remedy -------------------------------------------------------------------------


def test_uneven_over_two_axes_gives_the_numbers() -> None:
    message = (
        r"dim 0 of size 9 over dp=2 x tp=2 is uneven: piece 1 of 4 is 3:5 in DTensor.* 3:6 in a layout.*blocks of 3\n"
        r"  where: an array of shape \[9\] on mesh dp=2,tp=2\n  fix: pad dim 0 to 12, or split it over one axis"
    )
    with pytest.raises(LayoutError, match=message):
        to_placements(Layout.parse("[9{dp,tp}]", mesh_2x2))
    with pytest.raises(LayoutError, match=message):
        from_placements(mesh_2x2, [9], (Shard(0), Shard(0)))


@pytest.mark.parametrize("text", ["[9{tp,dp}]", "[9{tp:1}]", "[9{tp:6}]"])
def test_uneven_and_not_plain_blocks(text: str) -> None:
    with pytest.raises(
        LayoutError, match=r"dim 0 of layout .* is uneven and not in plain blocks over .*\n.*\n  fix: pad dim 0"
    ):
        to_placements(Layout.parse(text, mesh_2x2))


def test_uneven_split_factor() -> None:
    with pytest.raises(
        LayoutError, match=r"axis 'dp' of size 2 with split factor 2 cuts dim 0 into 4 chunks, and the 6 "
    ):
        from_placements(mesh_2x2, [6], (_StridedShard(0, split_factor=2), Replicate()))


def test_an_axis_that_takes_two_digits() -> None:
    mesh = Mesh.parse("dp=2,tp=4")
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    with pytest.raises(LayoutError, match=r"axis 'tp' of size 4 with split factor 1 takes no single digit") as caught:
        from_placements(mesh, [8], placements)
    assert "2 at stride 4, 2 at stride 1" in str(caught.value)
    # the remedy works: two axes of 2 in place of tp
    finer = Mesh.parse("dp=2,tp.0=2,tp.1=2")
    layout = from_placements(finer, [8], (*placements, Shard(0)))
    ours, theirs = distribute(np.arange(8), layout), torch_pieces(mesh, (8,), placements)
    for dp, tp in product(range(2), range(4)):
        assert ours[dp, tp // 2, tp % 2].tolist() == theirs[dp, tp].tolist()


@pytest.mark.parametrize("text", ["[8{mb}]", "[8]{sum:mb}"])
def test_time_has_no_dtensor_form(text: str) -> None:
    mesh = Mesh.parse("dp=2;mb=4")
    with pytest.raises(
        LayoutError, match=r"axis 'mb' of layout .* in time, and a DTensor lies in space alone\n.*\n  fix: "
    ):
        to_placements(Layout.parse(text, mesh))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            Partial("avg"),
            r"axis 'tp' has a pending average.*\n.*\n  fix: divide the local values by 2 and use Partial\('sum'\)",
        ),
        (Partial("bor"), r"axis 'tp' has a pending 'bor'\n.*\n  fix: reduce it first"),
        (
            _MaskPartial(offset_shape=torch.Size([4, 4])),
            r"placement _MaskPartial.* of axis 'tp' has no layout\n.*\n  fix: redis",
        ),
        (Shard(2), r"the placement of axis 'tp' shards dim 2 of an array with 2 dims\n.*\n  fix: "),
    ],
)
def test_placements_without_a_layout(placement: Placement, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        from_placements(mesh_2x2, [4, 4], (Replicate(), placement))


def test_wrong_number_of_placements() -> None:
    with pytest.raises(
        LayoutError, match=r"1 placements for 2 space axes \(dp=2, tp=2\)\n.*\n  fix: give one placement per"
    ):
        from_placements(mesh_2x2, [4], (Shard(0),))


def test_pending_stays_on_its_axis() -> None:
    layout = from_placements(mesh_2x2, [4], (Partial(), Replicate()))
    assert layout.entries == (("dp", Pending()),)
