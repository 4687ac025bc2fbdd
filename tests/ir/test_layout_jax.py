"""Conversions to and from partition specs, against JAX's own placement of arrays on eight CPU devices."""

from __future__ import annotations

import builtins
import importlib
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from layout_strategies import even_layouts, layouts, meshes

from sennit.errors import LayoutError, MeshError
from sennit.ir.layout import Layout, Pending
from sennit.ir.mesh import Mesh

jax = pytest.importorskip("jax")

from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from sennit.ir.layout_jax import from_partition_spec, to_partition_spec  # noqa: E402

quick = settings(derandomize=True, deadline=None, max_examples=100)
small = meshes(time=False, max_devices=8)
mesh_2x4 = Mesh.parse("dp=2,tp=4")


@pytest.fixture(scope="module")
def devices() -> np.ndarray:
    with suppress(RuntimeError):  # an earlier test of this process may have started JAX
        jax.config.update("jax_num_cpu_devices", 8)
    found = jax.devices("cpu")
    if len(found) < 8:
        pytest.skip(f"JAX was started with {len(found)} CPU devices in this process, and the test needs 8")
    return np.array(found[:8])


def jax_mesh(mesh: Mesh, devices: np.ndarray) -> Any:
    """The mesh with the n-th device of the plan on the n-th device of JAX that it uses."""
    used = {device: position for position, device in enumerate(sorted(mesh.devices))}
    chosen = np.array([devices[used[device]] for device in mesh.devices])
    return jax.sharding.Mesh(chosen.reshape([axis.size for axis in mesh.space]), mesh.names)


@quick
@given(layout=even_layouts(mesh=small, strided=False, pending=False))
def test_jax_gives_each_device_the_same_indices(devices: np.ndarray, layout: Layout) -> None:
    if not layout.mesh.axes:
        return  # JAX has no mesh without axes
    grid = jax_mesh(layout.mesh, devices)
    spec = to_partition_spec(layout)
    theirs = NamedSharding(grid, spec).devices_indices_map(layout.shape)
    for point in layout.mesh.points():
        slices = theirs[grid.devices[point]]
        indices = [np.arange(size)[s].tolist() for size, s in zip(layout.shape, slices, strict=True)]
        assert indices == [dim.tolist() for dim in layout.region(point).indices()]


@quick
@given(even_layouts(mesh=meshes(min_size=2), pending=False))
def test_round_trip_of_what_has_a_spec(layout: Layout) -> None:
    axes = {dim: [digit.axis for digit in layout.digits(dim)] for dim in range(len(layout.shape))}
    is_plain = Layout.block(layout.mesh, layout.shape, axes) == layout
    if is_plain and not any(layout.entry(axis.name) for axis in layout.mesh.time):
        assert from_partition_spec(layout.mesh, layout.shape, to_partition_spec(layout)) == layout
    else:
        with pytest.raises(LayoutError, match=r"\n  where: .*\n  fix: "):
            to_partition_spec(layout)


@quick
@given(layouts(mesh=small))
def test_only_even_layouts_have_a_spec(layout: Layout) -> None:
    try:
        spec = to_partition_spec(layout)
    except LayoutError:
        return
    again = from_partition_spec(layout.mesh, layout.shape, spec)
    assert [again.region(p) for p in again.mesh.points()] == [layout.region(p) for p in layout.mesh.points()]
    assert len({layout.region(point).shape for point in layout.mesh.points()}) == 1


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("[8,16]", PartitionSpec(None, None)),
        ("[8{dp},16{tp}]", PartitionSpec("dp", "tp")),
        ("[8{tp,dp},16]", PartitionSpec(("tp", "dp"), None)),
        ("[8,16{tp}]{sum:dp}", PartitionSpec(None, "tp", unreduced={"dp"})),
        ("[]", PartitionSpec()),
    ],
)
def test_examples(text: str, spec: PartitionSpec) -> None:
    layout = Layout.parse(text, mesh_2x4)
    assert to_partition_spec(layout) == spec
    assert from_partition_spec(mesh_2x4, layout.shape, spec) == layout


