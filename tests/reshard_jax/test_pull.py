"""What devices take out of each other's memory: the value against the array, and the compiled core against the value."""

from __future__ import annotations

import ctypes
import random
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sennit.reshard.pull as pull_module
from sennit.errors import LayoutError
from sennit.ir.layout import Layout, Split
from sennit.ir.mesh import Mesh
from sennit.reshard.pull import encode, is_of_blocks, pulls, take

CORE = sorted(Path(pull_module.__file__).parent.glob("_pull_core*.so"))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two layouts of even blocks on one mesh of primes; sizes with factors that clash."""
    rng = random.Random(draw(st.integers(0, 10**9)))
    sizes = rng.choice([(2,), (5,), (2, 2), (2, 3), (3, 3), (5, 2), (2, 2, 2), (3, 2, 2), (5, 3, 2)])
    mesh = Mesh.make(dict(zip("xyz", sizes, strict=False)))
    rank = rng.randint(1, 4)

    def dims() -> list[list[str]]:
        found: list[list[str]] = [[] for _ in range(rank)]
        for name in rng.sample(mesh.names, len(mesh.names)):
            dim = rng.randint(0, rank)
            if dim < rank:
                found[dim].append(name)
        return found

    sides = dims(), dims()
    counts = [[prod(mesh.size(axis) for axis in side[dim]) for side in sides] for dim in range(rank)]
    shape = [int(np.lcm(*count)) * rng.choice((1, 1, 2, 3, 7)) for count in counts]
    first, second = (Layout.block(mesh, shape, dict(enumerate(side))) for side in sides)
    return first, second


def pieces(layout: Layout, array: np.ndarray) -> list[np.ndarray]:
    return [
        np.ascontiguousarray(array[np.ix_(*(layout.indices(dim, point) for dim in range(array.ndim)))])
        for point in layout.mesh.points()
    ]


def changing_groups(source: Layout, target: Layout) -> list[list[int]]:
    """The devices that differ in the axes that change, by position in the mesh."""
    mesh = source.mesh
    stays = [number for number, name in enumerate(mesh.names) if source.entry(name) == target.entry(name)]
    found: dict[tuple[int, ...], list[int]] = {}
    for device, point in enumerate(mesh.points()):
        found.setdefault(tuple(point[number] for number in stays), []).append(device)
    return list(found.values())


@settings(derandomize=True, deadline=None, max_examples=150)
@given(pairs())
def test_what_is_taken_is_the_piece(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    assert all(map(is_of_blocks, pair))
    array = np.arange(prod(source.shape), dtype=np.int32).reshape(source.shape)
    have, want = pieces(source, array), pieces(target, array)
    for device, pull in enumerate(pulls(source, target)):
        np.testing.assert_array_equal(take(pull, have), want[device])
        # what a device has itself it takes from nobody else
        own = set(have[device].ravel().tolist()) & set(want[device].ravel().tolist())
        marked = [np.full_like(piece, number) for number, piece in enumerate(have)]
        assert int((take(pull, marked) == device).sum()) == len(own)


@pytest.mark.skipif(not CORE, reason="the core is not built: no C compiler at install")
@settings(derandomize=True, deadline=None, max_examples=300)
@given(pairs(), st.sampled_from(["u1", "u2", "u4", "u8", "c16"]))
def test_the_core_takes_the_same(pair: tuple[Layout, Layout], dtype: str) -> None:
    source, target = pair
    core = ctypes.CDLL(str(CORE[0]))
    core.sennit_pull.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    array = np.random.default_rng(0).integers(0, 255, prod(source.shape)).astype(dtype).reshape(source.shape)
    have, want = pieces(source, array), pieces(target, array)
    groups = changing_groups(source, target)
    table = encode(source, target, groups, array.itemsize)
    for device, piece in enumerate(want):
        group = next(group for group in groups if device in group)
        addresses = (ctypes.c_void_p * len(group))(*(have[member].ctypes.data for member in group))
        guarded = np.zeros(piece.nbytes + 128, np.uint8)
        assert core.sennit_pull(table.ctypes.data, device, addresses, guarded.ctypes.data + 64) == 0
        np.testing.assert_array_equal(guarded[64:-64].view(dtype).reshape(piece.shape), piece)
        assert not guarded[:64].any()  # nothing is written beside it
        assert not guarded[-64:].any()


def test_only_blocks_are_taken() -> None:
    mesh = Mesh.make({"x": 2, "y": 2})
    strided = Layout.make(mesh, (8,), {"x": Split(0, 1)})
    assert not is_of_blocks(strided)
    for pair in ((strided, Layout.block(mesh, (8,), {})), (Layout.block(mesh, (8,), {}), strided)):
        with pytest.raises(LayoutError, match="even blocks"):
            pulls(*pair)
