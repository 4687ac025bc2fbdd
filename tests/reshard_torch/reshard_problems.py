"""Random redistributions, and what each device holds before and after: the same on every rank for one seed."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.errors import LayoutError
from sennit.ir.layout import Entry, Layout, Pending, Reduction, Split, block_strides
from sennit.ir.layout_numpy import identity_of
from sennit.ir.mesh import Mesh, Point

Array = NDArray[Any]
KINDS = ("even", "strided", "uneven", "partial", "cross")


def random_mesh(chance: random.Random, world: int, devices: tuple[int, ...] | None = None) -> Mesh:
    options = {2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)], 5: [(5,)], 6: [(6,), (2, 3), (3, 2)]}
    count = len(devices) if devices else chance.choice([n for n in options if n <= world])
    sizes = chance.choice(options[count])
    if devices is None:
        devices = tuple(chance.sample(range(world), count))
    return Mesh.make(dict(zip("xyz", sizes, strict=False)), devices=devices)


def random_layout(
    chance: random.Random, mesh: Mesh, shape: tuple[int, ...], *, strided: bool, pending: Reduction | None
) -> Layout:
    """Each axis splits a dim, is pending or replicates. Splits are blocks, or digits anywhere with `strided`."""
    while True:
        entries: dict[str, Entry] = {}
        dims: dict[int, list[str]] = {}
        for axis in chance.sample(mesh.names, len(mesh.names)):
            choice = chance.random()
            if pending is not None and choice < 0.4:
                entries[axis] = Pending(pending)
            elif choice < 0.85:
                dims.setdefault(chance.randrange(len(shape)), []).append(axis)
        for dim, axes in dims.items():
            strides = block_strides(shape[dim], [mesh.size(axis) for axis in axes])
            for axis, stride in zip(axes, strides, strict=True):
                if strided:
                    size = shape[dim] // mesh.size(axis)
                    stride = chance.choice([s for s in range(1, size + 1) if size % s == 0] or [1])
                entries[axis] = Split(dim, stride)
        try:
            return Layout.make(mesh, shape, entries)
        except LayoutError:  # digits that overlap
            continue


def random_problem(kind: str, seed: int, world: int) -> tuple[Layout, Layout]:
    chance = random.Random(f"{kind} {seed}")
    even = kind in ("even", "strided") or (kind != "uneven" and chance.random() < 0.7)
    sizes = (6, 12, 24, 36) if even else (1, 5, 7, 9, 10, 13)
    shape = tuple(chance.choice(sizes) for _ in range(chance.randint(1, 3)))
    mesh = random_mesh(chance, world)
    other = mesh
    if kind == "cross":
        other = random_mesh(chance, world)
    op = chance.choice(list(Reduction)) if kind == "partial" else None
    if op is Reduction.PROD:
        op = Reduction.SUM  # products of random integers overflow
    if kind == "cross" and chance.random() < 0.3:
        op = Reduction.SUM
    strided = kind == "strided" or (kind in ("partial", "cross") and even and chance.random() < 0.5)
    source = random_layout(chance, mesh, shape, strided=strided, pending=op)
    target = random_layout(chance, other, shape, strided=strided, pending=None)
    return source, target


def whole_array(layout: Layout, seed: int) -> Array:
    return np.random.default_rng(seed).integers(-1000, 1000, layout.shape).astype(np.float64)


def piece_of(layout: Layout, point: Point, whole: Array, seed: int) -> Array:
    """What lies at a point: a slice; of a pending value a random part, exact in floating point."""
    piece = whole[np.ix_(*layout.region(point).indices())] if layout.shape else whole.copy()
    pending = [layout.mesh.index(axis) for axis, _ in layout.pending]
    if not pending:
        return piece
    op = layout.pending[0][1]
    sizes = [layout.mesh.axes[axis].size for axis in pending]
    mine = int(np.ravel_multi_index([point[axis] for axis in pending], sizes))
    parts = np.random.default_rng(seed + 1).integers(0, 9, (prod(sizes), *layout.shape)).astype(np.float64)
    cut = parts[:, *np.ix_(*layout.region(point).indices())] if layout.shape else parts
    match op:
        case Reduction.SUM:
            return piece - cut[1:].sum(0) if mine == 0 else cut[mine]
        case Reduction.MAX:
            return piece if mine == 0 else piece - cut[mine]
        case Reduction.MIN:
            return piece if mine == 0 else piece + cut[mine]
        case Reduction.PROD:
            return piece if mine == 0 else np.full_like(piece, identity_of(op, piece.dtype))