def test_an_unreduced_spec_is_one_that_jax_takes(devices: np.ndarray) -> None:
    grid = jax.sharding.Mesh(devices.reshape(2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(grid, to_partition_spec(Layout.parse("[8,16{tp}]{sum:dp}", mesh_2x4)))
    assert sharding.spec.unreduced == {"dp"}
    assert sharding.shard_shape((8, 16)) == (8, 4)


def test_a_short_spec_replicates_the_rest_and_reduced_is_replicated() -> None:
    assert str(from_partition_spec(mesh_2x4, [8, 16], PartitionSpec("dp"))) == "[8{dp},16]"
    assert str(from_partition_spec(mesh_2x4, [8], PartitionSpec(None, reduced={"dp"}))) == "[8]"
    assert from_partition_spec(mesh_2x4, [8], PartitionSpec(unreduced={"dp"})).entry("dp") == Pending()


# ---- refused, with the reason and the remedy -------------------------------------------------------------------------


def test_strided() -> None:
    with pytest.raises(
        LayoutError, match=r"axis 'tp' splits dim 0 of layout \[48\{tp:4\}\] at stride 4; .* stride 12 there"
    ):
        to_partition_spec(Layout.parse("[48{tp:4}]", mesh_2x4))


def test_uneven() -> None:
    message = r"dim 0 of size 9 does not divide into 4 blocks over \['tp'\], .*\n  where: .*\n  fix: pad dim 0 to 12"
    with pytest.raises(LayoutError, match=message):
        to_partition_spec(Layout.parse("[9{tp}]", mesh_2x4))
    with pytest.raises(LayoutError, match=message):
        from_partition_spec(mesh_2x4, [9], PartitionSpec("tp"))


def test_time() -> None:
    mesh = Mesh.parse("dp=2;mb=4")
    with pytest.raises(
        LayoutError, match=r"axis 'mb' of layout \[8\{mb\}\] is a time axis.*\n.*\n  fix: convert the layout of one"
    ):
        to_partition_spec(Layout.parse("[8{mb}]", mesh))
    with pytest.raises(LayoutError, match=r"axis 'mb' is a time axis\n.*\n  fix: name space axes"):
        from_partition_spec(mesh, [8], PartitionSpec("mb"))
    assert to_partition_spec(Layout.parse("[8{dp}]", mesh)) == PartitionSpec("dp")


def test_pending_max() -> None:
    with pytest.raises(
        LayoutError, match=r"axis 'dp' of layout \[8\]\{max:dp\} has a pending max.*\n.*\n  fix: reduce over 'dp'"
    ):
        to_partition_spec(Layout.parse("[8]{max:dp}", mesh_2x4))


def test_specs_without_a_layout() -> None:
    with pytest.raises(LayoutError, match=r"dim 0 is UNCONSTRAINED: the spec leaves its layout open\n.*\n  fix: "):
        from_partition_spec(mesh_2x4, [8], PartitionSpec(PartitionSpec.UNCONSTRAINED))
    with pytest.raises(
        LayoutError, match=r"a spec with 2 entries for an array with 1 dims\n.*\n  fix: give one entry per dim"
    ):
        from_partition_spec(mesh_2x4, [8], PartitionSpec("dp", "tp"))
    with pytest.raises(MeshError, match="unknown axis 'pp'"):
        from_partition_spec(mesh_2x4, [8], PartitionSpec("pp"))


def test_without_jax_the_import_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if name.split(".")[0] == "jax":
            raise ModuleNotFoundError("No module named 'jax'", name="jax")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "sennit.ir.layout_jax")
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r'needs JAX: pip install "sennit\[jax\]"'):
        importlib.import_module("sennit.ir.layout_jax")
