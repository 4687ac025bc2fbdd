from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_strategies import meshes

from sennit.errors import MeshError, ParseError
from sennit.ir.mesh import Axis, AxisKind, Mesh, prime_factors

quick = settings(derandomize=True, deadline=None, max_examples=100)


@quick
@given(meshes())
def test_text_round_trip(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=2,tp=4", Mesh.make({"dp": 2, "tp": 4})),
        ("dp=2;mb=4@4-5", Mesh.make({"dp": 2}, time={"mb": 4}, devices=(4, 5))),
        (";mb=3", Mesh.make({}, time={"mb": 3})),
        ("@7", Mesh.make({}, devices=(7,))),
        ("dp=4@6-7,0,2", Mesh.make({"dp": 4}, devices=(6, 7, 0, 2))),
    ],
)
def test_golden_text(text: str, mesh: Mesh) -> None:
    assert str(mesh) == text
    assert Mesh.parse(text) == mesh


def test_text_takes_spaces_and_comments() -> None:
    assert Mesh.parse(" dp = 2 , tp=4  # eight devices\n ; mb=2") == Mesh.make({"dp": 2, "tp": 4}, time={"mb": 2})


@quick
@given(meshes())
def test_devices_and_coordinates_are_inverse(mesh: Mesh) -> None:
    for device in mesh.devices:
        assert mesh.device(mesh.coordinate(device)) == device
    assert [mesh.device(point) for point in mesh.in_space().points()] == list(mesh.devices)


@quick
@given(meshes())
def test_points_count_and_share_devices_over_time(mesh: Mesh) -> None:
    points = list(mesh.points())
    assert len(points) == len(set(points)) == prod(axis.size for axis in mesh.axes)
    passes = prod(axis.size for axis in mesh.time)
    for device in mesh.devices:
        assert sum(mesh.device(point) == device for point in points) == passes


@quick
@given(meshes(time=False), st.data())
def test_group_is_the_devices_that_agree_elsewhere(mesh: Mesh, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.permutations(mesh.names)))[: data.draw(st.integers(0, len(mesh.names)))]
    device = data.draw(st.sampled_from(mesh.devices))
    others = [mesh.index(name) for name in mesh.names if name not in axes]
    mine = mesh.coordinate(device)
    agree = [d for d in mesh.devices if all(mesh.coordinate(d)[i] == mine[i] for i in others)]
    group = mesh.group(device, axes)
    assert set(group) == set(agree)
    positions = [mesh.index(name) for name in axes]
    assert list(group) == sorted(agree, key=lambda d: [mesh.coordinate(d)[i] for i in positions])


@quick
@given(meshes(), st.data())
def test_at_keeps_the_devices_with_those_coordinates(mesh: Mesh, data: st.DataObject) -> None:
    names = [axis.name for axis in mesh.space if "." not in axis.name]
    fixed = {name: data.draw(st.integers(0, mesh.size(name) - 1)) for name in names if data.draw(st.booleans())}
    part = mesh.at(**fixed)
    assert part.time == mesh.time
    assert part.devices == tuple(
        device
        for device in (mesh.device(point) for point in mesh.in_space().points())
        if all(mesh.coordinate(device)[mesh.index(name)] == value for name, value in fixed.items())
    )
    assert part.names == tuple(name for name in mesh.names if name not in fixed)


@quick
@given(meshes())
def test_refinement_keeps_every_device(mesh: Mesh) -> None:
    refined = mesh.refined()
    assert all(len(prime_factors(axis.size)) <= 1 for axis in refined.axes)
    assert refined.devices == mesh.devices
    # the sub-coordinates are the mixed-radix digits: points come in the same order
    assert [mesh.device(p) for p in mesh.points()] == [refined.device(p) for p in refined.points()]
    assert refined.refined() == refined


def test_refinement_names_sub_axes_major_to_minor() -> None:
    assert str(Mesh.parse("dp=2,tp=12;mb=4").refined()) == "dp=2,tp.0=2,tp.1=2,tp.2=3;mb.0=2,mb.1=2"


@given(st.integers(1, 3000))
@quick
def test_prime_factors(number: int) -> None:
    primes = prime_factors(number)
    assert prod(primes) == number
    assert list(primes) == sorted(primes)
    assert all(prime > 1 and all(prime % d for d in range(2, prime)) for prime in primes)


