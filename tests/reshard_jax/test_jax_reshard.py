"""`sennit.jax.reshard` against JAX's own placement of the same array, on eight CPU devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from jax_problems import Problem, cpu_devices, problem, problems  # noqa: E402

import sennit.jax  # noqa: E402
from sennit.errors import LayoutError  # noqa: E402
from sennit.jax import Resharder, reshard, steps_between  # noqa: E402

MESHES = ((2, 2, 2), (4, 2), (2, 4), (8,), (2, 3), (6,), (3, 2), (1, 4))
CASE = problem("x=2,y=4", (16, 32), "x y", "- yx")


def check(result: Any, values: np.ndarray, sharding: NamedSharding) -> None:
    """The values, the placement, and each device's piece are those of `jax.device_put`."""
    assert result.sharding == sharding
    expected = jax.device_put(values, sharding)
    assert result.dtype == expected.dtype
    for ours, theirs in zip(result.addressable_shards, expected.addressable_shards, strict=True):
        assert ours.device == theirs.device
        np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(theirs.data))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(problems(MESHES))
def test_random_problems(case: Problem) -> None:
    source, target = case.shardings()
    check(reshard(jax.device_put(case.values(), source), target), case.values(), target)


@pytest.mark.parametrize(
    "case",
    [
        problem("x=2,y=4", (2048, 512), "y x", "x y"),  # an exchange and a permute
        problem("x=2,y=4", (512, 2048), "- x", "- -"),  # brought to the front, then gathered
        problem("x=2,y=2,z=2", (512, 64, 32), "x y -", "- - -"),  # one gather of minor and major dims
        problem("x=2,y=3", (36, 5), "x -", "y -"),  # digits that clash
        problem("x=3,y=2", (36, 6), "yx -", "xy -"),  # the same blocks on other devices
        problem("x=2,y=3", (36, 36), "x y", "y x"),  # digits that clash, and no axis that is free
        problem("x=3,y=2", (1, 36, 12), "- x y", "- y -"),  # a dim of size 1
        problem("x=2,y=4", (8, 6, 4), "x - y", "- - y"),  # pieces with a dim of size 1
    ],
)
def test_each_kind_of_step(case: Problem) -> None:
    source, target = case.shardings()
    assert steps_between(source, target, case.shape, "float32") is not None
    check(reshard(jax.device_put(case.values(), source), target), case.values(), target)


def test_no_elements_and_no_dims() -> None:
    for case in (problem("x=2,y=4", (0, 16), "x y", "y x"), problem("x=2,y=4", (), "", "")):
        source, target = case.shardings()
        result = reshard(jax.device_put(case.values(), source), target)
        assert result.sharding == target
        np.testing.assert_array_equal(np.asarray(result), case.values())


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"])
def test_dtypes(dtype: str) -> None:
    for case in (CASE, problem("x=2,y=3", (6, 18), "- y", "- -")):
        source, target = case.shardings()
        values = case.values(jnp.dtype(dtype))
        check(reshard(jax.device_put(values, source), target), values, target)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("in_context", [False, True])
def test_inside_jit_and_under_a_mesh_in_context(kind: AxisType, in_context: bool) -> None:
    mesh = jax.sharding.Mesh(cpu_devices().reshape(2, 4), ("x", "y"), axis_types=(kind,) * 2)
    source, target = NamedSharding(mesh, PartitionSpec("x", "y")), NamedSharding(mesh, PartitionSpec(None, ("y", "x")))
    values = CASE.values()
    x = jax.device_put(values, source)
    known = None if kind is AxisType.Explicit else source

    def run() -> None:
        check(reshard(x, target), values, target)
        check(jax.jit(lambda a: reshard(a, target, source=known))(x), values, target)

    if in_context:
        with jax.set_mesh(mesh):
            run()
    else:
        run()


@pytest.mark.parametrize(
    "case",
    [CASE, problem("x=2,y=4", (16, 32), "x -", "- y"), problem("x=2,y=4", (16, 32), "- y", "- -")],
)
def test_the_gradient_is_that_of_the_identity(case: Problem) -> None:
    source, target = case.shardings()
    x = jax.device_put(case.values(), source)
    weight = jax.device_put(np.cos(case.values()), target)
    gradient = jax.grad(lambda a: jnp.sum(reshard(a, target, source=source) ** 2 * weight))(x)
    np.testing.assert_allclose(np.asarray(gradient), 2 * case.values() * np.cos(case.values()), rtol=1e-6)
    assert gradient.sharding.is_equivalent_to(source, len(case.shape))
    _, tangent = jax.jvp(lambda a: reshard(a, target, source=source), (x,), (x,))
    check(tangent, case.values(), target)


