"""Random even problems on JAX meshes, and the CPU devices to run them on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

DEVICES = 8
Dims = tuple[tuple[str, ...], ...]


def cpu_devices() -> np.ndarray:
    """Eight CPU devices; the test is skipped where JAX was started with fewer."""
    with suppress(RuntimeError):  # an earlier test of this process may have started JAX
        jax.config.update("jax_num_cpu_devices", DEVICES)
    found = jax.devices("cpu")
    if len(found) < DEVICES:
        pytest.skip(f"JAX was started with {len(found)} CPU devices in this process, and the test needs {DEVICES}")
    return np.array(found[:DEVICES])


@dataclass(frozen=True, slots=True)
class Problem:
    """Axis sizes, a shape, and per dim the axes that split it before and after."""

    axes: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    before: Dims
    after: Dims

    def shardings(self) -> tuple[NamedSharding, NamedSharding]:
        sizes = [size for _, size in self.axes]
        devices = cpu_devices()[: prod(sizes)].reshape(sizes)
        mesh = jax.sharding.Mesh(devices, tuple(name for name, _ in self.axes))
        return NamedSharding(mesh, spec(self.before)), NamedSharding(mesh, spec(self.after))

    def values(self, dtype: object = np.float32) -> np.ndarray:
        return np.arange(prod(self.shape)).reshape(self.shape).astype(dtype)


def spec(dims: Dims) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in dims))


def problem(mesh: str, shape: tuple[int, ...], before: str, after: str) -> Problem:
    """`problem("x=2,y=4", (8, 16), "x y", "- yx")`: axes of one letter, `-` for none."""
    axes = tuple((name, int(size)) for name, size in (axis.split("=") for axis in mesh.split(",")))
    dims = [tuple(tuple(part.replace("-", "")) for part in text.split()) for text in (before, after)]
    return Problem(axes, shape, dims[0], dims[1])


@st.composite
def problems(draw: st.DrawFn, meshes: tuple[tuple[int, ...], ...]) -> Problem:
    sizes = draw(st.sampled_from(meshes))
    axes = tuple(zip("xyzw", sizes, strict=False))
    rank = draw(st.integers(1, 3))

    def dims() -> Dims:
        found: list[list[str]] = [[] for _ in range(rank)]
        for name, _ in draw(st.permutations(axes)):
            dim = draw(st.integers(0, rank))
            if dim < rank:
                found[dim].append(name)
        return tuple(map(tuple, found))

    before, after = dims(), dims()
    blocks = [
        np.lcm(*(prod(dict(axes)[name] for name in side[dim]) for side in (before, after))) for dim in range(rank)
    ]
    shape = tuple(int(count) * draw(st.sampled_from([1, 2, 3, 4])) for count in blocks)
    return Problem(axes, shape, before, after)