def test_time_axes_are_added_and_dropped() -> None:
    mesh = Mesh.parse("dp=2,tp=2@4-7")
    assert str(mesh.with_time(mb=8)) == "dp=2,tp=2;mb=8@4-7"
    assert mesh.with_time(mb=8).in_space() == mesh
    assert mesh.with_time(mb=8).axis("mb") == Axis("mb", 8, AxisKind.TIME)
    assert "mb" not in mesh
    assert "tp" in mesh


# ---- errors say which axis, which mesh, and the fix ------------------------------------------------------------------


@pytest.mark.parametrize("use", [lambda m: m.index("pp"), lambda m: m.size("pp"), lambda m: m.at(pp=0)])
def test_unknown_axis(use: object) -> None:
    with pytest.raises(MeshError) as caught:
        use(Mesh.parse("dp=2,tp=4"))  # type: ignore[operator]
    text = str(caught.value)
    assert "unknown axis 'pp'" in text
    assert "mesh dp=2,tp=4 has the axes dp=2, tp=4" in text
    assert "fix: use one of these axes" in text


def test_axis_named_twice() -> None:
    with pytest.raises(
        MeshError, match=r"axis 'dp' appears 2 times in \['dp', 'tp', 'dp'\]\n  fix: give each axis its own"
    ):
        Mesh.parse("dp=2,tp=2,dp=2")


@pytest.mark.parametrize("size", [0, -4])
def test_size_below_one(size: int) -> None:
    with pytest.raises(MeshError, match=rf"axis 'tp' has size {size}\n  fix: give it a size of at least 1"):
        Mesh.make({"dp": 2, "tp": size})


def test_name_that_is_none() -> None:
    with pytest.raises(MeshError, match=r"'2d' is no axis name\n  fix: use letters"):
        Axis("2d", 2)


def test_wrong_number_of_devices() -> None:
    with pytest.raises(MeshError, match=r"3 devices for a mesh of 8 \(dp=2 x tp=4\)\n  fix: name 8 devices or change"):
        Mesh.parse("dp=2,tp=4@0-2")


@pytest.mark.parametrize("devices", [(0, 1, 1, 2), (0, 1, 2, -1)])
def test_duplicate_or_negative_devices(devices: tuple[int, ...]) -> None:
    with pytest.raises(
        MeshError, match=r"devices \[.*\] are not distinct and non-negative\n  fix: name each device once"
    ):
        Mesh.make({"dp": 4}, devices=devices)


def test_time_axis_before_space_axis() -> None:
    axes = (Axis("mb", 2, AxisKind.TIME), Axis("dp", 2))
    with pytest.raises(
        MeshError, match=r"a time axis stands before a space axis in \['mb', 'dp'\]\n  fix: list the space"
    ):
        Mesh(axes, (0, 1))


def test_unknown_device() -> None:
    with pytest.raises(MeshError, match=r"device 9 is not in the mesh\n  where: dp=2@4-5\n  fix: name a device"):
        Mesh.parse("dp=2@4-5").coordinate(9)


def test_at_outside_of_the_mesh() -> None:
    mesh = Mesh.parse("dp=2;mb=4")
    for name, coordinate in [("dp", 2), ("dp", -1), ("mb", 0)]:
        with pytest.raises(
            MeshError, match=rf"there is no {name}={coordinate} in space\n  where: mesh dp=2;mb=4\n  fix: 0 to"
        ):
            mesh.at(**{name: coordinate})


def test_group_over_a_time_axis() -> None:
    with pytest.raises(
        MeshError, match=r"axis 'mb' is in time, and a group is of devices\n  where: mesh dp=2;mb=4\n  fix: "
    ):
        Mesh.parse("dp=2;mb=4").group(0, ("mb",))


@pytest.mark.parametrize("text", ["", "dp", "dp=", "dp=2,", "dp=2@", "dp=2@1-", "dp=2 tp=2", "=2"])
def test_text_that_is_no_mesh(text: str) -> None:
    with pytest.raises(ParseError, match=r"expected .*\n  where: line 1, column"):
        Mesh.parse(text)


def test_empty_range_of_devices() -> None:
    with pytest.raises(ParseError, match="range 7-4"):
        Mesh.parse("dp=2@7-4")


def test_row_major_order() -> None:
    mesh = Mesh.parse("dp=2,tp=3@10-15")
    assert [mesh.device(point) for point in product(range(2), range(3))] == [10, 11, 12, 13, 14, 15]
    assert mesh.coordinate(14) == (1, 1)
    assert mesh.group(14, ("tp",)) == (13, 14, 15)
    assert mesh.group(14, ("tp", "dp")) == (10, 13, 11, 14, 12, 15)