def test_another_mesh_over_the_same_devices() -> None:
    source, _ = CASE.shardings()
    values = CASE.values()
    x = jax.device_put(values, source)
    for sizes, names, spec in (((4, 2), "ab", PartitionSpec("b", "a")), ((8,), "a", PartitionSpec(None, "a"))):
        mesh = jax.sharding.Mesh(cpu_devices().reshape(sizes), tuple(names))
        target = NamedSharding(mesh, spec)
        check(reshard(x, target), values, target)
        with jax.set_mesh(source.mesh):
            check(reshard(x, target), values, target)


# ---- memory, as the compiler states it -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        # with a gather at the end, temporaries stay within the larger piece
        (problem("x=2,y=4", (32, 256, 512), "x - -", "- y -"), 1.0),
        (problem("x=2,y=4", (256, 16384), "yx -", "- y"), 1.0),
        (problem("x=4,y=2", (16, 64, 32, 128), "- x - y", "y - - -"), 1.0),
        (problem("x=8", (512, 8192), "- x", "- -"), 1.0),
        # an exchange between more than two devices packs and unpacks: one piece each
        (problem("x=2,y=4", (64, 16, 16, 256), "x - y -", "- - - xy"), 2.0),
    ],
)
def test_temporaries_of_problems_that_xla_rematerialises(case: Problem, limit: float) -> None:
    source, target = case.shardings()
    like = jax.ShapeDtypeStruct(case.shape, np.float32, sharding=source)
    compiled = Resharder().function(like, target).lower(like).compile()
    pieces = [np.prod(sharding.shard_shape(case.shape)) * 4 for sharding in (source, target)]
    slack = 4096  # tables and pointers
    assert compiled.memory_analysis().temp_size_in_bytes <= limit * max(pieces) + slack


# ---- the functions kept ----------------------------------------------------------------------------------------------


def test_a_function_is_made_once_and_the_oldest_goes_first() -> None:
    source, target = CASE.shardings()
    x = jax.device_put(CASE.values(), source)
    resharder = Resharder(capacity=2)
    first = resharder.function(x, target)
    assert resharder.function(x, target) is first
    resharder(x, source)
    assert resharder.function(x, target) is first  # used again, so not the oldest
    resharder(jax.device_put(CASE.values(np.int32), source), target)
    assert len(resharder) == 2
    assert resharder.function(x, target) is first
    with pytest.raises(LayoutError, match="room for 1 functions"):
        Resharder(capacity=1)


# ---- refused, with the reason and the remedy -------------------------------------------------------------------------


def test_other_devices() -> None:
    source, target = CASE.shardings()
    mesh = jax.sharding.Mesh(cpu_devices()[::-1].reshape(2, 4), ("x", "y"))
    message = r"devices \[0, .*\] and \[7, .*\]\n  where: .*\n  fix: use a mesh over the array's devices"
    with pytest.raises(LayoutError, match=message):
        reshard(jax.device_put(CASE.values(), source), NamedSharding(mesh, target.spec))


def test_explicit_axes_stay_on_one_mesh() -> None:
    meshes = [
        jax.sharding.Mesh(cpu_devices().reshape(2, 4), tuple(names), axis_types=(AxisType.Explicit,) * 2)
        for names in ("xy", "ab")
    ]
    x = jax.device_put(CASE.values(), NamedSharding(meshes[0], PartitionSpec("x")))
    with pytest.raises(LayoutError, match=r"axes of the Explicit type stay on one mesh\n.*\n  fix: state both"):
        reshard(x, NamedSharding(meshes[1], PartitionSpec("a")))


def test_uneven() -> None:
    source, target = CASE.shardings()
    x = jax.device_put(np.zeros((4, 4)), NamedSharding(source.mesh, PartitionSpec()))
    with pytest.raises(LayoutError, match=r"dim 1 of size 4 does not divide into 8 blocks .*\n.*\n  fix: pad dim 1"):
        reshard(x, target)


def test_an_unknown_placement() -> None:
    source, target = CASE.shardings()
    x = jax.device_put(CASE.values(), source)
    with pytest.raises(
        LayoutError, match=r"where the array lies is not known\n.*\n  fix: inside jit and grad pass source"
    ):
        jax.jit(lambda a: reshard(a, target))(x)
    with pytest.raises(LayoutError, match="which names no mesh"):
        reshard(jnp.zeros((16, 32)), target)


def test_unreduced_sums_and_other_memory() -> None:
    mesh = jax.sharding.Mesh(cpu_devices().reshape(2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(CASE.values(), NamedSharding(mesh, PartitionSpec("y")))
    with pytest.raises(LayoutError, match=r"axes \['x'\] hold unreduced sums.*\n.*\n  fix: reduce first"):
        reshard(x, NamedSharding(mesh, PartitionSpec("y", unreduced={"x"})))
    with pytest.raises(LayoutError, match=r"from memory device to memory .*_host"):
        reshard(x, NamedSharding(mesh, PartitionSpec("y"), memory_kind="unpinned_host"))


def test_the_face_names_what_it_offers() -> None:
    assert sorted(sennit.jax.__all__) == ["Resharder", "TouchCost", "reshard", "steps_between"]
